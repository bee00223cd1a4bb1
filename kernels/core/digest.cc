#include "kernels/core/digest.h"

#include <openssl/evp.h>

#include <bit>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace kvstow {
namespace {

std::array<char, 8> LittleEndian(uint64_t value) {
  std::array<char, 8> bytes;
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}

}  // namespace

std::string Digest::ToHex() const {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

absl::StatusOr<Digest> Digest::FromHex(std::string_view hex) {
  Digest digest;
  if (hex.size() != 2 * digest.bytes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("key has ", hex.size(), " characters, want 64 hexadecimal digits"));
  }
  for (size_t i = 0; i < hex.size(); ++i) {
    const char c = hex[i];
    int nibble;
    if (c >= '0' && c <= '9') {
      nibble = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      nibble = c - 'a' + 10;
    } else if (c >= 'A' && c <= 'F') {
      nibble = c - 'A' + 10;
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("key has a character that is not a hexadecimal digit at position ", i));
    }
    digest.bytes[i / 2] = (digest.bytes[i / 2] << 4) | static_cast<std::byte>(nibble);
  }
  return digest;
}

absl::StatusOr<Digest> Digest::FromBytes(std::string_view raw, std::string_view field) {
  Digest digest;
  if (raw.size() != digest.bytes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(field), " is ", raw.size(), " bytes, want ", digest.bytes.size()));
  }
  std::memcpy(digest.bytes.data(), raw.data(), raw.size());
  return digest;
}

size_t DigestHash::operator()(const Digest& digest) const {
  size_t hash;
  std::memcpy(&hash, digest.bytes.data(), sizeof(hash));
  return hash;
}

struct DigestBuilder::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
  void Update(const void* data, size_t size) {
    KVSTOW_CHECK(EVP_DigestUpdate(context, data, size) == 1);
  }
};

DigestBuilder::DigestBuilder(std::string_view domain) : state_(std::make_unique<State>()) {
  KVSTOW_CHECK(state_->context != nullptr);
  KVSTOW_CHECK(EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1);
  Add(domain);
}

DigestBuilder::~DigestBuilder() = default;

DigestBuilder& DigestBuilder::Add(std::string_view field) {
  const std::array<char, 8> length = LittleEndian(field.size());
  state_->Update(length.data(), length.size());
  state_->Update(field.data(), field.size());
  return *this;
}

DigestBuilder& DigestBuilder::AddU64(uint64_t value) {
  const std::array<char, 8> bytes = LittleEndian(value);
  return Add({bytes.data(), bytes.size()});
}

DigestBuilder& DigestBuilder::AddTokens(absl::Span<const int32_t> tokens) {
  static_assert(std::endian::native == std::endian::little);
  return Add({reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t)});
}

Digest DigestBuilder::Finish() {
  Digest digest;
  unsigned int size = 0;
  KVSTOW_CHECK(EVP_DigestFinal_ex(state_->context,
                                  reinterpret_cast<unsigned char*>(digest.bytes.data()),
                                  &size) == 1);
  KVSTOW_CHECK(size == digest.bytes.size());
  return digest;
}

Digest Sha256(std::string_view bytes) {
  Digest digest;
  unsigned int size = 0;
  KVSTOW_CHECK(EVP_Digest(bytes.data(), bytes.size(),
                          reinterpret_cast<unsigned char*>(digest.bytes.data()), &size,
                          EVP_sha256(), nullptr) == 1);
  return digest;
}

}  // namespace kvstow
