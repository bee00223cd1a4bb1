// tq4, tq3, tq2: a signed Hadamard rotation, Lloyd-Max levels of a Gaussian, an fp16 scale per row.
//
// This header is the definition of the format: a plain reference for one row. Other backends are
// written on their own and give the same bytes (tests/kernels/codec_exactness_test.cc).
//
// All sums are sums of integers: a row is scaled once to 12-bit integers, so neither the order of
// the additions nor the width of a register changes a bit; every floating-point operation is a
// single, correctly rounded one. Cost against the fp32 form: 0.1 % of the error energy at 4 bits,
// less below.
//
// Source: rotation and Lloyd-Max levels as in TurboQuant (Zandieh et al., arXiv:2504.19874) and
// QuIP#; we differ: integer levels and sums, a scale fitted to the codes in place of the norm.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/codec/hadamard.h"
#include "kernels/codec/rows.h"

namespace kvstow {

// What the stored scale makes right. The decoder does not need to know.
enum class TqScale {
  kLeastSquares,  // the smallest error: keys, whose mean has not been removed
  kUnbiased,      // <x', x> = <x, x>: values, and keys without their mean
};

struct TqFormat {
  int bits = 4;  // 2, 3 or 4; 1 as the first part of tq_prod2
  int dim = 0;
  Role role = Role::kKey;
  TqScale scale = TqScale::kUnbiased;
};

// Levels and thresholds of b bits. Levels are integers in units that make the smallest error of all
// such sets below 2^7; thresholds are in units of the rms of the rotated row.
struct TqTable {
  int num_magnitudes;  // 2^(bits - 1)
  int8_t level[8];     // of magnitude 0, 1, ..: the positive half
  float threshold[7];  // magnitude i + 1 starts at threshold[i]
  int scale_log2;      // G_b: brings the stored scale near the rms of the row
  float clamp;         // kappa_b: the unbiased scale is at most this times the least-squares one
};

inline constexpr TqTable kTqTables[4] = {
    {1, {1}, {}, 0, 1.7278760f},
    {2, {3, 10}, {0.98159882f}, 3, 1.2464333f},
    {4, {10, 31, 55, 88}, {0.50054973f, 1.04995728f, 1.74792749f}, 5, 1.1393624f},
    {8,
     {5, 15, 25, 36, 48, 62, 79, 104},
     {0.25822166f, 0.52240370f, 0.79954979f, 1.09928583f, 1.43713879f, 1.84353181f, 2.40080340f},
     5,
     1.1105514f},
};

constexpr const TqTable& TqTableOf(int bits) { return kTqTables[bits - 1]; }

// Where the parts of a plane lie: row scales, in mean form (tqm.h) the mean scale and the means,
// zeros to a multiple of 16, code rows, zeros to a multiple of 64.
struct TqLayout {
  TqLayout(int bits, bool has_means, int64_t num_tokens, int64_t dim)
      : row_code_bytes(dim * bits / 8),
        means_at(2 * num_tokens),
        codes_at(AlignUp(means_at + (has_means ? 2 + dim : 0), 16)),
        plane_bytes(AlignUp(codes_at + num_tokens * row_code_bytes, 64)) {}

