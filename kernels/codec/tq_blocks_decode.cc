// Decode of the blocks engine: to bf16, at dims 64, 128 and 256.
#include <cstring>

#include "kernels/codec/tq_block_tables.h"
#include "kernels/codec/tq_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/tq_blocks_decode.cc"
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
constexpr int64_t kAheadBytes = 8192;

// The two levels (or sum and difference) of each byte lane of code register `c`.
struct LevelPair {
  BlockV8 even;  // b0 = 0
  BlockV8 odd;
};

HWY_INLINE BlockV8 LowNibbles(BlockV8 v) { return hn::And(v, hn::Set(BlockD8(), uint8_t{15})); }

template <int kShift>
HWY_INLINE BlockV8 ShiftBytes(BlockV8 v) {  // bits of the neighbour come in above: mask them
  return hn::BitCast(BlockD8(), hn::ShiftRight<kShift>(hn::BitCast(BlockDU16(), v)));
}

// Nibble of two 2-bit codes of each lane.
template <int64_t kStride>
HWY_INLINE BlockV8 PairNibbles(const std::byte* codes, int c) {
  const BlockD8 d8;
  const BlockV8 packed = LoadBlocks(d8, codes + c / 2 * 16, kStride);
  const BlockV8 bytes =
      hn::TableLookupBytes(packed, hn::LoadDup128(d8, kByteTables.byte_of_pair[c % 2]));
  const BlockV8 upper = hn::LoadDup128(d8, kByteTables.upper_half);
  return LowNibbles(hn::Or(hn::And(upper, ShiftBytes<4>(bytes)), hn::AndNot(upper, bytes)));
}

// 4 in each lane whose third index bit is set, for b0 = 0 and 1.
template <int kDim>
HWY_INLINE LevelPair HighBits(const std::byte* codes, int c) {
  const BlockD8 d8;
  constexpr int64_t kStride = kDim * 3 / 8;
  BlockV8 packed;
  if constexpr (kDim == 64) {  // 8 bytes per row: a load of 16 would read past the plane
    HWY_ALIGN std::byte lanes[16 * kB] = {};
    for (size_t r = 0; r < kB; ++r) std::memcpy(lanes + 16 * r, codes + r * kStride + kDim / 4, 8);
    packed = hn::Load(d8, reinterpret_cast<const uint8_t*>(lanes));
  } else {
    packed = LoadBlocks(d8, codes + kDim / 4 + c / 4 * 16, kStride);
  }
  const BlockV8 bytes =
      hn::TableLookupBytes(packed, hn::LoadDup128(d8, kByteTables.byte_of_high[c % 4]));
  const BlockV8 even = hn::LoadDup128(d8, kByteTables.high_bit);
  const BlockV8 odd = hn::Add(even, even);
  const auto four_where = [&](BlockV8 bit) HWY_ATTR {
    return hn::IfThenElseZero(hn::Eq(hn::And(bytes, bit), bit), hn::Set(d8, uint8_t{4}));
  };
  return {four_where(even), four_where(odd)};
}

template <int kBits, int kDim>
HWY_INLINE LevelPair LoadLevels(const std::byte* codes, int c) {
  const BlockD8 d8;
  constexpr int64_t kStride = kDim * kBits / 8;
  constexpr const LevelTables& kLevels = kLevelTables<kBits>;
  const BlockV8 levels = hn::LoadDup128(d8, kLevels.level);
  if constexpr (kBits == 4) {
    const BlockV8 bytes = hn::TableLookupBytes(LoadBlocks(d8, codes + 16 * c, kStride),
                                               hn::LoadDup128(d8, kByteTables.byte_of_nibble));
    return {hn::TableLookupBytes(levels, LowNibbles(bytes)),
            hn::TableLookupBytes(levels, LowNibbles(ShiftBytes<4>(bytes)))};
  } else if constexpr (kBits == 2) {
    const BlockV8 nibbles = PairNibbles<kStride>(codes, c);
    return {hn::TableLookupBytes(hn::LoadDup128(d8, kLevels.sum), nibbles),
            hn::TableLookupBytes(hn::LoadDup128(d8, kLevels.difference), nibbles)};
  } else {
    const BlockV8 nibbles = PairNibbles<kStride>(codes, c);
    const LevelPair high = HighBits<kDim>(codes, c);
    const BlockV8 low_mask = hn::Set(d8, uint8_t{3});
    const BlockV8 even = hn::Or(hn::And(nibbles, low_mask), high.even);
    const BlockV8 odd = hn::Or(hn::And(ShiftBytes<2>(nibbles), low_mask), high.odd);
    return {hn::TableLookupBytes(levels, even), hn::TableLookupBytes(levels, odd)};
  }
}

