// One tq row per 16-bit lane, with Highway: a plane's rows are turned to columns, a vector per
// channel, and a set of channels becomes codes without another move.
#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/codec/tq_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/tq_columns.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

using D16 = hn::ScalableTag<int16_t>;
using DU16 = hn::RebindToUnsigned<D16>;
using D32 = hn::Repartition<int32_t, D16>;
using DU32 = hn::RebindToUnsigned<D32>;
using DF = hn::RebindToFloat<D32>;
using D8 = hn::Repartition<uint8_t, D16>;
using V16 = hn::Vec<D16>;
using VU16 = hn::Vec<DU16>;
using V32 = hn::Vec<D32>;
using VF = hn::Vec<DF>;
constexpr int64_t kRows = hn::MaxLanes(D16());
constexpr bool kHasMaskRegisters = HWY_TARGET <= HWY_AVX3;  // numbers of better targets are lower
constexpr int kOrder = 12;  // of the Paley matrix, where there is one

// A number of 32 bits for each of the kRows rows: in each 128-bit block the first four of its eight
// rows in `lo`, the others in `hi`.
struct Halves {
  V32 lo;
  V32 hi;
};

HWY_INLINE Halves ZeroHalves() { return {hn::Zero(D32()), hn::Zero(D32())}; }

// a[0] * b[0] + a[1] * b[1] of each row, added to the sums.
HWY_INLINE void AddProducts(const V16 (&a)[2], const V16 (&b)[2], Halves& sums) {
  const D16 d16;
  const D32 d32;
  sums.lo = MulAddPairs(d32, hn::InterleaveLower(d16, a[0], a[1]),
                        hn::InterleaveLower(d16, b[0], b[1]), sums.lo);
  sums.hi = MulAddPairs(d32, hn::InterleaveUpper(d16, a[0], a[1]),
                        hn::InterleaveUpper(d16, b[0], b[1]), sums.hi);
}

HWY_INLINE Halves Unpack(V16 nonnegative) {
  const D16 d16;
  const D32 d32;
  const V16 zero = hn::Zero(d16);
  return {hn::BitCast(d32, hn::InterleaveLower(d16, nonnegative, zero)),
          hn::BitCast(d32, hn::InterleaveUpper(d16, nonnegative, zero))};
}

// The rows' numbers in order again. They fit 16 bits.
HWY_INLINE V16 Pack(V32 lo, V32 hi) { return hn::ReorderDemote2To(D16(), lo, hi); }

struct Signs {
  uint8_t is_minus[2][kMaxTqColumns];  // [role, value]
};

constexpr Signs MakeSigns() {
  Signs signs{};
  for (int role = 0; role < 2; ++role) {
    for (int i = 0; i < kMaxTqColumns; ++i) {
      signs.is_minus[role][i] = IsMinusSign(static_cast<Role>(role), i) ? 1 : 0;
    }
  }
  return signs;
}

constexpr Signs kSigns = MakeSigns();

// A set of channels, looked at more closely.
struct Set {
  explicit Set(const TqChannelSet& in)
      : plane(in.plane),
        channels(in.channels),
        dim(in.plane.format.dim),
        sylvester(dim / PaleyOrder(dim)),
        is_minus(kSigns.is_minus[static_cast<int>(in.plane.format.role)]) {}

  const TqPlane& plane;
  const int32_t* channels;
  int dim;
  int sylvester;  // order of that part of H; the other is 1 or kOrder
  const uint8_t* is_minus;
};

// [dim, kRows] of kRows rows.
void ToColumns(const std::byte* rows, int64_t dim, int16_t* columns) {
  const D16 d;
  for (int64_t i = 0; i < dim; i += 8) {
    V16 v[8];
    HWY_UNROLL(8)
    for (int64_t k = 0; k < 8; ++k) v[k] = LoadBlocks(d, rows + 2 * (k * dim + i), 16 * dim);
    TransposeEight(d, v);
    HWY_UNROLL(8)
    for (int64_t k = 0; k < 8; ++k) hn::Store(v[k], d, columns + (i + k) * kRows);
  }
}

void ToRows(const int16_t* columns, int64_t dim, std::byte* rows) {
  const D16 d;
  for (int64_t i = 0; i < dim; i += 8) {
    V16 v[8];
    HWY_UNROLL(8)
    for (int64_t k = 0; k < 8; ++k) v[k] = hn::Load(d, columns + (i + k) * kRows);
    TransposeEight(d, v);
    HWY_UNROLL(8)
    for (int64_t k = 0; k < 8; ++k) StoreBlocks(d, v[k], rows + 2 * (k * dim + i), 16 * dim);
  }
}

