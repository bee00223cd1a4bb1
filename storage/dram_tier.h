// DramTier: sealed records in one bounded arena of host memory.
//
//   KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<DramTier> tier, DramTier::Create(int64_t{1} << 30));
//   KVSTOW_ASSIGN_OR_RETURN(ArenaRegion region, tier->Allocate(record_bytes));
//   ... write the record into region.bytes() ...
//   KVSTOW_RETURN_IF_ERROR(tier->Adopt(key, std::move(region)));   // or Put, which copies
//
// Get costs one hash lookup and one small allocation; Put one copy. Nothing survives a restart. The
// bytes are not checked here: seal and promotion did so before they came in. A BlockRef keeps its
// memory even past the end of the tier.
//
// Thread safety: all methods may be called at once; none blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/block_key.h"
#include "kernels/core/mutex.h"
#include "storage/block_ref.h"
#include "storage/dram_arena.h"
#include "storage/tier.h"

namespace kvstow {

class DramTier final : public Tier {
 public:
  // Errors as DramArena::Create.
  static absl::StatusOr<std::unique_ptr<DramTier>> Create(int64_t capacity_bytes);

  // Room for a record that is not stored yet. It counts as used.
  //   kInvalidArgument    more than the whole tier, or nothing
  //   kResourceExhausted  no hole that large
  absl::StatusOr<ArenaRegion> Allocate(int64_t bytes);

  // Stores a region of this tier's own, without copying. kAlreadyExists: `region` is freed.
  absl::Status Adopt(const BlockKey& key, ArenaRegion region);

  // Drop, unless a BlockRef of the block lives. True when the block was there and is gone.
  bool DropIfUnpinned(const BlockKey& key);
  bool IsPinned(const BlockKey& key) const;
  // Of all blocks with a living BlockRef, dropped ones too.
  int64_t pinned_bytes() const { return pinned_bytes_->load(std::memory_order_relaxed); }

  TierKind kind() const override { return TierKind::kDram; }
  absl::Status Put(const BlockKey& key, absl::Span<const std::byte> record) override;
  absl::StatusOr<BlockRef> Get(const BlockKey& key) override;
  void Drop(const BlockKey& key) override;
  void ForEach(
      const std::function<void(const BlockKey& key, int64_t record_bytes)>& visit) const override;
  absl::Status Flush() override { return absl::OkStatus(); }
  int64_t used_bytes() const override { return arena_->used_bytes(); }
  int64_t capacity_bytes() const override { return arena_->capacity_bytes(); }

 private:
  using ByteGauge = std::atomic<int64_t>;
  // A stored record. Pins only grow under the tier's lock.
  struct Block {
    Block(ArenaRegion region, std::shared_ptr<ByteGauge> pinned_bytes)
        : region(std::move(region)), pinned_bytes(std::move(pinned_bytes)) {}
    ArenaRegion region;
    const std::shared_ptr<ByteGauge> pinned_bytes;
    std::atomic<int32_t> pins = 0;
  };
  class Pin;

  explicit DramTier(std::shared_ptr<DramArena> arena);

  const std::shared_ptr<DramArena> arena_;
  const std::shared_ptr<ByteGauge> pinned_bytes_ = std::make_shared<ByteGauge>(0);

  mutable Mutex mutex_;
  absl::flat_hash_map<BlockKey, std::shared_ptr<Block>, BlockKeyHash> blocks_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
