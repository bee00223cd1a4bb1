#include "client/cpp/bulk_windows.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/local_ip.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "kvstow/v1/channels.grpc.pb.h"
#include "transport/shm_window.h"

namespace kvstow {
namespace {

constexpr int64_t kPageBytes = 4096;

}  // namespace

// A window with a channel on it.
struct BulkArea::Open {
  std::unique_ptr<Window> window;
  uint64_t channel = 0;
  int64_t area_bytes = 0;
  Mutex mutex;
  CondVar freed;
  std::array<bool, BulkWindows::kNumAreas> is_taken ABSL_GUARDED_BY(mutex) = {};
  bool is_abandoned ABSL_GUARDED_BY(mutex) = false;
  bool was_written ABSL_GUARDED_BY(mutex) = false;  // when it was abandoned

  // -1: none is free in time.
  int TakeFree(absl::Duration patience) {
    const RealClock clock;
    const absl::Time deadline = clock.Now() + patience;
    MutexLock lock(&mutex);
    while (!is_abandoned) {
      const auto free = std::find(is_taken.begin(), is_taken.end(), false);
      if (free != is_taken.end()) {
        *free = true;
        return static_cast<int>(free - is_taken.begin());
      }
      const absl::Duration left = deadline - clock.Now();
      if (left <= absl::ZeroDuration()) break;
      freed.WaitFor(&mutex, left);
    }
    return -1;
  }
  bool IsUsable() {
    MutexLock lock(&mutex);
    return !is_abandoned && window->is_alive();
  }
};

BulkArea::BulkArea(std::shared_ptr<Open> open, int area_idx)
    : open_(std::move(open)),
      area_idx_(area_idx),
      memory_(open_->window->memory().subspan(area_idx * open_->area_bytes, open_->area_bytes)),
      window_offset_(static_cast<uint64_t>(area_idx * open_->area_bytes)) {}

BulkArea::~BulkArea() {
  if (open_ == nullptr) return;
  MutexLock lock(&open_->mutex);
  open_->is_taken[area_idx_] = false;
  open_->freed.Signal();
}

uint64_t BulkArea::channel() const { return open_->channel; }

void BulkArea::Abandon() {
  MutexLock lock(&open_->mutex);
  open_->is_abandoned = true;
  open_->freed.SignalAll();
}

int64_t BulkArea::OffsetOf(absl::Span<const std::byte> bytes) const {
  const std::less_equal<> is_not_behind;  // also of pointers into other memory
  const bool is_inside =
      !bytes.empty() && is_not_behind(memory_.data(), bytes.data()) &&
      is_not_behind(bytes.data() + bytes.size(), memory_.data() + memory_.size());
  return is_inside ? static_cast<int64_t>(window_offset_) + (bytes.data() - memory_.data()) : -1;
}

bool BulkArea::IsUsable() const { return open_->IsUsable(); }

void BulkArea::AbandonWritten() {
  Abandon();
  MutexLock lock(&open_->mutex);
  open_->was_written = true;
}

// The socket of the window closes when none of the service's threads run any more.
bool BulkArea::MayBeWritten() const {
  MutexLock lock(&open_->mutex);
  return open_->was_written && open_->window->is_alive();
}

bool BulkArea::Overlaps(absl::Span<const std::byte> bytes) const {
  const std::less<> is_before;  // also of pointers into other memory
  return is_before(bytes.data(), memory_.data() + memory_.size()) &&
         is_before(memory_.data(), bytes.data() + bytes.size());
}

std::vector<std::shared_ptr<BulkArea>> BulkWindows::WrittenBuffers() const {
  std::vector<std::shared_ptr<BulkArea>> written;
  MutexLock lock(&mutex_);
  for (const std::weak_ptr<BulkArea>& weak : buffers_) {
    std::shared_ptr<BulkArea> buffer = weak.lock();
    if (buffer != nullptr && buffer->MayBeWritten()) written.push_back(std::move(buffer));
  }
  return written;
}

absl::StatusOr<std::shared_ptr<BulkArea>> BulkWindows::OpenBuffer(int64_t bytes,
                                                                  absl::Time deadline) {
  const std::vector<PathKind>& paths = connection_->options().paths;
  if (std::find(paths.begin(), paths.end(), PathKind::kShm) == paths.end()) {
    return absl::UnavailableError("KvClientOptions::paths has no shared memory");
  }
  constexpr PathKind kPaths[] = {PathKind::kShm};
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<BulkArea::Open> open,
                          OpenOne(kPaths, {.num_areas = 1, .area_bytes = bytes}, deadline));
  std::shared_ptr<BulkArea> buffer(new BulkArea(std::move(open), 0));
  MutexLock lock(&mutex_);
  std::erase_if(buffers_, [](const std::weak_ptr<BulkArea>& old) { return old.expired(); });
  buffers_.push_back(buffer);
  return buffer;
}

std::shared_ptr<BulkArea> BulkWindows::BufferAt(const std::byte* at) const {
  MutexLock lock(&mutex_);
  for (const std::weak_ptr<BulkArea>& weak : buffers_) {
    std::shared_ptr<BulkArea> buffer = weak.lock();
    if (buffer != nullptr && buffer->OffsetOf({at, 1}) >= 0) return buffer;
  }
  return nullptr;
}

