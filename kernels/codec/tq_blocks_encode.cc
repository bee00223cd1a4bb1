// Encode of the blocks engine: bf16 rows, or integer rows less their means, at dims 64 and 128.
#include <bit>
#include <cstring>
#include <vector>

#include "kernels/codec/tq_block_tables.h"
#include "kernels/codec/tq_simd.h"
#include "kernels/codec/tqm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/tq_blocks_encode.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

constexpr size_t kB = kRowsPerBatch;
constexpr bool kHasMaskRegisters = HWY_TARGET <= HWY_AVX3;  // numbers of better targets are lower

constexpr int64_t kCodesAheadBytes = 2048;

// Rows that go through the steps together, so that what is done once per row is done for a whole
// vector of rows.
constexpr size_t kTileRows = 16;

// A row has four lanes in the members of [kTileRows, 4]: one block's worth, in the order of the
// rows.
template <int kDim>
struct Tile {
  static constexpr int kRegisters = kDim / 8;
  static constexpr size_t kLanes = 4 * kTileRows;
  HWY_ALIGN int16_t y[kTileRows * kDim];  // [batches, registers, lanes of a register]
  HWY_ALIGN int32_t exponent[kLanes];     // x = q * 2^(exponent - kTqRowBits); four equal lanes
  HWY_ALIGN int32_t qq[kLanes];           // sums still spread over the four lanes
  HWY_ALIGN int32_t yw[kLanes];
  HWY_ALIGN int32_t ww[kLanes];
  HWY_ALIGN int32_t max_y[kLanes];  // maxima of unsigned 16-bit halves, spread; 65535: q overflowed
  HWY_ALIGN int32_t sum_qq[kTileRows];
  // Twice in each lane, less 1. Read by the vector, hence the tail.
  HWY_ALIGN int32_t thresholds[7][2 * kTileRows];
};

// One batch: kB rows, one per block, in all members.
template <int kDim>
struct Batch {
  static constexpr int kRegisters = kDim / 8;
  BlockV16 v[kRegisters];  // q, then y
  BlockV32 exponent;
  BlockV32 overflow;  // -1 where 16 bits do not do
};

// Steps 1, 2 and the signs of bf16 rows. False where a value is not finite.
template <int kDim>
HWY_INLINE bool LoadBf16(const std::byte* rows, Role role, Batch<kDim>& batch) {
  const BlockD16 d16;
  const BlockDU16 du16;
  const BlockDU32 du32;
  const BlockD32 d32;
  const BlockDF df;
  constexpr int kRegisters = Batch<kDim>::kRegisters;
  auto max = hn::Zero(du16);
  HWY_UNROLL(16)
  for (int i = 0; i < kRegisters; ++i) {
    batch.v[i] = LoadBlocks(d16, rows + 16 * i, 2 * kDim);
    max = hn::Max(max, hn::And(hn::BitCast(du16, batch.v[i]), hn::Set(du16, uint16_t{0x7fff})));
  }
  const BlockV32 biased = hn::ShiftRight<7>(BlockMaxU16(hn::BitCast(d16, max)));
  if (!hn::AllTrue(d32, hn::Lt(biased, hn::Set(d32, 255)))) return false;
  const auto nonzero = hn::Gt(biased, hn::Set(d32, 127 - 40 - 1));
  // 2^(10 - e), 0 for a zero row.
  const auto factor_bits = hn::ShiftLeft<23>(hn::Sub(hn::Set(d32, 127 + kTqRowBits + 127), biased));
  const BlockVF factor = hn::BitCast(df, hn::IfThenElseZero(nonzero, factor_bits));
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits. Fused or not, there is one
  // rounding: the product is exact.
  const BlockVF magic = hn::Set(df, 12582912.0f);
  const uint16_t* signs = kSignMasks.top[static_cast<int>(role)];
  HWY_UNROLL(16)
  for (int i = 0; i < kRegisters; ++i) {
    const auto x = hn::BitCast(
        du32, hn::Xor(hn::BitCast(du16, batch.v[i]), hn::LoadDup128(du16, signs + 8 * i)));
    const auto even = hn::BitCast(df, hn::ShiftLeft<16>(x));
    const auto odd = hn::BitCast(df, hn::And(x, hn::Set(du32, 0xffff0000u)));
    const auto even_q = hn::BitCast(d16, hn::MulAdd(even, factor, magic));
    const auto odd_q = hn::ShiftLeft<16>(hn::BitCast(d32, hn::MulAdd(odd, factor, magic)));
    batch.v[i] = hn::OddEven(hn::BitCast(d16, odd_q), even_q);
  }
  batch.exponent = hn::Sub(biased, hn::Set(d32, 127));
  batch.overflow = hn::Zero(d32);
  return true;
}

