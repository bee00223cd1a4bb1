#include "kernels/layout/planes.h"

#include <cstring>

#include "kernels/core/stream_copy.h"

namespace kvstow {

namespace {

std::byte* FirstRow(const PlaneInfo& info, const RowsView& rows, int64_t first_token) {
  return rows.data + first_token * rows.token_stride_bytes + info.head_idx * rows.head_stride_bytes;
}

}  // namespace

absl::Span<std::byte> PlaneInPlace(const BlockLayout& layout, int32_t plane_idx,
                                   const RowsView& rows, int64_t first_token) {
  const PlaneInfo& info = layout.plane(plane_idx);
  if (rows.token_stride_bytes * layout.tokens_per_block() != info.row_bytes) return {};
  return {FirstRow(info, rows, first_token), static_cast<size_t>(info.row_bytes)};
}

void GatherPlane(const BlockLayout& layout, int32_t plane_idx, const RowsView& rows,
                 int64_t first_token, std::byte* plane) {
  const PlaneInfo& info = layout.plane(plane_idx);
  const int64_t row_bytes = info.row_bytes / layout.tokens_per_block();
  const std::byte* from = FirstRow(info, rows, first_token);
  if (rows.token_stride_bytes == row_bytes) {
    std::memcpy(plane, from, info.row_bytes);
    return;
  }
  for (int32_t t = 0; t < layout.tokens_per_block(); ++t) {
    std::memcpy(plane + t * row_bytes, from + t * rows.token_stride_bytes, row_bytes);
  }
}

void ScatterPlane(const BlockLayout& layout, int32_t plane_idx, const std::byte* plane,
                  int64_t first_token, const RowsView& rows) {
  const PlaneInfo& info = layout.plane(plane_idx);
  const int64_t row_bytes = info.row_bytes / layout.tokens_per_block();
  const absl::Span<std::byte> in_place = PlaneInPlace(layout, plane_idx, rows, first_token);
  if (!in_place.empty()) {
    // Into the caller's memory, which is read later, if on this core at all.
    StreamCopy({plane, in_place.size()}, in_place.data());
    return;
  }
  std::byte* const to = FirstRow(info, rows, first_token);
  for (int32_t t = 0; t < layout.tokens_per_block(); ++t) {
    std::memcpy(to + t * rows.token_stride_bytes, plane + t * row_bytes, row_bytes);
  }
}

}  // namespace kvstow
