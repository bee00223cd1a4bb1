// Scalar backends of tq and tqm: the row definitions of tq.h and tqm.h over a whole plane.
#include "kernels/codec/tqm.h"

namespace kvstow {
EncodeResult EncodeTqScalar(const TqFormat& format, const PlaneShape& shape, const std::byte* rows,
                            std::byte* plane) {
  const TqLayout layout(format.bits, /*has_means=*/false, shape.num_tokens, format.dim);
  std::memset(plane, 0, layout.plane_bytes);
  std::vector<int32_t> q(format.dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const int64_t first = t * format.dim;
    const float max = MaxMagnitude(shape.dtype, rows, first, format.dim);
    if (std::isnan(max)) return EncodeResult::kKeepRaw;
    if (max < kTqZeroBelow) continue;
    const int exponent = std::ilogb(max);
    for (int i = 0; i < format.dim; ++i) {
      q[i] = ScaledInt(LoadValue(shape.dtype, rows, first + i), kTqRowBits, exponent);
    }
    const uint16_t scale = EncodeTqInts(format, q.data(), exponent,
                                        plane + layout.codes_at + t * layout.row_code_bytes);
    if (scale == kF16Infinity) return EncodeResult::kKeepRaw;
    StoreU16(plane + 2 * t, scale);
  }
  return EncodeResult::kEncoded;
}

void DecodeTqScalar(const TqFormat& format, const PlaneShape& shape, const std::byte* plane,
                    std::byte* rows) {
  const TqLayout layout(format.bits, /*has_means=*/false, shape.num_tokens, format.dim);
  std::vector<float> values(format.dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    DecodeTqRow(format, LoadU16(plane + 2 * t), plane + layout.codes_at + t * layout.row_code_bytes,
                values.data());
    for (int i = 0; i < format.dim; ++i) {
      StoreValue(shape.dtype, rows, t * format.dim + i, values[i]);
    }
  }
}

EncodeResult EncodeTqmScalar(const TqFormat& format, const PlaneShape& shape, const std::byte* rows,
                             std::byte* plane) {
  const int dim = format.dim;
  const TqLayout layout(format.bits, /*has_means=*/true, shape.num_tokens, dim);
  std::memset(plane, 0, layout.plane_bytes);
  const int64_t num_values = int64_t{shape.num_tokens} * dim;
  const float max = MaxMagnitude(shape.dtype, rows, 0, num_values);
  if (std::isnan(max)) return EncodeResult::kKeepRaw;
  if (max < kTqZeroBelow) return EncodeResult::kEncoded;

  const int exponent = std::ilogb(max);
  std::vector<int32_t> p(num_values);
  for (int64_t i = 0; i < num_values; ++i) {
    p[i] = ScaledInt(LoadValue(shape.dtype, rows, i), kTqmPlaneBits, exponent);
  }
  const TqmMeans means = EncodeTqmMeans(p, shape.num_tokens, dim, exponent);
  if (means.scale == kF16Infinity) return EncodeResult::kKeepRaw;
  StoreU16(plane + layout.means_at, means.scale);
  std::memcpy(plane + layout.means_at + 2, means.code.data(), dim);

  std::vector<int32_t> u(dim);
  std::vector<int32_t> q(dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    for (int j = 0; j < dim; ++j) u[j] = p[t * dim + j] - means.p[j];
    const int shift = ShrinkTqmRow(u.data(), dim, q.data());
    if (std::all_of(q.begin(), q.end(), [](int32_t value) { return value == 0; })) continue;
    const int row_exponent = exponent - (kTqmPlaneBits - kTqRowBits) + shift;
    const uint16_t scale = EncodeTqInts(format, q.data(), row_exponent,
                                        plane + layout.codes_at + t * layout.row_code_bytes);
    if (scale == kF16Infinity) return EncodeResult::kKeepRaw;
    StoreU16(plane + 2 * t, scale);
  }
  return EncodeResult::kEncoded;
}

void DecodeTqmScalar(const TqFormat& format, const PlaneShape& shape, const std::byte* plane,
                     std::byte* rows) {
  const int dim = format.dim;
  const TqLayout layout(format.bits, /*has_means=*/true, shape.num_tokens, dim);
  const float mean_scale = F16ToFloat(LoadU16(plane + layout.means_at));
  const std::byte* codes = plane + layout.means_at + 2;
  std::vector<float> values(dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    DecodeTqRow(format, LoadU16(plane + 2 * t), plane + layout.codes_at + t * layout.row_code_bytes,
                values.data());
    for (int j = 0; j < dim; ++j) {
      const float mean = static_cast<float>(std::to_integer<int8_t>(codes[j])) * mean_scale;
      StoreValue(shape.dtype, rows, t * dim + j, values[j] + mean);
    }
  }
}

}  // namespace kvstow
