// What a device kernel must know of a codec and a plane's shape. Plain data, passed by value to
// kernels; written from the arithmetic's specification, not from the host reference, so that equal
// bytes are evidence.
#pragma once

#include <cstdint>

namespace kvstow {

inline constexpr int kDeviceMaxDim = 576;
inline constexpr int kDeviceMaxPaleyOrder = 36;

// Which kernels serve a plane.
enum class DeviceFamily : int32_t { kAbsmax, kKivi, kHadamard };

struct DeviceParams {
  DeviceFamily family = DeviceFamily::kHadamard;
  int32_t num_tokens = 0;
  int32_t dim = 0;
  int32_t dtype = 0;  // DType
  int32_t bits = 0;
  int32_t is_key = 0;
  int32_t has_mean = 0;     // mean form (tqm)
  int32_t is_unbiased = 0;  // scale rule of the encoder
  int32_t scale_shift = 0;  // g: the stored scale is alpha * 2^(e - 10 + g)
  float kappa = 0;          // cap of the unbiased scale, times the least-squares one
  int32_t num_levels = 0;   // 2^(bits - 1) magnitudes
  int32_t level[8] = {};
  float threshold[7] = {};
  int32_t paley_order = 1;  // dim = paley_order * sylvester_order
  int32_t sylvester_order = 1;
  uint64_t paley_minus[kDeviceMaxPaleyOrder] = {};  // row i: bit j set where the entry is -1
  uint32_t sign_minus[kDeviceMaxDim / 32] = {};     // bit j: the sign of coordinate j is -1
  // Byte offsets in the encoded plane.
  int32_t mean_offset = 0;  // of the mean scale, then the means; kivi: of the minima
  int32_t code_offset = 0;
  int32_t code_row_bytes = 0;
  int32_t plane_bytes = 0;
};

}  // namespace kvstow
