// Scalar backend of oscar2: the definition of oscar.h over a whole plane.
#include <algorithm>

#include "kernels/codec/oscar.h"

namespace kvstow {
namespace {

// One row, not all 0, to codes. Returns what is stored besides.
OscarRange EncodeRow(const OscarFormat& format, const int32_t* q, int exponent, std::byte* codes) {
  const int dim = format.shape.dim;
  const std::vector<int32_t> y = RotateForward(*format.shape.rotation, q);
  std::vector<int32_t> magnitudes(dim);
  for (int j = 0; j < dim; ++j) magnitudes[j] = std::abs(y[j]);
  std::sort(magnitudes.begin(), magnitudes.end());
  const int32_t clip = magnitudes[format.clip_rank()];
  const int32_t lo = std::min(0, std::max(*std::min_element(y.begin(), y.end()), -clip));
  const int32_t hi = std::max(0, std::min(*std::max_element(y.begin(), y.end()), clip));
  const OscarRange range = OscarRangeOf(lo, hi, exponent);
  if (range.scale == 0 || range.scale == kF16Infinity) return range;
  for (int j = 0; j < dim; ++j) {
    const auto clamped = static_cast<float>(std::clamp(y[j], lo, hi));
    const float place = clamped / range.step + range.zero_value() + 0.5f;
    const int code = std::clamp(static_cast<int>(place), 0, 3);
    codes[j % (dim / 4)] |= static_cast<std::byte>(code << (2 * (j / (dim / 4))));
  }
  return range;
}

}  // namespace

EncodeResult EncodeOscarScalar(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  const OscarFormat format{shape};
  std::memset(plane, 0, format.plane_bytes());
  std::vector<int32_t> q(shape.dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const float max = MaxMagnitude(shape.dtype, rows, t * shape.dim, shape.dim);
    if (std::isnan(max)) return EncodeResult::kKeepRaw;
    if (max < kTqZeroBelow) continue;
    const int exponent = std::ilogb(max);
    for (int64_t i = 0; i < shape.dim; ++i) {
      const float x = LoadValue(shape.dtype, rows, t * shape.dim + i);
      q[i] = ScaledInt(x, kTqRowBits, exponent);
    }
    const OscarRange range = EncodeRow(format, q.data(), exponent,
                                       plane + format.codes_at() + t * format.row_code_bytes());
    if (range.scale == kF16Infinity) return EncodeResult::kKeepRaw;
    StoreU16(plane + 4 * t, range.scale);
    StoreU16(plane + 4 * t + 2, FloatToF16(range.zero_value()));
  }
  return EncodeResult::kEncoded;
}

void DecodeOscarScalar(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  const OscarFormat format{shape};
  const int quarter = shape.dim / 4;
  std::vector<int32_t> u(shape.dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const std::byte* codes = plane + format.codes_at() + t * format.row_code_bytes();
    const uint16_t scale = LoadU16(plane + 4 * t);
    const int zero = OscarZero(LoadU16(plane + 4 * t + 2));
    for (int j = 0; j < shape.dim; ++j) {
      const int code = (std::to_integer<int>(codes[j % quarter]) >> (2 * (j / quarter))) & 3;
      u[j] = scale == 0 ? 0 : kOscarZeroUnits * code - zero;
    }
    const std::vector<int32_t> v = RotateBack(*shape.rotation, u.data());
    const float step = std::ldexp(F16ToFloat(scale), -(Rotation::kLog2One + 8));
    for (int i = 0; i < shape.dim; ++i) {
      StoreValue(shape.dtype, rows, t * shape.dim + i, static_cast<float>(v[i]) * step);
    }
  }
}

}  // namespace kvstow
