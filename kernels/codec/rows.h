// What the scalar codecs share: magnitudes and integers of a row's values, little-endian fields.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/core/float_values.h"

namespace kvstow {

inline constexpr uint16_t kF16Infinity = 0x7c00;

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