template <bool kIsExact>
HWY_INLINE void Butterfly(V16& a, V16& b) {
  const V16 sum = kIsExact ? hn::Add(a, b) : hn::SaturatedAdd(a, b);
  b = kIsExact ? hn::Sub(a, b) : hn::SaturatedSub(a, b);
  a = sum;
}

template <bool kIsExact>
HWY_INLINE void ButterfliesInMemory(int16_t* y, int dim, int stride) {
  const D16 d;
  for (int first = 0; first < dim; first += 2 * stride) {
    for (int i = first; i < first + stride; ++i) {
      V16 a = hn::Load(d, y + i * kRows);
      V16 b = hn::Load(d, y + (i + stride) * kRows);
      Butterfly<kIsExact>(a, b);
      hn::Store(a, d, y + i * kRows);
      hn::Store(b, d, y + (i + stride) * kRows);
    }
  }
}

// Butterflies over the low, Sylvester part of the index. |q| * 2^4 <= 2040 * 16 fits 16 bits; the
// stages after the fourth saturate: a value that leaves 16 bits becomes +-32767 or -32768, and so
// does one of those made from it.
void Sylvester(int16_t* y, int dim, int sylvester) {
  const D16 d;
  int stride = 1;
  if (sylvester >= 8) {  // three stages in registers
    for (int i = 0; i < dim; i += 8) {
      V16 v[8];
      HWY_UNROLL(8)
      for (int k = 0; k < 8; ++k) v[k] = hn::Load(d, y + (i + k) * kRows);
      HWY_UNROLL(3)
      for (int step = 1; step < 8; step *= 2) {
        HWY_UNROLL(4)
        for (int k = 0; k < 4; ++k) {
          const int at = k / step * 2 * step + k % step;
          Butterfly<true>(v[at], v[at + step]);
        }
      }
      HWY_UNROLL(8)
      for (int k = 0; k < 8; ++k) hn::Store(v[k], d, y + (i + k) * kRows);
    }
    stride = 8;
  }
  for (; stride < sylvester && stride <= 8; stride *= 2) ButterfliesInMemory<true>(y, dim, stride);
  for (; stride < sylvester; stride *= 2) ButterfliesInMemory<false>(y, dim, stride);
}

// out = P x or P^T x modulo 2^16: each output is the sum of all inputs less twice those of minus
// sign.
template <Transposed kTransposed>
HWY_INLINE void PaleyTwelve(const V16 (&x)[kOrder], V16 (&out)[kOrder]) {
  V16 all = x[0];
  HWY_UNROLL(12)
  for (int j = 1; j < kOrder; ++j) all = hn::Add(all, x[j]);
  HWY_UNROLL(12)
  for (int i = 0; i < kOrder; ++i) {
    V16 minus = hn::Zero(D16());
    HWY_UNROLL(12)
    for (int j = 0; j < kOrder; ++j) {
      const bool is_transposed = kTransposed == Transposed::kYes;
      const int sign = internal::kPaley12[is_transposed ? j * kOrder + i : i * kOrder + j];
      if (sign < 0) minus = hn::Add(minus, x[j]);
    }
    out[i] = hn::Sub(all, hn::Add(minus, minus));
  }
}

// A closer bound than the sum of magnitudes, of outputs that may need 17 bits: P of the inputs'
// halves fits 16, and what is lost by halving adds up to 12 at most.
VU16 BoundByHalves(const V16 (&x)[kOrder], VU16 magnitudes) {
  const DU16 du;
  V16 half[kOrder], out[kOrder];
  HWY_UNROLL(12)
  for (int j = 0; j < kOrder; ++j) half[j] = hn::ShiftRight<1>(x[j]);
  PaleyTwelve<Transposed::kNo>(half, out);
  VU16 max = hn::Zero(du);
  HWY_UNROLL(12)
  for (int i = 0; i < kOrder; ++i) max = hn::Max(max, hn::BitCast(du, hn::Abs(out[i])));
  const VU16 bound = hn::SaturatedAdd(hn::SaturatedAdd(max, max), hn::Set(du, uint16_t{12}));
  const auto is_beyond = hn::Gt(magnitudes, hn::Set(du, uint16_t{65500}));  // of 17 bits too
  return hn::IfThenElse(is_beyond, magnitudes, hn::Min(bound, magnitudes));
}

