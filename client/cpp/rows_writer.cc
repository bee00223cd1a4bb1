#include "client/cpp/rows_writer.h"

#include <algorithm>

#include "client/cpp/plane_selection.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/stream_copy.h"
#include "kernels/layout/planes.h"

namespace kvstow {

absl::Status RowsWriter::Write(const ReceivedBlock& block) {
  for (size_t i = 0; i < planes_.size(); ++i) {
    KVSTOW_RETURN_IF_ERROR(WriteUnit(block, planes_[i], block.units[i]));
  }
  return absl::OkStatus();
}

absl::Status RowsWriter::WriteUnit(const ReceivedBlock& block, int32_t plane_idx,
                                   const ReceivedBlock::Unit& unit) {
  const BlockLayout& layout = *model_.layout;
  const PlaneInfo& plane = layout.plane(plane_idx);
  const int64_t first_token =
      place_.first_token + int64_t{block.block_idx} * layout.tokens_per_block();
  const RowsView view =
      ViewOfPlane(layout, plane_idx, place_.heads, place_.layers[plane.layer_idx]);
  const absl::Span<std::byte> out = PlaneInPlace(layout, plane_idx, view, first_token);
  // Written in place by the service, and checked there.
  if (!out.empty() && unit.bytes.data() == out.data()) return absl::OkStatus();
  if (unit.codec == CodecId::kRaw && !unit.is_checked && !out.empty()) {
    if (CopyHashed(unit.bytes, out.data()) == unit.xxh3) return absl::OkStatus();
    return ChecksumDiffers(plane_idx);
  }
  const std::byte* rows = nullptr;
  KVSTOW_RETURN_IF_ERROR(Check(plane_idx, unit, rows));
  if (unit.codec != CodecId::kRaw) {
    plane_.resize(std::max<size_t>(plane_.size(), plane.row_bytes));
    const PlaneShape shape = CalibratedShape(layout, plane, block.calibration.get());
    BestBackend(*FindCodec(unit.codec)).decode(shape, rows, plane_.data());
    rows = plane_.data();
  }
  ScatterPlane(layout, plane_idx, rows, first_token, view);
  return absl::OkStatus();
}

absl::Status RowsWriter::Check(int32_t plane_idx, const ReceivedBlock::Unit& unit,
                               const std::byte*& bytes) {
  bytes = unit.bytes.data();
  if (unit.is_checked) return absl::OkStatus();
  unit_.assign(unit.bytes.begin(), unit.bytes.end());
  bytes = unit_.data();
  return Xxh3(unit_) == unit.xxh3 ? absl::OkStatus() : ChecksumDiffers(plane_idx);
}

}  // namespace kvstow