// All butterflies but that of index bit 5. Register index bits before: b0, b2, then those from b5
// on.
template <int kBits, int kRegisters>
HWY_INLINE void InverseHadamard(BlockV16* v) {
  if constexpr (kBits != 2) ForPairs<1, kRegisters, Butterfly>(v);
  ForPairs<8, kRegisters, Butterfly>(v);
  ForPairs<16, kRegisters, Butterfly>(v);
  // Lanes (b1 b4 b3): b2 goes in and b1 comes out, then b1 in and b4 out, then b5 in and b3 out.
  ForPairs<2, kRegisters, RotateInThenButterfly>(v);
  ForPairs<2, kRegisters, RotateInThenButterfly>(v);
  ForPairs<4, kRegisters, RotateInThenButterfly>(v);
}

// kB consecutive rows.
struct DecodeBatch {
  const std::byte* codes;
  std::byte* rows;
  BlockVF step;  // 2^16 times the scale of each row's integers
};

template <int kBits, int kDim, bool kHasMeans>
HWY_INLINE void DecodeRows(const DecodeBatch& batch, Role role, const float* means) {
  const BlockD16 d16;
  const BlockDF df;
  const BlockDU16 du16;
  constexpr int kRegisters = kDim / 8;
  BlockV16 v[kRegisters];
  HWY_UNROLL(8)
  for (int c = 0; c < kDim / 32; ++c) {
    const LevelPair pair = LoadLevels<kBits, kDim>(batch.codes, c);
    SumAndDifference(pair.even, v[4 * c], v[4 * c + 2]);
    SumAndDifference(pair.odd, v[4 * c + 1], v[4 * c + 3]);
  }
  InverseHadamard<kBits, kRegisters>(v);
  HWY_UNROLL(16)
  for (int i = 0; i < kRegisters; i += 2) {
    HWY_UNROLL(2)
    for (int b5 = 0; b5 < 2; ++b5) {
      BlockVF p[2];
      HWY_UNROLL(2)
      for (int b0 = 0; b0 < 2; ++b0) {
        const BlockV16 factors =
            hn::LoadDup128(d16, kLastFactors.at[static_cast<int>(role)][i + b0][b5]);
        p[b0] = hn::Mul(hn::ConvertTo(df, MulAddPairs(v[i + b0], factors)), batch.step);
        if constexpr (kHasMeans) {
          p[b0] = hn::Add(p[b0], hn::LoadDup128(df, means + 4 * (4 * (i / 2) + 2 * b5 + b0)));
        }
      }
      const auto even = hn::ShiftRight<16>(RoundedBf16(df, p[0]));
      const auto both = hn::BitCast(du16, hn::Or(even, RoundedBf16(df, p[1])));
      StoreBlocks(du16, both, batch.rows + 2 * OutputIdx(i, b5), 2 * kDim);
    }
  }
}

