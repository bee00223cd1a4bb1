// Device kernels of the codecs without a rotation: int8 and int4 (one warp a row), kivi (a thread a
// group, then a thread a byte of codes).
#pragma once

#include <cstdint>

#include "kernels/codec/device_values.cuh"

namespace SIMT_NS {

// The code of value `j` of a row, as an integer; 0 where j is past the end.
__device__ inline int AbsmaxCode(const DeviceParams& p, const unsigned char* rows, int64_t idx,
                                 float scale) {
  const int limit = (1 << (p.bits - 1)) - 1;
  if (scale == 0.0f) return 0;
  return max(-limit, min(limit, __float2int_rn(__fdiv_rn(LoadValue(p, rows, idx), scale))));
}

__global__ void __launch_bounds__(kThreadsPerCta)
    EncodeAbsmaxPlanes(const DeviceParams p, const PlaneJob* __restrict__ jobs) {
  const PlaneJob job = jobs[blockIdx.x];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float limit = __int2float_rn((1 << (p.bits - 1)) - 1);
  bool is_bad = false;
  ZeroBytes(job.plane, p.mean_offset, p.code_offset);
  ZeroBytes(job.plane, p.code_offset + p.num_tokens * p.code_row_bytes, p.plane_bytes);
  for (int row = warp; row < p.num_tokens; row += kWarpsPerCta) {
    const float amax = WarpRowAmax(p, job.rows, row, lane);
    const unsigned short stored = __half_as_ushort(__float2half_rn(__fdiv_rn(amax, limit)));
    const bool row_is_bad = !IsFinite(amax) || stored == 0x7c00u;
    is_bad |= row_is_bad;
    const float scale = row_is_bad ? 0.0f : __half2float(__ushort_as_half(stored));
    unsigned char* codes = job.plane + p.code_offset + row * p.code_row_bytes;
    const int64_t first = int64_t{1} * row * p.dim;
    for (int byte = lane; byte < p.code_row_bytes; byte += 32) {
      if (p.bits == 8) {
        codes[byte] = static_cast<unsigned char>(AbsmaxCode(p, job.rows, first + byte, scale));
      } else {
        const int low = AbsmaxCode(p, job.rows, first + 2 * byte, scale);
        const int high =
            2 * byte + 1 < p.dim ? AbsmaxCode(p, job.rows, first + 2 * byte + 1, scale) : 0;
        codes[byte] = static_cast<unsigned char>((low & 15) | ((high & 15) << 4));
      }
    }
    if (lane == 0) StoreU16(job.plane + 2 * row, stored);
  }
  ReportKeepRaw(job, is_bad);
}

__global__ void __launch_bounds__(kThreadsPerCta)
    DecodeAbsmaxPlanes(const DeviceParams p, const PlaneJob* __restrict__ jobs,
                       unsigned char* const* __restrict__ outputs) {
  const PlaneJob job = jobs[blockIdx.x];
  unsigned char* const rows = outputs[blockIdx.x];
  const int64_t num_values = int64_t{1} * p.num_tokens * p.dim;
  for (int64_t i = threadIdx.x; i < num_values; i += blockDim.x) {
    const int row = static_cast<int>(i / p.dim), j = static_cast<int>(i % p.dim);
    const float scale = __half2float(__ushort_as_half(LoadU16(job.plane + 2 * row)));
    const unsigned char* codes = job.plane + p.code_offset + row * p.code_row_bytes;
    int code = static_cast<signed char>(codes[j * p.bits / 8]);
    if (p.bits == 4) {
      const int nibble = (code >> (4 * (j % 2))) & 15;
      code = nibble >= 8 ? nibble - 16 : nibble;
    }
    StoreValue(p, rows, i, __fmul_rn(__int2float_rn(code), scale));
  }
}

// The group of value `j` of token `t`: keys 32 tokens of a channel, values 32 channels of a token.
__device__ inline int KiviGroupOf(const DeviceParams& p, int t, int j) {
  return p.is_key ? t / 32 * p.dim + j : t * ((p.dim + 31) / 32) + j / 32;
}

__device__ inline float KiviNumber(const unsigned char* numbers, int group) {
  return __half2float(__ushort_as_half(LoadU16(numbers + 2 * group)));
}

// Minimum and scale of one group, stored. False where one of them does not fit.
__device__ inline bool EncodeKiviGroup(const DeviceParams& p, const PlaneJob& job, int group) {
  const int per_row = p.is_key ? p.dim : (p.dim + 31) / 32;
  const int t = p.is_key ? group / per_row * 32 : group / per_row;
  const int j = p.is_key ? group % per_row : group % per_row * 32;
  const int64_t stride = p.is_key ? p.dim : 1;
  const int count = p.is_key || j + 32 <= p.dim ? 32 : p.dim - j;
  const int64_t first = int64_t{1} * t * p.dim + j;
  float low = LoadValue(p, job.rows, first);
  float high = low;
  bool fits = IsFinite(low);
  for (int i = 1; i < count; ++i) {
    const float x = LoadValue(p, job.rows, first + i * stride);
    fits &= IsFinite(x);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  unsigned short min = __half_as_ushort(__float2half_rn(low));
  if (min == 0x8000u) min = 0;
  const float decoded = __half2float(__ushort_as_half(min));
  const float range = high > decoded ? __fsub_rn(high, decoded) : 0.0f;
  const float steps = __int2float_rn((1 << p.bits) - 1);
  const unsigned short scale = __half_as_ushort(__float2half_rn(__fdiv_rn(range, steps)));
  StoreU16(job.plane + 2 * group, scale);
  StoreU16(job.plane + p.mean_offset + 2 * group, min);
  return fits && scale != 0x7c00u && (min & 0x7fffu) != 0x7c00u;
}

__global__ void __launch_bounds__(kThreadsPerCta)
    EncodeKiviPlanes(const DeviceParams p, const PlaneJob* __restrict__ jobs) {
  const PlaneJob job = jobs[blockIdx.x];
  bool is_bad = false;
  for (int group = threadIdx.x; group < p.mean_offset / 2; group += blockDim.x) {
    is_bad |= !EncodeKiviGroup(p, job, group);
  }
  ZeroBytes(job.plane, 2 * p.mean_offset, p.code_offset);
  ZeroBytes(job.plane, p.code_offset + p.num_tokens * p.code_row_bytes, p.plane_bytes);
  is_bad = __syncthreads_or(is_bad ? 1 : 0) != 0;
  const int per_byte = 8 / p.bits;
  const int num_bytes = is_bad ? 0 : p.num_tokens * p.code_row_bytes;
  for (int byte = threadIdx.x; byte < num_bytes; byte += blockDim.x) {
    const int t = byte / p.code_row_bytes;
    int codes = 0;
    for (int k = 0; k < per_byte; ++k) {
      const int j = byte % p.code_row_bytes * per_byte + k;
      const int group = KiviGroupOf(p, t, j);
      const float scale = KiviNumber(job.plane, group);
      const float x = LoadValue(p, job.rows, int64_t{1} * t * p.dim + j);
      const float rest = __fsub_rn(x, KiviNumber(job.plane + p.mean_offset, group));
      const int code = scale == 0.0f ? 0 : __float2int_rn(__fdiv_rn(rest, scale));
      codes |= max(0, min((1 << p.bits) - 1, code)) << (k * p.bits);
    }
    job.plane[p.code_offset + byte] = static_cast<unsigned char>(codes);
  }
  ReportKeepRaw(job, is_bad);
}

__global__ void __launch_bounds__(kThreadsPerCta)
    DecodeKiviPlanes(const DeviceParams p, const PlaneJob* __restrict__ jobs,
                     unsigned char* const* __restrict__ outputs) {
  const PlaneJob job = jobs[blockIdx.x];
  unsigned char* const rows = outputs[blockIdx.x];
  const int64_t num_values = int64_t{1} * p.num_tokens * p.dim;
  for (int64_t i = threadIdx.x; i < num_values; i += blockDim.x) {
    const int t = static_cast<int>(i / p.dim), j = static_cast<int>(i % p.dim);
    const int group = KiviGroupOf(p, t, j);
    const unsigned char* codes = job.plane + p.code_offset + t * p.code_row_bytes;
    const int code = (codes[j * p.bits / 8] >> (j * p.bits % 8)) & ((1 << p.bits) - 1);
    const float step = __fmul_rn(__int2float_rn(code), KiviNumber(job.plane, group));
    StoreValue(p, rows, i, __fadd_rn(step, KiviNumber(job.plane + p.mean_offset, group)));
  }
}

}  // namespace SIMT_NS
