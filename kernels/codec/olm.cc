// Highway backend of olm and osu2.
#include "kernels/codec/olm.h"

#include <algorithm>

#include "kernels/codec/code_bits.h"
#include "kernels/codec/rotate_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/olm.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/rotate_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

// 32 bits without a sign of each lane, added to the rows' sums.
HWY_INLINE void AddLanes(LaneV32 v, int64_t* sums) {
  HWY_ALIGN uint32_t lanes[kLaneRows];
  hn::Store(v, LaneD32(), reinterpret_cast<int32_t*>(lanes));
  for (int64_t r = 0; r < kLaneRows; ++r) sums[r] += lanes[r];
}

HWY_INLINE LaneV32 MagnitudeAt(const LaneRows& rows, int64_t j) {
  return hn::Abs(hn::Load(LaneD32(), rows.y(j)));
}

// How many of the thresholds the magnitude has reached.
template <int kMagnitudes>
HWY_INLINE LaneV32 MagnitudeIndex(LaneV32 magnitude_of_y, const LaneVF* thresholds) {
  const LaneD32 d;
  const LaneVF as_float = hn::ConvertTo(LaneDF(), magnitude_of_y);
  LaneV32 index = hn::Zero(d);
  HWY_UNROLL(7)
  for (int k = 0; k + 1 < kMagnitudes; ++k) {
    const auto reached = hn::RebindMask(d, hn::Ge(as_float, thresholds[k]));
    index = hn::IfThenElse(reached, hn::Set(d, k + 1), index);
  }
  return index;
}

// Writes the codes of all rows. `add(|y|, index)` sees every value.
template <int kBits, class Add>
HWY_INLINE void WriteCodes(const LaneRows& rows, int dim, const LaneVF* thresholds,
                           const LaneCodes& out, const Add& add) {
  const LaneD32 d;
  constexpr int kMagnitudes = 1 << (kBits - 1);
  constexpr int kLowBits = kBits == 3 ? 2 : kBits;
  for (int i = 0; i < dim; i += 8) {
    LaneV32 low = hn::Zero(d), high = hn::Zero(d);
    for (int e = 7; e >= 0; --e) {
      const LaneV32 v = hn::Load(d, rows.y(i + e));
      const LaneV32 magnitude_of_y = hn::Abs(v);
      const LaneV32 magnitude = MagnitudeIndex<kMagnitudes>(magnitude_of_y, thresholds);
      add(magnitude_of_y, magnitude);
      const LaneV32 index =
          hn::Add(hn::Xor(magnitude, hn::ShiftRight<31>(v)), hn::Set(d, kMagnitudes));
      const LaneV32 low_bits = hn::And(index, hn::Set(d, (1 << kLowBits) - 1));
      low = hn::Or(hn::ShiftLeft<kLowBits>(low), low_bits);
      if constexpr (kBits == 3) high = hn::Or(hn::Add(high, high), hn::ShiftRight<2>(index));
    }
    ScatterWords<kLowBits>(low, i * kLowBits / 8, out);
    if constexpr (kBits == 3) ScatterWords<1>(high, dim / 4 + i / 8, out);
  }
}

