// Rows rotated by a calibrated matrix, one row per SIMD lane: what the encoders
// of the calibrated codecs begin with. Sums over a row cross no lanes. Included
// once per instruction set, like simd-inl.h.
//
//   LaneRows lanes(shape);
//   if (!lanes.Load(rows, first, count)) return EncodeResult::kKeepRaw;
//   const V32 y = hn::Load(D32(), lanes.y(j));  // value j of kLaneRows rotated
//   rows
#if defined(KVSTOW_CODEC_ROTATE_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVSTOW_CODEC_ROTATE_LANES_INL_H_
#undef KVSTOW_CODEC_ROTATE_LANES_INL_H_
#else
#define KVSTOW_CODEC_ROTATE_LANES_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hwy/aligned_allocator.h"
#include "hwy/highway.h"
#include "kernels/codec/int_rows.h"
#include "kernels/codec/lanes-inl.h"
#include "kernels/codec/rotation.h"
#include "kernels/codec/tq.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

// kLaneRows rows as integers, x = q * 2^(exponent - 10), and rotated: y = R q.
class LaneRows {
 public:
  explicit LaneRows(const PlaneShape& shape)
      : shape_(shape),
        q_(kLaneRows * shape.dim),
        pairs_(hwy::AllocateAligned<int32_t>(kLaneRows * shape.dim / 2)),
        y_(hwy::AllocateAligned<int32_t>(kLaneRows * shape.dim)) {}

  // Up to kLaneRows rows from `first` on; zeros in other lanes. False where one
  // is not finite.
  bool Load(const std::byte* rows, int64_t first, int64_t count) {
    rows += first * DTypeBytes(shape_.dtype, shape_.dim);
    const bool is_finite =
        shape_.dtype == DType::kBf16 && count == kLaneRows ? LoadBf16(rows) : LoadAny(rows, count);
    if (!is_finite) return false;
    SumSquares();
    Rotate();
    return true;
  }

  const ValueRange& range(int64_t row) const { return range_[row]; }
  int64_t sum_qq(int64_t row) const { return sum_qq_[row]; }
  // Value j of all rows.
  const int32_t* y(int64_t j) const { return y_.get() + j * kLaneRows; }

