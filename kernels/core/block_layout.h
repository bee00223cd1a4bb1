// BlockLayout: the planes of one block of a model, their shapes and their places.
//
// A plane is the rows of one (layer, role, KV head): [tokens_per_block, dim]. Planes are numbered
// layer-major: for each layer, all K heads, then all V heads. The *row form* of a block is all of
// its planes in that order, unencoded, each row contiguous: [tokens_per_block, dim] of kv_dtype,
// without padding. It exists only if the ModelSpec is valid, so it carries the proof.
//
// Thread safety: immutable.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/model_spec.h"

namespace kvstow {

enum class Role : uint8_t { kKey = 0, kValue = 1 };

struct PlaneInfo {
  int32_t layer_idx = 0;
  Role role = Role::kKey;
  int32_t head_idx = 0;    // KV head
  int32_t dim = 0;         // values per row
  int64_t row_offset = 0;  // bytes from the start of the row form
  int64_t row_bytes = 0;   // bytes of the whole plane in row form
};

class BlockLayout {
 public:
  // kInvalidArgument where `spec` is invalid.
  static absl::StatusOr<BlockLayout> Create(const ModelSpec& spec);

  int32_t num_planes() const { return static_cast<int32_t>(planes_.size()); }
  int32_t num_layers() const { return static_cast<int32_t>(first_plane_.size()) - 1; }
  int32_t tokens_per_block() const { return tokens_per_block_; }
  DType dtype() const { return dtype_; }
  // Bytes of the row form of a whole block.
  int64_t block_bytes() const { return block_bytes_; }

  const PlaneInfo& plane(int32_t plane_idx) const { return planes_[plane_idx]; }
  absl::Span<const PlaneInfo> planes() const { return planes_; }

  // Planes [first, last) of a layer. layer_idx in [0, num_layers()).
  int32_t first_plane_of_layer(int32_t layer_idx) const { return first_plane_[layer_idx]; }
  int32_t num_planes_of_layer(int32_t layer_idx) const {
    return first_plane_[layer_idx + 1] - first_plane_[layer_idx];
  }

  // Index of a plane, or -1 where the layer has no such role or head.
  int32_t plane_idx(int32_t layer_idx, Role role, int32_t head_idx) const;

 private:
  BlockLayout() = default;

  int32_t tokens_per_block_ = 0;
  DType dtype_ = DType::kBf16;
  int64_t block_bytes_ = 0;
  std::vector<PlaneInfo> planes_;
  std::vector<int32_t> first_plane_;  // one more than layers
};

}  // namespace kvstow
