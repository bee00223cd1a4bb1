// Values of a plane's rows in memory: one value at a time, any float dtype, any alignment.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/core/check.h"
#include "kernels/core/dtype.h"

namespace kvstow {

inline constexpr uint16_t kF16Infinity = 0x7c00;

// The value at `value_idx`, exactly. `dtype` is a float dtype.
inline float LoadValue(DType dtype, const std::byte* values, int64_t value_idx) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, values + 4 * value_idx, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, values + 2 * value_idx, sizeof(bits));
  KVSTOW_DCHECK(dtype == DType::kBf16 || dtype == DType::kF16);
  return dtype == DType::kBf16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

// Largest magnitude of `count` values from `first` on; NaN where one of them is not finite.
inline float MaxMagnitude(DType dtype, const std::byte* values, int64_t first, int64_t count) {
  float max = 0.0f;
  for (int64_t i = first; i < first + count; ++i) {
    const float magnitude = std::fabs(LoadValue(dtype, values, i));
    if (!std::isfinite(magnitude)) return std::nanf("");
    max = std::max(max, magnitude);
  }
  return max;
}

// rint(x * 2^(bits - exponent)): an exact scaling and one rounding.
inline int32_t ScaledInt(float x, int bits, int exponent) {
  return static_cast<int32_t>(std::rint(std::ldexp(x, bits - exponent)));
}

// Rounds `value` to `dtype`: nearest, ties to even.
inline void StoreValue(DType dtype, std::byte* values, int64_t value_idx, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(values + 4 * value_idx, &value, sizeof(value));
    return;
  }
  KVSTOW_DCHECK(dtype == DType::kBf16 || dtype == DType::kF16);
  const uint16_t bits = dtype == DType::kBf16 ? FloatToBf16(value) : FloatToF16(value);
  std::memcpy(values + 2 * value_idx, &bits, sizeof(bits));
}

inline uint16_t LoadU16(const std::byte* bytes) {
  return static_cast<uint16_t>(std::to_integer<uint16_t>(bytes[0]) |
                               (std::to_integer<uint16_t>(bytes[1]) << 8));
}

inline void StoreU16(std::byte* bytes, uint16_t value) {
  bytes[0] = static_cast<std::byte>(value & 0xff);
  bytes[1] = static_cast<std::byte>(value >> 8);
}

constexpr int64_t AlignUp(int64_t bytes, int64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace kvstow
