// One tq row per lane, with Highway. The working buffer is [dim, lanes]: a vector per value index.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "hwy/aligned_allocator.h"
#include "kernels/codec/code_bits.h"
#include "kernels/codec/tq_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/tq_lanes.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

using D32 = hn::ScalableTag<int32_t>;
using DF = hn::ScalableTag<float>;
using V32 = hn::Vec<D32>;
constexpr size_t kLanes = hn::MaxLanes(D32());

// Eight values of a row, or one value of eight rows.
using D8x16 = hn::FixedTag<int16_t, 8>;
using V8x16 = hn::Vec<D8x16>;

// Butterflies over the low, Sylvester part of the index: the same for H and H^T.
void SylvesterLanes(int32_t* y, int dim, int sylvester) {
  const D32 d;
  int stride = 1;
  for (; stride * 2 < sylvester; stride *= 4) {  // two stages per pass over the buffer
    for (int first = 0; first < dim; first += 4 * stride) {
      for (int i = first; i < first + stride; ++i) {
        int32_t* at[4];
        for (int k = 0; k < 4; ++k) at[k] = y + (i + k * stride) * kLanes;
        const V32 v0 = hn::Load(d, at[0]), v1 = hn::Load(d, at[1]);
        const V32 v2 = hn::Load(d, at[2]), v3 = hn::Load(d, at[3]);
        const V32 s01 = hn::Add(v0, v1), d01 = hn::Sub(v0, v1);
        const V32 s23 = hn::Add(v2, v3), d23 = hn::Sub(v2, v3);
        hn::Store(hn::Add(s01, s23), d, at[0]);
        hn::Store(hn::Add(d01, d23), d, at[1]);
        hn::Store(hn::Sub(s01, s23), d, at[2]);
        hn::Store(hn::Sub(d01, d23), d, at[3]);
      }
    }
  }
  for (; stride < sylvester; stride *= 2) {
    for (int first = 0; first < dim; first += 2 * stride) {
      for (int i = first; i < first + stride; ++i) {
        const V32 a = hn::Load(d, y + i * kLanes);
        const V32 b = hn::Load(d, y + (i + stride) * kLanes);
        hn::Store(hn::Add(a, b), d, y + i * kLanes);
        hn::Store(hn::Sub(a, b), d, y + (i + stride) * kLanes);
      }
    }
  }
}

// The Paley part: each output is the sum of all inputs less twice those of minus sign.
void PaleyLanes(int32_t* y, int order, int sylvester, Transposed transposed) {
  const D32 d;
  const int8_t* p = PaleyMatrix(order);
  std::array<std::array<uint8_t, kMaxPaleyOrder>, kMaxPaleyOrder> minus;
  std::array<int, kMaxPaleyOrder> num_minus{};
  for (int i = 0; i < order; ++i) {
    for (int j = 0; j < order; ++j) {
      const int sign = transposed == Transposed::kYes ? p[j * order + i] : p[i * order + j];
      if (sign < 0) minus[i][num_minus[i]++] = static_cast<uint8_t>(j);
    }
  }
  HWY_ALIGN int32_t x[kMaxPaleyOrder * kLanes];
  for (int low = 0; low < sylvester; ++low) {
    V32 all = hn::Zero(d);
    for (int j = 0; j < order; ++j) {
      const V32 v = hn::Load(d, y + (j * sylvester + low) * kLanes);
      hn::Store(v, d, x + j * kLanes);
      all = hn::Add(all, v);
    }
    for (int i = 0; i < order; ++i) {
      V32 sum = hn::Zero(d);
      for (int k = 0; k < num_minus[i]; ++k)
        sum = hn::Add(sum, hn::Load(d, x + minus[i][k] * kLanes));
      hn::Store(hn::Sub(all, hn::Add(sum, sum)), d, y + (i * sylvester + low) * kLanes);
    }
  }
}

void HadamardLanes(int32_t* y, int dim, Transposed transposed) {
  const int order = PaleyOrder(dim);
  SylvesterLanes(y, dim, dim / order);
  if (order != 1) PaleyLanes(y, order, dim / order, transposed);
}

