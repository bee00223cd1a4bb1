// SegmentMap: which segment of the disk tier holds which record, and how much of each segment
// lives.
//
// Memory only: a record is dropped here at once, and its traces on disk are removed by whoever
// calls TakeDropped next.
//
// Thread safety: all methods may be called at once. A leaf in the lock order.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/core/block_key.h"
#include "kernels/core/mutex.h"
#include "storage/segment_device.h"

namespace kvstow {

class SegmentMap {
 public:
  // What a record costs beside its own bytes: entries, index, filter, blob header. An upper bound,
  // measured by tests/storage/nvme_tier_test.cc.
  static constexpr int64_t kEntryBytes = 384;

  struct Place {
    uint32_t segment_idx = 0;
    int64_t record_bytes = 0;
    std::shared_ptr<Segment> segment;  // alive while it is read
  };
  struct DroppedRecord {
    uint32_t segment_idx = 0;
    BlockKey key;
  };

  void AddSegment(uint32_t segment_idx, std::shared_ptr<Segment> segment);
  // CHECKs that nothing lives there.
  void RemoveSegment(uint32_t segment_idx);

  // False where the key is known.
  bool Add(const BlockKey& key, uint32_t segment_idx, int64_t record_bytes);
  // The copy in `from` moved to `to`. False where the record is no longer in `from`.
  bool Move(const BlockKey& key, uint32_t from, uint32_t to);
  bool Drop(const BlockKey& key);

  std::optional<Place> Find(const BlockKey& key) const;
  bool Contains(const BlockKey& key) const;
  void ForEach(const std::function<void(const BlockKey& key, int64_t record_bytes)>& visit) const;

  // Records dropped since the last call. At most as many as were ever there at once.
  std::vector<DroppedRecord> TakeDropped();
  // Gives back those that could not be removed yet.
  void ReturnDropped(const std::vector<DroppedRecord>& dropped);
  bool has_dropped() const;

  int64_t live_bytes() const;  // records with kEntryBytes each
  int64_t live_bytes(uint32_t segment_idx) const;
  int64_t live_records(uint32_t segment_idx) const;
  std::vector<BlockKey> KeysOf(uint32_t segment_idx) const;  // walks the whole map

 private:
  struct Usage {
    std::shared_ptr<Segment> segment;
    int64_t live_bytes = 0;
    int64_t live_records = 0;
  };
  struct Stored {
    uint32_t segment_idx = 0;
    uint32_t record_bytes = 0;
  };
  void Count(const Stored& stored, int64_t sign) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::map<uint32_t, Usage> segments_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<BlockKey, Stored, BlockKeyHash> records_ ABSL_GUARDED_BY(mutex_);
  std::vector<DroppedRecord> dropped_ ABSL_GUARDED_BY(mutex_);
  int64_t live_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvstow
