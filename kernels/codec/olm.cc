// Highway backend of olm and osu2.
#include "kernels/codec/olm.h"

#include <algorithm>

#include "kernels/codec/code_bits.h"
#include "kernels/codec/rotate_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/olm.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

// Dims are multiples of 16.
using D32 = hn::CappedTag<int32_t, 16>;
using DF = hn::RebindToFloat<D32>;
using V32 = hn::Vec<D32>;
using VF = hn::Vec<DF>;
constexpr int kLanes = hn::MaxLanes(D32());

// The sum of lanes of 32 bits without a sign.
HWY_INLINE int64_t SumOfLanes(V32 v) {
  const hn::Repartition<uint64_t, D32> d64;
  const auto pairs = hn::BitCast(d64, v);
  const auto even = hn::And(pairs, hn::Set(d64, 0xffffffffu));
  const auto sum = hn::Add(even, hn::ShiftRight<32>(pairs));
  return static_cast<int64_t>(hn::GetLane(hn::SumOfLanes(d64, sum)));
}

// Sums of |y| * level, |y| < 2^31, level < 2^7, over at most 1024 values: in two halves of |y|, so
// that each of the lanes' sums stays below 2^31.
struct WideSum {
  V32 low;
  V32 high;

  void Add(V32 magnitude_of_y, V32 level) {
    const V32 mask = hn::Set(D32(), 0x7fff);
    low = hn::Add(low, hn::Mul(hn::And(magnitude_of_y, mask), level));
    high = hn::Add(high, hn::Mul(hn::ShiftRight<15>(magnitude_of_y), level));
  }
  int64_t Total() const { return SumOfLanes(low) + (SumOfLanes(high) << 15); }
};

int64_t SumOfSquaresImpl(const int16_t* q, int dim) {
  const D32 d;
  const hn::Rebind<int16_t, D32> d16;
  int64_t sum = 0;
  for (int i = 0; i < dim;) {
    V32 part = hn::Zero(d);
    const int end = std::min(dim, i + 256 * kLanes);  // 2^8 * 2^22: below 2^31
    for (; i < end; i += kLanes) {
      const V32 v = hn::PromoteTo(d, hn::LoadU(d16, q + i));
      part = hn::Add(part, hn::Mul(v, v));
    }
    sum += SumOfLanes(part);
  }
  return sum;
}

// Codes of one row, one a byte, for ascending thresholds.
template <int kMagnitudes>
OlmSums QuantizeRow(const TqTable& table, const float* threshold, const int32_t* y, int dim,
                    uint8_t* index) {
  const D32 d;
  const DF df;
  const hn::Rebind<uint8_t, D32> d8;
  const hn::Repartition<uint8_t, D32> d_bytes;
  HWY_ALIGN uint8_t level_bytes[16] = {};
  for (int k = 0; k < kMagnitudes; ++k) level_bytes[k] = static_cast<uint8_t>(table.level[k]);
  const auto levels = hn::LoadDup128(d_bytes, level_bytes);
  WideSum yw{hn::Zero(d), hn::Zero(d)};
  V32 ww = hn::Zero(d);
  for (int j = 0; j < dim; j += kLanes) {
    const V32 v = hn::LoadU(d, y + j);
    const V32 magnitude_of_y = hn::Abs(v);
    const VF as_float = hn::ConvertTo(df, magnitude_of_y);
    V32 magnitude = hn::Zero(d);
    HWY_UNROLL(8)
    for (int k = 0; k + 1 < kMagnitudes; ++k) {
      const auto reached = hn::RebindMask(d, hn::Ge(as_float, hn::Set(df, threshold[k])));
      magnitude = hn::IfThenElse(reached, hn::Set(d, k + 1), magnitude);
    }
    // Bytes with the top bit set look up 0: only the low byte of each lane becomes a level.
    const auto at =
        hn::BitCast(d_bytes, hn::Or(magnitude, hn::Set(d, static_cast<int32_t>(0x80808000u))));
    const V32 level = hn::BitCast(d, hn::TableLookupBytesOr0(levels, at));
    yw.Add(magnitude_of_y, level);
    ww = hn::Add(ww, hn::Mul(level, level));
    const V32 code = hn::Add(hn::Xor(magnitude, hn::ShiftRight<31>(v)), hn::Set(d, kMagnitudes));
    hn::StoreU(hn::DemoteTo(d8, code), d8, index + j);
  }
  return {.yw = yw.Total(), .ww = SumOfLanes(ww)};
}

