// Rows in lanes: what engines share that keep one row per SIMD lane. Included once per instruction
// set, like simd-inl.h.
#if defined(KVSTOW_CODEC_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTOW_CODEC_LANES_INL_H_
#undef KVSTOW_CODEC_LANES_INL_H_
#else
#define KVSTOW_CODEC_LANES_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

// Lanes of 32 bits, a row in each.
using LaneD32 = hn::ScalableTag<int32_t>;
using LaneDF = hn::RebindToFloat<LaneD32>;
using LaneV32 = hn::Vec<LaneD32>;
using LaneVF = hn::Vec<LaneDF>;
constexpr int64_t kLaneRows = hn::MaxLanes(LaneD32());

// Eight vectors of eight in each 128-bit block: rows become columns.
template <class D>
HWY_INLINE void TransposeEight(D d16, hn::Vec<D>* v) {
  const hn::Repartition<int32_t, D> d32;
  const hn::Repartition<int64_t, D> d64;
  hn::Vec<D> t[8];
  HWY_UNROLL(4)
  for (int k = 0; k < 4; ++k) {
    t[2 * k] = hn::InterleaveLower(d16, v[2 * k], v[2 * k + 1]);
    t[2 * k + 1] = hn::InterleaveUpper(d16, v[2 * k], v[2 * k + 1]);
  }
  HWY_UNROLL(4)
  for (int k = 0; k < 4; ++k) {
    const int i = k / 2 * 4 + k % 2;  // 0, 1, 4, 5
    const auto a = hn::BitCast(d32, t[i]);
    const auto b = hn::BitCast(d32, t[i + 2]);
    v[2 * k] = hn::BitCast(d16, hn::InterleaveLower(d32, a, b));
    v[2 * k + 1] = hn::BitCast(d16, hn::InterleaveUpper(d32, a, b));
  }
  HWY_UNROLL(4)
  for (int k = 0; k < 4; ++k) {
    const auto a = hn::BitCast(d64, v[k]);
    const auto b = hn::BitCast(d64, v[k + 4]);
    t[2 * k] = hn::BitCast(d16, hn::InterleaveLower(d64, a, b));
    t[2 * k + 1] = hn::BitCast(d16, hn::InterleaveUpper(d64, a, b));
  }
  HWY_UNROLL(8)
  for (int k = 0; k < 8; ++k) v[k] = t[k];
}

// sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1], modulo 2^32.
template <class D, class V16, class V32>
HWY_INLINE V32 MulAddPairs(D d, V16 a, V16 b, V32 sum) {
#if HWY_TARGET == HWY_AVX3_DL
  // One instruction, which Highway does not use and for which it does not ask the compiler.
  V32 result;
  asm("vpdpwssd %2, %1, %0" : "=v"(result.raw) : "v"(a.raw), "v"(b.raw), "0"(sum.raw));
  return result;
#elif HWY_ARCH_X86
  V32 unused = hn::Zero(d);
  return hn::ReorderWidenMulAccumulate(d, a, b, sum, unused);
#else
  const V32 a32 = hn::BitCast(d, a);
  const V32 b32 = hn::BitCast(d, b);
  const V32 low = hn::Mul(hn::ShiftRight<16>(hn::ShiftLeft<16>(a32)),
                          hn::ShiftRight<16>(hn::ShiftLeft<16>(b32)));
  const V32 high = hn::Mul(hn::ShiftRight<16>(a32), hn::ShiftRight<16>(b32));
  return hn::Add(sum, hn::Add(low, high));
#endif
}

// Where the codes of the rows in the lanes go: of row r to codes + r * stride.
struct LaneCodes {
  std::byte* codes;
  int64_t stride;
  int64_t num_rows;
};

// The low bytes of each lane to byte `at` of its row's codes.
template <int kBytes>
HWY_INLINE void ScatterWords(LaneV32 words, int64_t at, const LaneCodes& out) {
  HWY_ALIGN int32_t lanes[kLaneRows];
  hn::Store(words, LaneD32(), lanes);
  for (int64_t r = 0; r < out.num_rows; ++r) {
    std::memcpy(out.codes + r * out.stride + at, &lanes[r], kBytes);
  }
}

#endif  // HWY_TARGET != HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#endif  // include guard
