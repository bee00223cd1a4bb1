// Blocks for storage tests: keys, records and folders whose bytes follow from a number, so that any
// wrong byte is seen.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/core/check.h"
#include "kernels/core/checksum.h"
#include "kernels/core/digest.h"
#include "kernels/core/status_macros.h"
#include "storage/record.h"
#include "storage/tiered_store.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {

inline BlockKey KeyOf(uint64_t number) { return Sha256(absl::StrCat("block ", number)); }

inline RecordMeta MetaOf(const BlockKey& key) {
  RecordMeta meta;
  meta.key = key;
  meta.fingerprint = Sha256("model");
  meta.codecs = {CodecId::kRaw, CodecId::kRaw};
  meta.num_tokens = 64;
  meta.logical_bytes = 4096;
  return meta;
}

// The bytes of one unit follow from the key.
inline void FillUnit(const BlockKey& key, uint32_t unit_idx, absl::Span<std::byte> unit) {
  uint64_t seed;
  std::memcpy(&seed, key.bytes.data(), sizeof(seed));
  Rng rng(seed + unit_idx);
  size_t i = 0;
  for (; i + 8 <= unit.size(); i += 8) {
    const uint64_t word = rng.Next();
    std::memcpy(unit.data() + i, &word, 8);
  }
  for (; i < unit.size(); ++i) unit[i] = static_cast<std::byte>(rng.Next());
}

inline std::vector<std::byte> RecordOf(const RecordMeta& meta,
                                       const std::vector<uint32_t>& lengths) {
  std::vector<uint64_t> offsets;
  std::vector<std::byte> record(static_cast<size_t>(LayOutUnits(lengths, offsets)));
  std::vector<UnitEntry> units;
  for (uint32_t i = 0; i < lengths.size(); ++i) {
    const absl::Span<std::byte> unit(record.data() + offsets[i], lengths[i]);
    FillUnit(meta.key, i, unit);
    units.push_back({offsets[i], lengths[i], CodecId::kRaw, Xxh3(unit)});
  }
  WriteRecordPrefix(meta, units, absl::MakeSpan(record));
  return record;
}

// A record of about `bytes` bytes, in two units.
inline std::vector<std::byte> RecordOf(uint64_t number, int64_t bytes) {
  const int64_t unit = (bytes - RecordPrefixBytes(2)) / 2 / 64 * 64;
  KVSTOW_CHECK(unit > 0);
  return RecordOf(MetaOf(KeyOf(number)),
                  {static_cast<uint32_t>(unit), static_cast<uint32_t>(unit)});
}

inline bool IsEqual(absl::Span<const std::byte> a, absl::Span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

inline ReserveRequest RequestOf(const BlockKey& key, std::vector<uint32_t> unit_bytes) {
  ReserveRequest request;
  request.meta = MetaOf(key);
  request.unit_bytes = std::make_shared<const std::vector<uint32_t>>(std::move(unit_bytes));
  return request;
}

// Writes the units of a ticket as FillUnit says, of the given lengths.
inline absl::Status WriteUnits(TieredStore& store, TicketId ticket, const BlockKey& key,
                               const std::vector<uint32_t>& lengths) {
  for (uint32_t i = 0; i < lengths.size(); ++i) {
    KVSTOW_ASSIGN_OR_RETURN(UnitWriter unit, store.BeginUnit(ticket, i, i));
    const absl::Span<std::byte> out = unit.Buffer(lengths[i]);
    FillUnit(key, i, out);
    KVSTOW_RETURN_IF_ERROR(unit.Commit(CodecId::kRaw, Xxh3(out)));
  }
  return absl::OkStatus();
}

// Reserve, write and seal; the record equals RecordOf(MetaOf(key), lengths).
inline absl::Status PutBlock(TieredStore& store, const BlockKey& key,
                             const std::vector<uint32_t>& lengths) {
  KVSTOW_ASSIGN_OR_RETURN(const TicketId ticket, store.Reserve(RequestOf(key, lengths)));
  absl::Status status = WriteUnits(store, ticket, key, lengths);
  if (status.ok()) status = store.Seal(ticket);
  if (!status.ok()) store.Abort(ticket).IgnoreError();
  return status;
}

// A folder of its own, removed at the end.
class TempDir {
 public:
  explicit TempDir(const std::string& base = "/tmp") {
    std::string name = base + "/kvstow-test-XXXXXX";
    KVSTOW_CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Bytes that the files below `path` take on disk. Files may come and go meanwhile.
inline int64_t FolderBytes(const std::string& path) {
  int64_t bytes = 0;
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator it(path, error), end; !error && it != end;
       it.increment(error)) {
    struct stat info;
    if (lstat(it->path().c_str(), &info) == 0) bytes += int64_t{info.st_blocks} * 512;
  }
  return bytes;
}

// The files below `path` whose names end in `extension`, in order.
inline std::vector<std::string> FilesOf(const std::string& path, const std::string& extension) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.path().extension() == extension) files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Changes the byte at `offset` of a file; negative offsets count from the end.
inline void FlipByte(const std::string& path, int64_t offset) {
  std::FILE* file = std::fopen(path.c_str(), "r+b");
  KVSTOW_CHECK(file != nullptr);
  KVSTOW_CHECK(std::fseek(file, offset, offset < 0 ? SEEK_END : SEEK_SET) == 0);
  const int byte = std::fgetc(file);
  KVSTOW_CHECK(byte != EOF && std::fseek(file, -1, SEEK_CUR) == 0);
  KVSTOW_CHECK(std::fputc(byte ^ 0x40, file) != EOF && std::fclose(file) == 0);
}

}  // namespace kvstow::testing