// So many values of a row add up to less than 2^32 in each of four lanes or more: |y| is at most
// 2^25 sqrt(dim) long.
constexpr int ValuesPerSum(int dim) { return dim <= 192 ? 192 : 32; }

float BestStep(const int32_t* y, int dim, float rms) {
  const D32 d;
  const DF df;
  float threshold[8];
  int64_t beyond[8] = {};
  int64_t count[8] = {};
  int64_t all = 0;
  for (int k = 0; k < 8; ++k) threshold[k] = kOsuSteps[k] * rms;
  for (int first = 0; first < dim; first += ValuesPerSum(dim)) {
    const int end = std::min(dim, first + ValuesPerSum(dim));
    V32 sum[8];
    V32 sum_of_all = hn::Zero(d);
    HWY_UNROLL(8)
    for (int k = 0; k < 8; ++k) sum[k] = hn::Zero(d);
    for (int j = first; j < end; j += kLanes) {
      const V32 magnitude_of_y = hn::Abs(hn::LoadU(d, y + j));
      const VF as_float = hn::ConvertTo(df, magnitude_of_y);
      sum_of_all = hn::Add(sum_of_all, magnitude_of_y);
      HWY_UNROLL(8)
      for (int k = 0; k < 8; ++k) {
        const auto reached = hn::RebindMask(d, hn::Ge(as_float, hn::Set(df, threshold[k])));
        sum[k] = hn::Add(sum[k], hn::IfThenElseZero(reached, magnitude_of_y));
        count[k] += static_cast<int64_t>(hn::CountTrue(d, reached));
      }
    }
    for (int k = 0; k < 8; ++k) beyond[k] += SumOfLanes(sum[k]);
    all += SumOfLanes(sum_of_all);
  }
  double best_score = -1;
  float best = 0;
  for (int k = 0; k < 8; ++k) {
    // |w| is 3 from the threshold on, else 1.
    const double score = OsuScore({.yw = all + 2 * beyond[k], .ww = dim + 8 * count[k]});
    if (score <= best_score) continue;
    best_score = score;
    best = threshold[k];
  }
  return best;
}

OlmSums QuantizeImpl(int bits, const int32_t* y, int dim, int64_t sum_qq, uint8_t* index) {
  const TqTable& table = OlmTableOf(bits);
  const float rms = OlmRms(sum_qq, dim);
  float threshold[7];
  for (int k = 0; k + 1 < table.num_magnitudes; ++k) threshold[k] = table.threshold[k] * rms;
  OlmSums sums;
  if (bits == 4) {
    sums = QuantizeRow<8>(table, threshold, y, dim, index);
  } else if (bits == 3) {
    sums = QuantizeRow<4>(table, threshold, y, dim, index);
  } else {
    threshold[0] = BestStep(y, dim, rms);
    sums = QuantizeRow<2>(table, threshold, y, dim, index);
  }
  sums.qq = sum_qq;
  return sums;
}

// The levels of one row's codes.
void LevelsImpl(const uint8_t* level_of_index, const uint8_t* index, int dim, int16_t* w) {
  const hn::CappedTag<int8_t, 16> d8;
  const hn::RebindToUnsigned<decltype(d8)> du8;
  const hn::Half<decltype(d8)> half;
  const hn::Rebind<int16_t, decltype(half)> d16;
  const auto table = hn::BitCast(d8, hn::LoadU(du8, level_of_index));
  for (int j = 0; j < dim; j += 16) {
    const auto at = hn::BitCast(d8, hn::LoadU(du8, index + j));
    const auto level = hn::TableLookupBytes(table, at);
    hn::StoreU(hn::PromoteTo(d16, hn::LowerHalf(half, level)), d16, w + j);
    hn::StoreU(hn::PromoteTo(d16, hn::UpperHalf(half, level)), d16, w + j + 8);
  }
}

