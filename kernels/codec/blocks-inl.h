// Vectors of the blocks engine: register i of a batch of rows holds values 8i..8i+7 of one row in
// each of its 128-bit blocks. All but loads and stores works within blocks, so it is the same code
// for 1, 2 or 4 rows per register. Included once per instruction set, like simd-inl.h.
#if defined(KVSTOW_CODEC_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTOW_CODEC_BLOCKS_INL_H_
#undef KVSTOW_CODEC_BLOCKS_INL_H_
#else
#define KVSTOW_CODEC_BLOCKS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

using BlockD16 = hn::ScalableTag<int16_t>;
using BlockDU16 = hn::RebindToUnsigned<BlockD16>;
using BlockD32 = hn::Repartition<int32_t, BlockD16>;
using BlockDU32 = hn::RebindToUnsigned<BlockD32>;
using BlockDF = hn::RebindToFloat<BlockD32>;
using BlockD8 = hn::Repartition<uint8_t, BlockD16>;
using BlockV16 = hn::Vec<BlockD16>;
using BlockV32 = hn::Vec<BlockD32>;
using BlockVF = hn::Vec<BlockDF>;
using BlockV8 = hn::Vec<BlockD8>;

constexpr size_t kRowsPerBatch = hn::MaxLanes(BlockD8()) / 16;

// The sum over its block in every lane.
HWY_INLINE BlockV32 BlockSum(BlockV32 v) {
  v = hn::Add(v, hn::Shuffle1032(v));
  return hn::Add(v, hn::Shuffle2301(v));
}

// The maximum of the unsigned 16-bit lanes of its block, in every 32-bit lane.
HWY_INLINE BlockV32 BlockMaxU16(BlockV16 v) {
  const BlockDU16 du16;
  const BlockDU32 du32;
  const BlockD32 d32;
  auto max = hn::BitCast(du32, v);
  const auto fold = [&](auto other) HWY_ATTR {
    max = hn::BitCast(du32, hn::Max(hn::BitCast(du16, max), hn::BitCast(du16, other)));
  };
  fold(hn::Shuffle1032(max));
  fold(hn::Shuffle2301(max));
  fold(hn::ShiftRight<16>(max));
  return hn::BitCast(d32, hn::And(max, hn::Set(du32, 0xffffu)));
}

// The low 16 bits of each 32-bit lane, in both of its halves.
HWY_INLINE BlockV16 TwiceLow16(BlockV32 v) {
  const BlockD32 d32;
  const BlockD16 d16;
  return hn::BitCast(d16, hn::Or(hn::And(v, hn::Set(d32, 0xffff)), hn::ShiftLeft<16>(v)));
}

// a[2i] * b[2i] + a[2i+1] * b[2i+1], for |a * b| below 2^15.
HWY_INLINE BlockV32 MulAddPairs(BlockV16 a, BlockV16 b) {
  const BlockD32 d32;
#if HWY_ARCH_X86
  BlockV32 unused = hn::Zero(d32);
  return hn::ReorderWidenMulAccumulate(d32, a, b, hn::Zero(d32), unused);
#else
  const BlockV32 product = hn::BitCast(d32, hn::Mul(a, b));
  return hn::Add(hn::ShiftRight<16>(hn::ShiftLeft<16>(product)), hn::ShiftRight<16>(product));
#endif
}

// Sum and difference of the two signed bytes of each 16-bit lane.
HWY_INLINE void SumAndDifference(BlockV8 bytes, BlockV16& sum, BlockV16& difference) {
  const BlockD16 d16;
  const BlockV16 v = hn::BitCast(d16, bytes);
  const BlockV16 low = hn::ShiftRight<8>(hn::ShiftLeft<8>(v));
  const BlockV16 high = hn::ShiftRight<8>(v);
  sum = hn::Add(low, high);
  difference = hn::Sub(low, high);
}

HWY_INLINE void Butterfly(BlockV16& a, BlockV16& b) {
  const BlockV16 sum = hn::Add(a, b);
  b = hn::Sub(a, b);
  a = sum;
}

// A value that leaves 16 bits becomes +-32767 or -32768, and so does one of those made from it.
HWY_INLINE void SaturatedButterfly(BlockV16& a, BlockV16& b) {
  const BlockV16 sum = hn::SaturatedAdd(a, b);
  b = hn::SaturatedSub(a, b);
  a = sum;
}

// Moves the lowest bit of the lane index out of a register index and its highest into it: lanes (l2
// l1 l0) of registers r become lanes (l1 l0 r) of registers l2.
HWY_INLINE void RotateIn(BlockV16& a, BlockV16& b) {
  const BlockD16 d16;
  const BlockV16 lower = hn::InterleaveLower(d16, a, b);
  b = hn::InterleaveUpper(d16, a, b);
  a = lower;
}

HWY_INLINE void RotateInThenButterfly(BlockV16& a, BlockV16& b) {
  RotateIn(a, b);
  Butterfly(a, b);
}

// `kOp` on all pairs of registers whose indexes differ in the bit kStride.
template <int kStride, int kRegisters, void (*kOp)(BlockV16&, BlockV16&)>
HWY_INLINE void ForPairs(BlockV16* v) {
  if constexpr (kStride < kRegisters) {
    HWY_UNROLL(16)
    for (int k = 0; k < kRegisters / 2; ++k) {
      const int i = k / kStride * 2 * kStride + k % kStride;
      kOp(v[i], v[i + kStride]);
    }
  }
}

#endif  // HWY_TARGET != HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#endif  // include guard
