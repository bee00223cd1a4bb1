// The emulator against the semantics written in the PTX manual, computed apart.
#include <cstdio>
#include <thread>
#include <vector>

#include "simt.h"
static int passed = 0, failed = 0;
static void check(bool ok, const char* what, int line) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("FAIL %s (line %d)\n", what, line);
}
#define CHECK(c) check((c), #c, __LINE__)

__global__ void shuffles(int* out, int width, int arg) {
  const int t = threadIdx.x, v = 100 + t;
  out[t] = __shfl_sync(~0u, v, arg, width);
  out[32 + t] = __shfl_up_sync(~0u, v, arg, width);
  out[64 + t] = __shfl_down_sync(~0u, v, arg, width);
  out[96 + t] = __shfl_xor_sync(~0u, v, arg, width);
}
// PTX shfl.sync pseudo code: c = clamp | (32 - width) << 8.
static int ptx_shfl(int mode, int lane, int b, int width) {
  const int segmask = 32 - width, cval = mode == 1 ? 0 : 31;
  const int maxLane = (lane & segmask) | (cval & ~segmask & 31), minLane = lane & segmask;
  int j = 0;
  bool p = false;
  b &= 31;
  switch (mode) {
    case 0:
      j = minLane | (b & ~segmask & 31);
      p = j <= maxLane;
      break;
    case 1:
      j = lane - b;
      p = j >= maxLane;
      break;
    case 2:
      j = lane + b;
      p = j <= maxLane;
      break;
    case 3:
      j = lane ^ b;
      p = j <= maxLane;
      break;
  }
  return p ? j : lane;
}
__global__ void votes(unsigned* out, unsigned seed) {
  const unsigned t = threadIdx.x;
  const int p = seed >> t & 1;
  out[t] = __ballot_sync(~0u, p);
  out[32 + t] = static_cast<unsigned>(__any_sync(~0u, p));
  out[64 + t] = static_cast<unsigned>(__all_sync(~0u, p));
  out[96 + t] = __match_any_sync(~0u, t % 5);
  out[128 + t] = __reduce_add_sync(~0u, t * t);
  out[160 + t] = static_cast<unsigned>(__reduce_min_sync(~0u, static_cast<int>(t) - 7));
  out[192 + t] = __reduce_max_sync(~0u, t ^ seed);
  out[224 + t] = __reduce_xor_sync(~0u, t * 77u);
}
__global__ void subgroups(unsigned* out) {  // four groups of 8 lanes, each at its own pace
  const unsigned t = threadIdx.x, g = t / 8, mask = 0xffu << (8 * g);
  unsigned v = t;
  for (unsigned i = 0; i <= g; ++i) v += __shfl_xor_sync(mask, v, 1);
  out[t] = v;
}
__global__ void geometry(unsigned* out) {
  const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[b * blockDim.x * blockDim.y * blockDim.z + t] = b * 1000 + t;
}
__global__ void block_votes(int* out) {
  const int t = threadIdx.x;
  const int c = __syncthreads_count(t % 3 == 0), a = __syncthreads_and(t >= 0),
            o = __syncthreads_or(t == 50);
  out[t] = c * 4 + a * 2 + o;
}
template <int N>
__global__ void tree_sum(const unsigned* in, unsigned* out) {  // static + dynamic shared, templates
  SIMT_SHARED(unsigned, s, [N]);
  SIMT_DYNAMIC_SHARED(unsigned, d);
  const int t = threadIdx.x;
  s[t] = in[blockIdx.x * N + t];
  __syncthreads();
  for (int w = N / 2; w > 0; w /= 2) {
    if (t < w) s[t] += s[t + w];
    __syncthreads();
  }
  d[t] = s[0];
  __syncthreads();
  if (t == 0) out[blockIdx.x] = d[N - 1];
}
__global__ void partial(unsigned* out) {  // the last warp has 8 lanes
  const unsigned t = threadIdx.x;
  out[t] = __ballot_sync(t < 32 ? ~0u : 0xffu, 1);
}
__global__ void histogram(const unsigned* in, unsigned* out, float* sum) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(out + in[t] % 16, 1u);
  atomicMax(out + 16, in[t]);
  atomicAdd(sum, 1.0f);
}

