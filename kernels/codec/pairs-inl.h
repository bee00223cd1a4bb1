// Neighbouring values in two vectors, even and odd ones apart, so that codes of less than a byte
// are packed without crossing lanes. Included once per instruction set, like simd-inl.h.
//
//   LoadPairs<kDType>(df, row + i * kValueBytes, even, odd);    // 2 * Lanes(df) values
//   StoreCodePairs<4>(df, code_of(even), code_of(odd), codes);  // Lanes(df) bytes
#if defined(KVSTOW_CODEC_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTOW_CODEC_PAIRS_INL_H_
#undef KVSTOW_CODEC_PAIRS_INL_H_
#else
#define KVSTOW_CODEC_PAIRS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

// 2 * Lanes(df) consecutive values of `kDType`, from any address.
template <DType kDType, class DF, class VF = hn::Vec<DF>>
HWY_INLINE void LoadPairs(DF df, const std::byte* values, VF& even, VF& odd) {
  if constexpr (kDType == DType::kF32) {
    hn::LoadInterleaved2(df, reinterpret_cast<const float*>(values), even, odd);
  } else {
    const hn::RebindToUnsigned<DF> du;
    const auto words = hn::LoadU(du, reinterpret_cast<const uint32_t*>(values));
    if constexpr (kDType == DType::kBf16) {
      even = hn::BitCast(df, hn::ShiftLeft<16>(words));
      odd = hn::BitCast(df, hn::And(words, hn::Set(du, 0xffff0000u)));
    } else {
      even = FloatFromF16Bits(du, hn::And(words, hn::Set(du, 0xffffu)));
      odd = FloatFromF16Bits(du, hn::ShiftRight<16>(words));
    }
  }
}

// The inverse: rounds to `kDType`, nearest, ties to even. NaN is not handled.
template <DType kDType, class DF, class VF>
HWY_INLINE void StorePairs(DF df, VF even, VF odd, std::byte* values) {
  if constexpr (kDType == DType::kF32) {
    hn::StoreInterleaved2(even, odd, df, reinterpret_cast<float*>(values));
  } else {
    const hn::RebindToUnsigned<DF> du;
    auto low = hn::Zero(du);
    auto high = hn::Zero(du);
    if constexpr (kDType == DType::kBf16) {
      const auto rounded = [&](VF v) HWY_ATTR {
        const auto bits = hn::BitCast(du, v);
        const auto last = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
        return hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), last);
      };
      low = hn::ShiftRight<16>(rounded(even));
      high = hn::And(rounded(odd), hn::Set(du, 0xffff0000u));
    } else {
      low = F16BitsFromFloat(df, even);
      high = hn::ShiftLeft<16>(F16BitsFromFloat(df, odd));
    }
    hn::StoreU(hn::Or(low, high), du, reinterpret_cast<uint32_t*>(values));
  }
}

// Packs 2 * Lanes(df) codes of `kBits` bits, the first in the lowest bits. Each lane holds one
// code, with zeros above it.
template <int kBits, class DF, class V32>
HWY_INLINE void StoreCodePairs(DF df, V32 even, V32 odd, std::byte* codes) {
  const auto pairs = hn::Or(even, hn::ShiftLeft<kBits>(odd));
  if constexpr (kBits == 4) {
    const hn::Rebind<uint8_t, DF> d8;
    hn::StoreU(hn::DemoteTo(d8, pairs), d8, reinterpret_cast<uint8_t*>(codes));
  } else {
    static_assert(kBits == 2);
    const hn::Rebind<uint16_t, DF> d16;
    const hn::RepartitionToWide<decltype(d16)> d32;
    const hn::RebindToSigned<decltype(d32)> di32;
    const hn::Rebind<uint8_t, decltype(d32)> d8;
    const auto nibbles = hn::BitCast(d32, hn::DemoteTo(d16, pairs));
    const auto bytes = hn::And(hn::Or(nibbles, hn::ShiftRight<12>(nibbles)), hn::Set(d32, 0xffu));
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di32, bytes)), d8, reinterpret_cast<uint8_t*>(codes));
  }
}

// The inverse.
template <int kBits, class DI, class V32>
HWY_INLINE void LoadCodePairs(DI di, const std::byte* codes, V32& even, V32& odd) {
  auto pairs = hn::Zero(di);
  if constexpr (kBits == 4) {
    const hn::Rebind<uint8_t, DI> d8;
    pairs = hn::PromoteTo(di, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(codes)));
  } else {
    static_assert(kBits == 2);
    const hn::Rebind<uint16_t, DI> d16;
    const hn::RepartitionToWide<decltype(d16)> d32;
    const hn::Rebind<uint8_t, decltype(d32)> d8;
    const auto bytes = hn::PromoteTo(d32, hn::LoadU(d8, reinterpret_cast<const uint8_t*>(codes)));
    const auto nibbles = hn::Or(hn::And(bytes, hn::Set(d32, 0xfu)),
                                hn::ShiftLeft<12>(hn::And(bytes, hn::Set(d32, 0xf0u))));
    pairs = hn::PromoteTo(di, hn::BitCast(d16, nibbles));
  }
  even = hn::And(pairs, hn::Set(di, (1 << kBits) - 1));
  odd = hn::ShiftRight<kBits>(pairs);
}

#endif  // HWY_TARGET != HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#endif  // include guard
