#include "service/channel_table.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "service/admission.h"
#include "storage/random_id.h"

namespace kvstow {
namespace {

// How long a dead worker's window may keep its memory.
constexpr absl::Duration kReapPeriod = absl::Seconds(1);
// How long a failed transfer may take to let go of local memory before the memory is given up.
constexpr absl::Duration kQuiesceTimeout = absl::Seconds(1);
// One waiter polls for all, and so long; then it looks whether its own transfer has ended.
constexpr absl::Duration kPollTimeout = absl::Milliseconds(100);

// Of a transfer for a call that has `left`; transfers take no zero.
absl::Duration TransferTimeout(absl::Duration left) {
  return std::clamp(left, absl::Milliseconds(1), BulkChannel::kTransferTimeout);
}

// For memory that a device or a peer may still write: never given back.
void KeepForEver(std::shared_ptr<const void> owner) {
  static auto* mutex = new Mutex();
  static auto* kept = new std::vector<std::shared_ptr<const void>>();
  MutexLock lock(mutex);
  kept->push_back(std::move(owner));
}

}  // namespace

absl::Status BulkChannel::CheckRange(uint64_t offset, uint64_t bytes) const {
  const auto all = static_cast<uint64_t>(channel_->window_bytes());
  if (offset <= all && bytes <= all - offset) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("window_offset ", offset, ", window_bytes ", bytes, ": the window has ", all));
}

absl::StatusOr<FramePayload> BulkChannel::Load(uint64_t offset, uint64_t bytes,
                                               absl::Duration timeout) {
  KVSTOW_RETURN_IF_ERROR(CheckRange(offset, bytes));
  if (bytes > static_cast<uint64_t>(kMaxFrameBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("window_bytes: ", bytes, ", want at most ", kMaxFrameBytes));
  }
  const auto from = static_cast<int64_t>(offset);
  const absl::Span<std::byte> in_place = channel_->InPlace(from, static_cast<int64_t>(bytes));
  if (!in_place.empty()) {
    if (!is_alive()) return absl::UnavailableError("the worker of the channel is gone");
    return FramePayload(OwnedSlice(shared_from_this(), in_place), /*is_shared=*/true);
  }
  std::shared_ptr<std::byte[]> copy(new std::byte[bytes]);
  const absl::Span<std::byte> local(copy.get(), bytes);
  KVSTOW_RETURN_IF_ERROR(Run({.op = TransferOp::kRead,
                              .window_offset = from,
                              .local = local,
                              .timeout = TransferTimeout(timeout)},
                             copy));
  return FramePayload(OwnedSlice(std::move(copy), local), /*is_shared=*/false);
}

