// Rows to integers, with Highway.
#include "kernels/codec/int_rows.h"

#include <algorithm>
#include <bit>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/int_rows.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

// The maximum of both halves, until at most eight lanes are left.
template <class D, class V>
HWY_INLINE hn::Vec<hn::CappedTag<hn::TFromD<D>, 8>> FoldMax(D d, V v) {
  if constexpr (hn::MaxLanes(D()) <= 8) {
    return v;
  } else {
    const hn::Half<D> half;
    return FoldMax(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

constexpr int64_t kAheadBytes = 2048;  // an address that is not there does no harm

// The largest magnitude as bits of its own format: magnitudes of IEEE formats are ordered as
// integers.
template <class T>
HWY_INLINE T MaxMagnitudeBits(const std::byte* values, int64_t count) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 8> d8;
  const int64_t num_lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* bits = reinterpret_cast<const T*>(values);
  constexpr T kMask = static_cast<T>(static_cast<T>(~T{0}) >> 1);
  auto max = hn::Zero(d);
  auto max1 = hn::Zero(d);  // two chains: one alone would wait for itself
  int64_t i = 0;
  for (; i + 2 * num_lanes <= count; i += 2 * num_lanes) {
    hwy::Prefetch(values + (i + num_lanes) * sizeof(T) + kAheadBytes);
    max = hn::Max(max, hn::And(hn::LoadU(d, bits + i), hn::Set(d, kMask)));
    max1 = hn::Max(max1, hn::And(hn::LoadU(d, bits + i + num_lanes), hn::Set(d, kMask)));
  }
  auto rest = FoldMax(d, hn::Max(max, max1));
  for (; i < count; i += static_cast<int64_t>(hn::Lanes(d8))) {
    rest = hn::Max(rest, hn::And(hn::LoadU(d8, bits + i), hn::Set(d8, kMask)));
  }
  HWY_ALIGN T lanes[8] = {};
  hn::Store(rest, d8, lanes);
  T result = 0;
  for (const T lane : lanes) result = std::max(result, lane);
  return result;
}

ValueRange RangeImpl(DType dtype, const std::byte* values, int64_t count) {
  uint32_t fp32_bits;
  if (dtype == DType::kF32) {
    fp32_bits = MaxMagnitudeBits<uint32_t>(values, count);
  } else {
    const uint16_t bits = MaxMagnitudeBits<uint16_t>(values, count);
    fp32_bits =
        std::bit_cast<uint32_t>(dtype == DType::kBf16 ? Bf16ToFloat(bits) : F16ToFloat(bits));
  }
  const int biased = static_cast<int>(fp32_bits >> 23);
  return {.is_finite = biased != 255, .is_zero = biased < 127 - 40, .exponent = biased - 127};
}

void IntsImpl(DType dtype, const std::byte* values, int64_t count, int log2, int16_t* ints) {
  const hn::CappedTag<float, 8> df;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<int16_t, decltype(df)> d16;
  const auto factor = hn::Set(df, PowerOfTwo(log2));
  WithDType(dtype, [&]<DType kDType>() HWY_ATTR {
    const int64_t value_bytes = kDType == DType::kF32 ? 4 : 2;
    for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(df))) {
      const auto x = LoadFloats<kDType>(df, values + i * value_bytes);
      const auto rounded = hn::NearestInt(hn::Mul(x, factor));
      hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, rounded)), d16, ints + i);
    }
  });
}

#else
ValueRange RangeImpl(DType, const std::byte*, int64_t) { return {}; }
void IntsImpl(DType, const std::byte*, int64_t, int, int16_t*) {}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(RangeImpl);
HWY_EXPORT(IntsImpl);

ValueRange RangeOfValues(DType dtype, const std::byte* values, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(RangeImpl)(dtype, values, count);
}

void ValuesToInts(DType dtype, const std::byte* values, int64_t count, int log2, int16_t* ints) {
  HWY_DYNAMIC_DISPATCH(IntsImpl)(dtype, values, count, log2, ints);
}

}  // namespace kvstow
#endif  // HWY_ONCE