// The Paley part. Returns what no output of a row exceeds; above 32766 they may be wrong.
template <Transposed kTransposed>
VU16 Paley(const Set& set, int16_t* y) {
  const D16 d;
  const DU16 du;
  VU16 bound = hn::Zero(du);
  for (int low = 0; low < set.sylvester; ++low) {
    V16 x[kOrder], out[kOrder];
    VU16 magnitudes = hn::Zero(du);
    HWY_UNROLL(12)
    for (int j = 0; j < kOrder; ++j) {
      x[j] = hn::Load(d, y + (j * set.sylvester + low) * kRows);
      magnitudes = hn::SaturatedAdd(magnitudes, hn::BitCast(du, hn::Abs(x[j])));
    }
    PaleyTwelve<kTransposed>(x, out);
    HWY_UNROLL(12)
    for (int i = 0; i < kOrder; ++i) {
      hn::Store(out[i], d, y + (i * set.sylvester + low) * kRows);
    }
    if constexpr (kTransposed == Transposed::kNo) {
      if (!hn::AllFalse(du, hn::Gt(magnitudes, hn::Set(du, uint16_t{32766})))) {
        magnitudes = BoundByHalves(x, magnitudes);
      }
    }
    bound = hn::Max(bound, magnitudes);
  }
  return bound;
}

// One tile of rows on its way to codes.
struct Tile {
  V16 biased;  // exponent of each row's largest magnitude, as stored in bf16
  Halves qq;
  Halves yw;
  Halves ww;
  VU16 bound;  // no |y| is larger; 32767 and up: it may have left 16 bits
};

// Steps 1 to 4. False where a value is not finite.
bool RotateTile(const Set& set, const int16_t* columns, int16_t* y, Tile& tile) {
  const D16 d16;
  const DU16 du16;
  const DU32 du32;
  const D32 d32;
  const DF df;
  VU16 max = hn::Zero(du16);
  for (int i = 0; i < set.dim; ++i) {
    const V16 x = hn::Load(d16, columns + set.channels[i] * kRows);
    max = hn::Max(max, hn::And(hn::BitCast(du16, x), hn::Set(du16, uint16_t{0x7fff})));
  }
  tile.biased = hn::BitCast(d16, hn::ShiftRight<7>(max));
  if (!hn::AllFalse(d16, hn::Eq(tile.biased, hn::Set(d16, int16_t{255})))) return false;
  const auto nonzero = hn::Gt(tile.biased, hn::Set(d16, int16_t{127 - 40 - 1}));
  // 2^(10 - e) as bf16, 0 for a zero row.
  const V16 exponent = hn::Sub(hn::Set(d16, int16_t{127 + kTqRowBits + 127}), tile.biased);
  const auto factor = hn::BitCast(du32, hn::IfThenElseZero(nonzero, hn::ShiftLeft<7>(exponent)));
  const auto high_half = hn::Set(du32, 0xffff0000u);
  const VF even_factor = hn::BitCast(df, hn::ShiftLeft<16>(factor));
  const VF odd_factor = hn::BitCast(df, hn::And(factor, high_half));
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits. Fused or not, there is one
  // rounding: the product is exact.
  const VF magic = hn::Set(df, 12582912.0f);
  tile.qq = ZeroHalves();
  for (int i = 0; i < set.dim; i += 2) {
    V16 q[2];
    HWY_UNROLL(2)
    for (int k = 0; k < 2; ++k) {
      const auto sign = hn::Set(d16, static_cast<int16_t>(set.is_minus[i + k] != 0 ? -32768 : 0));
      const auto x =
          hn::BitCast(du32, hn::Xor(hn::Load(d16, columns + set.channels[i + k] * kRows), sign));
      const VF even = hn::BitCast(df, hn::ShiftLeft<16>(x));
      const VF odd = hn::BitCast(df, hn::And(x, high_half));
      const V16 even_q = hn::BitCast(d16, hn::MulAdd(even, even_factor, magic));
      const auto odd_q = hn::ShiftLeft<16>(hn::BitCast(d32, hn::MulAdd(odd, odd_factor, magic)));
      q[k] = hn::OddEven(hn::BitCast(d16, odd_q), even_q);
      hn::Store(q[k], d16, y + (i + k) * kRows);
    }
    AddProducts(q, q, tile.qq);
  }
  Sylvester(y, set.dim, set.sylvester);
  tile.bound = set.sylvester == set.dim ? hn::Zero(du16) : Paley<Transposed::kNo>(set, y);
  return true;
}

