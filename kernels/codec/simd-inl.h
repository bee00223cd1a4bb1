// Vector code the Highway backends share. Compiled once per instruction set: include it inside a
// foreach_target file, after hwy/highway.h; the guard below is Highway's way of being included
// again.
#if defined(KVSTOW_CODEC_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTOW_CODEC_SIMD_INL_H_
#undef KVSTOW_CODEC_SIMD_INL_H_
#else
#define KVSTOW_CODEC_SIMD_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/codec/rows.h"
#include "kernels/core/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

namespace hn = hwy::HWY_NAMESPACE;

// 2^log2 for log2 in [-126, 127].
inline float PowerOfTwo(int log2) {
  return std::bit_cast<float>(static_cast<uint32_t>(127 + log2) << 23);
}

// fp16 bits (in the low half of each lane) to fp32, exactly; infinity and NaN keep their kind.
template <class DU, class VU>
HWY_INLINE hn::Vec<hn::RebindToFloat<DU>> FloatFromF16Bits(DU du, VU half) {
  const hn::RebindToFloat<DU> df;
  const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(half, hn::Set(du, 0x7fffu)));
  const auto exponent = hn::And(magnitude, hn::Set(du, 0x1fu << 23));
  const auto rebias = hn::Set(du, 112u << 23);
  auto bits = hn::Add(magnitude, rebias);
  bits = hn::Add(bits, hn::IfThenElseZero(hn::Eq(exponent, hn::Set(du, 0x1fu << 23)), rebias));
  // Subnormal: 1.fraction * 2^-14 minus the one that is not there.
  const auto subnormal =
      hn::Sub(hn::BitCast(df, hn::Add(bits, hn::Set(du, 1u << 23))), hn::Set(df, 0x1p-14f));
  const auto is_subnormal = hn::Eq(exponent, hn::Zero(du));
  bits = hn::IfThenElse(is_subnormal, hn::BitCast(du, subnormal), bits);
  return hn::BitCast(df, hn::Or(bits, sign));
}

// fp32 to fp16 bits in the low half of each lane: nearest, ties to even, overflow to infinity. NaN
// is not handled.
template <class DF, class VF>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> F16BitsFromFloat(DF df, VF value) {
  const hn::RebindToUnsigned<DF> du;
  const hn::RebindToSigned<DF> di;
  const auto bits = hn::BitCast(du, value);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffffu));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(du, 0xfffu)), odd);
  auto half = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 112u << 23)));
  // Below 2^-14: adding 0.5 puts the last kept bit, 2^-24, in the lowest place of the sum.
  const auto sum = hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f));
  const auto subnormal = hn::Sub(hn::BitCast(du, sum), hn::Set(du, 0x3f000000u));
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  const auto is_small = hn::Lt(signed_magnitude, hn::Set(di, 0x38800000));
  const auto is_big = hn::Gt(signed_magnitude, hn::Set(di, 0x477fefff));  // 65520 and up
  half = hn::IfThenElse(hn::RebindMask(du, is_small), subnormal, half);
  half = hn::IfThenElse(hn::RebindMask(du, is_big), hn::Set(du, 0x7c00u), half);
  return hn::Or(half, sign);
}

// p and its rounding to bf16: p is 2^16 times the value, and p - fl(p * (1 - 2^-16)) is the value
// rounded to 8 significant bits, ties to even; its low 16 bits are 0.
template <class DF, class VF>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> RoundedBf16(DF df, VF p) {
  const hn::RebindToUnsigned<DF> du;
  return hn::BitCast(du, hn::Add(hn::Mul(p, hn::Set(df, -65535.0f / 65536.0f)), p));
}

// Lanes(df) consecutive values of `kDType` as fp32, from any address.
template <DType kDType, class DF>
HWY_INLINE hn::Vec<DF> LoadFloats(DF df, const std::byte* values) {
  if constexpr (kDType == DType::kF32) {
    return hn::LoadU(df, reinterpret_cast<const float*>(values));
  } else {
    const hn::RebindToUnsigned<DF> du;
    const hn::Rebind<uint16_t, DF> d16;
    const auto half = hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(values)));
    if constexpr (kDType == DType::kBf16) return hn::BitCast(df, hn::ShiftLeft<16>(half));
    return FloatFromF16Bits(du, half);
  }
}

