// IndexShard: one of the index's 64 parts: a hash table over a slab of compact entries. Private to
// the index; block_index.h is what others use.
//
// Thread safety: all methods may be called at once. Callbacks run with the shard's lock held: they
// must not block and must not call the index.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/core/block_key.h"
#include "kernels/core/mutex.h"
#include "storage/block_info.h"
#include "storage/tier.h"

namespace kvstow {

// Names one insertion of a block; never used twice, so that what began with one incarnation of a
// key never ends on the next.
using BlockId = uint64_t;

class IndexShard;

// Is told of every block that comes into a tier or leaves it, with the shard's lock held.
class ResidencyListener {
 public:
  virtual ~ResidencyListener() = default;
  virtual void OnPlaced(const BlockKey& key, TierKind tier, int64_t record_bytes) = 0;
  virtual void OnRemoved(const BlockKey& key, TierKind tier, int64_t record_bytes) = 0;
};

// A block inside a callback. Valid only there.
class IndexedBlock {
 public:
  const BlockKey& key() const;
  BlockId id() const;
  int64_t record_bytes() const;
  bool in(TierKind tier) const;
  bool is_queued() const;  // waits to be written to disk
  bool is_rising() const;  // waits to be copied to hbm
  bool is_pinned() const;  // where it is not in dram, by a lease

  void Place(TierKind tier);   // now stored there too
  void Remove(TierKind tier);  // no longer stored there; a block in no tier leaves the index
  void SetQueued(bool is_queued);
  void SetRising(bool is_rising);
  void Pin();
  void Unpin();

 private:
  friend class IndexShard;
  IndexedBlock(IndexShard* shard, uint32_t slot) : shard_(shard), slot_(slot) {}
  IndexShard* shard_;
  uint32_t slot_;
};

class IndexShard {
 public:
  // `listener` may be null, and must outlive the shard.
  IndexShard(uint64_t hash_seed, ResidencyListener* listener);

  // Adds the block, then calls `placed`. False, and no call, where the key is known.
  bool Insert(const BlockInfo& block, BlockId id, absl::FunctionRef<void(IndexedBlock&)> placed);

  Location Lookup(const BlockKey& key) const;
  // False where the key is unknown.
  bool Find(const BlockKey& key, BlockInfo& block) const;

  // Calls `visit` when the block is there. `erased` tells whether it left the index by it.
  bool Visit(const BlockKey& key, absl::FunctionRef<void(IndexedBlock&)> visit, bool& erased);

  // Appends the blocks with key > `after` in ascending order, at most `limit`.
  void List(const BlockKey& after, int64_t limit, std::vector<BlockInfo>& blocks) const;

  struct Totals {
    int64_t num_blocks = 0;
    int64_t blocks_in[kNumStoreTiers] = {};  // by TierIdx
    int64_t bytes_in[kNumStoreTiers] = {};
    int64_t pinned_bytes = 0;  // not in dram, by leases
    int64_t index_bytes = 0;
    std::vector<CodecStats> codecs;
  };
  Totals totals() const;

 private:
  friend class IndexedBlock;
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kSlotsPerChunk = 256;

  // Sizes are limited where blocks enter: record_bytes and num_tokens fit.
  struct Entry {
    BlockKey key;
    BlockId id = 0;
    int64_t logical_bytes = 0;
    uint32_t record_bytes = 0;
    uint32_t model_idx = 0;
    uint32_t pins = 0;
    uint16_t num_tokens = 0;
    CodecId k_codec = CodecId::kRaw;
    CodecId v_codec = CodecId::kRaw;
    bool in_tier[kNumStoreTiers] = {};
    bool is_queued = false;
    bool is_rising = false;
  };
  struct Model {
    Digest fingerprint;
    int64_t num_blocks = 0;
  };
  // 0 is empty; else hash << 32 | slot + 1.
  using Bucket = uint64_t;

  Entry& entry(uint32_t slot) const {
    return chunks_[slot / kSlotsPerChunk][slot % kSlotsPerChunk];
  }
  uint32_t Hash(const BlockKey& key) const;
  uint32_t FindSlot(const BlockKey& key) const;
  void AddBucket(uint32_t hash, uint32_t slot);
  void RemoveBucket(const BlockKey& key);
  uint32_t TakeSlot();
  uint32_t TakeModel(const Digest& fingerprint);
  void DropModel(uint32_t model_idx);
  void CountCodec(const Entry& entry, int64_t sign);
  void EraseIfNowhere(uint32_t slot, bool& erased);
  static Location LocationOf(const Entry& entry);
  BlockInfo Describe(const Entry& entry) const;

  const uint64_t hash_seed_;
  ResidencyListener* const listener_;

  mutable Mutex mutex_;  // guards everything below
  std::vector<Bucket> buckets_;
  std::vector<std::unique_ptr<Entry[]>> chunks_;
  std::vector<uint32_t> free_slots_;
  uint32_t num_slots_ = 0;  // ever taken
  std::vector<Model> models_;
  std::vector<uint32_t> free_models_;
  absl::flat_hash_map<Digest, uint32_t, DigestHash> model_idx_;
  Totals totals_;
};

}  // namespace kvstow
