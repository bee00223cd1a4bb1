// simt.h: one kernel source, two machines.
//
// Under nvcc this header is a thin layer over the CUDA runtime. Under a plain
// host compiler (g++ >= 11, clang >= 14; C++20) it is a SIMT emulator: every CUDA
// thread is a fiber, and a scheduler per block switches fibers at barriers and
// warp collectives. Kernel files include this header first and otherwise look
// like ordinary CUDA.
//
// The engine is simt.cpp. It must not be built with -fsanitize=thread (see
// simt_trace.cpp for what that flag does on kernel units).
//
// The kernel dialect (see README.md):
//   SIMT_SHARED(float, tile, [32][33]);      static shared memory
//   SIMT_DYNAMIC_SHARED(float, buf);         dynamic shared memory (a pointer)
//   simt::launch(kernel, grid, block, shmem, stream, args...)
// Plain "__shared__ float tile[32];" works too, without redzones and poisoning.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#if defined(__CUDACC__)
// ---------------------------------------------------------------- real CUDA
#define SIMT_EMULATED 0
#define SIMT_NS gpu
#define SIMT_SHARED(T, name, ...) __shared__ T name __VA_ARGS__
#define SIMT_DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(16) unsigned char simt_dynamic_shared_[]; \
  T* const name = reinterpret_cast<T*>(simt_dynamic_shared_)

namespace simt {
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shmem,
                   cudaStream_t stream, A&&... args) {
  kernel<<<grid, block, shmem, stream>>>(static_cast<P>(std::forward<A>(args))...);
  return cudaGetLastError();
}
template <class... P>
cudaError_t allow_dynamic_shared(void (*kernel)(P...), int bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
}  // namespace simt

#else
// ------------------------------------------------------------ CPU emulation
#include <cmath>
#include <functional>
#include <source_location>
#include <stdexcept>
#include <string>

#define SIMT_EMULATED 1
#define SIMT_NS emu

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#if defined(__SANITIZE_THREAD__)
// g++ does not instrument the store of "p[i] = f()" when f returns a class and
// stays a call, as __float2half_rn does. Inlining it makes the store visible.
#define __global__ __attribute__((flatten))
#else
#define __global__
#endif
#define __device__
#define __host__
#define __shared__ static thread_local
#define __constant__
#define __launch_bounds__(...)

#define SIMT_SHARED(T, name, ...) \
  auto& name = ::simt::detail::shared_slot<::simt::detail::Same<T __VA_ARGS__>>([] {})
#define SIMT_DYNAMIC_SHARED(T, name) \
  T* const name = static_cast<T*>(::simt::detail::dynamic_shared())

#define SIMT_NO_TSAN __attribute__((no_sanitize("thread")))

namespace simt {

// A fault is anything CUDA leaves undefined, or would hang or fail on.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Order : std::uint8_t { lane, reverse, random };

struct Options {
  Order order = Order::lane;
  std::uint64_t seed = 1;
  bool strict = true;  // also fault on what hardware tolerates but the guide forbids
  std::size_t stack_bytes = 64 << 10;  // per CUDA thread
  std::size_t static_shared_limit = 48 << 10;
  std::size_t shared_limit = 227 << 10;  // sm_90 and sm_100, with allow_dynamic_shared
};
Options& options();  // of the calling OS thread

// Counters of the last launch, for tests and for the cost model.
struct Stats {
  std::uint64_t blocks = 0, threads = 0, switches = 0, block_barriers = 0, warp_ops = 0;
  std::size_t shared_bytes = 0;
};
const Stats& last_stats();

// Tells the tracer about "device memory" (no effect unless simt_trace.cpp is linked).
class Buffer {
 public:
  Buffer(const void* p, std::size_t n, const char* name, bool initialised);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

