#include "client/cpp/plane_selection.h"

#include "absl/strings/str_cat.h"
#include "client/cpp/client_state.h"

namespace kvstow {
namespace {

int32_t NumHeads(const BlockLayout& layout, int32_t layer_idx) {
  int32_t num_heads = 0;
  while (layout.plane_idx(layer_idx, Role::kKey, num_heads) >= 0) ++num_heads;
  return num_heads;
}

}  // namespace

absl::Status CheckHeads(const BlockLayout& layout, const HeadRange& heads) {
  for (int32_t layer = 0; layer < layout.num_layers(); ++layer) {
    const int32_t num_heads = NumHeads(layout, layer);
    const bool is_whole = heads.first == 0 && heads.count == 0;
    if (is_whole || num_heads == 1) continue;
    if (heads.first < 0 || heads.count < 1 || heads.count > num_heads ||
        heads.first > num_heads - heads.count) {
      return absl::InvalidArgumentError(absl::StrCat("heads: ", heads.count, " from head ",
                                                     heads.first, " on, layer ", layer, " has ",
                                                     num_heads));
    }
  }
  return absl::OkStatus();
}

std::vector<int32_t> PlanesOf(const BlockLayout& layout, const LayerRange& layers,
                              const HeadRange& heads) {
  std::vector<int32_t> planes;
  for (int32_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
    const bool is_whole = heads.count == 0 || NumHeads(layout, layer) == 1;
    const int32_t first = layout.first_plane_of_layer(layer);
    for (int32_t i = first; i < first + layout.num_planes_of_layer(layer); ++i) {
      const int32_t head = layout.plane(i).head_idx;
      if (is_whole || (head >= heads.first && head < heads.first + heads.count))
        planes.push_back(i);
    }
  }
  return planes;
}

int64_t RowBytes(const BlockLayout& layout, absl::Span<const int32_t> planes) {
  int64_t bytes = 0;
  for (const int32_t plane : planes) bytes += layout.plane(plane).row_bytes;
  return bytes;
}

RowsView ViewOfPlane(const BlockLayout& layout, int32_t plane_idx, const HeadRange& heads,
                     const LayerRows& rows) {
  const PlaneInfo& plane = layout.plane(plane_idx);
  RowsView view = RowsOf(plane, rows);
  if (heads.count > 0 && NumHeads(layout, plane.layer_idx) > 1) {
    view.data -= heads.first * view.head_stride_bytes;
  }
  return view;
}

absl::Status CheckNotWritten(const BulkWindows& windows, const BlockLayout& layout,
                             absl::Span<const int32_t> planes, const RowsPlace& place,
                             int64_t num_tokens) {
  const std::vector<std::shared_ptr<BulkArea>> buffers = windows.WrittenBuffers();
  if (buffers.empty() || planes.empty() || num_tokens <= 0) return absl::OkStatus();
  const int32_t first_layer = layout.plane(planes[0]).layer_idx;
  for (const int32_t plane_idx : planes) {
    const PlaneInfo& plane = layout.plane(plane_idx);
    const RowsView view =
        ViewOfPlane(layout, plane_idx, place.heads, place.layers[plane.layer_idx - first_layer]);
    const int64_t row_bytes = plane.row_bytes / layout.tokens_per_block();
    const std::byte* const begin = view.data + plane.head_idx * view.head_stride_bytes +
                                   place.first_token * view.token_stride_bytes;
    const absl::Span<const std::byte> rows(
        begin, static_cast<size_t>((num_tokens - 1) * view.token_stride_bytes + row_bytes));
    for (const std::shared_ptr<BulkArea>& buffer : buffers) {
      if (!buffer->Overlaps(rows)) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("layers[", plane.layer_idx,
                       "]: a Get into this WindowBuffer ended badly and the service may still "
                       "write there; make another one"));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvstow
