// Highway backend of kivi.
#include "kernels/codec/kivi.h"

#include "kernels/codec/int_rows.h"
#include "kernels/codec/kivi_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/kivi.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/pairs-inl.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

// Rows are multiples of 16 values: pairs of 8 lanes at most.
using DF = hn::CappedTag<float, 8>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
constexpr int64_t kLanes = hn::MaxLanes(DF());

template <DType kDType>
constexpr int64_t ValueBytes() {
  return kDType == DType::kF32 ? 4 : 2;
}

// Extremes of keys: over 32 rows, channel by channel.
template <DType kDType>
void KeyExtremes(const KiviFormat& format, const std::byte* rows, KiviGroups& groups) {
  const DF df;
  const int64_t row_bytes = format.dim * ValueBytes<kDType>();
  for (int64_t first = 0; first < format.num_tokens; first += kKiviGroup) {
    for (int64_t j = 0; j < format.dim; j += kLanes) {
      const std::byte* at = rows + first * row_bytes + j * ValueBytes<kDType>();
      VF min = LoadFloats<kDType>(df, at);
      VF max = min;
      for (int64_t t = 1; t < kKiviGroup; ++t) {
        const VF x = LoadFloats<kDType>(df, at + t * row_bytes);
        min = hn::Min(min, x);
        max = hn::Max(max, x);
      }
      const int64_t group = first / kKiviGroup * format.dim + j;
      hn::StoreU(max, df, groups.scales.data() + group);
      hn::StoreU(min, df, groups.mins.data() + group);
    }
  }
}

// Extremes of values: over up to 32 neighbours of a row.
template <DType kDType>
void ValueExtremes(const KiviFormat& format, const std::byte* rows, KiviGroups& groups) {
  const DF df;
  int64_t group = 0;
  for (int64_t t = 0; t < format.num_tokens; ++t) {
    const std::byte* row = rows + t * format.dim * ValueBytes<kDType>();
    for (int64_t j = 0; j < format.dim; j += kKiviGroup, ++group) {
      const int64_t end = std::min(j + kKiviGroup, format.dim);
      VF min = LoadFloats<kDType>(df, row + j * ValueBytes<kDType>());
      VF max = min;
      for (int64_t i = j + kLanes; i < end; i += kLanes) {
        const VF x = LoadFloats<kDType>(df, row + i * ValueBytes<kDType>());
        min = hn::Min(min, x);
        max = hn::Max(max, x);
      }
      groups.scales[group] = hn::GetLane(hn::MaxOfLanes(df, max));
      groups.mins[group] = hn::GetLane(hn::MinOfLanes(df, min));
    }
  }
}

// Lanes of fp16 bits to and from memory.
void StoreHalves(hn::Vec<DU> bits, std::byte* to, int64_t count) {
  const hn::Rebind<uint16_t, DF> d16;
  const auto halves = hn::DemoteTo(d16, hn::BitCast(DI(), bits));
  uint16_t lanes[kLanes];
  hn::StoreU(halves, d16, lanes);
  std::memcpy(to, lanes, 2 * std::min(count, kLanes));
}

// Extremes to stored scales and minima, and what the decoder will read of them. False where one
// does not fit.
bool StoreGroups(const KiviFormat& format, KiviGroups& groups, std::byte* plane) {
  const DF df;
  const DU du;
  const auto max_code = hn::Set(df, static_cast<float>(format.max_code()));
  const auto infinity = hn::Set(du, uint32_t{kF16Infinity});
  auto is_bad = hn::Zero(du);
  for (int64_t i = 0; i < groups.num_groups; i += kLanes) {
    const int64_t count = groups.num_groups - i;
    const VF max = hn::LoadU(df, groups.scales.data() + i);
    auto min_bits = F16BitsFromFloat(df, hn::LoadU(df, groups.mins.data() + i));
    const auto is_minus_zero = hn::Eq(min_bits, hn::Set(du, 0x8000u));
    min_bits = hn::IfThenElse(is_minus_zero, hn::Zero(du), min_bits);
    const VF min = FloatFromF16Bits(du, min_bits);
    const VF range = hn::IfThenElseZero(hn::Gt(max, min), hn::Sub(max, min));
    const auto scale_bits = F16BitsFromFloat(df, hn::Div(range, max_code));
    const auto min_is_bad = hn::Eq(hn::And(min_bits, hn::Set(du, 0x7fffu)), infinity);
    const auto scale_is_bad = hn::Eq(scale_bits, infinity);
    is_bad = hn::Or(is_bad, hn::VecFromMask(du, hn::Or(min_is_bad, scale_is_bad)));
    StoreHalves(scale_bits, plane + 2 * i, count);
    StoreHalves(min_bits, plane + format.mins_at() + 2 * i, count);
    hn::StoreU(FloatFromF16Bits(du, scale_bits), df, groups.scales.data() + i);
    hn::StoreU(min, df, groups.mins.data() + i);
  }
  return hn::AllTrue(du, hn::Eq(is_bad, hn::Zero(du)));
}

// Fills `groups` from a plane.
void LoadGroups(const KiviFormat& format, const std::byte* plane, KiviGroups& groups) {
  const hn::CappedTag<float, 4> df;
  constexpr int64_t kStep = hn::MaxLanes(df);
  const auto load = [&](const std::byte* halves, float* to) HWY_ATTR {
    int64_t i = 0;
    for (; i + kStep <= groups.num_groups; i += kStep) {
      hn::StoreU(LoadFloats<DType::kF16>(df, halves + 2 * i), df, to + i);
    }
    for (; i < groups.num_groups; ++i) to[i] = F16ToFloat(LoadU16(halves + 2 * i));
  };
  load(plane, groups.scales.data());
  load(plane + format.mins_at(), groups.mins.data());
}

// Scale and minimum of 2 * kLanes neighbouring values.
struct PairParams {
  VF even_scale, odd_scale, even_min, odd_min;
};

HWY_INLINE PairParams ParamsAt(const KiviValues& values, int64_t t, int64_t j) {
  const DF df;
  PairParams params{hn::Zero(df), hn::Zero(df), hn::Zero(df), hn::Zero(df)};
  const float* scale = values.groups.scales.data() + values.format.group_of(t, j);
  const float* min = values.groups.mins.data() + values.format.group_of(t, j);
  if (values.format.role == Role::kKey) {
    hn::LoadInterleaved2(df, scale, params.even_scale, params.odd_scale);
    hn::LoadInterleaved2(df, min, params.even_min, params.odd_min);
  } else {
    params.even_scale = params.odd_scale = hn::Set(df, *scale);
    params.even_min = params.odd_min = hn::Set(df, *min);
  }
  return params;
}

template <int kBits>
HWY_INLINE VI CodesOf(VF x, VF scale, VF min) {
  const DF df;
  const DI di;
  // A scale of 0 becomes 1: the differences of such a group are far below 1/2.
  const auto is_constant = hn::Eq(scale, hn::Zero(df));
  const VF step = hn::IfThenElse(is_constant, hn::Set(df, 1.0f), scale);
  const VI code = hn::NearestInt(hn::Div(hn::Sub(x, min), step));
  return hn::Min(hn::Max(code, hn::Zero(di)), hn::Set(di, (1 << kBits) - 1));
}

// Calls `call(t, j, params)` for every 2 * kLanes values; parameters of keys are loaded once for
// their 32 tokens.
template <class Call>
HWY_INLINE void ForPairs(const KiviValues& values, const Call& call) {
  const KiviFormat& format = values.format;
  const int64_t tokens_at_once = format.role == Role::kKey ? kKiviGroup : 1;
  for (int64_t first = 0; first < format.num_tokens; first += tokens_at_once) {
    for (int64_t j = 0; j < format.dim; j += 2 * kLanes) {
      const PairParams params = ParamsAt(values, first, j);
      for (int64_t t = first; t < first + tokens_at_once; ++t) call(t, j, params);
    }
  }
}

