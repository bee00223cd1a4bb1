// One tq row per lane, with Highway. The working buffer is [dim, lanes]: a vector per value index.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "hwy/aligned_allocator.h"
#include "kernels/codec/tq_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/tq_lanes.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

using D32 = hn::ScalableTag<int32_t>;
using DF = hn::ScalableTag<float>;
using V32 = hn::Vec<D32>;
constexpr size_t kLanes = hn::MaxLanes(D32());

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

void LoadInts(const TqFormat& format, absl::Span<const TqIntRow> rows, int32_t* y, RowSums& sums) {
  std::fill_n(y, format.dim * kLanes, 0);
  for (int i = 0; i < format.dim; ++i) {
    const bool minus = IsMinusSign(format.role, i);
    for (size_t r = 0; r < rows.size(); ++r) {
      const int32_t q = rows[r].q[i];
      y[i * kLanes + r] = minus ? -q : q;
      sums.qq[r] += q * q;
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
  int32_t level_of_index[16];
  for (int i = 0; i < table.num_magnitudes; ++i) {
    level_of_index[table.num_magnitudes + i] = table.level[i];
    level_of_index[table.num_magnitudes - 1 - i] = -table.level[i];
  }
  std::fill_n(w, format.dim * kLanes, 0);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].scale == 0) continue;
    for (int i = 0; i < format.dim; ++i) {
      w[i * kLanes + r] = level_of_index[TqCodeAt(format.bits, format.dim, rows[r].codes, i)];
    }
  }
}

// Integers to fp32 in place: sign, scale, mean.
void ScaleLanes(const TqFormat& format, absl::Span<const TqCodeRow> rows, const float* means,
                int32_t* v) {
  const D32 d;
  const DF df;
  const float unit = PowerOfTwo(-TqScaleLog2(format.bits, format.dim));
  HWY_ALIGN float steps[kLanes] = {};
  for (size_t r = 0; r < rows.size(); ++r) steps[r] = F16ToFloat(rows[r].scale) * unit;
  const auto step = hn::Load(df, steps);
  for (int i = 0; i < format.dim; ++i) {
    const V32 whole = hn::Load(d, v + i * kLanes);
    const V32 with_sign = IsMinusSign(format.role, i) ? hn::Neg(whole) : whole;
    auto value = hn::Mul(hn::ConvertTo(df, with_sign), step);
    if (means != nullptr) value = hn::Add(value, hn::Set(df, means[i]));
    hn::Store(value, df, reinterpret_cast<float*>(v) + i * kLanes);
  }
}

void DecodeLanesImpl(const TqFormat& format, DType dtype, const float* means,
                     absl::Span<const TqCodeRow> rows) {
  const auto v = hwy::AllocateAligned<int32_t>(format.dim * kLanes);
  const auto row_values = hwy::AllocateAligned<float>(format.dim);
  const hn::CappedTag<float, 8> d8;
  for (size_t first = 0; first < rows.size(); first += kLanes) {
    const absl::Span<const TqCodeRow> group = rows.subspan(first, kLanes);
    LoadLevels(format, group, v.get());
    HadamardLanes(v.get(), format.dim, Transposed::kYes);
    ScaleLanes(format, group, means, v.get());
    const float* values = reinterpret_cast<const float*>(v.get());
    for (size_t r = 0; r < group.size(); ++r) {
      for (int i = 0; i < format.dim; ++i) row_values[i] = values[i * kLanes + r];
      WithDType(dtype, [&]<DType kDType>() HWY_ATTR {
        const int value_bytes = kDType == DType::kF32 ? 4 : 2;
        for (int i = 0; i < format.dim; i += static_cast<int>(hn::Lanes(d8))) {
          StoreFloats<kDType>(d8, hn::Load(d8, row_values.get() + i),
                              group[r].values + i * value_bytes);
        }
      });
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