// Step 3 of the mean form and the signs: u = p - means, its lowest bits dropped.
template <int kDim>
HWY_INLINE void LoadResiduals(const std::byte* rows, const TqBlockInput& input, Role role,
                              Batch<kDim>& batch) {
  const BlockD16 d16;
  const BlockDU16 du16;
  const BlockD32 d32;
  const BlockDF df;
  constexpr int kRegisters = Batch<kDim>::kRegisters;
  auto max = hn::Zero(du16);
  HWY_UNROLL(16)
  for (int i = 0; i < kRegisters; ++i) {
    const BlockV16 mean = hn::LoadDup128(d16, input.means + 8 * i);
    batch.v[i] = hn::SaturatedSub(LoadBlocks(d16, rows + 16 * i, 2 * kDim), mean);
    max = hn::Max(max, hn::BitCast(du16, hn::Abs(batch.v[i])));  // |-32768| is 32768 here
  }
  const BlockV32 max32 = BlockMaxU16(hn::BitCast(d16, max));
  batch.overflow = hn::VecFromMask(d32, hn::Gt(max32, hn::Set(d32, 32766)));
  // Bit length from the exponent of the float; below 0 for 0.
  const BlockV32 length =
      hn::Sub(hn::ShiftRight<23>(hn::BitCast(d32, hn::ConvertTo(df, max32))), hn::Set(d32, 126));
  const BlockV32 shift = hn::Max(hn::Sub(length, hn::Set(d32, kTqRowBits + 1)), hn::Zero(d32));
  // (u * 2^(15 - shift) + 2^14) >> 15 = (u + 2^(shift - 1)) >> shift. No factor for shift = 0.
  const BlockVF power = hn::BitCast(df, hn::ShiftLeft<23>(hn::Sub(hn::Set(d32, 127 + 15), shift)));
  const BlockV16 factor = TwiceLow16(hn::ConvertTo(d32, power));
  const auto keep = hn::MaskFromVec(TwiceLow16(hn::VecFromMask(d32, hn::Eq(shift, hn::Zero(d32)))));
  const uint16_t* signs = kSignMasks.all[static_cast<int>(role)];
  HWY_UNROLL(16)
  for (int i = 0; i < kRegisters; ++i) {
    const BlockV16 u = batch.v[i];
    const BlockV16 q = hn::IfThenElse(keep, u, hn::MulFixedPoint15(u, factor));
    const BlockV16 sign = hn::BitCast(d16, hn::LoadDup128(du16, signs + 8 * i));
    batch.v[i] = hn::Sub(hn::Xor(q, sign), sign);
  }
  batch.exponent = hn::Add(shift, hn::Set(d32, input.exponent - (kTqmPlaneBits - kTqRowBits)));
}

// y = H q. Afterwards register r of a group of 8 holds values whose index is r modulo 8, lane l
// those with index 8l + r of the group's 64.
template <int kRegisters>
HWY_INLINE void ForwardHadamard(BlockV16* v) {
  // Index bits 3 and up are the register's. |q| * 2^3 <= 2^14: three stages need no saturation.
  ForPairs<1, kRegisters, Butterfly>(v);
  ForPairs<2, kRegisters, Butterfly>(v);
  ForPairs<4, kRegisters, Butterfly>(v);
  ForPairs<8, kRegisters, SaturatedButterfly>(v);
  HWY_UNROLL(2)
  for (int group = 0; group < kRegisters; group += 8) {
    BlockV16* g = v + group;
    HWY_UNROLL(3)
    for (int round = 0; round < 3; ++round) {  // three rotations transpose 8 x 8
      BlockV16 next[8] = {g[0], g[4], g[1], g[5], g[2], g[6], g[3], g[7]};
      HWY_UNROLL(4)
      for (int i = 0; i < 8; i += 2) {
        RotateIn(next[i], next[i + 1]);
        g[i] = next[i];
        g[i + 1] = next[i + 1];
      }
    }
    ForPairs<1, 8, SaturatedButterfly>(g);  // index bits 0 to 2 are the register's now
    ForPairs<2, 8, SaturatedButterfly>(g);
    ForPairs<4, 8, SaturatedButterfly>(g);
  }
}

