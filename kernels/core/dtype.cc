#include "kernels/core/dtype.h"

#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace kvstow {
namespace {

struct NamedDType {
  std::string_view name;
  DType dtype;
};

// Our own name of each type first, then the spellings engines use.
constexpr std::array<NamedDType, 16> kNames = {{
    {"bf16", DType::kBf16},
    {"f16", DType::kF16},
    {"f32", DType::kF32},
    {"f8_e4m3", DType::kF8E4M3},
    {"f8_e5m2", DType::kF8E5M2},
    {"int8", DType::kInt8},
    {"nvfp4", DType::kNvfp4},
    {"opaque", DType::kOpaque},
    {"bfloat16", DType::kBf16},
    {"float16", DType::kF16},
    {"half", DType::kF16},
    {"float32", DType::kF32},
    {"float", DType::kF32},
    {"fp8", DType::kF8E4M3},
    {"fp8_e4m3", DType::kF8E4M3},
    {"fp8_e5m2", DType::kF8E5M2},
}};

}  // namespace

std::string_view DTypeName(DType dtype) {
  for (const NamedDType& named : kNames) {
    if (named.dtype == dtype) return named.name;
  }
  return "unknown";
}

absl::StatusOr<DType> DTypeFromName(std::string_view name) {
  for (const NamedDType& named : kNames) {
    if (named.name == name) return named.dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("dtype is \"", std::string(name),
                   "\", want one of bf16, f16, f32, f8_e4m3, f8_e5m2, int8, nvfp4, opaque"));
}

bool IsKnownDType(int value) {
  return value >= static_cast<int>(DType::kBf16) && value <= static_cast<int>(DType::kOpaque);
}

bool IsFloatDType(DType dtype) {
  return dtype == DType::kBf16 || dtype == DType::kF16 || dtype == DType::kF32;
}

int64_t DTypeBytes(DType dtype, int64_t num_values) {
  switch (dtype) {
    case DType::kBf16:
    case DType::kF16:
      return 2 * num_values;
    case DType::kF32:
      return 4 * num_values;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kInt8:
    case DType::kNvfp4:
    case DType::kOpaque:
      return num_values;
  }
  KVSTOW_CHECK(false);
}

float F16ToFloat(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t fraction = bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  // Zero or subnormal: fraction * 2^-24 is exact in fp32.
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t FloatToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return sign | 0x7e00u | static_cast<uint16_t>((magnitude >> 13) & 0x1ffu);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and up
  if (magnitude < 0x38800000u) {
    // Below 2^-14. Adding 0.5 puts the last kept bit, 2^-24, in the lowest place of the sum, so
    // the adder does the rounding (to even).
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(sum) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

}  // namespace kvstow