std::optional<BulkArea> BulkWindows::Take(int64_t bytes, absl::Time deadline) {
  // Whole pages, so that areas share none.
  const int64_t area_bytes =
      (std::max(bytes, kBulkCallBytes) + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (area_bytes > connection_->options().window_bytes / kNumAreas) return std::nullopt;
  const std::shared_ptr<BulkArea::Open> open = Current(area_bytes, deadline);
  if (open == nullptr) return std::nullopt;
  const int area_idx = open->TakeFree(std::min(kPatience, deadline - connection_->clock().Now()));
  if (area_idx < 0) return std::nullopt;
  return BulkArea(open, area_idx);
}

absl::Duration BulkWindows::Timeout(absl::Time deadline) const {
  return std::clamp(deadline - connection_->clock().Now(), absl::ZeroDuration(),
                    connection_->options().control_timeout);
}

// One thread opens at a time; the others go by gRPC meanwhile.
std::shared_ptr<BulkArea::Open> BulkWindows::Current(int64_t area_bytes, absl::Time deadline) {
  {
    MutexLock lock(&mutex_);
    const bool is_usable = open_ != nullptr && open_->IsUsable();
    if (is_usable && open_->area_bytes >= area_bytes) return open_;
    // A window that works is replaced at once where it is too small, unless that was just tried.
    const bool may_try =
        connection_->clock().Now() >= next_try_ || (is_usable && area_bytes > failed_area_bytes_);
    if (is_opening_ || connection_->options().paths.empty() || !may_try) return nullptr;
    if (!is_usable) open_.reset();
    is_opening_ = true;
  }
  absl::StatusOr<std::shared_ptr<BulkArea::Open>> opened =
      OpenOne(connection_->options().paths, {.area_bytes = area_bytes}, deadline);
  MutexLock lock(&mutex_);
  is_opening_ = false;
  failed_area_bytes_ = opened.ok() ? 0 : area_bytes;
  // After a success too: a window that breaks at once must not be opened in a loop.
  next_try_ = connection_->clock().Now() + kRetryAfter;
  why_not_ = opened.ok() ? "" : std::string(opened.status().message());
  if (!opened.ok()) return nullptr;
  open_ = *std::move(opened);
  return open_;
}

absl::StatusOr<std::shared_ptr<BulkArea::Open>> BulkWindows::OpenPath(PathKind path,
                                                                      const std::string& address,
                                                                      const Size& size,
                                                                      absl::Time deadline) {
  const KvClientOptions& options = connection_->options();
  auto open = std::make_shared<BulkArea::Open>();
  if (path == PathKind::kShm) {
    KVSTOW_ASSIGN_OR_RETURN(open->window, OpenShmWindow({.socket_path = address,
                                                         .bytes = size.bytes(),
                                                         .timeout = Timeout(deadline)}));
  } else {
    std::string ip = options.ucx_ip;
    if (ip.empty()) {
      KVSTOW_ASSIGN_OR_RETURN(ip, LocalIpTowards(options.target));
    }
    KVSTOW_ASSIGN_OR_RETURN(
        open->window, OpenUcxWindow({.bytes = size.bytes(), .network = options.ucx, .ip = ip}));
  }
  v1::OpenChannelRequest request;
  v1::WindowOffer* offer = request.add_offers();
  offer->set_path(std::string(PathName(path)));
  offer->set_ticket(open->window->ticket());
  v1::OpenChannelResponse response;
  KVSTOW_RETURN_IF_ERROR(connection_->Call(Timeout(deadline), [&](grpc::ClientContext* context) {
    return connection_->channels().OpenChannel(context, request, &response);
  }));
  open->channel = response.channel();
  open->area_bytes = size.area_bytes;
  return open;
}

absl::StatusOr<std::shared_ptr<BulkArea::Open>> BulkWindows::OpenOne(
    absl::Span<const PathKind> paths, const Size& size, absl::Time deadline) {
  v1::ListPathsResponse response;
  KVSTOW_RETURN_IF_ERROR(connection_->Call(Timeout(deadline), [&](grpc::ClientContext* context) {
    return connection_->channels().ListPaths(context, v1::ListPathsRequest(), &response);
  }));
  std::string why_not;
  for (const PathKind path : paths) {
    absl::Status status = absl::FailedPreconditionError("the service does not know it");
    for (const v1::PathInfo& info : response.paths()) {
      if (info.path() != PathName(path)) continue;
      status = absl::FailedPreconditionError(info.unavailable());
      if (!info.unavailable().empty()) break;
      absl::StatusOr<std::shared_ptr<BulkArea::Open>> open =
          OpenPath(path, info.address(), size, deadline);
      if (open.ok()) return open;
      status = open.status();
    }
    absl::StrAppend(&why_not, why_not.empty() ? "" : "; ", ToAbsl(PathName(path)), ": ",
                    status.message());
  }
  return absl::UnavailableError(why_not);
}

std::string BulkWindows::Explain() const {
  MutexLock lock(&mutex_);
  if (open_ != nullptr) return std::string(PathName(open_->window->path()));
  if (why_not_.empty()) return "grpc";
  return absl::StrCat("grpc (", why_not_, ")");
}

}  // namespace kvstow