  int64_t row_code_bytes;
  int64_t means_at;  // fp16 mean scale, then dim int8 means
  int64_t codes_at;
  int64_t plane_bytes;
};

inline constexpr float kTqZeroBelow = 0x1p-40f;  // rows whose largest magnitude is below are zero
inline constexpr int kTqRowBits = 10;  // |q| <= 2^11: the leading bit of the largest is bit 10

// Exponent that turns the integer scale alpha into the stored one: x ~ a * 2^-g * H^T w.
inline int TqScaleLog2(int bits, int dim) {
  return TqTableOf(bits).scale_log2 + FloorLog2(dim) / 2;
}

// Codes: first value in the lowest bits. 3 bits: the low two bits of all, then the high bit of all.
inline void PackTqCodes(int bits, int dim, const uint8_t* index, std::byte* codes) {
  std::memset(codes, 0, dim * bits / 8);
  const int low_bits = bits == 3 ? 2 : bits;
  for (int i = 0; i < dim; ++i) {
    const int at = i * low_bits;
    codes[at / 8] |= static_cast<std::byte>((index[i] & ((1 << low_bits) - 1)) << (at % 8));
    if (bits == 3) codes[dim / 4 + i / 8] |= static_cast<std::byte>((index[i] >> 2) << (i % 8));
  }
}

inline int TqCodeAt(int bits, int dim, const std::byte* codes, int i) {
  const int low_bits = bits == 3 ? 2 : bits;
  const int at = i * low_bits;
  const int low = (std::to_integer<int>(codes[at / 8]) >> (at % 8)) & ((1 << low_bits) - 1);
  if (bits != 3) return low;
  return low | (((std::to_integer<int>(codes[dim / 4 + i / 8]) >> (i % 8)) & 1) << 2);
}

// One row of integers x = q * 2^(exponent - kTqRowBits), not all 0, to codes. Returns the stored
// scale: 0 where the row decodes to zeros (its codes are zero bits then), kF16Infinity where it
// does not fit.
inline uint16_t EncodeTqInts(const TqFormat& format, const int32_t* q, int exponent,
                             std::byte* codes) {
  const TqTable& table = TqTableOf(format.bits);
  const int dim = format.dim;
  std::vector<int32_t> y(q, q + dim);
  int64_t sum_qq = 0;
  for (int i = 0; i < dim; ++i) sum_qq += int64_t{q[i]} * q[i];
  ApplySigns(format.role, y.data(), dim);
  HadamardTransform(y.data(), dim, Transposed::kNo);

  const float rms = std::sqrt(static_cast<float>(sum_qq));
  float threshold[7];
  for (int k = 0; k + 1 < table.num_magnitudes; ++k) threshold[k] = table.threshold[k] * rms;
  int64_t sum_yw = 0;
  int64_t sum_ww = 0;
  std::vector<uint8_t> index(dim);
  for (int i = 0; i < dim; ++i) {
    const float magnitude_of_y = static_cast<float>(std::abs(y[i]));
    int magnitude = 0;
    while (magnitude + 1 < table.num_magnitudes && magnitude_of_y >= threshold[magnitude]) {
      ++magnitude;
    }
    const int level = table.level[magnitude];
    sum_yw += int64_t{std::abs(y[i])} * level;
    sum_ww += level * level;
    index[i] = static_cast<uint8_t>(y[i] < 0 ? table.num_magnitudes - 1 - magnitude
                                             : table.num_magnitudes + magnitude);
  }

  float alpha = static_cast<float>(sum_yw) / (static_cast<float>(sum_ww) * static_cast<float>(dim));
  if (format.scale == TqScale::kUnbiased) {
    alpha = std::fmin(static_cast<float>(sum_qq) / static_cast<float>(sum_yw), table.clamp * alpha);
  }
  const int log2 = exponent - kTqRowBits + TqScaleLog2(format.bits, dim);
  const uint16_t scale = FloatToF16(std::ldexp(alpha, log2));
  if (scale == 0) {
    std::memset(codes, 0, dim * format.bits / 8);
  } else {
    PackTqCodes(format.bits, dim, index.data(), codes);
  }
  return scale;
}

// The values of one row before a mean is added: fp32, rounded once.
inline void DecodeTqRow(const TqFormat& format, uint16_t scale, const std::byte* codes,
                        float* values) {
  const TqTable& table = TqTableOf(format.bits);
  std::vector<int32_t> v(format.dim, 0);
  if (scale != 0) {
    for (int i = 0; i < format.dim; ++i) {
      const int index = TqCodeAt(format.bits, format.dim, codes, i);
      v[i] = index < table.num_magnitudes ? -table.level[table.num_magnitudes - 1 - index]
                                          : table.level[index - table.num_magnitudes];
    }
  }
  HadamardTransform(v.data(), format.dim, Transposed::kYes);
  ApplySigns(format.role, v.data(), format.dim);
  const float step = std::ldexp(F16ToFloat(scale), -TqScaleLog2(format.bits, format.dim));
  for (int i = 0; i < format.dim; ++i) {
    values[i] = static_cast<float>(v[i]) * step;
  }
}

// The scale each role is stored with.
inline TqFormat TqFormatOf(int bits, const PlaneShape& shape) {
  return {.bits = bits,
          .dim = shape.dim,
          .role = shape.role,
          .scale = shape.role == Role::kKey ? TqScale::kLeastSquares : TqScale::kUnbiased};
}

// Scalar backend; `format.scale` is a parameter so that tests reach both scales for both roles.
EncodeResult EncodeTqScalar(const TqFormat& format, const PlaneShape& shape, const std::byte* rows,
                            std::byte* plane);
void DecodeTqScalar(const TqFormat& format, const PlaneShape& shape, const std::byte* plane,
                    std::byte* rows);

// Highway backend.
EncodeResult EncodeTqHighway(const TqFormat& format, const PlaneShape& shape, const std::byte* rows,
                             std::byte* plane);
void DecodeTqHighway(const TqFormat& format, const PlaneShape& shape, const std::byte* plane,
                     std::byte* rows);

}  // namespace kvstow
