// DType: how one value of a KV cache is stored by the engine, and exact conversions to fp32.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvstow {

// Stored in records and sent on the wire: never renumber, never reuse.
enum class DType : uint8_t {
  kBf16 = 1,
  kF16 = 2,
  kF32 = 3,
  kF8E4M3 = 4,  // already quantized: passed through, never quantized again
  kF8E5M2 = 5,  // already quantized
  kInt8 = 6,    // already quantized
  kNvfp4 = 7,   // already quantized; a row's bytes are the engine's own packing
  kOpaque = 8,  // bytes of an engine's own record; dims count bytes
};

// "bf16", "f16", "f32", "f8_e4m3", "f8_e5m2", "int8", "nvfp4", "opaque".
std::string_view DTypeName(DType dtype);

// Accepts the names above and the engines' spellings ("bfloat16", "float16", "half", "float32",
// "fp8", "fp8_e4m3", "fp8_e5m2", "auto" is refused). kInvalidArgument names the known ones.
absl::StatusOr<DType> DTypeFromName(std::string_view name);

// True for the numbers above; everything read from a peer or from disk goes through this.
bool IsKnownDType(int value);

// True where a codec may quantize the values: bf16, fp16, fp32.
bool IsFloatDType(DType dtype);

// Bytes of `num_values` consecutive values. nvfp4 is counted by the engine in bytes, as opaque is.
int64_t DTypeBytes(DType dtype, int64_t num_values);

inline float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Nearest, ties to even; NaN stays a (quiet) NaN.
inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// IEEE binary16; subnormals kept, exact.
float F16ToFloat(uint16_t bits);

// IEEE binary16; nearest, ties to even, subnormals kept, overflow (65520 and up) gives infinity.
uint16_t FloatToF16(float value);

}  // namespace kvstow
