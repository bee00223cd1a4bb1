#include "storage/block_index.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "storage/random_id.h"

namespace kvstow {

BlockIndex::BlockIndex(int64_t blocks_max, ResidencyListener* listener) : blocks_max_(blocks_max) {
  for (auto& shard : shards_) shard = std::make_unique<IndexShard>(RandomId(), listener);
}

absl::Status BlockIndex::Insert(const BlockInfo& block,
                                absl::FunctionRef<void(IndexedBlock&)> placed) {
  KVSTOW_CHECK(block.record_bytes >= 0 && block.record_bytes <= kRecordBytesMax);
  KVSTOW_CHECK(block.num_tokens >= 0 && block.num_tokens <= kTokensMax);
  KVSTOW_CHECK(block.location.present());
  if (num_blocks_.fetch_add(1, std::memory_order_relaxed) >= blocks_max_) {
    num_blocks_.fetch_sub(1, std::memory_order_relaxed);
    return absl::ResourceExhaustedError(
        absl::StrCat("index holds ", blocks_max_, " blocks, its limit"));
  }
  const BlockId id = next_id_.fetch_add(1, std::memory_order_relaxed);
  if (!shard(block.key).Insert(block, id, placed)) {
    num_blocks_.fetch_sub(1, std::memory_order_relaxed);
    return absl::AlreadyExistsError(
        absl::StrCat("block ", block.key.ToHex(), " is sealed already"));
  }
  return absl::OkStatus();
}

bool BlockIndex::Visit(const BlockKey& key, absl::FunctionRef<void(IndexedBlock&)> visit) {
  bool erased = false;
  const bool found = shard(key).Visit(key, visit, erased);
  if (erased) num_blocks_.fetch_sub(1, std::memory_order_relaxed);
  return found;
}

std::vector<BlockInfo> BlockIndex::List(const BlockKey& after, int64_t limit) const {
  std::vector<BlockInfo> blocks;
  for (int i = ShardIdx(after); i < kNumShards; ++i) {
    const int64_t missing = limit - static_cast<int64_t>(blocks.size());
    if (missing <= 0) break;
    shards_[i]->List(after, missing, blocks);
  }
  return blocks;
}

IndexShard::Totals BlockIndex::totals() const {
  IndexShard::Totals sum;
  for (const auto& shard : shards_) {
    const IndexShard::Totals part = shard->totals();
    sum.num_blocks += part.num_blocks;
    for (size_t tier_idx = 0; tier_idx < kNumStoreTiers; ++tier_idx) {
      sum.blocks_in[tier_idx] += part.blocks_in[tier_idx];
      sum.bytes_in[tier_idx] += part.bytes_in[tier_idx];
    }
    sum.pinned_bytes += part.pinned_bytes;
    sum.index_bytes += part.index_bytes;
    for (const CodecStats& codec : part.codecs) {
      const auto same = std::find_if(sum.codecs.begin(), sum.codecs.end(),
                                     [&](const CodecStats& s) { return s.codecs == codec.codecs; });
      if (same == sum.codecs.end()) {
        sum.codecs.push_back(codec);
      } else {
        same->num_blocks += codec.num_blocks;
        same->record_bytes += codec.record_bytes;
        same->logical_bytes += codec.logical_bytes;
      }
    }
  }
  std::erase_if(sum.codecs, [](const CodecStats& s) { return s.num_blocks == 0; });
  std::sort(sum.codecs.begin(), sum.codecs.end(), [](const CodecStats& a, const CodecStats& b) {
    return std::pair(a.codecs.k, a.codecs.v) < std::pair(b.codecs.k, b.codecs.v);
  });
  return sum;
}

}  // namespace kvstow