// Steps 5 and 6: thresholds - 1 of each row, so that |y| > t - 1 is |y| >= ceil(t * rms).
template <int kBits>
HWY_INLINE void Thresholds(const Tile& tile, V16* thresholds) {
  const D32 d32;
  const DF df;
  constexpr TqTable kTable = TqTableOf(kBits);
  const VF rms_lo = hn::Sqrt(hn::ConvertTo(df, tile.qq.lo));
  const VF rms_hi = hn::Sqrt(hn::ConvertTo(df, tile.qq.hi));
  for (int i = 0; i + 1 < kTable.num_magnitudes; ++i) {
    const auto less_one = [&](VF rms) HWY_ATTR {
      const VF whole = hn::Ceil(hn::Mul(hn::Set(df, kTable.threshold[i]), rms));
      return hn::Sub(hn::ConvertTo(d32, hn::Min(whole, hn::Set(df, 32767.0f))), hn::Set(d32, 1));
    };
    thresholds[i] = Pack(less_one(rms_lo), less_one(rms_hi));
  }
}

// How many thresholds |y| has reached.
template <int kBits>
HWY_INLINE V16 MagnitudeOf(V16 magnitude_of_y, const V16* thresholds) {
  const D16 d16;
  V16 magnitude = hn::Zero(d16);
  HWY_UNROLL(7)
  for (int i = 0; i + 1 < TqTableOf(kBits).num_magnitudes; ++i) {
    const auto reached = hn::Gt(magnitude_of_y, thresholds[i]);
    if constexpr (kHasMaskRegisters) {
      magnitude = hn::IfThenElse(reached, hn::Set(d16, static_cast<int16_t>(i + 1)), magnitude);
    } else {
      magnitude = hn::Sub(magnitude, hn::VecFromMask(d16, reached));
    }
  }
  return magnitude;
}

// Words of 16 bits, or bytes, of each row to the same place of the rows' codes.
template <int kBytes>
HWY_INLINE void ScatterWords(V16 words, int64_t num_rows, int64_t stride, std::byte* codes) {
  HWY_ALIGN uint16_t lanes[kRows];
  hn::Store(words, D16(), reinterpret_cast<int16_t*>(lanes));
  for (int64_t r = 0; r < num_rows; ++r) std::memcpy(codes + r * stride, &lanes[r], kBytes);
}

// Steps 6 and 7: codes and sums.
template <int kBits>
void QuantizeTile(const Set& set, const int16_t* y, int64_t num_rows, std::byte* codes,
                  Tile& tile) {
  const D16 d16;
  const DU16 du16;
  const D8 d8;
  constexpr TqTable kTable = TqTableOf(kBits);
  constexpr int kLowBits = kBits == 3 ? 2 : kBits;
  constexpr int kPerWord = 16 / kLowBits;
  HWY_ALIGN static constexpr uint8_t kLevels[16] = {
      kTable.level[0], kTable.level[1], kTable.level[2], kTable.level[3],
      kTable.level[4], kTable.level[5], kTable.level[6], kTable.level[7]};
  const auto levels = hn::LoadDup128(d8, kLevels);
  const int64_t stride = set.plane.layout.row_code_bytes;
  V16 thresholds[7];
  Thresholds<kBits>(tile, thresholds);
  Halves yw = ZeroHalves(), ww = ZeroHalves();
  VU16 max_y = tile.bound;
  for (int i = 0; i < set.dim; i += kPerWord) {
    V16 low = hn::Zero(d16), high = hn::Zero(d16);
    HWY_UNROLL(4)
    for (int e = kPerWord - 2; e >= 0; e -= 2) {
      V16 magnitude_of_y[2], level[2], index[2];
      HWY_UNROLL(2)
      for (int k = 0; k < 2; ++k) {
        const V16 v = hn::Load(d16, y + (i + e + k) * kRows);
        magnitude_of_y[k] = hn::Abs(v);
        max_y = hn::Max(max_y, hn::BitCast(du16, magnitude_of_y[k]));
        const V16 magnitude = MagnitudeOf<kBits>(magnitude_of_y[k], thresholds);
        // Bytes with the top bit set look up 0: only the low byte of each lane becomes a level.
        const V16 at = hn::Or(magnitude, hn::Set(d16, int16_t{-32768}));
        level[k] = hn::BitCast(d16, hn::TableLookupBytesOr0(levels, hn::BitCast(d8, at)));
        index[k] = hn::Add(hn::Xor(magnitude, hn::ShiftRight<15>(v)),
                           hn::Set(d16, int16_t{kTable.num_magnitudes}));
      }
      AddProducts(magnitude_of_y, level, yw);
      AddProducts(level, level, ww);
      HWY_UNROLL(2)
      for (int k = 1; k >= 0; --k) {
        const V16 low_bits = kBits == 3 ? hn::And(index[k], hn::Set(d16, int16_t{3})) : index[k];
        low = hn::Or(hn::ShiftLeft<kLowBits>(low), low_bits);
        if constexpr (kBits == 3) high = hn::Or(hn::Add(high, high), hn::ShiftRight<2>(index[k]));
      }
    }
    ScatterWords<2>(low, num_rows, stride, codes + i * kLowBits / 8);
    if constexpr (kBits == 3) {
      ScatterWords<1>(high, num_rows, stride, codes + set.dim / 4 + i / 8);
    }
  }
  tile.yw = yw;
  tile.ww = ww;
  tile.bound = max_y;
}