// Sums over one row each; exact.
struct RowSums {
  int64_t qq[kLanes] = {};
  int64_t yw[kLanes] = {};
  int32_t ww[kLanes] = {};
};

// The sign of each value of a row: all bits of minus ones.
std::vector<int16_t> SignMasks(const TqFormat& format) {
  std::vector<int16_t> masks(format.dim);
  for (int first = 0; first < format.dim; first += 64) {
    const uint64_t minus = SplitMix64At(42 + static_cast<uint64_t>(format.role), first / 64);
    for (int i = first; i < std::min(format.dim, first + 64); ++i) {
      masks[i] = ((minus >> (i - first)) & 1) != 0 ? int16_t{-1} : int16_t{0};
    }
  }
  return masks;
}

int64_t SumOfSquares(const int16_t* q, int dim) {
  const hn::CappedTag<int32_t, 8> d;
  const hn::Rebind<int16_t, decltype(d)> d16;
  constexpr int kStep = hn::MaxLanes(d);
  HWY_ALIGN int32_t lanes[kStep];
  int64_t sum = 0;
  for (int i = 0; i < dim;) {
    auto part = hn::Zero(d);
    const int end = std::min(dim, i + 256 * kStep);  // 2^8 * 2^22: below 2^31
    for (; i < end; i += kStep) {
      const auto v = hn::PromoteTo(d, hn::LoadU(d16, q + i));
      part = hn::Add(part, hn::Mul(v, v));
    }
    hn::Store(part, d, lanes);
    for (int k = 0; k < kStep; ++k) sum += lanes[k];
  }
  return sum;
}

// As many of eight 16-bit numbers as `d` has lanes.
template <class D>
HWY_INLINE hn::Vec<D> PromoteFirst(D d, V8x16 v) {
  if constexpr (hn::MaxLanes(D()) >= 8) {
    return hn::PromoteTo(d, v);
  } else {
    return hn::PromoteTo(d, hn::LowerHalf(hn::Half<D8x16>(), v));
  }
}

// Values i .. i + 7 of eight rows, one vector a row, to the lanes from `row` on.
HWY_INLINE void StoreInLanes(V8x16* rows, int32_t* y, int i, size_t row) {
  const hn::CappedTag<int32_t, 8> d;
  TransposeEight(D8x16(), rows);
  HWY_UNROLL(8)
  for (int k = 0; k < 8; ++k) {
    hn::StoreU(PromoteFirst(d, rows[k]), d, y + (i + k) * kLanes + row);
  }
}

void LoadInts(const TqFormat& format, absl::Span<const TqIntRow> rows, int32_t* y, RowSums& sums) {
  const D8x16 d16;
  const std::vector<int16_t> masks = SignMasks(format);
  for (size_t r = 0; r < rows.size(); ++r) sums.qq[r] = SumOfSquares(rows[r].q, format.dim);
  for (size_t first = 0; first < kLanes; first += 8) {
    for (int i = 0; i < format.dim; i += 8) {
      const V8x16 mask = hn::LoadU(d16, masks.data() + i);
      V8x16 v[8];
      for (size_t k = 0; k < 8; ++k) {
        v[k] = first + k < rows.size() ? hn::LoadU(d16, rows[first + k].q + i) : hn::Zero(d16);
        v[k] = hn::Sub(hn::Xor(v[k], mask), mask);
      }
      StoreInLanes(v, y, i, first);
    }
  }
}

// Codes of 8 consecutive values, as bit fields: `low` holds min(bits, 2) or 4 bits of each value,
// `high` the third bit of 3.
struct CodeWords {
  V32 low;
  V32 high;
};