 private:
  const void* p_;
};

// Runs fn under lane order, reverse order and n random orders.
template <class F>
void for_each_schedule(int n, F&& fn) {
  const Options saved = options();
  struct Restore {
    const Options& o;
    ~Restore() { options() = o; }
  } restore{saved};
  for (int i = -2; i < n; ++i) {
    options().order = i == -2 ? Order::lane : i == -1 ? Order::reverse : Order::random;
    options().seed = 0x9E3779B97F4A7C15ull * static_cast<std::uint64_t>(i + 3);
    fn(options());
  }
}

namespace detail {

template <class T>
struct SameT {
  using type = T;
};
template <class T>
using Same = typename SameT<T>::type;

struct Loc {
  const char* file;
  unsigned line;
  static constexpr Loc here(const char* f = __builtin_FILE(), unsigned l = __builtin_LINE()) {
    return {f, l};
  }
};
#define SIMT_LOC ::simt::detail::Loc simt_loc_ = ::simt::detail::Loc::here()

enum class Op : std::uint8_t {
  none,
  bar,
  bar_count,
  bar_and,
  bar_or,  // block wide
  syncwarp,
  shfl,
  shfl_up,
  shfl_down,
  shfl_xor,  // warp wide
  ballot,
  any,
  all,
  match_any,
  red_add,
  red_min_u,
  red_max_u,
  red_min_s,
  red_max_s,
  red_and,
  red_or,
  red_xor
};

struct Thread {
  uint3 tid;
  std::uint32_t linear;
  std::uint32_t lane, warp;
  // what it waits for
  Op op;
  std::uint32_t mask;
  std::int32_t arg, width;
  Loc loc;
  std::uint64_t value, result;
  // context
  void* sp;
  char* stack_lo;
  std::size_t stack_size;
  void* fake_stack;
  void* ucontext;
};

struct BlockCtx {
  uint3 bid;
  dim3 bdim, gdim;
};

extern constinit thread_local Thread* self;
extern constinit thread_local BlockCtx* block_ctx;

[[noreturn]] void fault(const std::string& what, Loc loc);
std::uint64_t collective(Op op, std::uint32_t mask, std::uint64_t v, int arg, int width, Loc loc);
int barrier(Op op, int predicate, Loc loc);
void* shared_alloc(unsigned slot, std::size_t bytes, std::size_t align);
void* dynamic_shared();
unsigned new_slot();
cudaError_t run(void (*body)(void*), void* args, std::size_t args_bytes, const void* kernel,
                dim3 grid, dim3 block, std::size_t shmem);
cudaError_t allow(const void* kernel, int bytes);
void touch_atomic(void* p, std::size_t n);

template <class A, class Tag>
SIMT_NO_TSAN A& shared_slot(Tag) {
  static_assert(std::is_trivially_destructible_v<A>);
  static const unsigned slot = new_slot();
  return *static_cast<A*>(shared_alloc(slot, sizeof(A), alignof(A)));
}

template <class T>
std::uint64_t pack(T v) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  std::uint64_t u = 0;
  std::memcpy(&u, &v, sizeof(T));
  return u;
}
template <class T>
T unpack(std::uint64_t u) {
  T v;
  std::memcpy(static_cast<void*>(&v), &u, sizeof(T));
  return v;
}

// Kernel arguments are converted to the parameter types first, as <<<>>> does.
template <class... P>
struct Closure {
  void (*kernel)(P...);
  std::tuple<P...> args;
  SIMT_NO_TSAN static void run(void* p) {
    auto* c = static_cast<Closure*>(p);
    std::apply(c->kernel, c->args);
  }
};

struct ThreadIdx {
  SIMT_NO_TSAN static uint3 get() { return self->tid; }
};
struct BlockIdx {
  SIMT_NO_TSAN static uint3 get() { return block_ctx->bid; }
};
struct BlockDim {
  SIMT_NO_TSAN static dim3 get() { return block_ctx->bdim; }
};
struct GridDim {
  SIMT_NO_TSAN static dim3 get() { return block_ctx->gdim; }
};

template <class T, class F>
SIMT_NO_TSAN T rmw(T* p, F f) {
  touch_atomic(p, sizeof(T));
  T old;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  for (;;) {
    T want = f(old);
    if (__atomic_compare_exchange(p, &old, &want, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return old;
  }
}

}  // namespace detail

template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t shmem, cudaStream_t,
                   A&&... args) {
  static_assert(sizeof...(P) == sizeof...(A));
  detail::Closure<P...> c{kernel, {static_cast<P>(std::forward<A>(args))...}};
  return detail::run(&detail::Closure<P...>::run, &c, sizeof c,
                     reinterpret_cast<const void*>(kernel), grid, block, shmem);
}
template <class... P>
cudaError_t allow_dynamic_shared(void (*kernel)(P...), int bytes) {
  return detail::allow(reinterpret_cast<const void*>(kernel), bytes);
}
}  // namespace simt