// Steps 8 and 9: fp16 bits.
template <int kBits>
HWY_INLINE V16 Scales(const Set& set, const Tile& tile) {
  const D32 d32;
  const DF df;
  const DU32 du32;
  const Halves biased = Unpack(tile.biased);
  const int log2_of_unit = TqScaleLog2(kBits, set.dim) - kTqRowBits;
  const auto scale = [&](V32 qq, V32 yw_sum, V32 ww_sum, V32 exponent) HWY_ATTR {
    const VF yw = hn::ConvertTo(df, yw_sum);
    const VF ww = hn::ConvertTo(df, ww_sum);
    VF alpha = hn::Div(yw, hn::Mul(ww, hn::Set(df, static_cast<float>(set.dim))));
    if (set.plane.format.scale == TqScale::kUnbiased) {
      const VF clamped = hn::Mul(hn::Set(df, TqTableOf(kBits).clamp), alpha);
      alpha = hn::Min(hn::Div(hn::ConvertTo(df, qq), yw), clamped);
    }
    // From 2^100 on every scale is infinite, and so is the product with 2^127.
    const V32 log2 =
        hn::Min(hn::Add(exponent, hn::Set(d32, log2_of_unit - 127)), hn::Set(d32, 127));
    const VF power = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(log2, hn::Set(d32, 127))));
    const auto half = hn::BitCast(d32, F16BitsFromFloat(df, hn::Mul(alpha, power)));
    return hn::IfThenZeroElse(hn::Eq(qq, hn::Zero(d32)), half);
  };
  return Pack(scale(tile.qq.lo, tile.yw.lo, tile.ww.lo, biased.lo),
              scale(tile.qq.hi, tile.yw.hi, tile.ww.hi, biased.hi));
}

// Codes and scales of the rows from `first` on.
template <int kBits>
bool EncodeTile(const Set& set, const int16_t* columns, int64_t first, std::byte* bytes,
                std::vector<int32_t>& left) {
  const int64_t num_rows = std::min(kRows, set.plane.num_tokens - first);
  HWY_ALIGN int16_t y[kMaxTqColumns * kRows];
  Tile tile;
  if (!RotateTile(set, columns, y, tile)) return false;
  QuantizeTile<kBits>(set, y, num_rows, set.plane.codes(bytes, first), tile);
  HWY_ALIGN int16_t scales[kRows];
  HWY_ALIGN uint16_t bounds[kRows];
  hn::Store(Scales<kBits>(set, tile), D16(), scales);
  hn::Store(tile.bound, DU16(), bounds);
  for (int64_t r = 0; r < num_rows; ++r) {
    const auto scale = static_cast<uint16_t>(scales[r]);
    if (bounds[r] >= 32767) {
      left.push_back(static_cast<int32_t>(first + r));
    } else if (scale == kF16Infinity) {
      return false;
    } else if (scale == 0) {
      std::fill_n(set.plane.codes(bytes, first + r), set.plane.layout.row_code_bytes, std::byte{0});
    }
    StoreU16(bytes + 2 * (first + r), scale);
  }
  return true;
}

