#include "kernels/core/block_layout.h"

#include "kernels/core/status_macros.h"

namespace kvstow {

absl::StatusOr<BlockLayout> BlockLayout::Create(const ModelSpec& spec) {
  KVSTOW_RETURN_IF_ERROR(spec.Validate());
  BlockLayout layout;
  layout.tokens_per_block_ = spec.tokens_per_block;
  layout.dtype_ = spec.kv_dtype;
  for (const LayerGroup& group : spec.groups) {
    for (int32_t i = 0; i < group.num_layers; ++i) {
      layout.first_plane_.push_back(static_cast<int32_t>(layout.planes_.size()));
      for (Role role : {Role::kKey, Role::kValue}) {
        const int32_t dim = role == Role::kKey ? group.k_dim : group.v_dim;
        if (dim == 0) continue;
        for (int32_t head = 0; head < group.num_kv_heads; ++head) {
          PlaneInfo plane{.layer_idx = group.first_layer + i,
                          .role = role,
                          .head_idx = head,
                          .dim = dim,
                          .row_offset = layout.block_bytes_};
          plane.row_bytes = DTypeBytes(spec.kv_dtype, int64_t{dim} * spec.tokens_per_block);
          layout.block_bytes_ += plane.row_bytes;
          layout.planes_.push_back(plane);
        }
      }
    }
  }
  layout.first_plane_.push_back(static_cast<int32_t>(layout.planes_.size()));
  return layout;
}

int32_t BlockLayout::plane_idx(int32_t layer_idx, Role role, int32_t head_idx) const {
  if (layer_idx < 0 || layer_idx >= num_layers()) return -1;
  for (int32_t i = first_plane_[layer_idx]; i < first_plane_[layer_idx + 1]; ++i) {
    if (planes_[i].role == role && planes_[i].head_idx == head_idx) return i;
  }
  return -1;
}

}  // namespace kvstow
