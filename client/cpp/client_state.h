// What the methods of KvClient and PutSession share. Private to the client library.
#pragma once

#include <atomic>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/bulk_windows.h"
#include "client/cpp/calibration_cache.h"
#include "client/cpp/connection.h"
#include "client/cpp/kv_client.h"

namespace kvstow {

struct ClientState {
  std::unique_ptr<Connection> connection;
  std::unique_ptr<BulkWindows> windows;
  std::unique_ptr<CalibrationCache> calibrations;
  std::atomic<int64_t> corrupt_blocks{0};
};

// kInvalidArgument unless there is one LayerRows for each layer of the model.
absl::Status CheckNumLayers(const BlockLayout& layout, size_t num_layers);

// kInvalidArgument names the layer and what is wrong with its pointers and strides. `layers` holds
// layers [first_layer, first_layer + layers.size()) of the model.
absl::Status CheckRows(const BlockLayout& layout, int32_t first_layer,
                       absl::Span<const LayerRows> layers);

// The view that holds a plane.
inline const RowsView& RowsOf(const PlaneInfo& plane, const LayerRows& rows) {
  return plane.role == Role::kKey ? rows.k : rows.v;
}

}  // namespace kvstow
