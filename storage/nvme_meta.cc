#include "storage/nvme_meta.h"

#include <bit>
#include <cstring>

#include "absl/types/span.h"
#include "kernels/core/checksum.h"

namespace kvstow {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint8_t kMetaVersion = 1;

struct StoredMeta {
  uint8_t version;
  uint8_t k_codec;
  uint8_t v_codec;
  uint8_t zero;
  uint32_t num_tokens;
  uint64_t record_bytes;
  uint64_t logical_bytes;
  Digest fingerprint;
};
static_assert(sizeof(StoredMeta) + sizeof(uint32_t) == kNvmeMetaBytes);

uint32_t MetaCrc(const BlockKey& key, const StoredMeta& meta) {
  std::byte covered[sizeof(key) + sizeof(meta)];
  std::memcpy(covered, &key, sizeof(key));
  std::memcpy(covered + sizeof(key), &meta, sizeof(meta));
  return Crc32c(covered);
}

}  // namespace

std::string EncodeNvmeMeta(const BlockInfo& block) {
  const StoredMeta meta{.version = kMetaVersion,
                        .k_codec = static_cast<uint8_t>(block.codecs.k),
                        .v_codec = static_cast<uint8_t>(block.codecs.v),
                        .zero = 0,
                        .num_tokens = static_cast<uint32_t>(block.num_tokens),
                        .record_bytes = static_cast<uint64_t>(block.record_bytes),
                        .logical_bytes = static_cast<uint64_t>(block.logical_bytes),
                        .fingerprint = block.fingerprint};
  const uint32_t crc = MetaCrc(block.key, meta);
  std::string bytes(kNvmeMetaBytes, '\0');
  std::memcpy(bytes.data(), &meta, sizeof(meta));
  std::memcpy(bytes.data() + sizeof(meta), &crc, sizeof(crc));
  return bytes;
}

std::optional<BlockInfo> DecodeNvmeMeta(const BlockKey& key, std::string_view bytes) {
  if (bytes.size() != kNvmeMetaBytes) return std::nullopt;
  StoredMeta meta;
  uint32_t crc;
  std::memcpy(&meta, bytes.data(), sizeof(meta));
  std::memcpy(&crc, bytes.data() + sizeof(meta), sizeof(crc));
  if (crc != MetaCrc(key, meta) || meta.version != kMetaVersion) return std::nullopt;
  return BlockInfo{
      .key = key,
      .fingerprint = meta.fingerprint,
      .codecs = {static_cast<CodecId>(meta.k_codec), static_cast<CodecId>(meta.v_codec)},
      .location = {.in_nvme = true},
      .num_tokens = static_cast<int32_t>(meta.num_tokens),
      .record_bytes = static_cast<int64_t>(meta.record_bytes),
      .logical_bytes = static_cast<int64_t>(meta.logical_bytes)};
}

}  // namespace kvstow