 private:
  // Pairs of 16-bit values to lanes: [dim / 2, kLaneRows].
  HWY_INLINE void ToLanes(const std::byte* rows) {
    const LaneD32 d;
    const hn::Repartition<int64_t, LaneD32> d64;
    const int64_t stride = 2 * shape_.dim;  // bytes of a row
    for (int64_t p = 0; p < shape_.dim / 2; p += 4) {
      LaneV32 v[4], t[4];
      HWY_UNROLL(4)
      for (int k = 0; k < 4; ++k) v[k] = LoadBlocks(d, rows + k * stride + 4 * p, 4 * stride);
      t[0] = hn::InterleaveLower(d, v[0], v[1]);
      t[1] = hn::InterleaveLower(d, v[2], v[3]);
      t[2] = hn::InterleaveUpper(d, v[0], v[1]);
      t[3] = hn::InterleaveUpper(d, v[2], v[3]);
      HWY_UNROLL(2)
      for (int k = 0; k < 2; ++k) {
        const auto a = hn::BitCast(d64, t[2 * k]);
        const auto b = hn::BitCast(d64, t[2 * k + 1]);
        int32_t* to = pairs_.get() + (p + 2 * k) * kLaneRows;
        hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, a, b)), d, to);
        hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, a, b)), d, to + kLaneRows);
      }
    }
  }

  bool LoadAny(const std::byte* rows, int64_t count) {
    const int dim = shape_.dim;
    std::fill(q_.begin(), q_.end(), int16_t{0});
    std::fill_n(range_, kLaneRows, ValueRange{.is_zero = true});
    for (int64_t r = 0; r < count; ++r) {
      const std::byte* row = rows + r * DTypeBytes(shape_.dtype, dim);
      range_[r] = RangeOfValues(shape_.dtype, row, dim);
      if (!range_[r].is_finite) return false;
      if (range_[r].is_zero) continue;
      ValuesToInts(shape_.dtype, row, dim, kTqRowBits - range_[r].exponent, q_.data() + r * dim);
    }
    ToLanes(reinterpret_cast<const std::byte*>(q_.data()));
    return true;
  }

  // The same for kLaneRows rows of bf16, in the lanes.
  bool LoadBf16(const std::byte* rows) {
    const LaneD32 d;
    const LaneDF df;
    const hn::Repartition<int16_t, LaneD32> d16;
    const hn::RebindToUnsigned<decltype(d16)> du16;
    ToLanes(rows);
    auto max16 = hn::Zero(du16);
    for (int64_t p = 0; p < shape_.dim / 2; ++p) {
      const auto pair = hn::BitCast(du16, hn::Load(d, pairs_.get() + p * kLaneRows));
      max16 = hn::Max(max16, hn::And(pair, hn::Set(du16, uint16_t{0x7fff})));
    }
    const LaneV32 max =
        hn::BitCast(d, hn::Max(max16, hn::BitCast(du16, hn::ShiftLeft<16>(hn::BitCast(d, max16)))));
    const LaneV32 biased = hn::ShiftRight<23>(max);
    if (!hn::AllTrue(d, hn::Lt(biased, hn::Set(d, 255)))) return false;
    HWY_ALIGN int32_t exponents[kLaneRows];
    hn::Store(biased, d, exponents);
    for (int64_t r = 0; r < kLaneRows; ++r) {
      range_[r] = {.is_zero = exponents[r] < 127 - 40, .exponent = exponents[r] - 127};
    }
    // 2^(10 - e), 0 for a zero row. Adding 1.5 * 2^23 leaves the rounded
    // integer in the low bits. Fused or not, there is one rounding: the product
    // is exact.
    const auto nonzero = hn::Gt(biased, hn::Set(d, 127 - 40 - 1));
    const LaneV32 factor_bits =
        hn::ShiftLeft<23>(hn::Sub(hn::Set(d, 127 + kTqRowBits + 127), biased));
    const LaneVF factor = hn::BitCast(df, hn::IfThenElseZero(nonzero, factor_bits));
    const LaneVF magic = hn::Set(df, 12582912.0f);
    const LaneV32 high_half = hn::Set(d, static_cast<int32_t>(0xffff0000u));
    for (int64_t p = 0; p < shape_.dim / 2; ++p) {
      const LaneV32 x = hn::Load(d, pairs_.get() + p * kLaneRows);
      const LaneVF even = hn::BitCast(df, hn::ShiftLeft<16>(x));
      const LaneVF odd = hn::BitCast(df, hn::And(x, high_half));
      const auto even_q = hn::BitCast(d16, hn::MulAdd(even, factor, magic));
      const LaneV32 odd_q = hn::ShiftLeft<16>(hn::BitCast(d, hn::MulAdd(odd, factor, magic)));
      hn::Store(hn::BitCast(d, hn::OddEven(hn::BitCast(d16, odd_q), even_q)), d,
                pairs_.get() + p * kLaneRows);
    }
    return true;
  }

  HWY_INLINE void SumSquares() {
    const LaneD32 d;
    const hn::Repartition<int16_t, LaneD32> d16;
    constexpr int64_t kPairsPerSum = 128;  // 2^8 * 2^22: below 2^31
    HWY_ALIGN int32_t lanes[kLaneRows];
    std::fill_n(sum_qq_, kLaneRows, int64_t{0});
    for (int64_t first = 0; first < shape_.dim / 2; first += kPairsPerSum) {
      LaneV32 sum = hn::Zero(d);
      for (int64_t p = first; p < std::min<int64_t>(first + kPairsPerSum, shape_.dim / 2); ++p) {
        const auto q = hn::BitCast(d16, hn::Load(d, pairs_.get() + p * kLaneRows));
        sum = MulAddPairs(d, q, q, sum);
      }
      hn::Store(sum, d, lanes);
      for (int64_t r = 0; r < kLaneRows; ++r) sum_qq_[r] += lanes[r];
    }
  }

  // So many outputs at once as there are registers for; dims are multiples
  // of 16.
  HWY_INLINE void Rotate() {
    constexpr int kOutputs = HWY_TARGET <= HWY_AVX3 ? 16 : 8;  // better targets: lower numbers
    const LaneD32 d;
    const hn::Repartition<int16_t, LaneD32> d16;
    const int64_t dim = shape_.dim;
    for (int64_t j = 0; j < dim; j += kOutputs) {
      const int16_t* factors = shape_.rotation->forward_pairs() + 2 * j;
      LaneV32 sum[kOutputs];
      HWY_UNROLL(16)
      for (int k = 0; k < kOutputs; ++k) sum[k] = hn::Zero(d);
      for (int64_t p = 0; p < dim / 2; ++p, factors += 2 * dim) {
        const auto q = hn::BitCast(d16, hn::Load(d, pairs_.get() + p * kLaneRows));
        HWY_UNROLL(16)
        for (int k = 0; k < kOutputs; ++k) {
          int32_t pair;
          std::memcpy(&pair, factors + 2 * k, sizeof(pair));
          sum[k] = MulAddPairs(d, q, hn::BitCast(d16, hn::Set(d, pair)), sum[k]);
        }
      }
      HWY_UNROLL(16)
      for (int k = 0; k < kOutputs; ++k) hn::Store(sum[k], d, y_.get() + (j + k) * kLaneRows);
    }
  }

  const PlaneShape& shape_;
  ValueRange range_[kLaneRows];
  int64_t sum_qq_[kLaneRows];
  std::vector<int16_t> q_;
  hwy::AlignedFreeUniquePtr<int32_t[]> pairs_;
  hwy::AlignedFreeUniquePtr<int32_t[]> y_;
};

#endif  // HWY_TARGET != HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#endif  // include guard
