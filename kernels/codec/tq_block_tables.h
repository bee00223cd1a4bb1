// Constant tables of the blocks engine (tq_simd.h), built by the compiler from the definitions.
#pragma once

#include <cstdint>

#include "kernels/codec/hadamard.h"
#include "kernels/codec/tq.h"

namespace kvstow {

inline constexpr int kMaxEncodeDim = 128;

// Signs of a role as masks: the sign bit of minus values, or all their bits.
struct SignMasks {
  alignas(64) uint16_t top[2][kMaxEncodeDim];
  alignas(64) uint16_t all[2][kMaxEncodeDim];
};

constexpr SignMasks MakeSignMasks() {
  SignMasks masks{};
  for (int role = 0; role < 2; ++role) {
    for (int i = 0; i < kMaxEncodeDim; ++i) {
      const bool minus = IsMinusSign(static_cast<Role>(role), i);
      masks.top[role][i] = minus ? 0x8000 : 0;
      masks.all[role][i] = minus ? 0xffff : 0;
    }
  }
  return masks;
}

inline constexpr SignMasks kSignMasks = MakeSignMasks();

inline constexpr int kMaxDecodeDim = 256;

// Before the last butterfly, register i of a row holds in lane pair (b2 b1) the values that give
// output index bits b0 = i[0], b4 = i[1], b3 = i[2], b6 = i[3], b7 = i[4]; b5 is the butterfly's
// own.
constexpr int OutputIdx(int register_idx, int b5) {
  const auto bit = [&](int k) { return (register_idx >> k) & 1; };
  return bit(0) | bit(2) << 3 | bit(1) << 4 | b5 << 5 | bit(3) << 6 | bit(4) << 7;
}

// Factors of the last butterfly, signs included: (s, s) for the sum, (s, -s) for the difference.
struct LastFactors {
  alignas(64) int16_t at[2][kMaxDecodeDim / 8][2][8];  // [role, register, b5, lane]
};

constexpr LastFactors MakeLastFactors() {
  LastFactors factors{};
  for (int role = 0; role < 2; ++role) {
    for (int i = 0; i < kMaxDecodeDim / 8; ++i) {
      for (int b5 = 0; b5 < 2; ++b5) {
        for (int pair = 0; pair < 4; ++pair) {
          const int idx = OutputIdx(i, b5) + 2 * pair;
          const int sign = IsMinusSign(static_cast<Role>(role), idx) ? -1 : 1;
          factors.at[role][i][b5][2 * pair] = static_cast<int16_t>(sign);
          factors.at[role][i][b5][2 * pair + 1] = static_cast<int16_t>(b5 != 0 ? -sign : sign);
        }
      }
    }
  }
  return factors;
}

inline constexpr LastFactors kLastFactors = MakeLastFactors();

// Tables of byte lookups. A byte lane (b1 b4 b3 b2) of code register c stands for the values of
// index bits b1 to b4; b0 tells its two registers apart, bits from b5 on are c.
struct ByteTables {
  alignas(64) uint8_t byte_of_nibble[16];   // 4 bits: which byte of 16 holds the lane's two codes
  alignas(64) uint8_t byte_of_pair[2][16];  // 2 bits: which byte, for even and odd c
  alignas(64) uint8_t byte_of_high[4][16];  // third bits: which byte, for c modulo 4
  alignas(64) uint8_t high_bit[16];         // and which bit, for b0 = 0
  alignas(64) uint8_t upper_half[16];       // 0xff where b1 = 1
};

constexpr ByteTables MakeByteTables() {
  ByteTables tables{};
  for (int lane = 0; lane < 16; ++lane) {
    const int b2 = lane & 1, b3 = (lane >> 1) & 1, b4 = (lane >> 2) & 1, b1 = (lane >> 3) & 1;
    tables.byte_of_nibble[lane] = static_cast<uint8_t>(b1 | b2 << 1 | b3 << 2 | b4 << 3);
    for (int c = 0; c < 2; ++c) {
      tables.byte_of_pair[c][lane] = static_cast<uint8_t>(b2 | b3 << 1 | b4 << 2 | c << 3);
    }
    for (int c = 0; c < 4; ++c) {
      tables.byte_of_high[c][lane] = static_cast<uint8_t>(b3 | b4 << 1 | c << 2);
    }
    tables.high_bit[lane] = static_cast<uint8_t>(1 << (b1 << 1 | b2 << 2));
    tables.upper_half[lane] = b1 != 0 ? 0xff : 0;
  }
  return tables;
}

inline constexpr ByteTables kByteTables = MakeByteTables();

// Signed level of each index; at 2 bits, sum and difference of the levels of a nibble's two
// indexes.
struct LevelTables {
  alignas(16) uint8_t level[16];
  alignas(16) uint8_t sum[16];
  alignas(16) uint8_t difference[16];
};

template <int kBits>
constexpr LevelTables MakeLevelTables() {
  const TqTable table = TqTableOf(kBits);
  LevelTables tables{};
  int signed_level[16] = {};
  for (int i = 0; i < table.num_magnitudes; ++i) {
    signed_level[table.num_magnitudes + i] = table.level[i];
    signed_level[table.num_magnitudes - 1 - i] = -table.level[i];
  }
  for (int i = 0; i < 16; ++i) {
    tables.level[i] = static_cast<uint8_t>(signed_level[i]);
    tables.sum[i] = static_cast<uint8_t>(signed_level[i & 3] + signed_level[i >> 2]);
    tables.difference[i] = static_cast<uint8_t>(signed_level[i & 3] - signed_level[i >> 2]);
  }
  return tables;
}

template <int kBits>
inline constexpr LevelTables kLevelTables = MakeLevelTables<kBits>();

}  // namespace kvstow
