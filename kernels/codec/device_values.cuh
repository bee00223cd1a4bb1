// What the device kernels of all codecs share: the job of a CTA, values in memory, sums of a warp.
// One CTA encodes or decodes one plane.
#pragma once

#if defined(__CUDACC__)
#include "kernels/core/cuda_dialect.h"
#else
#include "simt.h"
#endif

#include <cstdint>

#include "kernels/codec/device_params.h"

namespace SIMT_NS {

using kvstow::DeviceFamily;
using kvstow::DeviceParams;

constexpr int kWarpsPerCta = 4;
constexpr int kThreadsPerCta = 32 * kWarpsPerCta;
constexpr unsigned kFullMask = 0xffffffffu;
// DType numbers of the rows.
constexpr int kBf16 = 1;
constexpr int kF16 = 2;

struct PlaneJob {
  const unsigned char* rows;  // [num_tokens, dim] of params.dtype
  unsigned char* plane;       // params.plane_bytes
  int* keep_raw;              // encode only: set to 1 where the rows must stay as they are, else 0
};

__device__ inline float LoadValue(const DeviceParams& p, const unsigned char* rows, int64_t idx) {
  if (p.dtype == kBf16) {
    const unsigned bits = reinterpret_cast<const unsigned short*>(rows)[idx];
    return __uint_as_float(bits << 16);
  }
  if (p.dtype == kF16) return __half2float(reinterpret_cast<const __half*>(rows)[idx]);
  return reinterpret_cast<const float*>(rows)[idx];
}

__device__ inline void StoreValue(const DeviceParams& p, unsigned char* rows, int64_t idx,
                                  float value) {
  if (p.dtype == kBf16) {
    const unsigned short bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
    reinterpret_cast<unsigned short*>(rows)[idx] = bits;
  } else if (p.dtype == kF16) {
    const unsigned short bits = __half_as_ushort(__float2half_rn(value));
    reinterpret_cast<unsigned short*>(rows)[idx] = bits;
  } else {
    reinterpret_cast<float*>(rows)[idx] = value;
  }
}

__device__ inline unsigned short LoadU16(const unsigned char* from) {
  return static_cast<unsigned short>(from[0] | (from[1] << 8));
}

__device__ inline void StoreU16(unsigned char* to, unsigned short value) {
  to[0] = static_cast<unsigned char>(value & 0xff);
  to[1] = static_cast<unsigned char>(value >> 8);
}

// 2^exponent as fp32, -126 <= exponent <= 127: exact.
__device__ inline float PowerOfTwo(int exponent) {
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// floor(log2 value) of a normal positive fp32.
__device__ inline int FloorLog2(float value) {
  return static_cast<int>((__float_as_uint(value) >> 23) & 0xffu) - 127;
}

__device__ inline bool IsFinite(float value) {
  return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
}

// value * 2^exponent where exponent may lie outside of fp32's range of powers; one rounding at
// most.
__device__ inline float ScaleByPower(float value, int exponent) {
  if (exponent > 127)
    return __fmul_rn(__fmul_rn(value, PowerOfTwo(127)), PowerOfTwo(exponent - 127));
  return __fmul_rn(value, PowerOfTwo(exponent));
}

__device__ inline long long WarpSum(long long value) {
  for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(kFullMask, value, step);
  return value;
}

__device__ inline int WarpMax(int value) { return __reduce_max_sync(kFullMask, value); }

// The largest magnitude of a row as fp32 bits (ordered like integers), and whether all are finite.
__device__ inline float WarpRowAmax(const DeviceParams& p, const unsigned char* rows, int64_t row,
                                    int lane) {
  int bits = 0;
  for (int j = lane; j < p.dim; j += 32) {
    bits = max(
        bits, static_cast<int>(__float_as_uint(LoadValue(p, rows, row * p.dim + j)) & 0x7fffffffu));
  }
  return __uint_as_float(static_cast<unsigned>(WarpMax(bits)));
}

__device__ inline void ZeroBytes(unsigned char* to, int from, int end) {
  for (int i = from + static_cast<int>(threadIdx.x); i < end; i += blockDim.x) to[i] = 0;
}

// Tells the host whether the plane's rows must stay as they are. All threads of the CTA call it.
__device__ inline void ReportKeepRaw(const PlaneJob& job, bool is_bad) {
  const int any_bad = __syncthreads_or(is_bad ? 1 : 0);
  if (threadIdx.x == 0) *job.keep_raw = any_bad ? 1 : 0;
}

}  // namespace SIMT_NS