template <int kBits>
HWY_INLINE CodeWords QuantizeEight(const int32_t* y, const V32* thresholds, V32& sum_yw,
                                   V32& sum_ww) {
  const D32 d;
  const hn::Repartition<uint8_t, D32> d8;
  constexpr TqTable kTable = TqTableOf(kBits);
  HWY_ALIGN static constexpr uint8_t kLevels[16] = {
      kTable.level[0], kTable.level[1], kTable.level[2], kTable.level[3],
      kTable.level[4], kTable.level[5], kTable.level[6], kTable.level[7]};
  const auto levels = hn::LoadDup128(d8, kLevels);
  constexpr int kLowBits = kBits == 3 ? 2 : kBits;
  CodeWords words = {hn::Zero(d), hn::Zero(d)};
  for (int e = 7; e >= 0; --e) {
    const V32 v = hn::Load(d, y + e * kLanes);
    const V32 magnitude_of_y = hn::Abs(v);
    V32 magnitude = hn::Zero(d);
    HWY_UNROLL(8)
    for (int i = 0; i + 1 < kTable.num_magnitudes; ++i) {
      const auto reached = hn::VecFromMask(d, hn::Gt(magnitude_of_y, thresholds[i]));
      magnitude = hn::Sub(magnitude, reached);
    }
    // Bytes with the top bit set look up 0: only the low byte of each lane becomes a level.
    const auto at =
        hn::BitCast(d8, hn::Or(magnitude, hn::Set(d, static_cast<int32_t>(0x80808000u))));
    const V32 level = hn::BitCast(d, hn::TableLookupBytesOr0(levels, at));
    sum_yw = hn::Add(sum_yw, hn::Mul(magnitude_of_y, level));
    sum_ww = hn::Add(sum_ww, hn::Mul(level, level));
    const V32 sign = hn::ShiftRight<31>(v);
    const V32 index = hn::Add(hn::Xor(magnitude, sign), hn::Set(d, kTable.num_magnitudes));
    words.low =
        hn::Or(hn::ShiftLeft<kLowBits>(words.low), hn::And(index, hn::Set(d, (1 << kLowBits) - 1)));
    if constexpr (kBits == 3) {
      words.high = hn::Or(hn::Add(words.high, words.high), hn::ShiftRight<2>(index));
    }
  }
  return words;
}

// Writes the codes of all rows and adds up the sums that their scales need.
template <int kBits>
void QuantizeLanes(const TqFormat& format, absl::Span<const TqIntRow> rows, const int32_t* y,
                   RowSums& sums) {
  const D32 d;
  const DF df;
  constexpr TqTable kTable = TqTableOf(kBits);
  HWY_ALIGN float qq[kLanes];
  for (size_t r = 0; r < kLanes; ++r) qq[r] = static_cast<float>(sums.qq[r]);
  const auto rms = hn::Sqrt(hn::Load(df, qq));
  V32 thresholds[7];
  for (int i = 0; i + 1 < kTable.num_magnitudes; ++i) {
    const auto threshold = hn::Ceil(hn::Mul(hn::Set(df, kTable.threshold[i]), rms));
    thresholds[i] = hn::Sub(hn::ConvertTo(d, threshold), hn::Set(d, 1));  // |y| > t - 1: |y| >= t
  }
  // n products are below sqrt(n) * dim * 2^11 * 104, since sum y^2 <= (dim * 2^11)^2: after this
  // many values the unsigned 32-bit sums are emptied.
  const int num_exact = format.dim <= 1024 ? 128 : 8;
  V32 sum_yw = hn::Zero(d);
  V32 sum_ww = hn::Zero(d);
  HWY_ALIGN int32_t low[kLanes];
  HWY_ALIGN int32_t high[kLanes];
  HWY_ALIGN int32_t yw[kLanes];
  for (int i = 0; i < format.dim; i += 8) {
    const CodeWords words = QuantizeEight<kBits>(y + i * kLanes, thresholds, sum_yw, sum_ww);
    hn::Store(words.low, d, low);
    if constexpr (kBits == 3) hn::Store(words.high, d, high);
    for (size_t r = 0; r < rows.size(); ++r) {
      constexpr int kLowBytes = kBits == 4 ? 4 : 2;
      std::memcpy(rows[r].codes + i / 8 * kLowBytes, &low[r], kLowBytes);
      if constexpr (kBits == 3)
        rows[r].codes[format.dim / 4 + i / 8] = static_cast<std::byte>(high[r]);
    }
    if ((i + 8) % num_exact == 0 || i + 8 == format.dim) {
      hn::Store(sum_yw, d, yw);
      for (size_t r = 0; r < kLanes; ++r) sums.yw[r] += static_cast<uint32_t>(yw[r]);
      sum_yw = hn::Zero(d);
    }
  }
  hn::Store(sum_ww, d, sums.ww);
}

