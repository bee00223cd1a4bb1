// Which planes of a block a call is about: a stretch of layers, and of each layer the KV heads of
// one tensor-parallel rank. Private to the client library.
//
//   KVSTOW_RETURN_IF_ERROR(CheckHeads(layout, heads));
//   const std::vector<int32_t> planes = PlanesOf(layout, {.first = 0, .count = 4}, heads);
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/bulk_windows.h"
#include "client/cpp/kv_client.h"

namespace kvstow {

struct LayerRange {
  int32_t first = 0;
  int32_t count = 0;
};

// kInvalidArgument: heads that a layer of several heads does not have.
absl::Status CheckHeads(const BlockLayout& layout, const HeadRange& heads);

// Ascending. Layers with one head only (MLA) belong to every rank.
std::vector<int32_t> PlanesOf(const BlockLayout& layout, const LayerRange& layers,
                              const HeadRange& heads);

// Bytes of these planes in row form.
int64_t RowBytes(const BlockLayout& layout, absl::Span<const int32_t> planes);

// The view that holds a plane of `heads`, as GatherPlane and ScatterPlane want it: by the heads of
// the model, while the caller's begins with the first one of `heads`.
RowsView ViewOfPlane(const BlockLayout& layout, int32_t plane_idx, const HeadRange& heads,
                     const LayerRows& rows);

// Where the rows of a call are.
struct RowsPlace {
  absl::Span<const LayerRows> layers;
  int64_t first_token = 0;  // of block 0
  HeadRange heads;
};

// kFailedPrecondition: of these planes, rows of `num_tokens` tokens in a WindowBuffer that the
// service may still be writing to, as a Get into it ended badly. `place.layers` begins with the
// layer of planes[0].
absl::Status CheckNotWritten(const BulkWindows& windows, const BlockLayout& layout,
                             absl::Span<const int32_t> planes, const RowsPlace& place,
                             int64_t num_tokens);

}  // namespace kvstow
