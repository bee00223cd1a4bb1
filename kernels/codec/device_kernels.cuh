// Device kernels of tq* and tqm*, one warp a row, and the launches of all codecs.
//
// Arithmetic: sums are integer sums, so neither the order of threads nor their number can change a
// bit; every floating-point operation is a single correctly rounded one (never fused: --fmad=false
// and the _rn intrinsics). Encodes keep the plane's rows in global memory and read them again where
// a second pass needs them: a plane of 64 x 128 bf16 stays in L2.
//
// Shared memory, dynamic: kWarpsPerCta rows of 2 * dim int32 (a row and the transform's second
// buffer), then dim int32 of means. Source: the integer arithmetic of kernels/codec/README.md.
#pragma once

#include <cstdint>

#include "kernels/codec/device_minmax.cuh"
#include "kernels/codec/device_values.cuh"

namespace SIMT_NS {

// y = H v (transposed: H^T v) for one row of a warp, H = Paley (x) Sylvester. `v` is overwritten;
// the result is in the buffer that is returned: `v` or `spare`.
__device__ inline int* WarpHadamard(const DeviceParams& p, int* v, int* spare, bool transposed,
                                    int lane) {
  const int n = p.sylvester_order;
  for (int half = 1; half < n; half <<= 1) {
    __syncwarp(kFullMask);
    for (int i = lane; i < p.dim / 2; i += 32) {
      const int lo = (i / half) * 2 * half + i % half;
      const int a = v[lo], b = v[lo + half];
      v[lo] = a + b;
      v[lo + half] = a - b;
    }
  }
  __syncwarp(kFullMask);
  if (p.paley_order == 1) return v;
  for (int i = lane; i < p.dim; i += 32) {
    const int row = i / n, column = i % n;
    int sum = 0;
    for (int j = 0; j < p.paley_order; ++j) {
      const uint64_t word = transposed ? p.paley_minus[j] >> row : p.paley_minus[row] >> j;
      const int term = v[j * n + column];
      sum += (word & 1u) ? -term : term;
    }
    spare[i] = sum;
  }
  __syncwarp(kFullMask);
  return spare;
}

__device__ inline int ApplySign(const DeviceParams& p, int idx, int value) {
  return (p.sign_minus[idx / 32] >> (idx % 32)) & 1u ? -value : value;
}

__device__ inline int Magnitude(const DeviceParams& p, int y, float r) {
  const float magnitude = __int2float_rn(y < 0 ? -y : y);
  int count = 0;
  for (int i = 0; i + 1 < p.num_levels; ++i) {
    count += magnitude >= __fmul_rn(p.threshold[i], r) ? 1 : 0;
  }
  return count;
}

// Writes the 8 indexes of a group into the row's code bytes. 3 bits: two planes, low bits first.
__device__ inline void PackGroup(const DeviceParams& p, unsigned char* codes, int group,
                                 const int (&index)[8]) {
  if (p.bits == 4) {
    for (int i = 0; i < 4; ++i) {
      codes[4 * group + i] = static_cast<unsigned char>(index[2 * i] | (index[2 * i + 1] << 4));
    }
    return;
  }
  for (int half = 0; half < 2; ++half) {
    int byte = 0;
    for (int i = 0; i < 4; ++i) byte |= (index[4 * half + i] & 3) << (2 * i);
    codes[2 * group + half] = static_cast<unsigned char>(byte);
  }
  if (p.bits == 3) {
    int byte = 0;
    for (int i = 0; i < 8; ++i) byte |= (index[i] >> 2) << i;
    codes[p.dim / 4 + group] = static_cast<unsigned char>(byte);
  }
}

__device__ inline int UnpackIndex(const DeviceParams& p, const unsigned char* codes, int j) {
  if (p.bits == 4) return (codes[j / 2] >> (4 * (j % 2))) & 15;
  int index = (codes[j / 4] >> (2 * (j % 4))) & 3;
  if (p.bits == 3) index |= ((codes[p.dim / 4 + j / 8] >> (j % 8)) & 1) << 2;
  return index;
}

// Steps 3 to 9: from the integers q (in `q`, exponent e) to codes and the stored scale. Returns
// false where the scale does not fit fp16.
__device__ inline bool EncodeIntegers(const DeviceParams& p, int* q, int* spare, int e,
                                      unsigned char* codes, unsigned char* scale, int lane) {
  long long s = 0;
  for (int j = lane; j < p.dim; j += 32) s += static_cast<long long>(q[j]) * q[j];
  s = WarpSum(s);
  unsigned short stored = 0;
  int* y = q;
  float r = 0.0f;
  if (s != 0) {
    for (int j = lane; j < p.dim; j += 32) q[j] = ApplySign(p, j, q[j]);
    y = WarpHadamard(p, q, spare, false, lane);
    r = __fsqrt_rn(__ll2float_rn(s));
    long long a = 0;
    int b = 0;
    for (int j = lane; j < p.dim; j += 32) {
      const int w = p.level[Magnitude(p, y[j], r)];
      a += static_cast<long long>(y[j] < 0 ? -y[j] : y[j]) * w;
      b += w * w;
    }
    a = WarpSum(a);
    b = static_cast<int>(WarpSum(b));
    const float a32 = __ll2float_rn(a);
    float alpha = __fdiv_rn(a32, __fmul_rn(__int2float_rn(b), __int2float_rn(p.dim)));
    if (p.is_unbiased) {
      const float exact = __fdiv_rn(__ll2float_rn(s), a32);
      const float cap = __fmul_rn(p.kappa, alpha);
      alpha = exact < cap ? exact : cap;
    }
    stored = __half_as_ushort(__float2half_rn(ScaleByPower(alpha, e - 10 + p.scale_shift)));
  }
  const bool is_zero = stored == 0;
  for (int group = lane; group < p.dim / 8; group += 32) {
    int index[8];
    for (int i = 0; i < 8; ++i) {
      const int value = y[8 * group + i];
      const int magnitude = is_zero ? 0 : Magnitude(p, value, r);
      index[i] = is_zero ? 0 : value < 0 ? p.num_levels - 1 - magnitude : p.num_levels + magnitude;
    }
    PackGroup(p, codes, group, index);
  }
  if (lane == 0) StoreU16(scale, stored);
  return stored != 0x7c00u;
}

// Largest magnitude of the plane as fp32 bits: non-finite values compare above every finite one.
__device__ inline int PlaneAmaxBits(const DeviceParams& p, const unsigned char* rows,
                                    int* scratch) {
  int bits = 0;
  const int64_t num_values = int64_t{1} * p.num_tokens * p.dim;
  for (int64_t i = threadIdx.x; i < num_values; i += blockDim.x) {
    bits = max(bits, static_cast<int>(__float_as_uint(LoadValue(p, rows, i)) & 0x7fffffffu));
  }
  bits = WarpMax(bits);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = scratch[0];
  for (int warp = 1; warp < kWarpsPerCta; ++warp) bits = max(bits, scratch[warp]);
  __syncthreads();
  return bits;
}

// Mean form, steps 1 and 2: writes the mean scale and the int8 means, leaves M' in `means`. Returns
// false where the mean scale does not fit fp16.
__device__ inline bool EncodeMeans(const DeviceParams& p, const PlaneJob& job, int e, int* means,
                                   int* scratch) {
  int largest = 0;
  for (int j = threadIdx.x; j < p.dim; j += blockDim.x) {
    long long sum = 0;
    for (int t = 0; t < p.num_tokens; ++t) {
      const float x = LoadValue(p, job.rows, int64_t{1} * t * p.dim + j);
      sum += __float2int_rn(ScaleByPower(x, 13 - e));
    }
    const long long numerator = 2 * sum + p.num_tokens;
    const long long denominator = 2 * static_cast<long long>(p.num_tokens);
    long long mean = numerator / denominator;
    if (numerator % denominator < 0) --mean;  // floor, not toward zero
    means[j] = static_cast<int>(mean);
    largest = max(largest, means[j] < 0 ? -means[j] : means[j]);
  }
  largest = WarpMax(largest);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = scratch[0];
  for (int warp = 1; warp < kWarpsPerCta; ++warp) largest = max(largest, scratch[warp]);
  const float peak = ScaleByPower(__int2float_rn(largest), e - 13);
  const unsigned short stored = __half_as_ushort(__float2half_rn(__fdiv_rn(peak, 127.0f)));
  const float ms = __half2float(__ushort_as_half(stored));
  unsigned char* out = job.plane + p.mean_offset;
  for (int j = threadIdx.x; j < p.dim; j += blockDim.x) {
    int k = 0;
    if (stored != 0) {
      k = __float2int_rn(__fdiv_rn(ScaleByPower(__int2float_rn(means[j]), e - 13), ms));
      k = max(-127, min(127, k));
    }
    means[j] = __float2int_rn(ScaleByPower(__fmul_rn(__int2float_rn(k), ms), 13 - e));
    out[2 + j] = static_cast<unsigned char>(k);
  }
  if (threadIdx.x == 0) StoreU16(out, stored);
  __syncthreads();
  return stored != 0x7c00u;
}

// One row of the mean form, step 3: q from the rest u after the mean; returns the exponent for
// EncodeIntegers.
__device__ inline int LoadRestOfMean(const DeviceParams& p, const PlaneJob& job, int row, int e,
                                     const int* means, int* q, int lane) {
  int largest = 0;
  for (int j = lane; j < p.dim; j += 32) {
    const float x = LoadValue(p, job.rows, int64_t{1} * row * p.dim + j);
    q[j] = __float2int_rn(ScaleByPower(x, 13 - e)) - means[j];
    largest = max(largest, q[j] < 0 ? -q[j] : q[j]);
  }
  largest = WarpMax(largest);
  const int shift = max(0, 32 - __clz(largest) - 11);
  if (shift > 0) {
    for (int j = lane; j < p.dim; j += 32) q[j] = (q[j] + (1 << (shift - 1))) >> shift;
  }
  return e - 3 + shift;
}

__global__ void __launch_bounds__(kThreadsPerCta)
    EncodeHadamardPlanes(const DeviceParams p, const PlaneJob* __restrict__ jobs) {
  SIMT_DYNAMIC_SHARED(int, shared);
  SIMT_SHARED(int, scratch, [kWarpsPerCta]);
  const PlaneJob job = jobs[blockIdx.x];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int* const q = shared + warp * 2 * p.dim;
  int* const spare = q + p.dim;
  int* const means = shared + kWarpsPerCta * 2 * p.dim;
  const int amax_bits = PlaneAmaxBits(p, job.rows, scratch);
  bool is_bad = amax_bits >= 0x7f800000;
  int plane_e = 0;
  bool plane_is_zero = false;
  if (p.has_mean && !is_bad) {
    const float amax = __uint_as_float(static_cast<unsigned>(amax_bits));
    plane_is_zero = amax < PowerOfTwo(-40);
    if (plane_is_zero) {
      ZeroBytes(job.plane, 0, p.plane_bytes);
    } else {
      plane_e = FloorLog2(amax);
      is_bad = !EncodeMeans(p, job, plane_e, means, scratch);
    }
  }
  if (!is_bad && !plane_is_zero) {
    const int header_end = p.mean_offset + (p.has_mean ? 2 + p.dim : 0);
    ZeroBytes(job.plane, header_end, p.code_offset);
    ZeroBytes(job.plane, p.code_offset + p.num_tokens * p.code_row_bytes, p.plane_bytes);
    for (int row = warp; row < p.num_tokens; row += kWarpsPerCta) {
      int e = 0;
      if (p.has_mean) {
        e = LoadRestOfMean(p, job, row, plane_e, means, q, lane);
      } else {
        const float amax = WarpRowAmax(p, job.rows, row, lane);
        e = amax < PowerOfTwo(-40) ? 0 : FloorLog2(amax);
        for (int j = lane; j < p.dim; j += 32) {
          const float x = LoadValue(p, job.rows, int64_t{1} * row * p.dim + j);
          q[j] = amax < PowerOfTwo(-40) ? 0 : __float2int_rn(ScaleByPower(x, 10 - e));
        }
      }
      __syncwarp(kFullMask);
      unsigned char* codes = job.plane + p.code_offset + row * p.code_row_bytes;
      is_bad |= !EncodeIntegers(p, q, spare, e, codes, job.plane + 2 * row, lane);
      __syncwarp(kFullMask);
    }
  }
  ReportKeepRaw(job, is_bad);
}

__global__ void __launch_bounds__(kThreadsPerCta)
    DecodeHadamardPlanes(const DeviceParams p, const PlaneJob* __restrict__ jobs,
                         unsigned char* const* __restrict__ outputs) {
  SIMT_DYNAMIC_SHARED(int, shared);
  const PlaneJob job = jobs[blockIdx.x];
  unsigned char* const rows = outputs[blockIdx.x];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int* const w = shared + warp * 2 * p.dim;
  int* const spare = w + p.dim;
  const unsigned char* means = job.plane + p.mean_offset;
  const float ms = p.has_mean ? __half2float(__ushort_as_half(LoadU16(means))) : 0.0f;
  for (int row = warp; row < p.num_tokens; row += kWarpsPerCta) {
    const unsigned char* codes = job.plane + p.code_offset + row * p.code_row_bytes;
    const float a = __half2float(__ushort_as_half(LoadU16(job.plane + 2 * row)));
    const float scale = __fmul_rn(a, PowerOfTwo(-p.scale_shift));
    for (int j = lane; j < p.dim; j += 32) {
      const int index = UnpackIndex(p, codes, j);
      w[j] =
          index < p.num_levels ? -p.level[p.num_levels - 1 - index] : p.level[index - p.num_levels];
    }
    const int* v = WarpHadamard(p, w, spare, true, lane);
    for (int j = lane; j < p.dim; j += 32) {
      float value = a == 0.0f ? 0.0f : __fmul_rn(__int2float_rn(ApplySign(p, j, v[j])), scale);
      if (p.has_mean) {
        const float k = __int2float_rn(static_cast<signed char>(means[2 + j]));
        value = __fadd_rn(value, __fmul_rn(k, ms));
      }
      StoreValue(p, rows, int64_t{1} * row * p.dim + j, value);
    }
    __syncwarp(kFullMask);
  }
}

inline std::size_t HadamardSharedBytes(const DeviceParams& p) {
  return sizeof(int) * (static_cast<std::size_t>(kWarpsPerCta) * 2 * p.dim + p.dim);
}

// Enqueue on `stream`; `jobs` and `outputs` are device arrays of num_planes entries that stay alive
// until the stream gets there.
inline cudaError_t LaunchEncode(const DeviceParams& p, const PlaneJob* jobs, int num_planes,
                                cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(num_planes)), cta(kThreadsPerCta);
  if (p.family == DeviceFamily::kAbsmax) {
    return simt::launch(EncodeAbsmaxPlanes, grid, cta, 0, stream, p, jobs);
  }
  if (p.family == DeviceFamily::kKivi) {
    return simt::launch(EncodeKiviPlanes, grid, cta, 0, stream, p, jobs);
  }
  return simt::launch(EncodeHadamardPlanes, grid, cta, HadamardSharedBytes(p), stream, p, jobs);
}

inline cudaError_t LaunchDecode(const DeviceParams& p, const PlaneJob* jobs,
                                unsigned char* const* outputs, int num_planes,
                                cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(num_planes)), cta(kThreadsPerCta);
  if (p.family == DeviceFamily::kAbsmax) {
    return simt::launch(DecodeAbsmaxPlanes, grid, cta, 0, stream, p, jobs, outputs);
  }
  if (p.family == DeviceFamily::kKivi) {
    return simt::launch(DecodeKiviPlanes, grid, cta, 0, stream, p, jobs, outputs);
  }
  return simt::launch(DecodeHadamardPlanes, grid, cta, HadamardSharedBytes(p), stream, p, jobs,
                      outputs);
}

}  // namespace SIMT_NS
