// Digest: a SHA-256 value, and a hasher over length-prefixed fields.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvstow {

struct Digest {
  std::array<std::byte, 32> bytes{};

  auto operator<=>(const Digest&) const = default;
  bool is_zero() const { return *this == Digest{}; }
  std::string ToHex() const;  // 64 lower-case hexadecimal digits
  // kInvalidArgument unless `hex` is exactly 64 hexadecimal digits.
  static absl::StatusOr<Digest> FromHex(std::string_view hex);
  // kInvalidArgument unless `raw` is exactly 32 bytes; `field` is named in the message.
  static absl::StatusOr<Digest> FromBytes(std::string_view raw, std::string_view field);
  std::string_view AsStringView() const {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
};

// Digests are uniform already: their first bytes serve as a hash.
struct DigestHash {
  size_t operator()(const Digest& digest) const;
};

// SHA-256 (FIPS 180-4) over a sequence of fields. Each field is preceded by its length as a
// little-endian uint64, so no two different sequences give the same bytes.
class DigestBuilder {
 public:
  // `domain` keeps digests of different kinds apart; it is the first field.
  explicit DigestBuilder(std::string_view domain);
  ~DigestBuilder();
  DigestBuilder(const DigestBuilder&) = delete;
  DigestBuilder& operator=(const DigestBuilder&) = delete;

  DigestBuilder& Add(std::string_view field);
  DigestBuilder& Add(const Digest& field) { return Add(field.AsStringView()); }
  DigestBuilder& AddU64(uint64_t value);  // a field of eight little-endian bytes
  // Values as consecutive little-endian int32: one field.
  DigestBuilder& AddTokens(absl::Span<const int32_t> tokens);
  Digest Finish();  // once; the builder is spent afterwards

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Plain SHA-256 of `bytes`, without prefixes: for files and whole messages.
Digest Sha256(std::string_view bytes);

}  // namespace kvstow
