// Planes: engine memory <-> the planes of a block. Pure copies, bit-exact for every dtype.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/core/block_layout.h"

namespace kvstow {

// Where an engine keeps the rows of one (layer, role): [num_tokens, num_kv_heads, dim] or any other
// order, told by byte strides. A row (dim values) is contiguous. The memory is borrowed.
struct RowsView {
  std::byte* data = nullptr;
  int64_t token_stride_bytes = 0;
  int64_t head_stride_bytes = 0;
};

// The rows of tokens [first_token, first_token + tokens_per_block) of one head where they stand one
// after the other, which is row form in place; else empty.
absl::Span<std::byte> PlaneInPlace(const BlockLayout& layout, int32_t plane_idx,
                                   const RowsView& rows, int64_t first_token);

// Copies the rows of tokens [first_token, first_token + tokens_per_block) of one head into `plane`
// (row form, layout.plane(plane_idx).row_bytes bytes).
void GatherPlane(const BlockLayout& layout, int32_t plane_idx, const RowsView& rows,
                 int64_t first_token, std::byte* plane);

// The inverse.
void ScatterPlane(const BlockLayout& layout, int32_t plane_idx, const std::byte* plane,
                  int64_t first_token, const RowsView& rows);

}  // namespace kvstow
