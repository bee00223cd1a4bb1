// BlockIndex: which blocks there are, and in which tiers.
//
//   BlockIndex index(blocks_max, &retention);
//   index.Insert(info, [&](IndexedBlock& block) { ... });       // under the shard's lock
//   Location where = index.Lookup(key);
//
// 64 shards by the top six bits of the key, so that walking the shards walks the keys in order. A
// block costs about 100 bytes (README.md; measured by tests/storage/block_index_test.cc).
//
// Callbacks make a tier and the index change together: they run with the shard's lock held, so they
// must not block nor call the index. Lock order: shard, then whatever a tier or queue locks inside.
//
// Which block leaves next is not the index's business: a listener (retention.h) is told of every
// block that comes into a tier or leaves it.
//
// Thread safety: all methods may be called at once. No lock is held across shards.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/core/block_key.h"
#include "storage/block_info.h"
#include "storage/index_shard.h"
#include "storage/tier.h"

namespace kvstow {

class BlockIndex {
 public:
  static constexpr int64_t kRecordBytesMax = UINT32_MAX;  // what an entry can hold
  static constexpr int32_t kTokensMax = UINT16_MAX;

  // `listener` may be null, and must outlive the index. It is called with a shard's lock held.
  explicit BlockIndex(int64_t blocks_max, ResidencyListener* listener = nullptr);

  // Adds a block at `block.location`. `placed` runs before anyone sees it.
  //   kAlreadyExists      the key is known
  //   kResourceExhausted  blocks_max entries; the message says so
  // In both cases `placed` does not run.
  absl::Status Insert(const BlockInfo& block, absl::FunctionRef<void(IndexedBlock&)> placed);

  Location Lookup(const BlockKey& key) const { return shard(key).Lookup(key); }
  // False where the key is unknown.
  bool Find(const BlockKey& key, BlockInfo& block) const { return shard(key).Find(key, block); }

  // False where the key is unknown. A block that is in no tier afterwards has left the index.
  bool Visit(const BlockKey& key, absl::FunctionRef<void(IndexedBlock&)> visit);

  // Blocks with key > `after`, ascending, at most `limit`.
  std::vector<BlockInfo> List(const BlockKey& after, int64_t limit) const;

  int64_t num_blocks() const { return num_blocks_.load(std::memory_order_relaxed); }
  IndexShard::Totals totals() const;  // summed over the shards

 private:
  static constexpr int kNumShards = 64;

  static int ShardIdx(const BlockKey& key) { return static_cast<int>(key.bytes[0]) >> 2; }
  IndexShard& shard(const BlockKey& key) { return *shards_[ShardIdx(key)]; }
  const IndexShard& shard(const BlockKey& key) const { return *shards_[ShardIdx(key)]; }

  const int64_t blocks_max_;
  std::array<std::unique_ptr<IndexShard>, kNumShards> shards_;
  std::atomic<int64_t> num_blocks_ = 0;
  std::atomic<BlockId> next_id_ = 1;
};

}  // namespace kvstow