// Steps 8 and 9: false where the scale does not fit.
bool StoreScale(const TqFormat& format, const TqIntRow& row, const RowSums& sums, size_t lane) {
  const float yw = static_cast<float>(sums.yw[lane]);
  float alpha = yw / (static_cast<float>(sums.ww[lane]) * static_cast<float>(format.dim));
  if (format.scale == TqScale::kUnbiased) {
    const float clamped = TqTableOf(format.bits).clamp * alpha;
    const float unbiased = static_cast<float>(sums.qq[lane]) / yw;
    alpha = unbiased < clamped ? unbiased : clamped;
  }
  const int log2 = row.exponent - kTqRowBits + TqScaleLog2(format.bits, format.dim);
  // From 2^100 on every scale is infinite, and so is this product.
  const uint16_t scale = FloatToF16(alpha * PowerOfTwo(std::min(log2, 127)));
  StoreU16(row.scale, scale);
  if (scale == 0) std::fill_n(row.codes, format.dim * format.bits / 8, std::byte{0});
  return scale != kF16Infinity;
}

bool EncodeLanesImpl(const TqFormat& format, absl::Span<const TqIntRow> rows) {
  const auto y = hwy::AllocateAligned<int32_t>(format.dim * kLanes);
  bool fits = true;
  for (size_t first = 0; first < rows.size(); first += kLanes) {
    const absl::Span<const TqIntRow> group = rows.subspan(first, kLanes);
    RowSums sums;
    LoadInts(format, group, y.get(), sums);
    HadamardLanes(y.get(), format.dim, Transposed::kNo);
    if (format.bits == 4) {
      QuantizeLanes<4>(format, group, y.get(), sums);
    } else if (format.bits == 3) {
      QuantizeLanes<3>(format, group, y.get(), sums);
    } else {
      QuantizeLanes<2>(format, group, y.get(), sums);
    }
    for (size_t r = 0; r < group.size(); ++r) fits = StoreScale(format, group[r], sums, r) && fits;
  }
  return fits;
}

void LoadLevels(const TqFormat& format, absl::Span<const TqCodeRow> rows, int32_t* w) {
  const TqTable& table = TqTableOf(format.bits);
  const hn::CappedTag<int8_t, 16> d_table;
  const hn::CappedTag<int8_t, 8> d8;
  const D8x16 d16;
  HWY_ALIGN int8_t level_of_index[16] = {};
  for (int i = 0; i < table.num_magnitudes; ++i) {
    level_of_index[table.num_magnitudes + i] = table.level[i];
    level_of_index[table.num_magnitudes - 1 - i] = static_cast<int8_t>(-table.level[i]);
  }
  const auto levels = hn::Load(d_table, level_of_index);
  std::vector<uint8_t> index(rows.size() * format.dim);
  for (size_t r = 0; r < rows.size(); ++r) {
    SpreadCodeRow(format.bits, format.dim, rows[r].codes, index.data() + r * format.dim);
  }
  for (size_t first = 0; first < kLanes; first += 8) {
    for (int i = 0; i < format.dim; i += 8) {
      V8x16 v[8];
      for (size_t k = 0; k < 8; ++k) {
        v[k] = hn::Zero(d16);
        const size_t r = first + k;
        if (r >= rows.size() || rows[r].scale == 0) continue;
        const auto* at = reinterpret_cast<const int8_t*>(index.data() + r * format.dim + i);
        v[k] = hn::PromoteTo(d16, hn::TableLookupBytes(levels, hn::LoadU(d8, at)));
      }
      StoreInLanes(v, w, i, first);
    }
  }
}