// The sum over the four lanes of each row from `row_idx` on.
HWY_INLINE BlockV32 RowSums(const int32_t* lanes, size_t row_idx) {
  BlockV32 v0, v1, v2, v3;
  hn::LoadInterleaved4(BlockD32(), lanes + 4 * row_idx, v0, v1, v2, v3);
  return hn::Add(hn::Add(v0, v1), hn::Add(v2, v3));
}

// Steps 5 and 6: thresholds - 1 of each row, so that |y| > t - 1 is |y| >= ceil(t * rms).
template <int kBits, int kDim>
HWY_INLINE void Thresholds(Tile<kDim>& tile) {
  const BlockD32 d32;
  const BlockDF df;
  const hn::RebindToSigned<BlockDF> di;
  constexpr TqTable kTable = TqTableOf(kBits);
  for (size_t row = 0; row < kTileRows; row += hn::Lanes(d32)) {
    const BlockV32 sum_qq = RowSums(tile.qq, row);
    hn::Store(sum_qq, d32, tile.sum_qq + row);
    const BlockVF rms = hn::Sqrt(hn::ConvertTo(df, sum_qq));
    for (int i = 0; i + 1 < kTable.num_magnitudes; ++i) {
      const BlockVF scaled = hn::Mul(hn::Set(df, kTable.threshold[i]), rms);
      // Rows without overflow have |y| <= 32766.
      const BlockV32 whole = hn::ConvertTo(di, hn::Min(hn::Ceil(scaled), hn::Set(df, 32767.0f)));
      const BlockV16 twice = TwiceLow16(hn::Sub(whole, hn::Set(d32, 1)));
      hn::Store(hn::BitCast(d32, twice), d32, tile.thresholds[i] + row);
    }
  }
}