// Levels of the rows' codes; 0 in rows whose scale is.
template <int kBits>
void LoadTile(const Set& set, const std::byte* codes, int64_t num_rows, V16 nonzero, int16_t* w) {
  const D16 d16;
  const D8 d8;
  constexpr TqTable kTable = TqTableOf(kBits);
  constexpr int kLowBits = kBits == 3 ? 2 : kBits;
  constexpr int kPerWord = 16 / kLowBits;
  const int64_t stride = set.plane.layout.row_code_bytes;
  HWY_ALIGN uint8_t level_of_index[16] = {};  // plus 128
  for (int i = 0; i < kTable.num_magnitudes; ++i) {
    level_of_index[kTable.num_magnitudes + i] = static_cast<uint8_t>(128 + kTable.level[i]);
    level_of_index[kTable.num_magnitudes - 1 - i] = static_cast<uint8_t>(128 - kTable.level[i]);
  }
  const auto levels = hn::LoadDup128(d8, level_of_index);
  HWY_ALIGN uint16_t words[kRows] = {};
  HWY_ALIGN uint16_t bits[kRows] = {};
  for (int i = 0; i < set.dim; i += kPerWord) {
    const std::byte* from = codes + i * kLowBits / 8;
    for (int64_t r = 0; r < num_rows; ++r) std::memcpy(&words[r], from + r * stride, 2);
    auto low = hn::Load(DU16(), words);
    auto high = hn::Zero(DU16());
    if constexpr (kBits == 3) {
      from = codes + set.dim / 4 + i / 8;
      for (int64_t r = 0; r < num_rows; ++r) std::memcpy(&bits[r], from + r * stride, 1);
      high = hn::ShiftLeft<2>(hn::Load(DU16(), bits));
    }
    HWY_UNROLL(8)
    for (int e = 0; e < kPerWord; ++e) {
      auto index = hn::And(low, hn::Set(DU16(), (1 << kLowBits) - 1));
      low = hn::ShiftRight<kLowBits>(low);
      if constexpr (kBits == 3) {
        index = hn::Or(index, hn::And(high, hn::Set(DU16(), uint16_t{4})));
        high = hn::ShiftRight<1>(high);
      }
      // Bytes with the top bit set look up 0: only the low byte of each lane becomes a level.
      const auto at = hn::BitCast(d8, hn::Or(index, hn::Set(DU16(), uint16_t{0x8000})));
      const V16 level = hn::Sub(hn::BitCast(d16, hn::TableLookupBytesOr0(levels, at)),
                                hn::Set(d16, int16_t{128}));
      hn::Store(hn::And(level, nonzero), d16, w + (i + e) * kRows);
    }
  }
}

template <int kBits>
void DecodeTile(const Set& set, const std::byte* bytes, int64_t first, int16_t* columns) {
  const D16 d16;
  const D32 d32;
  const DF df;
  const int64_t num_rows = std::min(kRows, set.plane.num_tokens - first);
  // 2^16 times the scale of each row's integers, even and odd rows apart.
  HWY_ALIGN float steps[2][kRows / 2] = {};
  HWY_ALIGN int16_t nonzero[kRows] = {};
  const float unit = PowerOfTwo(16 - TqScaleLog2(kBits, set.dim));
  for (int64_t r = 0; r < num_rows; ++r) {
    const uint16_t scale = LoadU16(bytes + 2 * (first + r));
    steps[r % 2][r / 2] = F16ToFloat(scale) * unit;
    nonzero[r] = scale == 0 ? int16_t{0} : int16_t{-1};
  }
  HWY_ALIGN int16_t w[kMaxTqColumns * kRows];
  LoadTile<kBits>(set, set.plane.codes(bytes, first), num_rows, hn::Load(d16, nonzero), w);
  Sylvester(w, set.dim, set.sylvester);
  if (set.sylvester != set.dim) Paley<Transposed::kYes>(set, w);
  const VF even_step = hn::Load(df, steps[0]);
  const VF odd_step = hn::Load(df, steps[1]);
  for (int i = 0; i < set.dim; ++i) {
    const V16 sign = hn::Set(d16, static_cast<int16_t>(-set.is_minus[i]));
    const V32 v = hn::BitCast(d32, hn::Sub(hn::Xor(hn::Load(d16, w + i * kRows), sign), sign));
    const VF even = hn::ConvertTo(df, hn::ShiftRight<16>(hn::ShiftLeft<16>(v)));
    const VF odd = hn::ConvertTo(df, hn::ShiftRight<16>(v));
    const auto low = hn::ShiftRight<16>(RoundedBf16(df, hn::Mul(even, even_step)));
    const auto both = hn::Or(low, RoundedBf16(df, hn::Mul(odd, odd_step)));
    hn::Store(hn::BitCast(d16, both), d16, columns + set.channels[i] * kRows);
  }
}

