// KvData: KV caches made from a seed, so that every byte that comes back can be checked.
//
//   const ModelSpec spec = SmallModel();
//   KvData kv(spec, /*seed=*/7, /*num_blocks=*/4);
//   client.Put(model, {.tokens = kv.tokens(), .layers = kv.layers(), .codec = ...});
//   KvData got = KvData::Empty(spec, 4);
//   client.Get(model, keys, got.layers());
//   EXPECT_TRUE(got.EqualsBlock(kv, 2));
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/kv_client.h"
#include "kernels/codec/calibration.h"
#include "kernels/codec/codec.h"
#include "kernels/core/block_layout.h"
#include "kernels/core/model_spec.h"

namespace kvstow::testing {

// 4 layers, 2 KV heads, head_dim 64, bf16, 64 tokens a block: 128 KiB a block.
ModelSpec SmallModel();

// Sixteen of its layers: 512 KiB a block.
ModelSpec LargerModel();

class KvData {
 public:
  // Tokens and finite bf16 rows, all from `seed`. The rows of a block depend on the seed and the
  // block's place only.
  KvData(const ModelSpec& spec, uint64_t seed, int num_blocks);
  // Rows filled with 0xA5, to receive what a Get brings.
  static KvData Empty(const ModelSpec& spec, int num_blocks);

  KvData(KvData&&) = default;
  KvData& operator=(KvData&&) = default;

  absl::Span<const int32_t> tokens() const { return tokens_; }
  std::vector<int32_t>& mutable_tokens() { return tokens_; }
  std::vector<LayerRows> layers() const;  // views of this object's memory
  std::vector<std::byte>& k(int layer_idx) { return k_[layer_idx]; }
  std::vector<std::byte>& v(int layer_idx) { return v_[layer_idx]; }
  int num_blocks() const { return num_blocks_; }
  const BlockLayout& layout() const { return layout_; }

  // What a reader must get after these rows went through `codecs`: each plane encoded and decoded
  // here, by the same definition.
  KvData AfterCodec(const CodecPair& codecs, const Calibration* calibration = nullptr) const;

  // Byte equality of the rows of one block; the same after a block of `other` at another place.
  bool EqualsBlock(const KvData& other, int block_idx) const;
  bool EqualsBlockAt(int block_idx, const KvData& other, int other_block_idx) const;
  // True when the block still holds the 0xA5 of Empty().
  bool IsUntouched(int block_idx) const;

  // All planes of one block, in order, each contiguous.
  std::vector<std::byte> RowForm(int block_idx) const;
  void SetBlock(int block_idx, const std::vector<std::byte>& row_form);

 private:
  KvData(const ModelSpec& spec, int num_blocks);

  ModelSpec spec_;
  BlockLayout layout_;
  int num_blocks_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<std::vector<std::byte>> k_;  // per layer, [tokens, heads, k_dim]
  std::vector<std::vector<std::byte>> v_;
};

}  // namespace kvstow::testing
