#include "storage/segment_store.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "storage/nvme_meta.h"
#include "storage/record.h"

namespace kvstow {
namespace {

constexpr int64_t kSegmentsPerCapacity = 16;
constexpr int64_t kSegmentBytesMin = int64_t{4} << 20;
constexpr double kLiveShare = 0.8;  // of what is left beside the room to clean
constexpr absl::Duration kRetryAfter = absl::Seconds(1);

int64_t Cost(int64_t record_bytes) { return record_bytes + SegmentMap::kEntryBytes; }

// The meta entry of a record.
BlockInfo Describe(const RecordView& record) {
  const RecordMeta& meta = record.meta();
  return {.key = meta.key,
          .fingerprint = meta.fingerprint,
          .codecs = meta.codecs,
          .location = {.in_nvme = true},
          .num_tokens = meta.num_tokens,
          .record_bytes = static_cast<int64_t>(record.bytes().size()),
          .logical_bytes = meta.logical_bytes};
}

absl::StatusOr<BlockInfo> DescribeBytes(const BlockKey& key, absl::Span<const std::byte> bytes) {
  absl::StatusOr<RecordView> record = RecordView::Parse(bytes);
  if (!record.ok() || record->meta().key != key || bytes.size() > UINT32_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("disk tier: ", bytes.size(), " bytes are no record of block ", key.ToHex(),
                     ": ", record.ok() ? "another key or too large" : record.status().message()));
  }
  return Describe(*record);
}

}  // namespace

SegmentStore::SegmentStore(int64_t capacity_bytes, SegmentDevice* device, const Clock* clock)
    : segment_bytes_(std::max(capacity_bytes / kSegmentsPerCapacity, kSegmentBytesMin)),
      usable_bytes_(capacity_bytes - segment_bytes_),
      live_bytes_max_(static_cast<int64_t>(static_cast<double>(usable_bytes_) * kLiveShare)),
      device_(device),
      clock_(clock) {}

// --- opening ---

absl::StatusOr<int64_t> SegmentStore::Adopt(std::map<uint32_t, std::shared_ptr<Segment>> segments,
                                            const std::function<void(const BlockInfo&)>& found) {
  int64_t num_lost = 0;
  // Oldest first: of a block found twice the younger copy counts.
  for (const auto& [segment_idx, segment] : segments) {
    map_.AddSegment(segment_idx, segment);
    num_lost += AdoptSegment(segment_idx, *segment, found);
  }
  MutexLock lock(&mutex_);
  for (auto& [segment_idx, segment] : segments) {
    const int64_t file_bytes = device_->FileBytes(*segment);
    segments_[segment_idx] = {.segment = std::move(segment), .file_bytes = file_bytes};
    last_segment_ = segment_idx;
  }
  Sum();
  KVSTOW_RETURN_IF_ERROR(ApplyDrops());
  if (!segments_.empty() && segments_.rbegin()->second.file_bytes < segment_bytes_) {
    active_ = segments_.rbegin()->first;
  }
  return num_lost;
}

int64_t SegmentStore::AdoptSegment(uint32_t segment_idx, const Segment& segment,
                                   const std::function<void(const BlockInfo&)>& found) {
  int64_t num_lost = 0;
  const absl::Status status =
      device_->Scan(segment, [&](const BlockKey& key, std::string_view meta) {
        const std::optional<BlockInfo> block = ReadMeta(segment, key, meta);
        if (!block.has_value()) {
          ++num_lost;
          return;
        }
        map_.Drop(key);
        KVSTOW_CHECK(map_.Add(key, segment_idx, block->record_bytes));
        found(*block);
      });
  if (!status.ok()) {
    ++num_lost;  // at least
    Log(Severity::kWarning, "disk tier: a segment is damaged",
        {{"segment", absl::StrCat(segment_idx)}, {"error", std::string(status.message())}});
  }
  return num_lost;
}

