// olm4, olm3, osu2: a calibrated rotation, then Lloyd-Max levels (olm) or a searched uniform step
// (osu2), and an fp16 scale per row. They need PlaneShape::rotation.
//
// This header is the definition: a plain reference for one row. It is tq.h's with another rotation:
// y = R q, where R is the int16 matrix of the plane's layer, head and role, row j the output
// coordinate j. A row x ~ alpha * R^T w * 2^(e - 10); sums are integer sums. Layout, packing,
// levels and thresholds of olm are tq's; osu2 has the levels -3, -1, 1, 3.
//
// Source: calibration of rotations from second moments as in OSCAR (arXiv:2605.17757); scalar
// quantizers and their scale are ours.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/codec/rotation.h"
#include "kernels/codec/tq.h"

namespace kvstow {

struct OlmFormat {
  int bits = 4;  // 4 or 3; 2: osu2
  TqScale scale = TqScale::kUnbiased;
  PlaneShape shape;

  TqLayout layout() const {
    return TqLayout(bits, /*has_means=*/false, shape.num_tokens, shape.dim);
  }
};

// osu2 as a table: no threshold of its own, one of kOsuSteps instead.
inline constexpr TqTable kOsuTable = {2, {1, 3}, {}, 1, 1.2464333f};
inline constexpr float kOsuSteps[8] = {.62f, .70f, .78f, .86f, .94f, 1.02f, 1.10f, 1.20f};

constexpr const TqTable& OlmTableOf(int bits) { return bits == 2 ? kOsuTable : TqTableOf(bits); }

// x ~ a * 2^-g * R^T w.
constexpr int OlmScaleLog2(int bits) { return Rotation::kLog2One + OlmTableOf(bits).scale_log2; }

inline bool OlmAccepts(const PlaneShape& shape) {
  return IsFloatDType(shape.dtype) && shape.num_tokens >= 1 && shape.dim % 16 == 0 &&
         shape.rotation != nullptr && shape.rotation->dim() == shape.dim;
}

inline OlmFormat OlmFormatOf(int bits, const PlaneShape& shape) {
  const bool is_key = shape.role == Role::kKey;
  return {
      .bits = bits, .scale = is_key ? TqScale::kLeastSquares : TqScale::kUnbiased, .shape = shape};
}

// What the scale of a row is made of.
struct OlmSums {
  int64_t qq = 0;  // q^2
  int64_t yw = 0;  // |y| * |w|
  int64_t ww = 0;  // w^2
};

// The rms of y, from the norm of q.
inline float OlmRms(int64_t sum_qq, int dim) {
  return 16384.0f * std::sqrt(static_cast<float>(sum_qq) / static_cast<float>(dim));
}

// The better of two steps has the larger score.
inline double OsuScore(const OlmSums& sums) {
  const auto yw = static_cast<double>(sums.yw);
  return (yw * yw) / static_cast<double>(sums.ww);
}

// The stored scale of a row x = q * 2^(exponent - kTqRowBits).
inline uint16_t OlmScale(const OlmFormat& format, const OlmSums& sums, int exponent) {
  const auto yw = static_cast<float>(sums.yw);
  float alpha = yw / static_cast<float>(sums.ww) * 0x1p-28f;
  if (format.scale == TqScale::kUnbiased) {
    const float unbiased = static_cast<float>(sums.qq) / yw;
    const float clamped = OlmTableOf(format.bits).clamp * alpha;
    alpha = unbiased < clamped ? unbiased : clamped;
  }
  return FloatToF16(std::ldexp(alpha, exponent - kTqRowBits + OlmScaleLog2(format.bits)));
}

inline std::vector<int32_t> RotateForward(const Rotation& rotation, const int32_t* q) {
  std::vector<int32_t> y(rotation.dim());
  for (int j = 0; j < rotation.dim(); ++j) {
    int64_t sum = 0;
    for (int i = 0; i < rotation.dim(); ++i) sum += int64_t{rotation.at(j, i)} * q[i];
    y[j] = static_cast<int32_t>(sum);
  }
  return y;
}

inline std::vector<int32_t> RotateBack(const Rotation& rotation, const int32_t* w) {
  std::vector<int32_t> v(rotation.dim());
  for (int i = 0; i < rotation.dim(); ++i) {
    int64_t sum = 0;
    for (int j = 0; j < rotation.dim(); ++j) sum += int64_t{rotation.at(j, i)} * w[j];
    v[i] = static_cast<int32_t>(sum);
  }
  return v;
}

// One row of integers, not all 0, to codes. Returns the stored scale: 0 where the row decodes to
// zeros (its codes are zero bits then), kF16Infinity where it does not fit.
uint16_t EncodeOlmInts(const OlmFormat& format, const int32_t* q, int exponent, std::byte* codes);

EncodeResult EncodeOlmScalar(const OlmFormat& format, const std::byte* rows, std::byte* plane);
void DecodeOlmScalar(const OlmFormat& format, const std::byte* plane, std::byte* rows);

EncodeResult EncodeOlmHighway(const OlmFormat& format, const std::byte* rows, std::byte* plane);
void DecodeOlmHighway(const OlmFormat& format, const std::byte* plane, std::byte* rows);

}  // namespace kvstow