// Integers to values of `kDType`, [dim, lanes]: sign, scale, mean.
template <DType kDType>
void ScaleLanes(const TqFormat& format, absl::Span<const TqCodeRow> rows, const float* means,
                const int32_t* v, std::byte* values) {
  const D32 d;
  const DF df;
  const std::vector<int16_t> masks = SignMasks(format);
  const float unit = PowerOfTwo(-TqScaleLog2(format.bits, format.dim));
  HWY_ALIGN float steps[kLanes] = {};
  for (size_t r = 0; r < rows.size(); ++r) steps[r] = F16ToFloat(rows[r].scale) * unit;
  const auto step = hn::Load(df, steps);
  constexpr int64_t kLaneBytes = kDType == DType::kF32 ? 4 * kLanes : 2 * kLanes;
  for (int i = 0; i < format.dim; ++i) {
    const V32 mask = hn::Set(d, masks[i]);
    const V32 with_sign = hn::Sub(hn::Xor(hn::Load(d, v + i * kLanes), mask), mask);
    auto value = hn::Mul(hn::ConvertTo(df, with_sign), step);
    if (means != nullptr) value = hn::Add(value, hn::Set(df, means[i]));
    StoreFloats<kDType>(df, value, values + i * kLaneBytes);
  }
}

// [dim, lanes] of 16-bit values to rows.
void StoreRows16(absl::Span<const TqCodeRow> rows, int dim, const int16_t* values) {
  const D8x16 d16;
  for (size_t first = 0; first < rows.size(); first += 8) {
    for (int i = 0; i < dim; i += 8) {
      V8x16 v[8];
      // Four lanes are followed by four of the next value: those rows are not stored.
      for (size_t k = 0; k < 8; ++k) v[k] = hn::LoadU(d16, values + (i + k) * kLanes + first);
      TransposeEight(d16, v);
      for (size_t k = 0; k < 8 && first + k < rows.size(); ++k) {
        hn::StoreU(v[k], d16, reinterpret_cast<int16_t*>(rows[first + k].values) + i);
      }
    }
  }
}

void StoreRows32(absl::Span<const TqCodeRow> rows, int dim, const float* values) {
  for (size_t r = 0; r < rows.size(); ++r) {
    for (int i = 0; i < dim; ++i) {
      std::memcpy(rows[r].values + 4 * i, &values[i * kLanes + r], sizeof(float));
    }
  }
}

void DecodeLanesImpl(const TqFormat& format, DType dtype, const float* means,
                     absl::Span<const TqCodeRow> rows) {
  const auto v = hwy::AllocateAligned<int32_t>(format.dim * kLanes);
  const auto values = hwy::AllocateAligned<float>((format.dim + 8) * kLanes);
  auto* const bytes = reinterpret_cast<std::byte*>(values.get());
  for (size_t first = 0; first < rows.size(); first += kLanes) {
    const absl::Span<const TqCodeRow> group = rows.subspan(first, kLanes);
    LoadLevels(format, group, v.get());
    HadamardLanes(v.get(), format.dim, Transposed::kYes);
    WithDType(dtype, [&]<DType kDType>()
                         HWY_ATTR { ScaleLanes<kDType>(format, group, means, v.get(), bytes); });
    if (dtype == DType::kF32) {
      StoreRows32(group, format.dim, values.get());
    } else {
      StoreRows16(group, format.dim, reinterpret_cast<const int16_t*>(bytes));
    }
  }
}

#else
bool EncodeLanesImpl(const TqFormat&, absl::Span<const TqIntRow>) { return false; }
void DecodeLanesImpl(const TqFormat&, DType, const float*, absl::Span<const TqCodeRow>) {}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(EncodeLanesImpl);
HWY_EXPORT(DecodeLanesImpl);

bool EncodeTqLanes(const TqFormat& format, absl::Span<const TqIntRow> rows) {
  return HWY_DYNAMIC_DISPATCH(EncodeLanesImpl)(format, rows);
}

void DecodeTqLanes(const TqFormat& format, DType dtype, const float* means,
                   absl::Span<const TqCodeRow> rows) {
  HWY_DYNAMIC_DISPATCH(DecodeLanesImpl)(format, dtype, means, rows);
}

}  // namespace kvstow
#endif  // HWY_ONCE