// From the meta entry or, where that is damaged, from the record itself.
std::optional<BlockInfo> SegmentStore::ReadMeta(const Segment& segment, const BlockKey& key,
                                                std::string_view meta) const {
  std::optional<BlockInfo> block = DecodeNvmeMeta(key, meta);
  if (block.has_value() && block->record_bytes <= UINT32_MAX) return block;
  const absl::StatusOr<BlockRef> read = device_->Read(segment, key);
  if (!read.ok()) return std::nullopt;
  absl::StatusOr<BlockInfo> described = DescribeBytes(key, read->bytes());
  if (!described.ok()) return std::nullopt;
  return *std::move(described);
}

// --- reading ---

absl::StatusOr<BlockRef> SegmentStore::Get(const BlockKey& key) const {
  const std::optional<SegmentMap::Place> place = map_.Find(key);
  if (!place.has_value()) {
    return absl::NotFoundError(absl::StrCat("disk tier: no block ", key.ToHex()));
  }
  absl::StatusOr<BlockRef> read = device_->Read(*place->segment, key);
  if (read.ok() && static_cast<int64_t>(read->bytes().size()) != place->record_bytes) {
    return absl::DataLossError(absl::StrCat("disk tier: block ", key.ToHex(), " has ",
                                            read->bytes().size(), " bytes, want ",
                                            place->record_bytes));
  }
  return read;
}

bool SegmentStore::has_unflushed() const {
  return has_unflushed_.load(std::memory_order_relaxed) || map_.has_dropped();
}

// --- writing ---

