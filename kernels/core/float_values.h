// Float values in memory: one at a time, of any float dtype, at any alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/core/check.h"
#include "kernels/core/dtype.h"

namespace kvstow {

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

}  // namespace kvstow