template <int kBits, int kDim, bool kHasMeans>
void DecodePlane(const TqPlane& plane, const float* means, const std::byte* bytes,
                 std::byte* rows) {
  const BlockDF df;
  // In the order of use: [i / 2, b5, b0, pair], times 2^16.
  alignas(64) float ordered_means[kHasMeans ? kDim : 1];
  if constexpr (kHasMeans) {
    for (int k = 0; k < kDim; ++k) {
      const int idx = OutputIdx(k / 16 * 2, (k / 8) % 2) + (k / 4) % 2 + 2 * (k % 4);
      ordered_means[k] = means[idx] * 65536.0f;
    }
  }
  constexpr int64_t kRowCodeBytes = kDim * kBits / 8;
  const float unit = PowerOfTwo(16 - TqScaleLog2(kBits, kDim));
  for (int64_t first = 0; first < plane.num_tokens; first += kB) {
    const int64_t num_rows = std::min<int64_t>(kB, plane.num_tokens - first);
    // Lines to be written are fetched first as well; an address that is not there does no harm.
    for (size_t at = 0; at < kB * 2 * kDim; at += 64) {
      hwy::Prefetch(rows + first * 2 * kDim + kAheadBytes + at);
    }
    DecodeBatch batch;
    batch.codes = plane.codes(bytes, first);
    batch.rows = rows + first * 2 * kDim;
    HWY_ALIGN float steps[4 * kB] = {};
    for (int64_t r = 0; r < num_rows; ++r) {
      const float step = F16ToFloat(LoadU16(bytes + 2 * (first + r))) * unit;
      for (int k = 0; k < 4; ++k) steps[4 * r + k] = step;
    }
    batch.step = hn::Load(df, steps);
    HWY_ALIGN std::byte spare_rows[kB * 2 * kDim];
    HWY_ALIGN std::byte spare_codes[kB * kRowCodeBytes];
    const bool is_short = num_rows < static_cast<int64_t>(kB);
    if (is_short) {  // the last batch: zeros behind its end
      std::memset(spare_codes, 0, sizeof(spare_codes));
      std::memcpy(spare_codes, batch.codes, num_rows * kRowCodeBytes);
      batch.codes = spare_codes;
      batch.rows = spare_rows;
    }
    DecodeRows<kBits, kDim, kHasMeans>(batch, plane.format.role, ordered_means);
    if (is_short) std::memcpy(rows + first * 2 * kDim, spare_rows, num_rows * 2 * kDim);
  }
}

template <int kBits, int kDim>
void DecodeMeans(const TqPlane& plane, const float* means, const std::byte* bytes,
                 std::byte* rows) {
  if (means != nullptr) {
    DecodePlane<kBits, kDim, true>(plane, means, bytes, rows);
  } else {
    DecodePlane<kBits, kDim, false>(plane, means, bytes, rows);
  }
}

template <int kBits>
void DecodeDims(const TqPlane& plane, const float* means, const std::byte* bytes, std::byte* rows) {
  switch (plane.format.dim) {
    case 64:
      return DecodeMeans<kBits, 64>(plane, means, bytes, rows);
    case 128:
      return DecodeMeans<kBits, 128>(plane, means, bytes, rows);
    default:
      return DecodeMeans<kBits, 256>(plane, means, bytes, rows);
  }
}

void DecodeBlocks(const TqPlane& plane, const float* means, const std::byte* bytes,
                  std::byte* rows) {
  switch (plane.format.bits) {
    case 2:
      return DecodeDims<2>(plane, means, bytes, rows);
    case 3:
      return DecodeDims<3>(plane, means, bytes, rows);
    default:
      return DecodeDims<4>(plane, means, bytes, rows);
  }
}

#else
void DecodeBlocks(const TqPlane&, const float*, const std::byte*, std::byte*) {}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(DecodeBlocks);

bool CanDecodeTqBlocks(DType dtype, int dim) {
  return dtype == DType::kBf16 && (dim == 64 || dim == 128 || dim == 256);
}

void DecodeTqBlocks(const TqPlane& plane, const float* means, const std::byte* bytes,
                    std::byte* rows) {
  HWY_DYNAMIC_DISPATCH(DecodeBlocks)(plane, means, bytes, rows);
}

}  // namespace kvstow
#endif  // HWY_ONCE