// One lane for each of kB rows, copied to all lanes of the row's block.
HWY_INLINE BlockV32 BroadcastRows(const int32_t* rows) {
  const BlockD32 d32;
  if constexpr (kB == 1) {
    return hn::Set(d32, rows[0]);
  } else {
    HWY_ALIGN static constexpr int32_t kIdx[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    return hn::TableLookupLanes(hn::LoadU(d32, rows), hn::SetTableIndices(d32, kIdx));
  }
}

// Exact sums over one row each, spread over the lanes of its block.
struct BlockSums {
  BlockV32 yw[2];
  BlockV32 ww[2];
  BlockV16 max_y;  // unsigned
};

// How many thresholds |y| has reached, plus 2^15: the top bit makes the upper byte look up 0.
template <int kBits>
HWY_INLINE BlockV16 MagnitudeOf(BlockV16 magnitude_of_y, const BlockV16 (&thresholds)[7]) {
  const BlockD16 d16;
  const BlockV16 base = hn::Set(d16, static_cast<int16_t>(-32768));
  const auto plus = [&](BlockV16 v, auto mask, int by) HWY_ATTR {
    return hn::IfThenElse(mask, hn::Add(v, hn::Set(d16, static_cast<int16_t>(by))), v);
  };
  if constexpr (kBits == 4 && kHasMaskRegisters) {  // a binary search
    const BlockV16* t = thresholds;
    const auto from4 = hn::Gt(magnitude_of_y, t[3]);
    const auto from2 = hn::Gt(magnitude_of_y, hn::IfThenElse(from4, t[5], t[1]));
    const BlockV16 below4 = hn::IfThenElse(from2, t[2], t[0]);
    const BlockV16 above4 = hn::IfThenElse(from2, t[6], t[4]);
    const auto from1 = hn::Gt(magnitude_of_y, hn::IfThenElse(from4, above4, below4));
    return plus(plus(hn::IfThenElse(from4, hn::Set(d16, int16_t{-32764}), base), from2, 2), from1,
                1);
  } else {
    BlockV16 magnitude = base;
    HWY_UNROLL(7)
    for (int i = 0; i + 1 < TqTableOf(kBits).num_magnitudes; ++i) {
      const auto reached = hn::Gt(magnitude_of_y, thresholds[i]);
      if constexpr (kHasMaskRegisters) {
        magnitude =
            hn::IfThenElse(reached, hn::Set(d16, static_cast<int16_t>(-32767 + i)), magnitude);
      } else {
        magnitude = hn::Sub(magnitude, hn::VecFromMask(d16, reached));
      }
    }
    return magnitude;
  }
}

// Magnitude index xor sign: the stored index less 2^(bits - 1), plus 2^15. Adds to the sums.
template <int kBits>
HWY_INLINE BlockV16 QuantizeBlock(BlockV16 y, const BlockV16 (&thresholds)[7], BlockV8 levels,
                                  BlockSums& sums) {
  const BlockD16 d16;
  const BlockDU16 du16;
  const BlockD32 d32;
  const BlockD8 d8;
  constexpr TqTable kTable = TqTableOf(kBits);
  const BlockV16 magnitude_of_y = hn::Abs(y);
  sums.max_y =
      hn::BitCast(d16, hn::Max(hn::BitCast(du16, sums.max_y), hn::BitCast(du16, magnitude_of_y)));
  const BlockV16 magnitude = MagnitudeOf<kBits>(magnitude_of_y, thresholds);
  const BlockV16 level =
      hn::BitCast(d16, hn::TableLookupBytesOr0(levels, hn::BitCast(d8, magnitude)));
  sums.yw[0] = hn::ReorderWidenMulAccumulate(d32, magnitude_of_y, level, sums.yw[0], sums.yw[1]);
  sums.ww[0] = hn::ReorderWidenMulAccumulate(d32, level, level, sums.ww[0], sums.ww[1]);
  return hn::Xor(magnitude, hn::ShiftRight<15>(y));
}

// Quantizes the 8 registers of a group and stores their codes: of row r at codes + r * stride, the
// third bits at high + r * stride.
template <int kBits, int kDim>
HWY_INLINE void QuantizeGroup(const int16_t* registers, const BlockV16 (&thresholds)[7],
                              std::byte* codes, std::byte* high_bits, BlockSums& sums) {
  const BlockD16 d16;
  const BlockD8 d8;
  constexpr int64_t kStride = kDim * kBits / 8;
  constexpr TqTable kTable = TqTableOf(kBits);
  alignas(16) static constexpr uint8_t kLevels[16] = {
      kTable.level[0], kTable.level[1], kTable.level[2], kTable.level[3],
      kTable.level[4], kTable.level[5], kTable.level[6], kTable.level[7]};
  const BlockV8 levels = hn::LoadDup128(d8, kLevels);
  BlockV16 y[8];
  HWY_UNROLL(8)
  for (int i = 0; i < 8; ++i) {
    y[i] = hn::Load(d16, registers + i * hn::MaxLanes(d16));
    const BlockV16 negative = hn::ShiftRight<15>(y[i]);
    BlockV16 index = QuantizeBlock<kBits>(y[i], thresholds, levels, sums);
    if constexpr (kBits == 3) {
      // Two low bits of the index and, above them, the sign: the high bit is its complement.
      index = hn::Or(hn::And(index, hn::Set(d16, 3)), hn::And(negative, hn::Set(d16, 0x100)));
    }
    y[i] = index;
  }
  if constexpr (kBits == 4) {
    // Sums modulo 2^16: index + 8 in each nibble; of the offsets 2^15 only the first one stays.
    const BlockV16 offset = hn::Set(d16, int16_t{0x0888});
    BlockV16 word[2];
    HWY_UNROLL(2)
    for (int half = 0; half < 2; ++half) {
      const BlockV16* n = y + 4 * half;
      const BlockV16 high = hn::Add(hn::ShiftLeft<4>(n[3]), n[2]);
      const BlockV16 low = hn::Add(hn::ShiftLeft<4>(n[1]), n[0]);
      word[half] = hn::Add(hn::Add(hn::ShiftLeft<8>(high), low), offset);
    }
    RotateIn(word[0], word[1]);
    StoreBlocks(d16, word[0], codes, kStride);
    StoreBlocks(d16, word[1], codes + 16, kStride);
  } else if constexpr (kBits == 2) {
    BlockV16 word = y[7];
    HWY_UNROLL(7)
    for (int i = 6; i >= 0; --i) word = hn::Add(hn::ShiftLeft<2>(word), y[i]);
    StoreBlocks(d16, hn::Add(word, hn::Set(d16, int16_t{0x2aaa})), codes, kStride);
  } else {
    BlockV16 low = hn::And(y[7], hn::Set(d16, 3));
    BlockV16 negative = hn::ShiftRight<8>(y[7]);
    HWY_UNROLL(7)
    for (int i = 6; i >= 0; --i) {
      low = hn::Or(hn::ShiftLeft<2>(low), hn::And(y[i], hn::Set(d16, 3)));
      negative = hn::Or(hn::Add(negative, negative), hn::ShiftRight<8>(y[i]));
    }
    StoreBlocks(d16, low, codes, kStride);
    alignas(64) static constexpr uint8_t kEvenBytes[16] = {
        0, 2, 4, 6, 8, 10, 12, 14, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};
    const BlockV8 high = hn::TableLookupBytesOr0(
        hn::BitCast(d8, hn::Xor(negative, hn::Set(d16, 0xff))), hn::LoadDup128(d8, kEvenBytes));
    HWY_ALIGN uint8_t lanes[16 * kB];
    hn::Store(high, d8, lanes);
    for (size_t r = 0; r < kB; ++r) {
      std::memcpy(high_bits + r * kStride, lanes + 16 * r, 8);
    }
  }
}

// Steps 1 to 4 of the tile's rows. False where a value is not finite.
template <int kDim, bool kHasMeans>
HWY_INLINE bool RotateTile(const TqBlockInput& input, Role role, const std::byte* rows,
                           const std::byte* ahead, Tile<kDim>& tile) {
  const BlockD16 d16;
  const BlockD32 d32;
  for (size_t row = 0; row < kTileRows; row += kB, rows += kB * 2 * kDim) {
    for (size_t at = 0; at < kB * 2 * kDim; at += 64) hwy::Prefetch(ahead + row * 2 * kDim + at);
    Batch<kDim> batch;
    if constexpr (kHasMeans) {
      LoadResiduals(rows, input, role, batch);
    } else {
      if (!LoadBf16(rows, role, batch)) return false;
    }
    hn::Store(batch.exponent, d32, tile.exponent + 4 * row);
    hn::Store(batch.overflow, d32, tile.max_y + 4 * row);
    BlockV32 qq[2] = {hn::Zero(d32), hn::Zero(d32)};
    HWY_UNROLL(16)
    for (int i = 0; i < Batch<kDim>::kRegisters; ++i) {
      qq[0] = hn::ReorderWidenMulAccumulate(d32, batch.v[i], batch.v[i], qq[0], qq[1]);
    }
    hn::Store(hn::Add(qq[0], qq[1]), d32, tile.qq + 4 * row);
    ForwardHadamard<Batch<kDim>::kRegisters>(batch.v);
    int16_t* y = tile.y + row * kDim;
    HWY_UNROLL(16)
    for (int i = 0; i < Batch<kDim>::kRegisters; ++i) {
      hn::Store(batch.v[i], d16, y + i * hn::MaxLanes(d16));
    }
  }
  return true;
}

// Steps 6 and 7: codes and sums.
template <int kBits, int kDim>
HWY_INLINE void QuantizeTile(std::byte* codes, Tile<kDim>& tile) {
  const BlockD16 d16;
  const BlockD32 d32;
  constexpr int64_t kGroupBytes = kBits == 4 ? 32 : 16;  // of 64 values, third bits apart
  for (size_t row = 0; row < kTileRows; row += kB, codes += kB * kDim * kBits / 8) {
    BlockV16 thresholds[7];
    for (int i = 0; i + 1 < TqTableOf(kBits).num_magnitudes; ++i) {
      thresholds[i] = hn::BitCast(d16, BroadcastRows(tile.thresholds[i] + row));
    }
    BlockSums sums = {{hn::Zero(d32), hn::Zero(d32)},
                      {hn::Zero(d32), hn::Zero(d32)},
                      hn::BitCast(d16, hn::Load(d32, tile.max_y + 4 * row))};
    for (int group = 0; group < kDim / 64; ++group) {
      const int16_t* registers = tile.y + row * kDim + group * 8 * hn::MaxLanes(d16);
      QuantizeGroup<kBits, kDim>(registers, thresholds, codes + group * kGroupBytes,
                                 codes + kDim / 4 + group * 8, sums);
    }
    hn::Store(hn::BitCast(d32, sums.max_y), d32, tile.max_y + 4 * row);
    hn::Store(hn::Add(sums.yw[0], sums.yw[1]), d32, tile.yw + 4 * row);
    hn::Store(hn::Add(sums.ww[0], sums.ww[1]), d32, tile.ww + 4 * row);
  }
}

// fp16 bits of each row's scale, and whether a value of the row left 16 bits.
struct RowResults {
  HWY_ALIGN uint32_t scale[kTileRows];
  HWY_ALIGN uint32_t max_y[kTileRows];  // 32767 and up: overflow
};

// Steps 8 and 9.
template <int kBits, int kDim>
HWY_INLINE void ScaleTile(TqScale scale, const Tile<kDim>& tile, RowResults& results) {
  const BlockD32 d32;
  const BlockDU32 du32;
  const BlockDU16 du16;
  const BlockDF df;
  constexpr int kLog2 = TqTableOf(kBits).scale_log2 + FloorLog2(kDim) / 2 - kTqRowBits;
  for (size_t row = 0; row < kTileRows; row += hn::Lanes(d32)) {
    const BlockVF yw = hn::ConvertTo(df, RowSums(tile.yw, row));
    const BlockVF ww = hn::ConvertTo(df, RowSums(tile.ww, row));
    const BlockV32 sum_qq = hn::Load(d32, tile.sum_qq + row);
    BlockVF alpha = hn::Div(yw, hn::Mul(ww, hn::Set(df, static_cast<float>(kDim))));
    if (scale == TqScale::kUnbiased) {
      const BlockVF clamped = hn::Mul(hn::Set(df, TqTableOf(kBits).clamp), alpha);
      alpha = hn::Min(hn::Div(hn::ConvertTo(df, sum_qq), yw), clamped);
    }
    BlockV32 exponent, e1, e2, e3;
    hn::LoadInterleaved4(d32, tile.exponent + 4 * row, exponent, e1, e2, e3);
    // From 2^100 on every scale is infinite, and so is the product with 2^127.
    const BlockV32 log2 = hn::Min(hn::Add(exponent, hn::Set(d32, kLog2)), hn::Set(d32, 127));
    const BlockVF power = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(log2, hn::Set(d32, 127))));
    const auto half = F16BitsFromFloat(df, hn::Mul(alpha, power));
    const auto is_zero_row = hn::RebindMask(du32, hn::Eq(sum_qq, hn::Zero(d32)));
    hn::Store(hn::IfThenZeroElse(is_zero_row, half), du32, results.scale + row);

    BlockV32 m0, m1, m2, m3;
    hn::LoadInterleaved4(d32, tile.max_y + 4 * row, m0, m1, m2, m3);
    const auto max =
        hn::BitCast(du32, hn::Max(hn::Max(hn::BitCast(du16, m0), hn::BitCast(du16, m1)),
                                  hn::Max(hn::BitCast(du16, m2), hn::BitCast(du16, m3))));
    const auto folded = hn::BitCast(
        du32, hn::Max(hn::BitCast(du16, max), hn::BitCast(du16, hn::ShiftRight<16>(max))));
    hn::Store(hn::And(folded, hn::Set(du32, 0xffffu)), du32, results.max_y + row);
  }
}

