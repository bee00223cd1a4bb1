#include "kernels/core/checksum.h"

#include <xxhash.h>
#if defined(__x86_64__)
// Makes XXH3_64bits choose AVX2 or AVX-512 at run time: the packaged library's own is SSE2, at less
// than half the rate. Same value.
#include <xxh_x86dispatch.h>
#endif

#include <array>
#include <new>

namespace kvstow {
namespace {

constexpr std::array<uint32_t, 256> MakeCrcTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kCrcTable = MakeCrcTable();

}  // namespace

uint64_t Xxh3(absl::Span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

Xxh3Stream::Xxh3Stream() {
  static_assert(sizeof(XXH3_state_t) <= kStateBytes && alignof(XXH3_state_t) <= 64);
  XXH3_64bits_reset(new (state_) XXH3_state_t);
}

void Xxh3Stream::Add(absl::Span<const std::byte> bytes) {
  XXH3_64bits_update(std::launder(reinterpret_cast<XXH3_state_t*>(state_)), bytes.data(),
                     bytes.size());
}

uint64_t Xxh3Stream::Value() const {
  return XXH3_64bits_digest(std::launder(reinterpret_cast<const XXH3_state_t*>(state_)));
}

// A table of bytes is enough: only headers and unit tables, a few kilobytes, come through here.
uint32_t Crc32c(absl::Span<const std::byte> bytes) {
  uint32_t crc = 0xffffffffu;
  for (std::byte b : bytes) crc = kCrcTable[(crc ^ static_cast<uint32_t>(b)) & 0xffu] ^ (crc >> 8);
  return ~crc;
}

}  // namespace kvstow
