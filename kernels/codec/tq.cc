// Highway backend of tq: the blocks where they exist, the lanes for all other rows.
#include "kernels/codec/tq.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "kernels/codec/int_rows.h"
#include "kernels/codec/tq_simd.h"

namespace kvstow {
namespace {

constexpr int64_t kRowsAtOnce = 64;
constexpr int64_t kAheadBytes = 8192;  // as far as memory is slow: some 500 ns of encoding

// All channels of a row, for the columns.
std::array<int32_t, kMaxTqColumns> AllChannels() {
  std::array<int32_t, kMaxTqColumns> channels;
  std::iota(channels.begin(), channels.end(), 0);
  return channels;
}

}  // namespace

EncodeResult EncodeTqValueRows(const TqPlane& plane, DType dtype, absl::Span<const TqValueRow> rows,
                               std::byte* bytes) {
  const int dim = plane.format.dim;
  std::vector<int16_t> ints(std::min<int64_t>(kRowsAtOnce, rows.size()) * dim);
  std::vector<TqIntRow> int_rows;
  for (size_t first = 0; first < rows.size(); first += kRowsAtOnce) {
    int_rows.clear();
    for (const TqValueRow& row : rows.subspan(first, kRowsAtOnce)) {
      const ValueRange range = RangeOfValues(dtype, row.values, dim);
      if (!range.is_finite) return EncodeResult::kKeepRaw;
      std::byte* const scale = bytes + 2 * row.row_idx;
      std::byte* const codes = plane.codes(bytes, row.row_idx);
      if (range.is_zero) {
        StoreU16(scale, 0);
        std::fill_n(codes, plane.layout.row_code_bytes, std::byte{0});
        continue;
      }
      int16_t* q = ints.data() + int_rows.size() * dim;
      ValuesToInts(dtype, row.values, dim, kTqRowBits - range.exponent, q);
      int_rows.push_back({q, range.exponent, codes, scale});
    }
    if (!EncodeTqLanes(plane.format, int_rows)) return EncodeResult::kKeepRaw;
  }
  return EncodeResult::kEncoded;
}

EncodeResult EncodeTqHighway(const TqFormat& format, const PlaneShape& shape, const std::byte* rows,
                             std::byte* bytes) {
  const TqPlane plane{.format = format, .has_means = false, .num_tokens = shape.num_tokens};
  ClearTqPadding(plane, bytes);
  std::vector<int32_t> row_idx;
  if (CanEncodeTqBlocks(shape.dtype, format.dim)) {
    if (!EncodeTqBlocks(plane, {.rows = rows, .ahead = rows + kAheadBytes}, bytes, row_idx))
      return EncodeResult::kKeepRaw;
  } else if (CanUseTqColumns(shape.dtype, format.dim)) {
    const std::array<int32_t, kMaxTqColumns> channels = AllChannels();
    if (!EncodeTqColumns({{plane, channels.data()}}, format.dim, rows, {bytes}, {&row_idx, 1}))
      return EncodeResult::kKeepRaw;
  } else {
    row_idx.resize(shape.num_tokens);
    std::iota(row_idx.begin(), row_idx.end(), 0);
  }
  std::vector<TqValueRow> left;
  left.reserve(row_idx.size());
  for (const int64_t t : row_idx)
    left.push_back({t, rows + DTypeBytes(shape.dtype, t * format.dim)});
  return EncodeTqValueRows(plane, shape.dtype, left, bytes);
}

void DecodeTqHighway(const TqFormat& format, const PlaneShape& shape, const std::byte* bytes,
                     std::byte* rows) {
  const TqPlane plane{.format = format, .has_means = false, .num_tokens = shape.num_tokens};
  DecodeTqPlane(plane, shape.dtype, /*means=*/nullptr, bytes, rows);
}

void ClearTqPadding(const TqPlane& plane, std::byte* bytes) {
  const TqLayout& layout = plane.layout;
  const int64_t head_end =
      plane.has_means ? layout.means_at + 2 + plane.format.dim : 2 * plane.num_tokens;
  std::fill(bytes + head_end, bytes + layout.codes_at, std::byte{0});
  std::fill(plane.codes(bytes, plane.num_tokens), bytes + layout.plane_bytes, std::byte{0});
}

void DecodeTqPlane(const TqPlane& plane, DType dtype, const float* means, const std::byte* bytes,
                   std::byte* rows) {
  if (CanDecodeTqBlocks(dtype, plane.format.dim)) {
    DecodeTqBlocks(plane, means, bytes, rows);
    return;
  }
  if (means == nullptr && CanUseTqColumns(dtype, plane.format.dim)) {
    const std::array<int32_t, kMaxTqColumns> channels = AllChannels();
    DecodeTqColumns({{plane, channels.data()}}, plane.format.dim, {bytes}, rows);
    return;
  }
  const int64_t row_bytes = DTypeBytes(dtype, plane.format.dim);
  std::vector<TqCodeRow> code_rows;
  for (int64_t t = 0; t < plane.num_tokens; ++t) {
    code_rows.push_back({LoadU16(bytes + 2 * t), plane.codes(bytes, t), rows + t * row_bytes});
    if (static_cast<int64_t>(code_rows.size()) == kRowsAtOnce || t + 1 == plane.num_tokens) {
      DecodeTqLanes(plane.format, dtype, means, code_rows);
      code_rows.clear();
    }
  }
}

}  // namespace kvstow
