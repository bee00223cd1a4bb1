// Eight codes at a time between one byte each and their packed bits, the first in the lowest: plain
// 64-bit arithmetic, the same on every machine.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/codec/rows.h"

namespace kvstow {

inline uint64_t LoadU64(const void* bytes) {
  uint64_t value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// `codes` holds a code of kBits (1, 2 or 4) in each byte; the result has 8 * kBits bits.
template <int kBits>
constexpr uint64_t PackEight(uint64_t codes) {
  codes = (codes | codes >> (8 - kBits)) & (0x0001000100010001u * ((1u << (2 * kBits)) - 1));
  codes = (codes | codes >> (16 - 2 * kBits)) &
          (0x0000000100000001u * ((uint64_t{1} << (4 * kBits)) - 1));
  return (codes | codes >> (32 - 4 * kBits)) &
         (kBits == 4 ? 0xffffffffu : (uint64_t{1} << (8 * kBits)) - 1);
}

// The inverse. Bits above 8 * kBits are zero.
template <int kBits>
constexpr uint64_t SpreadEight(uint64_t bits) {
  bits = (bits | bits << (32 - 4 * kBits)) &
         (0x0000000100000001u * ((uint64_t{1} << (4 * kBits)) - 1));
  bits = (bits | bits << (16 - 2 * kBits)) & (0x0001000100010001u * ((1u << (2 * kBits)) - 1));
  return (bits | bits << (8 - kBits)) & (0x0101010101010101u * ((1u << kBits) - 1));
}

// A row of `dim` (a multiple of 8) one-byte codes to tq's packing: 3 bits are the low two bits of
// all, then the high bits.
inline void PackCodeRow(int bits, int dim, const uint8_t* index, std::byte* codes) {
  for (int i = 0; i < dim; i += 8) {
    const uint64_t eight = LoadU64(index + i);
    if (bits == 4) {
      const uint64_t packed = PackEight<4>(eight);
      std::memcpy(codes + i / 2, &packed, 4);
      continue;
    }
    const uint64_t low = PackEight<2>(eight & 0x0303030303030303u);
    std::memcpy(codes + i / 4, &low, 2);
    if (bits == 3) {
      const uint64_t high = PackEight<1>(eight >> 2 & 0x0101010101010101u);
      codes[dim / 4 + i / 8] = static_cast<std::byte>(high);
    }
  }
}

inline void SpreadCodeRow(int bits, int dim, const std::byte* codes, uint8_t* index) {
  for (int i = 0; i < dim; i += 8) {
    uint64_t packed = 0;
    uint64_t eight = 0;
    if (bits == 4) {
      std::memcpy(&packed, codes + i / 2, 4);
      eight = SpreadEight<4>(packed);
    } else {
      std::memcpy(&packed, codes + i / 4, 2);
      eight = SpreadEight<2>(packed);
      if (bits == 3) {
        eight |= SpreadEight<1>(std::to_integer<uint64_t>(codes[dim / 4 + i / 8])) << 2;
      }
    }
    std::memcpy(index + i, &eight, sizeof(eight));
  }
}

}  // namespace kvstow
