// Highway backend of tq: the blocks where they exist, the lanes for all other rows.
#include "kernels/codec/tq.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/codec/int_rows.h"
#include "kernels/codec/tq_simd.h"

namespace kvstow {
namespace {

constexpr int32_t kRowsAtOnce = 64;
constexpr int64_t kAheadBytes = 8192;  // as far as memory is slow: some 500 ns of encoding

// Encodes the rows named by `row_idx`, one row per lane.
EncodeResult EncodeRows(const TqPlane& plane, DType dtype, const std::byte* rows, std::byte* bytes,
                        absl::Span<const int32_t> row_idx) {
  const int dim = plane.format.dim;
  const int64_t row_bytes = DTypeBytes(dtype, dim);
  std::vector<int16_t> ints(row_idx.size() * dim);
  std::vector<TqIntRow> int_rows;
  int_rows.reserve(row_idx.size());
  for (size_t i = 0; i < row_idx.size(); ++i) {
    const int64_t t = row_idx[i];
    const std::byte* row = rows + t * row_bytes;
    const ValueRange range = RangeOfValues(dtype, row, dim);
    if (!range.is_finite) return EncodeResult::kKeepRaw;
    if (range.is_zero) {
      StoreU16(bytes + 2 * t, 0);
      std::fill_n(plane.codes(bytes, t), plane.layout.row_code_bytes, std::byte{0});
      continue;
    }
    int16_t* q = ints.data() + i * dim;
    ValuesToInts(dtype, row, dim, kTqRowBits - range.exponent, q);
    int_rows.push_back({q, range.exponent, plane.codes(bytes, t), bytes + 2 * t});
  }
  const bool fits = EncodeTqLanes(plane.format, int_rows);
  return fits ? EncodeResult::kEncoded : EncodeResult::kKeepRaw;
}

}  // namespace

EncodeResult EncodeTqHighway(const TqFormat& format, const PlaneShape& shape, const std::byte* rows,
                             std::byte* bytes) {
  const TqPlane plane{.format = format, .has_means = false, .num_tokens = shape.num_tokens};
  ClearTqPadding(plane, bytes);
  std::vector<int32_t> row_idx;
  if (CanEncodeTqBlocks(shape.dtype, format.dim)) {
    if (!EncodeTqBlocks(plane, {.rows = rows, .ahead = rows + kAheadBytes}, bytes, row_idx))
      return EncodeResult::kKeepRaw;
  } else {
    row_idx.resize(shape.num_tokens);
    std::iota(row_idx.begin(), row_idx.end(), 0);
  }
  const absl::Span<const int32_t> all(row_idx);
  for (size_t first = 0; first < all.size(); first += kRowsAtOnce) {
    const EncodeResult result =
        EncodeRows(plane, shape.dtype, rows, bytes, all.subspan(first, kRowsAtOnce));
    if (result != EncodeResult::kEncoded) return result;
  }
  return EncodeResult::kEncoded;
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
  const int64_t row_bytes = DTypeBytes(dtype, plane.format.dim);
  std::vector<TqCodeRow> code_rows;
  for (int64_t t = 0; t < plane.num_tokens; ++t) {
    code_rows.push_back({LoadU16(bytes + 2 * t), plane.codes(bytes, t), rows + t * row_bytes});
    if (code_rows.size() == kRowsAtOnce || t + 1 == plane.num_tokens) {
      DecodeTqLanes(plane.format, dtype, means, code_rows);
      code_rows.clear();
    }
  }
}

}  // namespace kvstow
