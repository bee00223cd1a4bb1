// RowsWriter: the rows of received blocks into the caller's memory. Private to the client library.
//
//   RowsWriter writer(model, planes, {.layers = layers});
//   KVSTOW_RETURN_IF_ERROR(writer.Write(block));
//
// Thread safety: none; one for each stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cpp/block_receiver.h"
#include "client/cpp/plane_selection.h"

namespace kvstow {

class RowsWriter {
 public:
  // `planes`: those of each block, in order. All three must outlive this.
  RowsWriter(const Model& model, absl::Span<const int32_t> planes, const RowsPlace& place)
      : model_(model), planes_(planes), place_(place) {}

  // Of what was not checked before, what is written is what was checked, whoever changes `block`
  // meanwhile. kDataLoss: a unit is not what it should be; the ones before it, and of rows that
  // stand one after the other it too, are written.
  absl::Status Write(const ReceivedBlock& block);

 private:
  absl::Status WriteUnit(const ReceivedBlock& block, int32_t plane_idx,
                         const ReceivedBlock::Unit& unit);
  // The unit's bytes, as far as they are not checked: a copy that is. kDataLoss.
  absl::Status Check(int32_t plane_idx, const ReceivedBlock::Unit& unit, const std::byte*& bytes);

  const Model& model_;
  const absl::Span<const int32_t> planes_;
  const RowsPlace& place_;
  std::vector<std::byte> unit_;   // a copy
  std::vector<std::byte> plane_;  // in row form
};

}  // namespace kvstow
