// oscar2: a calibrated rotation, a clipped range and 2-bit codes with an fp16 scale and zero per
// row, as OSCAR stores them. 2.25 bits per value at dim 128. For exchange with servers that read
// this layout; osu2 has less error at fewer bits. Needs PlaneShape::rotation.
//
// This header is the definition. q and e of a row are tq.h's, y = R q olm.h's; one group, the row.
//   t  = the |y| with floor(rho * dim) smaller or equal ones before it, rho = .96 keys, .92 values
//   lo = min(0, max(min y, -t)), hi = max(0, min(max y, t))
//   s  = fp16(fp32(hi - lo) / 3 * 2^(e - 24)); infinite: the plane stays raw; 0: a zero row
//   S  = s * 2^(24 - e), the same in units of y
//   Z  = rint(fp32(-lo) / S * 256), at most 768; stored zero: fp16(Z / 256), exact
//   code = the integer part of (fp32(clamp(y, lo, hi)) / S + Z / 256) + .5, within 0 to 3
// Decoding: u_j = 256 * code_j - Z, v = R^T u, x' = fp32(v) * (s * 2^-22), then the output type.
// A zero that no encoder writes counts as the nearest one in 0 to 3.
//
// Plane: per row scale and zero (fp16), zeros to a multiple of 16, per row dim / 4 bytes, zeros to
// a multiple of 64. Byte i of a row holds values i, i + dim/4, i + dim/2, i + 3 dim/4, the first in
// the lowest bits: both arrays are those of one head of a published page.
//
// Source: OSCAR (arXiv:2605.17757): rotation, clip, rounding and layout. We differ: integer sums;
// codes are taken with the stored scale and zero; the range always holds 0; the zero is a multiple
// of 1/256; one group for every dim.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/codec/olm.h"

namespace kvstow {

inline constexpr int kOscarScaleLog2 = kTqRowBits + Rotation::kLog2One;  // 24
inline constexpr int kOscarZeroUnits = 256;
inline constexpr int kOscarMaxZero = 3 * kOscarZeroUnits;

struct OscarFormat {
  PlaneShape shape;

  int64_t row_code_bytes() const { return shape.dim / 4; }
  int64_t codes_at() const { return AlignUp(int64_t{4} * shape.num_tokens, 16); }
  int64_t plane_bytes() const {
    return AlignUp(codes_at() + shape.num_tokens * row_code_bytes(), 64);
  }
  // Place of the clip among the row's magnitudes, ascending.
  int clip_rank() const { return shape.dim * (shape.role == Role::kKey ? 96 : 92) / 100; }
};

// Scale, zero and range of a row.
struct OscarRange {
  uint16_t scale = 0;  // fp16
  int zero = 0;        // in 1/256
  int32_t lo = 0;
  int32_t hi = 0;
  float step = 0;  // S

  float zero_value() const { return static_cast<float>(zero) / kOscarZeroUnits; }
};

// `lo` <= 0 <= `hi`.
inline OscarRange OscarRangeOf(int32_t lo, int32_t hi, int exponent) {
  OscarRange range{.lo = lo, .hi = hi};
  const auto width = static_cast<float>(int64_t{hi} - lo);
  range.scale = FloatToF16(std::ldexp(width / 3.0f, exponent - kOscarScaleLog2));
  if (range.scale == 0 || range.scale == kF16Infinity) return range;
  range.step = std::ldexp(F16ToFloat(range.scale), kOscarScaleLog2 - exponent);
  const float zero = std::rint(static_cast<float>(-int64_t{lo}) / range.step * kOscarZeroUnits);
  range.zero = zero < kOscarMaxZero ? static_cast<int>(zero) : kOscarMaxZero;
  return range;
}

// A stored zero in 1/256; any bits.
inline int OscarZero(uint16_t stored) {
  const float zero = std::rint(F16ToFloat(stored) * kOscarZeroUnits);
  if (!(zero > 0.0f)) return 0;
  return zero < kOscarMaxZero ? static_cast<int>(zero) : kOscarMaxZero;
}

EncodeResult EncodeOscarScalar(const PlaneShape& shape, const std::byte* rows, std::byte* plane);
void DecodeOscarScalar(const PlaneShape& shape, const std::byte* plane, std::byte* rows);

EncodeResult EncodeOscarHighway(const PlaneShape& shape, const std::byte* rows, std::byte* plane);
void DecodeOscarHighway(const PlaneShape& shape, const std::byte* plane, std::byte* rows);

}  // namespace kvstow