bool EncodeColumns(absl::Span<const TqChannelSet> in, int64_t dim, const std::byte* rows,
                   absl::Span<std::byte* const> bytes, absl::Span<std::vector<int32_t>> left) {
  const std::vector<Set> sets(in.begin(), in.end());
  HWY_ALIGN int16_t columns[kMaxTqColumns * kRows];
  HWY_ALIGN std::byte spare[2 * kMaxTqColumns * kRows];
  const int64_t num_tokens = in[0].plane.num_tokens;
  for (int64_t first = 0; first < num_tokens; first += kRows) {
    const std::byte* tile_rows = rows + 2 * first * dim;
    if (num_tokens - first < kRows) {  // the last tile: zero rows behind its end
      std::memset(spare, 0, 2 * dim * kRows);
      std::memcpy(spare, tile_rows, 2 * dim * (num_tokens - first));
      tile_rows = spare;
    }
    ToColumns(tile_rows, dim, columns);
    for (size_t i = 0; i < sets.size(); ++i) {
      const int bits = sets[i].plane.format.bits;
      const auto encode = bits == 4 ? EncodeTile<4> : bits == 3 ? EncodeTile<3> : EncodeTile<2>;
      if (!encode(sets[i], columns, first, bytes[i], left[i])) return false;
    }
  }
  return true;
}

void DecodeColumns(absl::Span<const TqChannelSet> in, int64_t dim,
                   absl::Span<const std::byte* const> bytes, std::byte* rows) {
  const std::vector<Set> sets(in.begin(), in.end());
  HWY_ALIGN int16_t columns[kMaxTqColumns * kRows];
  HWY_ALIGN std::byte spare[2 * kMaxTqColumns * kRows];
  const int64_t num_tokens = in[0].plane.num_tokens;
  for (int64_t first = 0; first < num_tokens; first += kRows) {
    for (size_t i = 0; i < sets.size(); ++i) {
      const int bits = sets[i].plane.format.bits;
      const auto decode = bits == 4 ? DecodeTile<4> : bits == 3 ? DecodeTile<3> : DecodeTile<2>;
      decode(sets[i], bytes[i], first, columns);
    }
    std::byte* const tile_rows = rows + 2 * first * dim;
    // Lines to be written are fetched first; an address that is not there does no harm.
    for (int64_t at = 0; at < 2 * dim * kRows; at += 64) {
      hwy::Prefetch(tile_rows + 2 * dim * kRows + at);
    }
    const bool is_short = num_tokens - first < kRows;
    ToRows(columns, dim, is_short ? spare : tile_rows);
    if (is_short) std::memcpy(tile_rows, spare, 2 * dim * (num_tokens - first));
  }
}

#else
bool EncodeColumns(absl::Span<const TqChannelSet>, int64_t, const std::byte*,
                   absl::Span<std::byte* const>, absl::Span<std::vector<int32_t>>) {
  return false;
}
void DecodeColumns(absl::Span<const TqChannelSet>, int64_t, absl::Span<const std::byte* const>,
                   std::byte*) {}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(EncodeColumns);
HWY_EXPORT(DecodeColumns);

bool EncodeTqColumns(absl::Span<const TqChannelSet> sets, int64_t dim, const std::byte* rows,
                     absl::Span<std::byte* const> bytes, absl::Span<std::vector<int32_t>> left) {
  return HWY_DYNAMIC_DISPATCH(EncodeColumns)(sets, dim, rows, bytes, left);
}

void DecodeTqColumns(absl::Span<const TqChannelSet> sets, int64_t dim,
                     absl::Span<const std::byte* const> bytes, std::byte* rows) {
  HWY_DYNAMIC_DISPATCH(DecodeColumns)(sets, dim, bytes, rows);
}

}  // namespace kvstow
#endif  // HWY_ONCE