int main() {
  simt::for_each_schedule(6, [](const simt::Options&) {
    for (int w : {32, 16, 8, 4, 2, 1})
      for (int a = 0; a < 32; ++a) {
        std::vector<int> o(128);
        simt::launch(shuffles, 1, 32, 0, nullptr, o.data(), w, a);
        bool ok = true;
        for (int m = 0; m < 4; ++m)
          for (int l = 0; l < 32; ++l) ok &= o[m * 32 + l] == 100 + ptx_shfl(m, l, a, w);
        CHECK(ok);
      }
    for (unsigned s : {0u, 1u, 0xffffffffu, 0x12345678u}) {
      std::vector<unsigned> o(256);
      simt::launch(votes, 1, 32, 0, nullptr, o.data(), s);
      unsigned add = 0, mx = 0, x = 0;
      for (unsigned t = 0; t < 32; ++t) {
        add += t * t;
        mx = std::max(mx, t ^ s);
        x ^= t * 77;
      }
      bool ok = true;
      for (unsigned t = 0; t < 32; ++t) {
        unsigned m = 0;
        for (unsigned k = 0; k < 32; ++k) m |= (k % 5 == t % 5 ? 1u : 0u) << k;
        ok &= o[t] == s && o[32 + t] == (s != 0) && o[64 + t] == (s == ~0u) && o[96 + t] == m &&
              o[128 + t] == add && o[160 + t] == static_cast<unsigned>(-7) && o[192 + t] == mx &&
              o[224 + t] == x;
      }
      CHECK(ok);
    }
    std::vector<unsigned> o(32);
    simt::launch(subgroups, 1, 32, 0, nullptr, o.data());
    CHECK(o[0] == 1 && o[1] == 1 && o[8] == (8 + 9) * 2 && o[31] == (30 + 31) * 8);
    std::vector<unsigned> g(2 * 3 * 4 * 5 * 6 * 7);
    simt::launch(geometry, dim3(2, 3, 4), dim3(5, 6, 7), 0, nullptr, g.data());
    bool ok = true;
    for (unsigned b = 0; b < 24; ++b)
      for (unsigned t = 0; t < 210; ++t) ok &= g[b * 210 + t] == b * 1000 + t;
    CHECK(ok);
    std::vector<int> v(100);
    simt::launch(block_votes, 1, 100, 0, nullptr, v.data());
    CHECK(v[0] == 34 * 4 + 3 && v[99] == v[0]);
    std::vector<unsigned> in(256 * 5, 3), out(5);
    CHECK(simt::launch(tree_sum<256>, 5, 256, 1024, nullptr, in.data(), out.data()) == cudaSuccess);
    CHECK(out[0] == 768 && out[4] == 768);
    CHECK(simt::launch(tree_sum<64>, 5, 64, 256, nullptr, in.data(), out.data()) == cudaSuccess);
    CHECK(out[0] == 192);
    std::vector<unsigned> p(40);
    simt::launch(partial, 1, 40, 0, nullptr, p.data());
    CHECK(p[0] == ~0u && p[39] == 0xff);
    std::vector<unsigned> h(17);
    float sum = 0;
    simt::launch(histogram, 5, 256, 0, nullptr, in.data(), h.data(), &sum);
    CHECK(h[3] == 1280 && h[16] == 3 && sum == 1280.0f);
  });
  // Limits answer like the runtime.
  CHECK(simt::launch(geometry, 0, 32, 0, nullptr, nullptr) == cudaErrorInvalidConfiguration);
  CHECK(simt::launch(geometry, 1, dim3(1, 1, 65), 0, nullptr, nullptr) ==
        cudaErrorInvalidConfiguration);
  std::vector<unsigned> in(256 * 5, 3), out(5);
  CHECK(simt::launch(tree_sum<256>, 1, 256, 64 << 10, nullptr, in.data(), out.data()) ==
        cudaErrorInvalidValue);
  CHECK(simt::allow_dynamic_shared(tree_sum<256>, 64 << 10) == cudaSuccess);
  CHECK(simt::launch(tree_sum<256>, 1, 256, 64 << 10, nullptr, in.data(), out.data()) ==
        cudaSuccess);
  CHECK(__byte_perm(0x44332211, 0x88776655, 0x7531) == 0x88664422u &&
        __byte_perm(0x80, 0, 0x8888) == 0xffffffffu);
  CHECK(__funnelshift_l(0x80000000u, 1, 1) == 3 && __funnelshift_r(0, 1, 1) == 0x80000000u &&
        __brev(1) == 0x80000000u);
  CHECK(__float2int_rn(2.5f) == 2 && __float2int_rn(3.5f) == 4 &&
        __float2int_rn(1e20f) == INT32_MAX && __float2int_rn(-1e20f) == INT32_MIN &&
        __float2int_rn(NAN) == 0);
  // Two OS threads launch at the same time: an engine each.
  std::vector<unsigned> h(17);
  float sum = 0;
  auto work = [&] {
    for (int i = 0; i < 200; ++i)
      simt::launch(histogram, 5, 256, 0, nullptr, in.data(), h.data(), &sum);
  };
  std::thread a(work), b(work);
  a.join();
  b.join();
  CHECK(h[3] == 2 * 200 * 1280);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