absl::Status BulkChannel::Store(uint64_t offset, absl::Span<const std::byte> bytes,
                                std::shared_ptr<const void> owner, absl::Duration timeout) {
  KVSTOW_RETURN_IF_ERROR(CheckRange(offset, bytes.size()));
  const absl::Span<std::byte> in_place =
      channel_->InPlace(static_cast<int64_t>(offset), static_cast<int64_t>(bytes.size()));
  if (!in_place.empty()) {
    if (!is_alive()) return absl::UnavailableError("the worker of the channel is gone");
    std::memcpy(in_place.data(), bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  // A write does not change what it sends; the type is that of both directions.
  const absl::Span<std::byte> local(const_cast<std::byte*>(bytes.data()), bytes.size());
  return Run({.op = TransferOp::kWrite,
              .window_offset = static_cast<int64_t>(offset),
              .local = local,
              .timeout = TransferTimeout(timeout)},
             std::move(owner));
}

absl::Status BulkChannel::Run(const Transfer& transfer, std::shared_ptr<const void> owner) {
  KVSTOW_ASSIGN_OR_RETURN(const TransferId id, channel_->Post(transfer));
  absl::Status status = WaitFor(id);
  // Of the window, not of the caller's ticket or call: other ways are open.
  if (absl::IsDeadlineExceeded(status)) status = absl::UnavailableError(status.message());
  if (status.ok() || channel_->Quiesce(kQuiesceTimeout).ok()) return status;
  Log(Severity::kError, "a transfer did not let go of its memory, which is kept",
      {{"path", std::string(PathName(path()))},
       {"bytes", absl::StrCat(transfer.local.size())},
       {"status", status.ToString()}});
  KeepForEver(std::move(owner));
  return status;
}

// Transfers end by their own timeout, so this does too.
absl::Status BulkChannel::WaitFor(TransferId id) {
  MutexLock lock(&mutex_);
  for (;;) {
    if (const auto ended = ended_.find(id); ended != ended_.end()) {
      absl::Status status = std::move(ended->second);
      ended_.erase(ended);
      return status;
    }
    if (is_polling_) {
      polled_.WaitFor(&mutex_, kPollTimeout);
      continue;
    }
    is_polling_ = true;
    mutex_.Unlock();
    std::array<Completion, 16> completions;
    const size_t count = channel_->Poll(absl::MakeSpan(completions), kPollTimeout);
    mutex_.Lock();
    is_polling_ = false;
    for (size_t i = 0; i < count; ++i) {
      ended_.emplace(completions[i].id, std::move(completions[i].status));
    }
    polled_.SignalAll();
  }
}

ChannelTable::ChannelTable(std::vector<ServedPath> paths, int32_t channels_max)
    : paths_(std::move(paths)), channels_max_(channels_max), reaper_([this] { DropDeadOnes(); }) {}

ChannelTable::~ChannelTable() {
  {
    MutexLock lock(&mutex_);
    is_stopping_ = true;
  }
  stopped_.SignalAll();
  reaper_.join();
}

absl::StatusOr<uint64_t> ChannelTable::Open(std::string_view path, std::string_view ticket,
                                            absl::Duration timeout) {
  const auto served = std::find_if(paths_.begin(), paths_.end(), [&](const ServedPath& known) {
    return PathName(known.path) == path;
  });
  if (served == paths_.end() || served->transport == nullptr) {
    return absl::FailedPreconditionError(served == paths_.end() ? "this service does not know it"
                                                                : served->unavailable);
  }
  if (num_open() >= channels_max_) {
    return WithRetryHint(absl::ResourceExhaustedError(
        absl::StrCat("limits.channels: ", channels_max_, " are open")));
  }
  KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<Channel> channel,
                          served->transport->Attach(ticket, timeout));
  auto shared = std::make_shared<BulkChannel>(std::move(channel));
  const uint64_t id = RandomId();
  MutexLock lock(&mutex_);
  channels_.emplace(id, std::move(shared));
  return id;
}

absl::StatusOr<std::shared_ptr<BulkChannel>> ChannelTable::Find(uint64_t id) {
  MutexLock lock(&mutex_);
  const auto found = channels_.find(id);
  if (found == channels_.end()) return absl::NotFoundError("channel: not open; open another one");
  return found->second;
}

absl::Status ChannelTable::Close(uint64_t id) {
  std::shared_ptr<BulkChannel> closed;  // goes after the lock
  MutexLock lock(&mutex_);
  const auto found = channels_.find(id);
  if (found == channels_.end()) return absl::NotFoundError("channel: not open");
  closed = std::move(found->second);
  channels_.erase(found);
  return absl::OkStatus();
}

int64_t ChannelTable::num_open() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(channels_.size());
}

void ChannelTable::DropDeadOnes() {
  for (;;) {
    std::vector<std::shared_ptr<BulkChannel>> dead;  // go after the lock
    MutexLock lock(&mutex_);
    if (is_stopping_) return;
    for (auto at = channels_.begin(); at != channels_.end();) {
      if (at->second->is_alive()) {
        ++at;
        continue;
      }
      dead.push_back(std::move(at->second));
      at = channels_.erase(at);
    }
    if (dead.empty()) stopped_.WaitFor(&mutex_, kReapPeriod);
  }
}

}  // namespace kvstow