// Lloyd-Max levels: codes, and what the scales need.
template <int kBits>
void QuantizeOlm(const LaneRows& rows, int dim, LaneVF rms, const LaneCodes& out, OlmSums* sums) {
  const LaneD32 d;
  const hn::Repartition<uint8_t, LaneD32> d8;
  const hn::Repartition<int16_t, LaneD32> d16;
  constexpr TqTable kTable = TqTableOf(kBits);
  HWY_ALIGN static constexpr uint8_t kLevels[16] = {
      kTable.level[0], kTable.level[1], kTable.level[2], kTable.level[3],
      kTable.level[4], kTable.level[5], kTable.level[6], kTable.level[7]};
  const auto levels = hn::LoadDup128(d8, kLevels);
  LaneVF thresholds[7];
  for (int k = 0; k + 1 < kTable.num_magnitudes; ++k) {
    thresholds[k] = hn::Mul(hn::Set(LaneDF(), kTable.threshold[k]), rms);
  }
  // |y| is at most 2^30 long and level below 2^7: in two halves of |y|, 1024
  // products of each stay below 2^32.
  LaneV32 low = hn::Zero(d), high = hn::Zero(d), ww = hn::Zero(d);
  const auto add = [&](LaneV32 magnitude_of_y, LaneV32 magnitude) HWY_ATTR {
    // Bytes with the top bit set look up 0: only the low byte of each lane
    // becomes a level.
    const auto at =
        hn::BitCast(d8, hn::Or(magnitude, hn::Set(d, static_cast<int32_t>(0x80808000u))));
    const auto level = hn::BitCast(d16, hn::TableLookupBytesOr0(levels, at));
    // Numbers of 15 bits in 16: a pair's other one is 0.
    const LaneV32 low_half = hn::And(magnitude_of_y, hn::Set(d, 0x7fff));
    const LaneV32 high_half = hn::ShiftRight<15>(magnitude_of_y);
    low = MulAddPairs(d, hn::BitCast(d16, low_half), level, low);
    high = MulAddPairs(d, hn::BitCast(d16, high_half), level, high);
    ww = MulAddPairs(d, level, level, ww);
  };
  WriteCodes<kBits>(rows, dim, thresholds, out, add);
  int64_t yw_low[kLaneRows] = {}, yw_high[kLaneRows] = {}, sum_ww[kLaneRows] = {};
  AddLanes(low, yw_low);
  AddLanes(high, yw_high);
  AddLanes(ww, sum_ww);
  for (int64_t r = 0; r < kLaneRows; ++r) {
    sums[r].yw = yw_low[r] + (yw_high[r] << 15);
    sums[r].ww = sum_ww[r];
  }
}

// The sum of n magnitudes is at most 2^25 sqrt(n dim): for so many of them
// below 2^32.
constexpr int ValuesPerSum(int dim) { return std::max(8, (1 << 13) / dim); }

// Magnitudes from each of the steps on: their sum and number.
struct Beyond {
  int64_t sum[8][kLaneRows] = {};
  int64_t count[8][kLaneRows] = {};
  int64_t all[kLaneRows] = {};
};

void SumBeyond(const LaneRows& rows, int dim, LaneVF rms, Beyond& beyond) {
  const LaneD32 d;
  const LaneDF df;
  LaneVF threshold[8];
  for (int k = 0; k < 8; ++k) threshold[k] = hn::Mul(hn::Set(df, kOsuSteps[k]), rms);
  for (int first = 0; first < dim; first += ValuesPerSum(dim)) {
    LaneV32 sum[8], count[8];
    LaneV32 all = hn::Zero(d);
    HWY_UNROLL(8)
    for (int k = 0; k < 8; ++k) sum[k] = count[k] = hn::Zero(d);
    for (int j = first; j < std::min(dim, first + ValuesPerSum(dim)); ++j) {
      const LaneV32 magnitude_of_y = MagnitudeAt(rows, j);
      const LaneVF as_float = hn::ConvertTo(df, magnitude_of_y);
      all = hn::Add(all, magnitude_of_y);
      HWY_UNROLL(8)
      for (int k = 0; k < 8; ++k) {
        const auto reached = hn::RebindMask(d, hn::Ge(as_float, threshold[k]));
        sum[k] = hn::Add(sum[k], hn::IfThenElseZero(reached, magnitude_of_y));
        count[k] = hn::Sub(count[k], hn::VecFromMask(d, reached));
      }
    }
    AddLanes(all, beyond.all);
    for (int k = 0; k < 8; ++k) {
      AddLanes(sum[k], beyond.sum[k]);
      AddLanes(count[k], beyond.count[k]);
    }
  }
}

// The step of largest score of each row; the first wins ties.
void BestSteps(const Beyond& beyond, int dim, int64_t* best) {
  const hn::ScalableTag<double> df;
  const hn::RebindToSigned<decltype(df)> d;
  for (int64_t r = 0; r < kLaneRows; r += static_cast<int64_t>(hn::Lanes(d))) {
    auto best_score = hn::Set(df, -1.0);
    auto best_step = hn::Zero(d);
    const auto all = hn::LoadU(d, beyond.all + r);
    for (int k = 0; k < 8; ++k) {
      // |w| is 3 from the threshold on, else 1. The score is OsuScore's.
      const auto sum = hn::LoadU(d, beyond.sum[k] + r);
      const auto count = hn::LoadU(d, beyond.count[k] + r);
      const auto yw = hn::ConvertTo(df, hn::Add(all, hn::Add(sum, sum)));
      const auto ww = hn::ConvertTo(df, hn::Add(hn::Set(d, dim), hn::ShiftLeft<3>(count)));
      const auto score = hn::Div(hn::Mul(yw, yw), ww);
      const auto is_better = hn::Gt(score, best_score);
      best_score = hn::IfThenElse(is_better, score, best_score);
      best_step = hn::IfThenElse(hn::RebindMask(d, is_better), hn::Set(d, k), best_step);
    }
    hn::StoreU(best_step, d, best + r);
  }
}