template <DType kDType, int kBits>
void StoreCodes(const KiviValues& values, const std::byte* rows, std::byte* plane) {
  const KiviFormat& format = values.format;
  std::byte* codes = plane + format.codes_at();
  ForPairs(values, [&](int64_t t, int64_t j, const PairParams& params) HWY_ATTR {
    const DF df;
    VF even = hn::Zero(df);
    VF odd = hn::Zero(df);
    LoadPairs<kDType>(df, rows + (t * format.dim + j) * ValueBytes<kDType>(), even, odd);
    StoreCodePairs<kBits>(df, CodesOf<kBits>(even, params.even_scale, params.even_min),
                          CodesOf<kBits>(odd, params.odd_scale, params.odd_min),
                          codes + t * format.row_code_bytes() + j * kBits / 8);
  });
}

template <DType kDType, int kBits>
void LoadCodes(const KiviValues& values, const std::byte* plane, std::byte* rows) {
  const KiviFormat& format = values.format;
  const std::byte* codes = plane + format.codes_at();
  ForPairs(values, [&](int64_t t, int64_t j, const PairParams& params) HWY_ATTR {
    const DF df;
    const DI di;
    VI even = hn::Zero(di);
    VI odd = hn::Zero(di);
    LoadCodePairs<kBits>(di, codes + t * format.row_code_bytes() + j * kBits / 8, even, odd);
    const VF even_value =
        hn::Add(hn::Mul(hn::ConvertTo(df, even), params.even_scale), params.even_min);
    const VF odd_value = hn::Add(hn::Mul(hn::ConvertTo(df, odd), params.odd_scale), params.odd_min);
    StorePairs<kDType>(df, even_value, odd_value,
                       rows + (t * format.dim + j) * ValueBytes<kDType>());
  });
}

bool EncodeImpl(const KiviFormat& format, DType dtype, const std::byte* rows, std::byte* plane) {
  KiviGroups groups(format.num_groups());
  return WithDType(dtype, [&]<DType kDType>() HWY_ATTR {
    if (format.role == Role::kKey) {
      KeyExtremes<kDType>(format, rows, groups);
    } else {
      ValueExtremes<kDType>(format, rows, groups);
    }
    if (!StoreGroups(format, groups, plane)) return false;
    if (format.bits == 4) {
      StoreCodes<kDType, 4>({format, groups}, rows, plane);
    } else {
      StoreCodes<kDType, 2>({format, groups}, rows, plane);
    }
    return true;
  });
}

void DecodeImpl(const KiviFormat& format, DType dtype, const std::byte* plane, std::byte* rows) {
  KiviGroups groups(format.num_groups());
  LoadGroups(format, plane, groups);
  WithDType(dtype, [&]<DType kDType>() HWY_ATTR {
    if (format.bits == 4) {
      LoadCodes<kDType, 4>({format, groups}, plane, rows);
    } else {
      LoadCodes<kDType, 2>({format, groups}, plane, rows);
    }
  });
}

#else
bool EncodeImpl(const KiviFormat&, DType, const std::byte*, std::byte*) { return false; }
void DecodeImpl(const KiviFormat&, DType, const std::byte*, std::byte*) {}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(EncodeImpl);
HWY_EXPORT(DecodeImpl);

EncodeResult EncodeKiviHighway(const KiviFormat& format, const PlaneShape& shape,
                               const std::byte* rows, std::byte* plane) {
  if (!RangeOfValues(shape.dtype, rows, format.num_tokens * format.dim).is_finite) {
    return EncodeResult::kKeepRaw;
  }
  std::fill(plane + 4 * format.num_groups(), plane + format.codes_at(), std::byte{0});
  std::fill(plane + format.codes_at() + format.num_tokens * format.row_code_bytes(),
            plane + format.plane_bytes(), std::byte{0});
  const bool fits = HWY_DYNAMIC_DISPATCH(EncodeImpl)(format, shape.dtype, rows, plane);
  return fits ? EncodeResult::kEncoded : EncodeResult::kKeepRaw;
}

void DecodeKiviHighway(const KiviFormat& format, const PlaneShape& shape, const std::byte* plane,
                       std::byte* rows) {
  HWY_DYNAMIC_DISPATCH(DecodeImpl)(format, shape.dtype, plane, rows);
}

}  // namespace kvstow
#endif  // HWY_ONCE
