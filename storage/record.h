// Record: a sealed block as every tier stores it. FORMAT.md has the byte layout.
//
//   RecordBuilder / Tickets write it once; afterwards it never changes.
//   KVSTOW_ASSIGN_OR_RETURN(RecordView record, RecordView::Parse(bytes));
//   for (uint32_t i = 0; i < record.num_units(); ++i) { ... record.unit(i) ... }
//
// Layout: header (256 bytes), unit table (24 bytes a unit, padded to 64), units, each at a multiple
// of 64 bytes from the start of the record. All integers little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/codec/codec.h"
#include "kernels/core/block_key.h"
#include "kernels/core/digest.h"

namespace kvstow {

inline constexpr uint16_t kRecordVersion = 1;
inline constexpr int64_t kRecordHeaderBytes = 256;
inline constexpr int64_t kUnitAlignment = 64;
inline constexpr uint32_t kMaxUnitsPerRecord = 1u << 20;

// What a record says of itself, apart from its units.
struct RecordMeta {
  BlockKey key;
  Digest fingerprint;     // of the ModelSpec
  Digest calibration_id;  // zero: none needed
  Digest plan_id;         // zero: no plan
  CodecPair codecs;       // as asked for; each unit says what it really holds
  int32_t num_tokens = 0;
  int64_t logical_bytes = 0;  // of the row form of the block
  bool operator==(const RecordMeta&) const = default;
};

// One row of the unit table.
struct UnitEntry {
  uint64_t offset = 0;  // from the start of the record; a multiple of kUnitAlignment
  uint32_t length = 0;  // bytes, without padding
  CodecId codec = CodecId::kRaw;
  uint64_t xxh3 = 0;  // over the unit's `length` bytes
  bool operator==(const UnitEntry&) const = default;
};

// Rounds up to kUnitAlignment.
int64_t AlignUnit(int64_t bytes);

// Bytes of header and table: where the first unit starts.
int64_t RecordPrefixBytes(uint32_t num_units);

// Offsets of units of the given lengths laid one after the other; returns the record's size.
int64_t LayOutUnits(absl::Span<const uint32_t> unit_bytes, std::vector<uint64_t>& offsets);

// Writes header and table into `record` (record.size() is the whole size). The units must stand in
// place already. CHECKs that the entries fit: only our own bug can break that.
void WriteRecordPrefix(const RecordMeta& meta, absl::Span<const UnitEntry> units,
                       absl::Span<std::byte> record);

// A parsed record. Borrows the bytes.
class RecordView {
 public:
  // Checks magic, version, CRC32C of header and table, and that every unit lies inside `bytes`, in
  // order, without overlap. kDataLoss where it does not hold (cut short, flipped bits);
  // kFailedPrecondition for a version or codec this build does not know. Unit bytes are *not*
  // checked here.
  static absl::StatusOr<RecordView> Parse(absl::Span<const std::byte> bytes);

  const RecordMeta& meta() const { return meta_; }
  uint32_t num_units() const { return static_cast<uint32_t>(units_.size()); }
  const UnitEntry& entry(uint32_t unit_idx) const { return units_[unit_idx]; }
  absl::Span<const std::byte> unit(uint32_t unit_idx) const;
  absl::Span<const std::byte> bytes() const { return bytes_; }

  // XXH3 of every unit. kDataLoss names the first that differs.
  absl::Status VerifyUnits() const;

 private:
  RecordView() = default;

  absl::Span<const std::byte> bytes_;
  RecordMeta meta_;
  std::vector<UnitEntry> units_;
};

}  // namespace kvstow
