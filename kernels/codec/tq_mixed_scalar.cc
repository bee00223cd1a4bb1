// Scalar backend of tq_mixed: the definition of tq_mixed.h over a whole plane.
#include <algorithm>
#include <functional>

#include "kernels/codec/tq_mixed.h"

namespace kvstow {
namespace {

// The columns order[first .. first + part.dim) of `rows`, in part.dtype.
std::vector<std::byte> Columns(const PlaneShape& shape, const std::byte* rows,
                               const PlaneShape& part, const int32_t* order) {
  std::vector<std::byte> columns(DTypeBytes(part.dtype, int64_t{part.num_tokens} * part.dim));
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    for (int64_t i = 0; i < part.dim; ++i) {
      const float x = LoadValue(shape.dtype, rows, t * shape.dim + order[i]);
      StoreValue(part.dtype, columns.data(), t * part.dim + i, x);
    }
  }
  return columns;
}

void PutColumns(const PlaneShape& part, const std::vector<std::byte>& columns, const int32_t* order,
                const PlaneShape& shape, std::byte* rows) {
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    for (int64_t i = 0; i < part.dim; ++i) {
      const float x = LoadValue(part.dtype, columns.data(), t * part.dim + i);
      StoreValue(shape.dtype, rows, t * shape.dim + order[i], x);
    }
  }
}

}  // namespace

void MarkTqOutliers(const std::vector<int64_t>& energy, int64_t least, std::byte* marks) {
  const int dim = static_cast<int>(energy.size());
  auto num_equal = TqMixedOutliers(dim) - std::count_if(energy.begin(), energy.end(),
                                                        [&](int64_t each) { return each > least; });
  std::fill_n(marks, dim / 8, std::byte{0});
  for (int i = 0; i < dim; ++i) {
    const bool is_equal = energy[i] == least && num_equal > 0;
    num_equal -= is_equal ? 1 : 0;
    marks[i / 8] |= static_cast<std::byte>((energy[i] > least || is_equal ? 1 : 0) << (i % 8));
  }
}

std::vector<int32_t> TqMixedOrder(int dim, const std::byte* marks) {
  const auto is_marked = [&](int i) { return (std::to_integer<int>(marks[i / 8]) >> (i % 8)) & 1; };
  int num_marked = 0;
  for (int i = 0; i < dim; ++i) num_marked += is_marked(i);
  std::vector<int32_t> order(dim);
  int marked = 0;
  int other = num_marked;
  for (int i = 0; i < dim; ++i) {
    const int is_outlier = is_marked(i);
    order[is_outlier != 0 ? marked : other] = i;
    marked += is_outlier;
    other += 1 - is_outlier;
  }
  return order;
}

EncodeResult EncodeTqMixedScalar(const TqMixedFormat& format, const std::byte* rows,
                                 std::byte* plane) {
  const PlaneShape& shape = format.shape;
  std::memset(plane, 0, format.plane_bytes());
  const float max = MaxMagnitude(shape.dtype, rows, 0, int64_t{shape.num_tokens} * shape.dim);
  if (std::isnan(max)) return EncodeResult::kKeepRaw;
  if (max < kTqZeroBelow) return EncodeResult::kEncoded;
  const int exponent = std::ilogb(max);
  std::vector<int64_t> energy(shape.dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    for (int64_t j = 0; j < shape.dim; ++j) {
      const float x = LoadValue(shape.dtype, rows, t * shape.dim + j);
      const int64_t p = ScaledInt(x, kTqRowBits, exponent);
      energy[j] += p * p;
    }
  }
  std::vector<int64_t> sorted(energy);
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  MarkTqOutliers(energy, sorted[TqMixedOutliers(shape.dim) - 1], plane + format.marks_at());
  const std::vector<int32_t> order = TqMixedOrder(shape.dim, plane + format.marks_at());
  const PlaneShape outliers = format.outliers();
  const PlaneShape others = format.others();
  const std::vector<std::byte> outlier_rows = Columns(shape, rows, outliers, order.data());
  const std::vector<std::byte> other_rows =
      Columns(shape, rows, others, order.data() + outliers.dim);
  const EncodeResult result =
      EncodeTqScalar(TqFormatOf(format.bits + 1, outliers), outliers, outlier_rows.data(), plane);
  if (result != EncodeResult::kEncoded) return result;
  return EncodeTqScalar(TqFormatOf(format.bits, others), others, other_rows.data(),
                        plane + format.others_at());
}

void DecodeTqMixedScalar(const TqMixedFormat& format, const std::byte* plane, std::byte* rows) {
  const PlaneShape& shape = format.shape;
  const std::vector<int32_t> order = TqMixedOrder(shape.dim, plane + format.marks_at());
  const PlaneShape outliers = format.outliers();
  const PlaneShape others = format.others();
  std::vector<std::byte> columns(DTypeBytes(shape.dtype, int64_t{shape.num_tokens} * shape.dim));
  DecodeTqScalar(TqFormatOf(format.bits + 1, outliers), outliers, plane, columns.data());
  PutColumns(outliers, columns, order.data(), shape, rows);
  DecodeTqScalar(TqFormatOf(format.bits, others), others, plane + format.others_at(),
                 columns.data());
  PutColumns(others, columns, order.data() + outliers.dim, shape, rows);
}

}  // namespace kvstow