#define threadIdx (::simt::detail::ThreadIdx::get())
#define blockIdx (::simt::detail::BlockIdx::get())
#define blockDim (::simt::detail::BlockDim::get())
#define gridDim (::simt::detail::GridDim::get())
inline constexpr int warpSize = 32;

// ----- barriers and fences
inline void __syncthreads(SIMT_LOC) {
  ::simt::detail::barrier(::simt::detail::Op::bar, 0, simt_loc_);
}
inline int __syncthreads_count(int p, SIMT_LOC) {
  return ::simt::detail::barrier(::simt::detail::Op::bar_count, p, simt_loc_);
}
inline int __syncthreads_and(int p, SIMT_LOC) {
  return ::simt::detail::barrier(::simt::detail::Op::bar_and, p, simt_loc_);
}
inline int __syncthreads_or(int p, SIMT_LOC) {
  return ::simt::detail::barrier(::simt::detail::Op::bar_or, p, simt_loc_);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_LOC) {
  ::simt::detail::collective(::simt::detail::Op::syncwarp, mask, 0, 0, 32, simt_loc_);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// ----- warp collectives
#define SIMT_SHFL(NAME, OP, ARG)                                                          \
  template <class T>                                                                      \
  T NAME(unsigned mask, T v, ARG a, int width = 32, SIMT_LOC) {                           \
    return ::simt::detail::unpack<T>(                                                     \
        ::simt::detail::collective(::simt::detail::Op::OP, mask, ::simt::detail::pack(v), \
                                   static_cast<int>(a), width, simt_loc_));               \
  }
SIMT_SHFL(__shfl_sync, shfl, int)
SIMT_SHFL(__shfl_up_sync, shfl_up, unsigned)
SIMT_SHFL(__shfl_down_sync, shfl_down, unsigned)
SIMT_SHFL(__shfl_xor_sync, shfl_xor, int)
#undef SIMT_SHFL
inline unsigned __ballot_sync(unsigned mask, int p, SIMT_LOC) {
  return static_cast<unsigned>(
      ::simt::detail::collective(::simt::detail::Op::ballot, mask, p != 0, 0, 32, simt_loc_));
}
inline int __any_sync(unsigned mask, int p, SIMT_LOC) {
  return static_cast<int>(
      ::simt::detail::collective(::simt::detail::Op::any, mask, p != 0, 0, 32, simt_loc_));
}
inline int __all_sync(unsigned mask, int p, SIMT_LOC) {
  return static_cast<int>(
      ::simt::detail::collective(::simt::detail::Op::all, mask, p != 0, 0, 32, simt_loc_));
}
template <class T>
unsigned __match_any_sync(unsigned mask, T v, SIMT_LOC) {
  return static_cast<unsigned>(::simt::detail::collective(
      ::simt::detail::Op::match_any, mask, ::simt::detail::pack(v), 0, 32, simt_loc_));
}
#define SIMT_RED(NAME, T, OP)                                                            \
  inline T NAME(unsigned mask, T v, SIMT_LOC) {                                          \
    return static_cast<T>(::simt::detail::collective(                                    \
        ::simt::detail::Op::OP, mask, static_cast<std::uint32_t>(v), 0, 32, simt_loc_)); \
  }
SIMT_RED(__reduce_add_sync, unsigned, red_add)
SIMT_RED(__reduce_add_sync, int, red_add)
SIMT_RED(__reduce_min_sync, unsigned, red_min_u)
SIMT_RED(__reduce_min_sync, int, red_min_s)
SIMT_RED(__reduce_max_sync, unsigned, red_max_u)
SIMT_RED(__reduce_max_sync, int, red_max_s)
SIMT_RED(__reduce_and_sync, unsigned, red_and)
SIMT_RED(__reduce_or_sync, unsigned, red_or)
SIMT_RED(__reduce_xor_sync, unsigned, red_xor)
#undef SIMT_RED
// __activemask is left out on purpose: its value is not defined by the program.

// ----- atomics
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return ::simt::detail::rmw(p, [v](T o) { return static_cast<T>(o + v); });
}
template <class T>
T atomicSub(T* p, std::type_identity_t<T> v) {
  return ::simt::detail::rmw(p, [v](T o) { return static_cast<T>(o - v); });
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> v) {
  return ::simt::detail::rmw(p, [v](T o) { return v < o ? v : o; });
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  return ::simt::detail::rmw(p, [v](T o) { return o < v ? v : o; });
}
template <class T>
T atomicAnd(T* p, std::type_identity_t<T> v) {
  return ::simt::detail::rmw(p, [v](T o) { return static_cast<T>(o & v); });
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> v) {
  return ::simt::detail::rmw(p, [v](T o) { return static_cast<T>(o | v); });
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return ::simt::detail::rmw(p, [v](T) { return v; });
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> c, std::type_identity_t<T> v) {
  return ::simt::detail::rmw(p, [c, v](T o) { return o == c ? v : o; });
}

