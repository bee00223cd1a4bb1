// tqm4, tqm3, tqm2: tq with the mean of the block's keys stored apart. Keys only.
//
// Half of the energy of post-RoPE keys is their mean over a block of tokens. It is stored once per
// plane: one int8 per channel and one fp16 scale (0.13 bits per value at 64 tokens). The rows that
// remain are smaller by that half, and tq's error with them. Needs no calibration.
//
// This header is the definition: a plain reference. The row arithmetic is tq.h's.
// Source: ours; the effect is measured in README.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/codec/tq.h"

namespace kvstow {

inline constexpr int kTqmPlaneBits = 13;  // |p| <= 2^14: the plane's largest value has bit 13

// The means of a plane, as stored and as the encoder subtracts them.
struct TqmMeans {
  uint16_t scale = 0;        // fp16
  std::vector<int8_t> code;  // mean of channel j = code[j] * scale
  std::vector<int32_t> p;    // the same in the units of the plane's integers
};

// `p` is [num_tokens, dim] integers x = p * 2^(exponent - kTqmPlaneBits). scale == kF16Infinity
// where the means do not fit.
inline TqmMeans EncodeTqmMeans(const std::vector<int32_t>& p, int64_t num_tokens, int dim,
                               int exponent) {
  TqmMeans means{.scale = 0, .code = std::vector<int8_t>(dim), .p = std::vector<int32_t>(dim)};
  int32_t max_mean = 0;
  for (int j = 0; j < dim; ++j) {
    int64_t sum = 0;
    for (int64_t t = 0; t < num_tokens; ++t) sum += p[t * dim + j];
    // floor((2 sum + T) / 2T): the mean, rounded half up.
    const int64_t dividend = 2 * sum + num_tokens;
    const int64_t divisor = 2 * num_tokens;
    means.p[j] = static_cast<int32_t>(dividend / divisor - (dividend % divisor < 0 ? 1 : 0));
    max_mean = std::max(max_mean, std::abs(means.p[j]));
  }
  const int to_value = exponent - kTqmPlaneBits;
  means.scale = FloatToF16(std::ldexp(static_cast<float>(max_mean), to_value) / 127.0f);
  if (means.scale == kF16Infinity) return means;
  const float scale = F16ToFloat(means.scale);
  for (int j = 0; j < dim; ++j) {
    float code = 0.0f;
    if (means.scale != 0) {
      code = std::rint(std::ldexp(static_cast<float>(means.p[j]), to_value) / scale);
      code = std::min(std::max(code, -127.0f), 127.0f);
    }
    means.code[j] = static_cast<int8_t>(code);
    // What the decoder will add, not the exact mean: its rounding error stays in the rows.
    means.p[j] = static_cast<int32_t>(std::rint(std::ldexp(code * scale, -to_value)));
  }
  return means;
}

// One row without its mean, u (17 signed bits), to integers of at most 11 bits and a sign, half up.
// Returns the number of bits dropped.
inline int ShrinkTqmRow(const int32_t* u, int dim, int32_t* q) {
  int32_t max_u = 0;
  for (int j = 0; j < dim; ++j) max_u = std::max(max_u, std::abs(u[j]));
  const int length = max_u == 0 ? 0 : FloorLog2(max_u) + 1;
  const int shift = std::max(0, length - (kTqRowBits + 1));
  for (int j = 0; j < dim; ++j) q[j] = shift == 0 ? u[j] : (u[j] + (1 << (shift - 1))) >> shift;
  return shift;
}

inline TqFormat TqmFormatOf(int bits, const PlaneShape& shape) {
  return {.bits = bits, .dim = shape.dim, .role = shape.role, .scale = TqScale::kUnbiased};
}

EncodeResult EncodeTqmScalar(const TqFormat& format, const PlaneShape& shape, const std::byte* rows,
                             std::byte* plane);
void DecodeTqmScalar(const TqFormat& format, const PlaneShape& shape, const std::byte* plane,
                     std::byte* rows);

EncodeResult EncodeTqmHighway(const TqFormat& format, const PlaneShape& shape,
                              const std::byte* rows, std::byte* plane);
void DecodeTqmHighway(const TqFormat& format, const PlaneShape& shape, const std::byte* plane,
                      std::byte* rows);

}  // namespace kvstow