// Rounds to `kDType`: nearest, ties to even. NaN is not handled.
template <DType kDType, class DF, class VF>
HWY_INLINE void StoreFloats(DF df, VF value, std::byte* values) {
  if constexpr (kDType == DType::kF32) {
    hn::StoreU(value, df, reinterpret_cast<float*>(values));
  } else {
    const hn::RebindToUnsigned<DF> du;
    const hn::RebindToSigned<DF> di;
    const hn::Rebind<uint16_t, DF> d16;
    auto half = hn::Zero(du);
    if constexpr (kDType == DType::kBf16) {
      const auto bits = hn::BitCast(du, value);
      const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
      half = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
    } else {
      half = F16BitsFromFloat(df, value);
    }
    const auto packed = hn::DemoteTo(d16, hn::BitCast(di, half));  // fits: no saturation
    hn::StoreU(packed, d16, reinterpret_cast<uint16_t*>(values));
  }
}

// Block b of the result is the 16 bytes at first + b * stride: the same place of rows that far
// apart.
template <class D>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const std::byte* first, int64_t stride) {
  using T = hn::TFromD<D>;
  constexpr size_t kBlocks = hn::MaxLanes(D()) * sizeof(T) / 16;
  if constexpr (kBlocks == 1) {
    return hn::LoadU(d, reinterpret_cast<const T*>(first));
  } else {
    const hn::Half<D> half;
    const auto low = LoadBlocks(half, first, stride);
    const auto high = LoadBlocks(half, first + kBlocks / 2 * stride, stride);
    return hn::Combine(d, high, low);
  }
}

template <class D, class V>
HWY_INLINE void StoreBlocks(D d, V v, std::byte* first, int64_t stride) {
  using T = hn::TFromD<D>;
  constexpr size_t kBlocks = hn::MaxLanes(D()) * sizeof(T) / 16;
  if constexpr (kBlocks == 1) {
    hn::StoreU(v, d, reinterpret_cast<T*>(first));
  } else {
    const hn::Half<D> half;
    StoreBlocks(half, hn::LowerHalf(half, v), first, stride);
    StoreBlocks(half, hn::UpperHalf(half, v), first + kBlocks / 2 * stride, stride);
  }
}

// Largest magnitude of a row; infinity where a value is not finite.
template <DType kDType>
HWY_INLINE float RowMax(const std::byte* row, int64_t dim) {
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::RebindToSigned<decltype(df)> di;
  constexpr int64_t kValueBytes = kDType == DType::kF32 ? 4 : 2;
  const int64_t num_lanes = static_cast<int64_t>(hn::Lanes(df));
  // As integers: magnitudes of fp32 are ordered, and NaN lies above infinity.
  auto max = hn::Zero(di);
  int64_t i = 0;
  for (; i + num_lanes <= dim; i += num_lanes) {
    const auto magnitude = hn::Abs(LoadFloats<kDType>(df, row + i * kValueBytes));
    max = hn::Max(max, hn::BitCast(di, hn::BitCast(du, magnitude)));
  }
  int32_t result = hn::GetLane(hn::MaxOfLanes(di, max));
  for (; i < dim; ++i) {
    result = std::max(result, std::bit_cast<int32_t>(std::fabs(LoadValue(kDType, row, i))));
  }
  return std::bit_cast<float>(std::min(result, 0x7f800000));
}

// Calls `call.template operator()<kDType>()` for a float dtype.
template <class Call>
HWY_INLINE auto WithDType(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kF16:
      return call.template operator()<DType::kF16>();
    case DType::kF32:
      return call.template operator()<DType::kF32>();
    default:
      return call.template operator()<DType::kBf16>();
  }
}

#endif  // HWY_TARGET != HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#endif  // include guard