// The best step of each row: codes, and what the scales need.
void QuantizeOsu(const LaneRows& rows, int dim, const float* rms, const LaneCodes& out,
                 OlmSums* sums) {
  Beyond beyond;
  SumBeyond(rows, dim, hn::Load(LaneDF(), rms), beyond);
  int64_t best[kLaneRows];
  BestSteps(beyond, dim, best);
  HWY_ALIGN float threshold[kLaneRows];
  for (int64_t r = 0; r < kLaneRows; ++r) {
    const int64_t k = best[r];
    threshold[r] = kOsuSteps[k] * rms[r];
    sums[r].yw = beyond.all[r] + 2 * beyond.sum[k][r];
    sums[r].ww = dim + 8 * beyond.count[k][r];
  }
  const LaneVF thresholds = hn::Load(LaneDF(), threshold);
  WriteCodes<2>(rows, dim, &thresholds, out, [](LaneV32, LaneV32) HWY_ATTR {});
}

bool EncodeImpl(const OlmFormat& format, const std::byte* rows, std::byte* plane) {
  const PlaneShape& shape = format.shape;
  const TqLayout layout = format.layout();
  LaneRows lanes(shape);
  for (int64_t first = 0; first < shape.num_tokens; first += kLaneRows) {
    const int64_t count = std::min(kLaneRows, shape.num_tokens - first);
    if (!lanes.Load(rows, first, count)) return false;
    const LaneCodes out{plane + layout.codes_at + first * layout.row_code_bytes,
                        layout.row_code_bytes, count};
    HWY_ALIGN float rms[kLaneRows];
    for (int64_t r = 0; r < kLaneRows; ++r) rms[r] = OlmRms(lanes.sum_qq(r), shape.dim);
    OlmSums sums[kLaneRows];
    if (format.bits == 4) {
      QuantizeOlm<4>(lanes, shape.dim, hn::Load(LaneDF(), rms), out, sums);
    } else if (format.bits == 3) {
      QuantizeOlm<3>(lanes, shape.dim, hn::Load(LaneDF(), rms), out, sums);
    } else {
      QuantizeOsu(lanes, shape.dim, rms, out, sums);
    }
    for (int64_t r = 0; r < count; ++r) {
      sums[r].qq = lanes.sum_qq(r);
      const bool is_zero = lanes.range(r).is_zero;
      const uint16_t scale =
          is_zero ? uint16_t{0} : OlmScale(format, sums[r], lanes.range(r).exponent);
      if (scale == kF16Infinity) return false;
      StoreU16(plane + 2 * (first + r), scale);
      if (scale == 0) std::fill_n(out.codes + r * out.stride, out.stride, std::byte{0});
    }
  }
  return true;
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
bool EncodeImpl(const OlmFormat&, const std::byte*, std::byte*) { return false; }
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(EncodeImpl);
HWY_EXPORT(LevelsImpl);

EncodeResult EncodeOlmHighway(const OlmFormat& format, const std::byte* rows, std::byte* plane) {
  const int64_t num_tokens = format.shape.num_tokens;
  const TqLayout layout = format.layout();
  std::fill(plane + 2 * num_tokens, plane + layout.codes_at, std::byte{0});
  std::fill(plane + layout.codes_at + num_tokens * layout.row_code_bytes,
            plane + layout.plane_bytes, std::byte{0});
  return HWY_DYNAMIC_DISPATCH(EncodeImpl)(format, rows, plane) ? EncodeResult::kEncoded
                                                               : EncodeResult::kKeepRaw;
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
      HWY_DYNAMIC_DISPATCH(LevelsImpl)
      (level_of_index, index.data(), dim, w.data() + r * dim);
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
