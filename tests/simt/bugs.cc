// Kernels with one planted mistake each.
#include "bugs.h"

#include <vector>

#include "simt.h"
namespace {
using simt::launch;
constexpr int N = 128;
struct Io {
  std::vector<unsigned> in, out;
  simt::Buffer bi, bo;
  explicit Io(std::size_t n = N)
      : in(n),
        out(n, 0xeeeeeeee),
        bi(in.data(), n * 4, "in", true),
        bo(out.data(), n * 4, "out", false) {
    for (std::size_t i = 0; i < n; ++i) in[i] = static_cast<unsigned>(i * 2654435761u);
  }
};
template <class F>
bool same(const std::vector<unsigned>& out, F want) {
  for (std::size_t i = 0; i < out.size(); ++i)
    if (out[i] != want(i)) return false;
  return true;
}

__global__ void ok(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  s[t] = in[t];
  __syncthreads();
  out[t] = s[N - 1 - t];
}
__global__ void missing_sync(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  s[t] = in[t];
  out[t] = s[N - 1 - t];
}
__global__ void missing_sync_plain(const unsigned* in, unsigned* out) {
  __shared__ unsigned s[N];
  const int t = threadIdx.x;
  s[t] = in[t];
  out[t] = s[N - 1 - t];
}
__global__ void missing_sync_down(const unsigned* in, unsigned* out) {  // lane order hides it
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  s[t] = in[t];
  out[t] = t ? s[t - 1] : in[N - 1];
}
__global__ void missing_syncwarp(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  s[t] = in[t];
  out[t] = s[t ^ 1];
}
__global__ void missing_second_sync(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  unsigned v = in[t];
  for (int i = 0; i < 2; ++i) {
    s[t] = v;
    __syncthreads();
    v = s[(t + 40) % N];
  }
  out[t] = v;
}
__global__ void shuffle_as_barrier(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  s[t] = in[t];
  const unsigned z = __shfl_xor_sync(0xffffffffu, t, 1) & 0u;
  out[t] = s[t ^ 1] + z;
}
__global__ void divergent_barrier(const unsigned* in, unsigned* out) {
  const int t = threadIdx.x;
  if (t % 2) __syncthreads();
  out[t] = in[t];
  if (t % 2) __syncthreads();
}
__global__ void two_barriers(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  s[t] = in[t];
  if (t < 64) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[t] = s[N - 1 - t];
}
__global__ void early_return(const unsigned* in, unsigned* out, int n) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  if (t >= n) return;
  s[t] = in[t];
  __syncthreads();
  out[t] = s[n - 1 - t];
}
__global__ void divergent_shuffle(const unsigned* in, unsigned* out) {
  const int t = threadIdx.x;
  unsigned v = in[t];
  if ((t & 31) < 16) v = __shfl_xor_sync(0xffffffffu, v, 1);
  out[t] = v;
}
__global__ void inactive_lane(const unsigned* in, unsigned* out) {
  const int t = threadIdx.x;
  unsigned v = in[t];
  if ((t & 31) < 16) v = __shfl_down_sync(0x0000ffffu, v, 8);
  out[t] = v;
}
__global__ void not_in_mask(const unsigned* in, unsigned* out) {
  const int t = threadIdx.x;
  out[t] = __shfl_xor_sync(0x0000ffffu, in[t], 1);
}
__global__ void shared_overrun(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  SIMT_SHARED(unsigned, other, [N]);
  const int t = threadIdx.x;
  other[t] = 7;
  __syncthreads();
  volatile int k = t + 1;
  s[k] = in[t];
  __syncthreads();
  out[t] = s[t + 1];
}
__global__ void dynamic_overrun(const unsigned* in, unsigned* out) {
  SIMT_DYNAMIC_SHARED(unsigned, s);
  const int t = threadIdx.x;
  s[t] = in[t];
  __syncthreads();
  out[t] = s[N - 1 - t];
}
__global__ void global_overrun(const unsigned* in, unsigned* out) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  out[t] = in[t < N ? t : 0];
}
__global__ void uninitialised(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  if (t != 77) s[t] = in[t];
  __syncthreads();
  out[t] = s[t] & (t == 77 ? 0u : 0xffffffffu);  // the value does not even matter
}
__global__ void uninitialised_used(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x;
  if (t != 77) s[t] = in[t];
  __syncthreads();
  out[t] = s[t];
}
__global__ void counter(unsigned* out) { out[0] = out[0] + 1; }
__global__ void counter_atomic(unsigned* out) { atomicAdd(out, 1u); }
__global__ void block_race(unsigned* out) {
  if (threadIdx.x == 0) out[0] = blockIdx.x;
}
__global__ void misaligned(const unsigned* in, unsigned* out) {
  const int t = threadIdx.x;
  const uint4 v = *reinterpret_cast<const uint4*>(in + 1 + 4 * (t % 16));
  out[t] = v.x;
}
__global__ void float_atomics(const float* in, float* out) { atomicAdd(out, in[threadIdx.x]); }
__global__ void too_much_static(unsigned* out) {
  SIMT_SHARED(unsigned, s, [16384]);
  s[threadIdx.x] = 1;
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void partial_syncwarp(const unsigned* in, unsigned* out) {
  SIMT_SHARED(unsigned, s, [N]);
  const int t = threadIdx.x, h = t & 16;
  s[t] = in[t];
  __syncwarp(0xffffu << h);  // orders halves, but the read crosses them
  out[t] = s[t ^ 16];
}

#define RUN(K, ...) launch(K, 1, N, 0, nullptr __VA_OPT__(, ) __VA_ARGS__)
}  // namespace

