// SegmentStore: records in segments of a device, within a number of bytes.
//
// Records are appended to the *active* segment, of about 1/16 of the capacity; a full one is
// closed. A segment without living records is deleted as a whole. When the room is used up by dead
// records, the living ones of the deadest segment move to the active one and it is deleted; one
// segment's room is kept free for that, so that cleaning stays inside the capacity. Living records
// take at most 0.8 of the rest, so a segment to be cleaned is on average at least a fifth dead;
// under least-recently-used eviction it is nearly all dead and little moves.
//
// Thread safety: all methods may be called at once. Writers are serialised. Lock order: this, then
// SegmentMap.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/block_key.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"
#include "storage/block_info.h"
#include "storage/block_ref.h"
#include "storage/segment_device.h"
#include "storage/segment_map.h"

namespace kvstow {

class SegmentStore {
 public:
  // What is put goes to disk when this much waits. Larger makes fewer files; it is memory.
  static constexpr int64_t kFlushBytesMax = int64_t{32} << 20;

  // `device` and `clock` must outlive the store.
  SegmentStore(int64_t capacity_bytes, SegmentDevice* device, const Clock* clock);
  SegmentStore(const SegmentStore&) = delete;
  SegmentStore& operator=(const SegmentStore&) = delete;

  // Takes over the segments that are there, by number, and calls `found` for each record; again
  // where a younger copy is found. Returns how many entries could not be read.
  absl::StatusOr<int64_t> Adopt(std::map<uint32_t, std::shared_ptr<Segment>> segments,
                                const std::function<void(const BlockInfo&)>& found);

  // Errors as NvmeTier's.
  absl::Status Put(const BlockKey& key, absl::Span<const std::byte> record);
  absl::StatusOr<BlockRef> Get(const BlockKey& key) const;
  void Drop(const BlockKey& key) { map_.Drop(key); }
  absl::Status MakeRoom(int64_t bytes);
  absl::Status Flush();
  absl::Status FlushDrops();

  const SegmentMap& map() const { return map_; }
  int64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  int64_t live_bytes_max() const { return live_bytes_max_; }
  bool has_unflushed() const;

 private:
  struct Usage {
    std::shared_ptr<Segment> segment;
    int64_t file_bytes = 0;
    int64_t unflushed_bytes = 0;
    bool has_unflushed_drops = false;
  };

  std::optional<BlockInfo> ReadMeta(const Segment& segment, const BlockKey& key,
                                    std::string_view meta) const;
  int64_t AdoptSegment(uint32_t segment_idx, const Segment& segment,
                       const std::function<void(const BlockInfo&)>& found);
  // Appends to the active segment and says which it was.
  absl::StatusOr<uint32_t> Append(const BlockInfo& block, absl::Span<const std::byte> record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OpenActive(int64_t cost) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FlushSegment(uint32_t segment_idx) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status DeleteSegment(uint32_t segment_idx) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Reclaim(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Clean(uint32_t segment_idx) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MoveRecord(uint32_t from, const BlockKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ApplyDrops() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status DeleteEmptySegments() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<uint32_t> DeadestSegment() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Recover() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Fail(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Sum() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t segment_bytes_;
  const int64_t usable_bytes_;
  const int64_t live_bytes_max_;
  SegmentDevice* const device_;
  const Clock* const clock_;
  SegmentMap map_;
  std::atomic<int64_t> used_bytes_ = 0;
  std::atomic<bool> has_unflushed_ = false;

  Mutex mutex_;
  std::map<uint32_t, Usage> segments_ ABSL_GUARDED_BY(mutex_);
  uint32_t active_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none yet
  uint32_t last_segment_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);  // of the device, until it recovers
  absl::Time retry_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