template <int kBits, int kDim, bool kHasMeans>
bool EncodePlane(const TqPlane& plane, const TqBlockInput& input, std::byte* bytes,
                 std::vector<int32_t>& left) {
  constexpr int64_t kRowBytes = 2 * kDim;
  constexpr int64_t kCodeBytes = kDim * kBits / 8;
  Tile<kDim> tile;
  RowResults results;
  HWY_ALIGN std::byte spare_rows[kTileRows * kRowBytes];
  HWY_ALIGN std::byte spare_codes[kTileRows * kCodeBytes];
  for (int64_t first = 0; first < plane.num_tokens; first += kTileRows) {
    const int64_t num_rows = std::min<int64_t>(kTileRows, plane.num_tokens - first);
    const std::byte* rows = input.rows + first * kRowBytes;
    const std::byte* ahead = input.ahead + first * kRowBytes;
    std::byte* codes = plane.codes(bytes, first);
    // Lines to be written are fetched first as well.
    for (int64_t at = 0; at < static_cast<int64_t>(kTileRows) * kCodeBytes; at += 64) {
      hwy::Prefetch(codes + kCodesAheadBytes + at);
    }
    if (num_rows < static_cast<int64_t>(kTileRows)) {  // the last tile: zero rows behind its end
      std::memset(spare_rows, 0, sizeof(spare_rows));
      std::memcpy(spare_rows, rows, num_rows * kRowBytes);
      rows = spare_rows;
      codes = spare_codes;
    }
    if (!RotateTile<kDim, kHasMeans>(input, plane.format.role, rows, ahead, tile)) return false;
    Thresholds<kBits>(tile);
    QuantizeTile<kBits>(codes, tile);
    ScaleTile<kBits>(plane.format.scale, tile, results);
    for (int64_t r = 0; r < num_rows; ++r) {
      const auto scale = static_cast<uint16_t>(results.scale[r]);
      if (results.max_y[r] >= 32767) {
        left.push_back(static_cast<int32_t>(first + r));
      } else if (scale == kF16Infinity) {
        return false;
      } else if (scale == 0) {
        std::memset(codes + r * kCodeBytes, 0, kCodeBytes);
      }
      StoreU16(bytes + 2 * (first + r), scale);
    }
    if (codes == spare_codes) {
      std::memcpy(plane.codes(bytes, first), spare_codes, num_rows * kCodeBytes);
    }
  }
  return true;
}

