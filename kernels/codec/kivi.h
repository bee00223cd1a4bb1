// kivi4, kivi2: asymmetric codes with an fp16 scale and minimum per group; keys per channel over 32
// tokens, values per token over 32 channels. b + 1 bits per value where 32 divides both.
//
// This header is the definition. Keys: num_tokens a multiple of 32, because a group of few tokens
// would cost more than its rows; values: any num_tokens, the last group of a row may be of 16
// channels. Plane: the scales of all groups (fp16), then their minima (fp16), zeros to a multiple
// of 16, num_tokens rows of dim * bits / 8 bytes, zeros to a multiple of 64. Groups of keys are in
// the order [num_tokens / 32, dim], those of values [num_tokens, ceil(dim / 32)]. In a row the
// first value is in the lowest bits.
//
// Source: KIVI (Liu et al., arXiv:2402.02750): grouping, and rounding ties to even. We differ:
// codes are packed along channels for both roles; differences are taken in fp32 from the stored
// minimum and divided by the stored scale, so that encoder and decoder speak of the same numbers; a
// constant group has scale 0 (KIVI divides by it).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/codec/codec.h"
#include "kernels/codec/rows.h"

namespace kvstow {

inline constexpr int64_t kKiviGroup = 32;

struct KiviFormat {
  int bits = 4;  // 4 or 2
  int64_t num_tokens = 0;
  int64_t dim = 0;
  Role role = Role::kKey;

  int max_code() const { return (1 << bits) - 1; }
  int64_t groups_per_row() const { return (dim + kKiviGroup - 1) / kKiviGroup; }
  int64_t num_groups() const {
    return role == Role::kKey ? num_tokens / kKiviGroup * dim : num_tokens * groups_per_row();
  }
  // The group of value `j` of token `t`.
  int64_t group_of(int64_t t, int64_t j) const {
    return role == Role::kKey ? t / kKiviGroup * dim + j : t * groups_per_row() + j / kKiviGroup;
  }
  int64_t mins_at() const { return 2 * num_groups(); }
  int64_t codes_at() const { return AlignUp(4 * num_groups(), 16); }
  int64_t row_code_bytes() const { return dim * bits / 8; }
  int64_t plane_bytes() const { return AlignUp(codes_at() + num_tokens * row_code_bytes(), 64); }
};

inline bool KiviAccepts(const PlaneShape& shape) {
  return IsFloatDType(shape.dtype) && shape.num_tokens >= 1 && shape.dim >= 16 &&
         shape.dim % 16 == 0 && (shape.role == Role::kValue || shape.num_tokens % kKiviGroup == 0);
}

inline KiviFormat KiviFormatOf(int bits, const PlaneShape& shape) {
  return {.bits = bits, .num_tokens = shape.num_tokens, .dim = shape.dim, .role = shape.role};
}

// The stored minimum: never -0.
inline uint16_t KiviMin(float min) {
  const uint16_t stored = FloatToF16(min);
  return stored == 0x8000 ? uint16_t{0} : stored;
}

// The stored scale, from the largest value and the stored minimum. 0 where the group is constant.
inline uint16_t KiviScale(float max, float stored_min, int max_code) {
  const float range = max > stored_min ? max - stored_min : 0.0f;
  return FloatToF16(range / static_cast<float>(max_code));
}

inline bool KiviFits(uint16_t stored_min, uint16_t stored_scale) {
  return (stored_min & 0x7fff) != kF16Infinity && stored_scale != kF16Infinity;
}

inline int KiviCode(float x, float stored_min, float scale, int max_code) {
  if (scale == 0.0f) return 0;
  const float code = std::rint((x - stored_min) / scale);
  return static_cast<int>(std::min(std::max(code, 0.0f), static_cast<float>(max_code)));
}

// The product is exact; the sum is rounded to fp32, then to the output type.
inline float KiviValue(int code, float stored_min, float scale) {
  return static_cast<float>(code) * scale + stored_min;
}

EncodeResult EncodeKiviScalar(const KiviFormat& format, const PlaneShape& shape,
                              const std::byte* rows, std::byte* plane);
void DecodeKiviScalar(const KiviFormat& format, const PlaneShape& shape, const std::byte* plane,
                      std::byte* rows);

EncodeResult EncodeKiviHighway(const KiviFormat& format, const PlaneShape& shape,
                               const std::byte* rows, std::byte* plane);
void DecodeKiviHighway(const KiviFormat& format, const PlaneShape& shape, const std::byte* plane,
                       std::byte* rows);

}  // namespace kvstow