absl::Status SegmentStore::Put(const BlockKey& key, absl::Span<const std::byte> record) {
  KVSTOW_ASSIGN_OR_RETURN(const BlockInfo block, DescribeBytes(key, record));
  MutexLock lock(&mutex_);
  if (map_.Contains(key)) {
    return absl::AlreadyExistsError(absl::StrCat("disk tier: block ", key.ToHex(), " is stored"));
  }
  KVSTOW_RETURN_IF_ERROR(Recover());
  KVSTOW_RETURN_IF_ERROR(Reclaim(Cost(block.record_bytes)));
  KVSTOW_ASSIGN_OR_RETURN(const uint32_t segment_idx, Append(block, record));
  KVSTOW_CHECK(map_.Add(key, segment_idx, block.record_bytes));
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> SegmentStore::Append(const BlockInfo& block,
                                              absl::Span<const std::byte> record) {
  const int64_t cost = Cost(block.record_bytes);
  KVSTOW_RETURN_IF_ERROR(OpenActive(cost));
  Usage& active = segments_.at(active_);
  // Before the write, so that a disk that is full refuses this block and not those before it.
  const int64_t flush_bytes = std::min(kFlushBytesMax, segment_bytes_);
  if (active.unflushed_bytes > 0 && active.unflushed_bytes + cost > flush_bytes) {
    KVSTOW_RETURN_IF_ERROR(FlushSegment(active_));
  }
  const absl::Status status =
      device_->Write(*active.segment, block.key, EncodeNvmeMeta(block), record);
  if (!status.ok()) return Fail(status);
  active.unflushed_bytes += cost;
  Sum();
  return active_;
}

// An active segment with room for `cost`; a record larger than a segment gets one of its own.
absl::Status SegmentStore::OpenActive(int64_t cost) {
  if (active_ != 0) {
    const Usage& active = segments_.at(active_);
    const int64_t written = active.file_bytes + active.unflushed_bytes;
    if (written == 0 || written + cost <= segment_bytes_) return absl::OkStatus();
    KVSTOW_RETURN_IF_ERROR(FlushSegment(active_));
    active_ = 0;
  }
  absl::StatusOr<std::shared_ptr<Segment>> created = device_->Create(last_segment_ + 1);
  if (!created.ok()) return Fail(created.status());
  active_ = ++last_segment_;
  map_.AddSegment(active_, *created);
  segments_[active_].segment = *std::move(created);
  return absl::OkStatus();
}

absl::Status SegmentStore::FlushSegment(uint32_t segment_idx) {
  Usage& usage = segments_.at(segment_idx);
  if (usage.unflushed_bytes == 0 && !usage.has_unflushed_drops) return absl::OkStatus();
  const absl::Status status = device_->Flush(*usage.segment);
  if (!status.ok()) return Fail(status);
  usage.unflushed_bytes = 0;
  usage.has_unflushed_drops = false;
  usage.file_bytes = device_->FileBytes(*usage.segment);
  Sum();
  return absl::OkStatus();
}

absl::Status SegmentStore::Flush() {
  MutexLock lock(&mutex_);
  const bool has_puts = std::any_of(segments_.begin(), segments_.end(), [](const auto& segment) {
    return segment.second.unflushed_bytes > 0;
  });
  // A failed disk takes nothing back from what it holds already.
  if (!has_puts && !error_.ok()) return absl::OkStatus();
  KVSTOW_RETURN_IF_ERROR(Recover());
  KVSTOW_RETURN_IF_ERROR(ApplyDrops());
  for (const auto& [segment_idx, usage] : segments_) {
    if (usage.unflushed_bytes > 0) KVSTOW_RETURN_IF_ERROR(FlushSegment(segment_idx));
  }
  return absl::OkStatus();
}

absl::Status SegmentStore::FlushDrops() {
  MutexLock lock(&mutex_);
  KVSTOW_RETURN_IF_ERROR(Recover());
  KVSTOW_RETURN_IF_ERROR(ApplyDrops());
  for (const auto& [segment_idx, usage] : segments_) {
    KVSTOW_RETURN_IF_ERROR(FlushSegment(segment_idx));
  }
  return absl::OkStatus();
}

absl::Status SegmentStore::Fail(const absl::Status& status) {
  error_ = status;
  retry_at_ = clock_->Now() + kRetryAfter;
  return status;
}

// After a failure: is the disk back? Asked at most once per kRetryAfter.
absl::Status SegmentStore::Recover() {
  if (error_.ok()) return absl::OkStatus();
  if (clock_->Now() < retry_at_) return error_;
  // First, for it may be our own room that is missing.
  DeleteEmptySegments().IgnoreError();
  const absl::Status status = device_->Resume();
  if (!status.ok()) return Fail(status);
  for (const auto& [segment_idx, usage] : segments_) {
    if (usage.unflushed_bytes > 0) KVSTOW_RETURN_IF_ERROR(FlushSegment(segment_idx));
  }
  error_ = absl::OkStatus();
  return absl::OkStatus();
}

// --- room ---

void SegmentStore::Sum() {
  int64_t used = 0;
  bool has_unflushed = false;
  for (const auto& [segment_idx, usage] : segments_) {
    used += usage.file_bytes + usage.unflushed_bytes;
    has_unflushed |= usage.unflushed_bytes > 0 || usage.has_unflushed_drops;
  }
  used_bytes_.store(used, std::memory_order_relaxed);
  has_unflushed_.store(has_unflushed, std::memory_order_relaxed);
}

absl::Status SegmentStore::MakeRoom(int64_t bytes) {
  MutexLock lock(&mutex_);
  KVSTOW_RETURN_IF_ERROR(Recover());
  return Reclaim(bytes);
}

absl::Status SegmentStore::Reclaim(int64_t bytes) {
  if (bytes > live_bytes_max_) {
    return absl::InvalidArgumentError(absl::StrCat("disk tier: record needs ", bytes,
                                                   " bytes, the tier holds ", live_bytes_max_));
  }
  KVSTOW_RETURN_IF_ERROR(ApplyDrops());
  while (true) {
    const int64_t live = map_.live_bytes();
    const int64_t used = used_bytes();
    std::optional<uint32_t> deadest;
    if (live + bytes <= live_bytes_max_) {
      if (used + bytes <= usable_bytes_) return absl::OkStatus();
      deadest = DeadestSegment();
    }
    if (deadest.has_value()) {
      KVSTOW_RETURN_IF_ERROR(Clean(*deadest));
      if (used_bytes() < used) continue;
    }
    return absl::ResourceExhaustedError(absl::StrCat("disk tier: ", bytes, " bytes wanted, ",
                                                     std::max<int64_t>(live_bytes_max_ - live, 0),
                                                     " of ", live_bytes_max_, " free"));
  }
}

// The segment with the most to win; the active one only where there is no other.
std::optional<uint32_t> SegmentStore::DeadestSegment() const {
  std::optional<uint32_t> deadest;
  int64_t most = 0;
  for (const auto& [segment_idx, usage] : segments_) {
    if (segment_idx == active_ && segments_.size() > 1) continue;
    const int64_t dead = usage.file_bytes + usage.unflushed_bytes - map_.live_bytes(segment_idx);
    if (dead <= most) continue;
    most = dead;
    deadest = segment_idx;
  }
  return deadest;
}

absl::Status SegmentStore::Clean(uint32_t segment_idx) {
  if (segment_idx == active_) active_ = 0;
  for (const BlockKey& key : map_.KeysOf(segment_idx)) {
    KVSTOW_RETURN_IF_ERROR(MoveRecord(segment_idx, key));
  }
  // The copies must be safe before the originals go.
  if (active_ != 0) KVSTOW_RETURN_IF_ERROR(FlushSegment(active_));
  return DeleteSegment(segment_idx);
}

absl::Status SegmentStore::MoveRecord(uint32_t from, const BlockKey& key) {
  const absl::StatusOr<BlockRef> read = device_->Read(*segments_.at(from).segment, key);
  if (absl::IsUnavailable(read.status())) return read.status();
  const absl::StatusOr<BlockInfo> block =
      read.ok() ? DescribeBytes(key, read->bytes()) : read.status();
  if (!block.ok()) {
    map_.Drop(key);  // unreadable: a miss from now on
    return absl::OkStatus();
  }
  KVSTOW_ASSIGN_OR_RETURN(const uint32_t to, Append(*block, read->bytes()));
  if (map_.Move(key, from, to)) return absl::OkStatus();
  // Dropped while it moved: the copy goes too.
  const absl::Status status = device_->Erase(*segments_.at(to).segment, key);
  segments_.at(to).has_unflushed_drops = true;
  return status.ok() ? status : Fail(status);
}

// Takes what was dropped off the disk: whole segments where nothing lives, else meta entries.
absl::Status SegmentStore::ApplyDrops() {
  std::vector<SegmentMap::DroppedRecord> dropped = map_.TakeDropped();
  while (!dropped.empty()) {
    const SegmentMap::DroppedRecord record = dropped.back();
    const auto found = segments_.find(record.segment_idx);
    if (found != segments_.end() && map_.live_records(record.segment_idx) > 0) {
      const absl::Status status = device_->Erase(*found->second.segment, record.key);
      if (!status.ok()) {
        map_.ReturnDropped(dropped);
        return Fail(status);
      }
      found->second.has_unflushed_drops = true;
    }
    dropped.pop_back();
  }
  return DeleteEmptySegments();
}

absl::Status SegmentStore::DeleteEmptySegments() {
  std::vector<uint32_t> empty;
  for (const auto& [segment_idx, usage] : segments_) {
    const bool is_fresh = segment_idx == active_ && usage.file_bytes + usage.unflushed_bytes == 0;
    if (map_.live_records(segment_idx) == 0 && !is_fresh) empty.push_back(segment_idx);
  }
  for (const uint32_t segment_idx : empty) KVSTOW_RETURN_IF_ERROR(DeleteSegment(segment_idx));
  Sum();
  return absl::OkStatus();
}

absl::Status SegmentStore::DeleteSegment(uint32_t segment_idx) {
  const absl::Status status = device_->Delete(*segments_.at(segment_idx).segment);
  if (!status.ok()) return Fail(status);
  if (segment_idx == active_) active_ = 0;
  map_.RemoveSegment(segment_idx);
  segments_.erase(segment_idx);
  Sum();
  return absl::OkStatus();
}

}  // namespace kvstow