#else
void LevelsImpl(const uint8_t*, const uint8_t*, int, int16_t*) {}
int64_t SumOfSquaresImpl(const int16_t*, int) { return 0; }
OlmSums QuantizeImpl(int, const int32_t*, int, int64_t, uint8_t*) { return {}; }
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(SumOfSquaresImpl);
HWY_EXPORT(QuantizeImpl);
HWY_EXPORT(LevelsImpl);

EncodeResult EncodeOlmHighway(const OlmFormat& format, const std::byte* rows, std::byte* plane) {
  const PlaneShape& shape = format.shape;
  const int dim = shape.dim;
  const TqLayout layout = format.layout();
  std::fill(plane + 2 * int64_t{shape.num_tokens}, plane + layout.codes_at, std::byte{0});
  std::fill(plane + layout.codes_at + shape.num_tokens * layout.row_code_bytes,
            plane + layout.plane_bytes, std::byte{0});
  RotatedBatch batch(shape);
  std::vector<uint8_t> index(dim);
  for (int64_t first = 0; first < shape.num_tokens; first += kRotatedRows) {
    const int64_t count = std::min<int64_t>(kRotatedRows, shape.num_tokens - first);
    if (!batch.Load(rows, first, count)) return EncodeResult::kKeepRaw;
    for (int64_t r = 0; r < count; ++r) {
      std::byte* codes = plane + layout.codes_at + (first + r) * layout.row_code_bytes;
      uint16_t scale = 0;
      if (!batch.range(r).is_zero) {
        const int64_t sum_qq = HWY_DYNAMIC_DISPATCH(SumOfSquaresImpl)(batch.q(r), dim);
        const OlmSums sums =
            HWY_DYNAMIC_DISPATCH(QuantizeImpl)(format.bits, batch.y(r), dim, sum_qq, index.data());
        scale = OlmScale(format, sums, batch.range(r).exponent);
      }
      if (scale == kF16Infinity) return EncodeResult::kKeepRaw;
      StoreU16(plane + 2 * (first + r), scale);
      if (scale == 0) {
        std::fill_n(codes, layout.row_code_bytes, std::byte{0});
      } else {
        PackCodeRow(format.bits, dim, index.data(), codes);
      }
    }
  }
  return EncodeResult::kEncoded;
}

void DecodeOlmHighway(const OlmFormat& format, const std::byte* plane, std::byte* rows) {
  const PlaneShape& shape = format.shape;
  const int dim = shape.dim;
  const TqTable& table = OlmTableOf(format.bits);
  const TqLayout layout = format.layout();
  const int64_t row_bytes = DTypeBytes(shape.dtype, dim);
  uint8_t level_of_index[16] = {};
  for (int i = 0; i < table.num_magnitudes; ++i) {
    level_of_index[table.num_magnitudes + i] = static_cast<uint8_t>(table.level[i]);
    level_of_index[table.num_magnitudes - 1 - i] = static_cast<uint8_t>(-table.level[i]);
  }
  std::vector<int16_t> w(kRotatedRows * dim);
  std::vector<int32_t> v(kRotatedRows * dim);
  std::vector<uint8_t> index(dim);
  for (int64_t first = 0; first < shape.num_tokens; first += kRotatedRows) {
    const int64_t count = std::min<int64_t>(kRotatedRows, shape.num_tokens - first);
    for (int64_t r = 0; r < count; ++r) {
      const std::byte* codes = plane + layout.codes_at + (first + r) * layout.row_code_bytes;
      if (LoadU16(plane + 2 * (first + r)) == 0) {
        std::fill_n(w.data() + r * dim, dim, int16_t{0});
        continue;
      }
      SpreadCodeRow(format.bits, dim, codes, index.data());
      HWY_DYNAMIC_DISPATCH(LevelsImpl)(level_of_index, index.data(), dim, w.data() + r * dim);
    }
    RotateRows(shape.rotation->inverse_pairs(), dim, w.data(), v.data());
    for (int64_t r = 0; r < count; ++r) {
      const float step =
          std::ldexp(F16ToFloat(LoadU16(plane + 2 * (first + r))), -OlmScaleLog2(format.bits));
      ScaleRow(shape.dtype, v.data() + r * dim, dim, step, rows + (first + r) * row_bytes);
    }
  }
}

}  // namespace kvstow
#endif  // HWY_ONCE