// ----- loads and stores with cache hints (instrumented as plain ones)
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, std::type_identity_t<T> v) {
  *p = v;
}
template <class T>
void __stcg(T* p, std::type_identity_t<T> v) {
  *p = v;
}

// ----- arithmetic that is correctly rounded on both machines. Approximate
// device functions (__expf, __fdividef, rsqrtf, __frcp_approx, ...) are left
// out on purpose: a kernel that uses one does not compile here.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __float_as_uint(float f) { return __builtin_bit_cast(unsigned, f); }
inline int __float_as_int(float f) { return __builtin_bit_cast(int, f); }
inline float __uint_as_float(unsigned u) { return __builtin_bit_cast(float, u); }
inline float __int_as_float(int i) { return __builtin_bit_cast(float, i); }
// cvt.rni.s32.f32 saturates and maps NaN to 0; lrintf does neither.
inline int __float2int_rn(float f) {
  if (!(f == f)) return 0;
  if (f >= 2147483648.0f) return INT32_MAX;
  if (f < -2147483648.0f) return INT32_MIN;
  return static_cast<int>(__builtin_lrintf(f));
}
inline int __float2int_rz(float f) {
  if (!(f == f)) return 0;
  if (f >= 2147483648.0f) return INT32_MAX;
  if (f < -2147483648.0f) return INT32_MIN;
  return static_cast<int>(f);
}
inline float __int2float_rn(int i) { return static_cast<float>(i); }
inline float __uint2float_rn(unsigned i) { return static_cast<float>(i); }
inline float __ll2float_rn(long long i) { return static_cast<float>(i); }

// ----- integer intrinsics
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= ((x >> i) & 1u) << (31 - i);
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(a) * b) >> 32);
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
  return static_cast<unsigned>(((static_cast<std::uint64_t>(hi) << 32 | lo) << (s & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(hi) << 32 | lo) >> (s & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const std::uint64_t v = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned sel = (s >> (4 * i)) & 0xf;
    unsigned b = static_cast<unsigned>(v >> (8 * (sel & 7))) & 0xff;
    if (sel & 8) b = (b & 0x80) ? 0xff : 0;
    r |= b << (8 * i);
  }
  return r;
}
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }

namespace simt::detail {
// Hooks set by the tracer.
struct Hooks {
  void (*launch)(const void* args, std::size_t n) = nullptr;
  void (*block_begin)() = nullptr;
  void (*block_barrier)() = nullptr;
  void (*warp_barrier)(unsigned warp, std::uint32_t mask) = nullptr;
  void (*shared_alloc)(void* p, std::size_t n) = nullptr;
  void (*atomic)(void* p, std::size_t n, void* pc) = nullptr;
  void (*region)(const void* p, std::size_t n, const char* name, bool init, bool add) = nullptr;
};
extern constinit Hooks hooks;
}  // namespace simt::detail
#endif  // __CUDACC__