template <int kBits, bool kHasMeans>
bool EncodeDims(const TqPlane& plane, const TqBlockInput& input, std::byte* bytes,
                std::vector<int32_t>& left) {
  if (plane.format.dim == 64) return EncodePlane<kBits, 64, kHasMeans>(plane, input, bytes, left);
  return EncodePlane<kBits, 128, kHasMeans>(plane, input, bytes, left);
}

template <bool kHasMeans>
bool EncodeBits(const TqPlane& plane, const TqBlockInput& input, std::byte* bytes,
                std::vector<int32_t>& left) {
  if (plane.format.bits == 4) return EncodeDims<4, kHasMeans>(plane, input, bytes, left);
  if (plane.format.bits == 3) return EncodeDims<3, kHasMeans>(plane, input, bytes, left);
  return EncodeDims<2, kHasMeans>(plane, input, bytes, left);
}

bool EncodeBlocks(const TqPlane& plane, const TqBlockInput& input, std::byte* bytes,
                  std::vector<int32_t>& left) {
  return plane.has_means ? EncodeBits<true>(plane, input, bytes, left)
                         : EncodeBits<false>(plane, input, bytes, left);
}

#else
bool EncodeBlocks(const TqPlane&, const TqBlockInput&, std::byte*, std::vector<int32_t>&) {
  return false;
}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(EncodeBlocks);

bool CanEncodeTqBlocks(DType dtype, int dim) {
  return dtype == DType::kBf16 && (dim == 64 || dim == 128);
}

bool EncodeTqBlocks(const TqPlane& plane, const TqBlockInput& input, std::byte* bytes,
                    std::vector<int32_t>& left) {
  return HWY_DYNAMIC_DISPATCH(EncodeBlocks)(plane, input, bytes, left);
}

}  // namespace kvstow
#endif  // HWY_ONCE
