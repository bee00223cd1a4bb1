// Checksums: XXH3-64 over unit bytes, CRC32C over record headers. Client, wire and tiers use these.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace kvstow {

// XXH3, 64 bits, seed 0, as published by the xxHash project.
uint64_t Xxh3(absl::Span<const std::byte> bytes);

// The same of bytes that come piece by piece.
class Xxh3Stream {
 public:
  Xxh3Stream();
  void Add(absl::Span<const std::byte> bytes);
  uint64_t Value() const;

 private:
  static constexpr size_t kStateBytes = 576;
  alignas(64) std::byte state_[kStateBytes];  // an XXH3_state_t
};

// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78), as in RFC 3720 appendix B.4; not masked.
uint32_t Crc32c(absl::Span<const std::byte> bytes);

}  // namespace kvstow