const std::vector<Bug>& bugs() {
  static const std::vector<Bug> b = {
      {"(correct kernel)",
       [] {
         Io i;
         RUN(ok, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[N - 1 - t]; });
       }},
      {"(correct atomic counter)",
       [] {
         Io i(1);
         i.in[0] = 0;
         launch(counter_atomic, 4, N, 0, nullptr, i.in.data());
         return i.in[0] == 4 * N;
       }},
      {"missing __syncthreads",
       [] {
         Io i;
         RUN(missing_sync, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[N - 1 - t]; });
       }},
      {"same, plain __shared__",
       [] {
         Io i;
         RUN(missing_sync_plain, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[N - 1 - t]; });
       }},
      {"same, lane order hides it",
       [] {
         Io i;
         RUN(missing_sync_down, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[(t + N - 1) % N]; });
       }},
      {"missing __syncwarp",
       [] {
         Io i;
         RUN(missing_syncwarp, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[t ^ 1]; });
       }},
      {"__syncwarp with too small mask",
       [] {
         Io i;
         RUN(partial_syncwarp, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[t ^ 16]; });
       }},
      {"missing second barrier in loop",
       [] {
         Io i;
         RUN(missing_second_sync, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[(t + 80) % N]; });
       }},
      {"shuffle used as memory barrier",
       [] {
         Io i;
         RUN(shuffle_as_barrier, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[t ^ 1]; });
       }},
      {"barrier in divergent branch",
       [] {
         Io i;
         RUN(divergent_barrier, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[t]; });
       }},
      {"two different barriers",
       [] {
         Io i;
         RUN(two_barriers, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[N - 1 - t]; });
       }},
      {"return before barrier",
       [] {
         Io i;
         RUN(early_return, i.in.data(), i.out.data(), 100);
         i.out.resize(100);
         return same(i.out, [&](int t) { return i.in[99 - t]; });
       }},
      {"shuffle in divergent branch",
       [] {
         Io i;
         RUN(divergent_shuffle, i.in.data(), i.out.data());
         return true;
       }},
      {"shuffle reads inactive lane",
       [] {
         Io i;
         RUN(inactive_lane, i.in.data(), i.out.data());
         return true;
       }},
      {"caller not in mask",
       [] {
         Io i;
         RUN(not_in_mask, i.in.data(), i.out.data());
         return true;
       }},
      {"static shared overrun",
       [] {
         Io i;
         RUN(shared_overrun, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[t]; });
       }},
      {"dynamic shared overrun",
       [] {
         Io i;
         launch(dynamic_overrun, 1, N, (N - 1) * 4, nullptr, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[N - 1 - t]; });
       }},
      {"global overrun",
       [] {
         Io i;
         launch(global_overrun, 2, N, 0, nullptr, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[t]; });
       }},
      {"uninitialised shared, harmless",
       [] {
         Io i;
         RUN(uninitialised, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return t == 77 ? 0u : i.in[t]; });
       }},
      {"uninitialised shared, used",
       [] {
         Io i;
         RUN(uninitialised_used, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[t]; });
       }},
      {"counter without atomic",
       [] {
         Io i(1);
         i.in[0] = 0;
         launch(counter, 4, N, 0, nullptr, i.in.data());
         return i.in[0] == 4 * N;
       }},
      {"blocks write the same word",
       [] {
         Io i;
         launch(block_race, 4, N, 0, nullptr, i.out.data());
         return i.out[0] == 3;
       }},
      {"misaligned uint4 load",
       [] {
         Io i;
         RUN(misaligned, i.in.data(), i.out.data());
         return same(i.out, [&](int t) { return i.in[1 + 4 * (t % 16)]; });
       }},
      {"float atomicAdd order",
       [] {
         std::vector<float> f(N), o(1, 0.f);
         for (int k = 0; k < N; ++k) f[k] = 1.0f / static_cast<float>(k + 1);
         simt::Buffer a(f.data(), N * 4, "in", true), b(o.data(), 4, "out", true);
         RUN(float_atomics, f.data(), o.data());
         static const float first = o[0];
         return o[0] == first;
       }},
      {"static shared over 48 KiB",
       [] {
         Io i;
         RUN(too_much_static, i.out.data());
         return true;
       }},
      {"dynamic shared over 48 KiB",
       [] {
         Io i;
         return launch(dynamic_overrun, 1, N, 60000, nullptr, i.in.data(), i.out.data()) ==
                cudaSuccess;
       }},
      {"block of 1056 threads",
       [] {
         Io i;
         return launch(counter, 1, 1056, 0, nullptr, i.out.data()) == cudaSuccess;
       }},
  };
  return b;
}
