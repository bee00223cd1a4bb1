#include "storage/record.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

static_assert(std::endian::native == std::endian::little,
              "records are little-endian and are copied without swapping");

// As stored. The first 24 bytes keep their places in every version, so that a record of any version
// can be told from a damaged one.
struct StoredHeader {
  std::array<char, 8> magic;
  uint16_t version;
  uint16_t zero_a;
  uint32_t prefix_bytes;  // header, unit table and padding: where the first unit starts
  uint32_t crc32c;        // over prefix_bytes bytes, with this field as zero
  uint32_t num_units;
  uint64_t record_bytes;
  uint64_t payload_bytes;  // sum of the unit lengths
  uint64_t logical_bytes;
  uint32_t num_tokens;
  uint8_t k_codec;
  uint8_t v_codec;
  uint16_t zero_b;
  Digest key;
  Digest fingerprint;
  Digest calibration_id;
  Digest plan_id;
  std::array<std::byte, 72> zero_c;
};
static_assert(sizeof(StoredHeader) == kRecordHeaderBytes);
static_assert(offsetof(StoredHeader, key) == 56);

struct StoredUnit {
  uint64_t offset;
  uint32_t length;
  uint8_t codec;
  std::array<uint8_t, 3> zero;
  uint64_t xxh3;
};
static_assert(sizeof(StoredUnit) == 24);

constexpr std::array<char, 8> kMagic = {'K', 'V', 'S', 'T', 'O', 'W', 'R', '\n'};
constexpr size_t kCrcOffset = offsetof(StoredHeader, crc32c);

bool IsZero(absl::Span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

// CRC32C of the prefix as if its CRC field were zero. The copy is small: a few kilobytes.
uint32_t PrefixCrc(absl::Span<const std::byte> prefix) {
  std::vector<std::byte> copy(prefix.begin(), prefix.end());
  std::memset(copy.data() + kCrcOffset, 0, sizeof(uint32_t));
  return Crc32c(copy);
}

absl::Status CheckVersionAndCodecs(const StoredHeader& header) {
  if (header.version != kRecordVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("record has version ", header.version, ", this build reads ", kRecordVersion));
  }
  for (const uint8_t codec : {header.k_codec, header.v_codec}) {
    if (FindCodec(static_cast<CodecId>(codec)) == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("record has codec ", codec, ", which this build does not know"));
    }
  }
  return absl::OkStatus();
}

// Everything the CRC cannot vouch for: the fields against each other and against the size.
absl::Status CheckHeader(const StoredHeader& header, size_t size) {
  if (header.num_units == 0 || header.num_units > kMaxUnitsPerRecord) {
    return absl::DataLossError(absl::StrCat("record has ", header.num_units,
                                            " units, allowed are 1 to ", kMaxUnitsPerRecord));
  }
  if (header.prefix_bytes != static_cast<uint64_t>(RecordPrefixBytes(header.num_units))) {
    return absl::DataLossError(absl::StrCat("record has ", header.prefix_bytes,
                                            " bytes of header and table, its ", header.num_units,
                                            " units need ", RecordPrefixBytes(header.num_units)));
  }
  if (header.record_bytes != size) {
    return absl::DataLossError(
        absl::StrCat("record is ", size, " bytes, its header says ", header.record_bytes));
  }
  if (header.zero_a != 0 || header.zero_b != 0 || !IsZero(header.zero_c) ||
      header.logical_bytes > static_cast<uint64_t>(INT64_MAX) ||
      header.num_tokens > static_cast<uint32_t>(INT32_MAX)) {
    return absl::DataLossError("record header has a field out of range");
  }
  return absl::OkStatus();
}

// Entry `unit_idx`, checked against the end of the unit before it.
absl::StatusOr<UnitEntry> CheckUnit(const StoredUnit& stored, uint32_t unit_idx,
                                    uint64_t previous_end, uint64_t record_bytes) {
  if (stored.offset % kUnitAlignment != 0 || stored.offset < previous_end ||
      stored.offset > record_bytes || stored.length > record_bytes - stored.offset ||
      stored.zero != std::array<uint8_t, 3>{}) {
    return absl::DataLossError(
        absl::StrCat("unit ", unit_idx, " at offset ", stored.offset, " with ", stored.length,
                     " bytes does not fit: it must start at a multiple of ", kUnitAlignment,
                     " from ", previous_end, " on and end within ", record_bytes, " bytes"));
  }
  if (FindCodec(static_cast<CodecId>(stored.codec)) == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "unit ", unit_idx, " has codec ", stored.codec, ", which this build does not know"));
  }
  return UnitEntry{stored.offset, stored.length, static_cast<CodecId>(stored.codec), stored.xxh3};
}

}  // namespace

int64_t AlignUnit(int64_t bytes) {
  return (bytes + kUnitAlignment - 1) / kUnitAlignment * kUnitAlignment;
}

int64_t RecordPrefixBytes(uint32_t num_units) {
  return AlignUnit(kRecordHeaderBytes +
                   static_cast<int64_t>(num_units) * static_cast<int64_t>(sizeof(StoredUnit)));
}

int64_t LayOutUnits(absl::Span<const uint32_t> unit_bytes, std::vector<uint64_t>& offsets) {
  offsets.clear();
  offsets.reserve(unit_bytes.size());
  int64_t end = RecordPrefixBytes(static_cast<uint32_t>(unit_bytes.size()));
  for (const uint32_t length : unit_bytes) {
    offsets.push_back(static_cast<uint64_t>(end));
    end += AlignUnit(length);
  }
  return end;
}

void WriteRecordPrefix(const RecordMeta& meta, absl::Span<const UnitEntry> units,
                       absl::Span<std::byte> record) {
  KVSTOW_CHECK(!units.empty() && units.size() <= kMaxUnitsPerRecord);
  const uint32_t num_units = static_cast<uint32_t>(units.size());
  const int64_t prefix_bytes = RecordPrefixBytes(num_units);
  KVSTOW_CHECK(prefix_bytes <= static_cast<int64_t>(record.size()));
  KVSTOW_CHECK(meta.num_tokens >= 0 && meta.logical_bytes >= 0);

  StoredHeader header{};
  header.magic = kMagic;
  header.version = kRecordVersion;
  header.prefix_bytes = static_cast<uint32_t>(prefix_bytes);
  header.num_units = num_units;
  header.record_bytes = record.size();
  header.logical_bytes = static_cast<uint64_t>(meta.logical_bytes);
  header.num_tokens = static_cast<uint32_t>(meta.num_tokens);
  header.k_codec = static_cast<uint8_t>(meta.codecs.k);
  header.v_codec = static_cast<uint8_t>(meta.codecs.v);
  header.key = meta.key;
  header.fingerprint = meta.fingerprint;
  header.calibration_id = meta.calibration_id;
  header.plan_id = meta.plan_id;

  std::byte* table = record.data() + kRecordHeaderBytes;
  uint64_t end = static_cast<uint64_t>(prefix_bytes);
  for (uint32_t i = 0; i < num_units; ++i) {
    const UnitEntry& unit = units[i];
    KVSTOW_CHECK(unit.offset % kUnitAlignment == 0 && unit.offset >= end);
    KVSTOW_CHECK(unit.offset <= record.size() && unit.length <= record.size() - unit.offset);
    const StoredUnit stored{
        unit.offset, unit.length, static_cast<uint8_t>(unit.codec), {}, unit.xxh3};
    std::memcpy(table + i * sizeof(stored), &stored, sizeof(stored));
    // Between units there is nothing, not what the memory held before.
    std::memset(record.data() + end, 0, unit.offset - end);
    end = unit.offset + unit.length;
    header.payload_bytes += unit.length;
  }
  std::memset(record.data() + end, 0, record.size() - end);
  const int64_t table_end =
      kRecordHeaderBytes + num_units * static_cast<int64_t>(sizeof(StoredUnit));
  std::memset(record.data() + table_end, 0, static_cast<size_t>(prefix_bytes - table_end));

  std::memcpy(record.data(), &header, sizeof(header));
  const uint32_t crc = Crc32c(record.first(static_cast<size_t>(prefix_bytes)));
  std::memcpy(record.data() + kCrcOffset, &crc, sizeof(crc));
}

absl::StatusOr<RecordView> RecordView::Parse(absl::Span<const std::byte> bytes) {
  if (bytes.size() < static_cast<size_t>(kRecordHeaderBytes)) {
    return absl::DataLossError(absl::StrCat("record is ", bytes.size(),
                                            " bytes, its header alone is ", kRecordHeaderBytes));
  }
  StoredHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.magic != kMagic) return absl::DataLossError("record does not start with its magic");
  if (header.prefix_bytes < kRecordHeaderBytes || header.prefix_bytes > bytes.size()) {
    return absl::DataLossError(absl::StrCat("record says that its header and table are ",
                                            header.prefix_bytes, " bytes, it has ", bytes.size()));
  }
  const uint32_t crc = PrefixCrc(bytes.first(header.prefix_bytes));
  if (crc != header.crc32c) {
    return absl::DataLossError(absl::StrCat("record header and table have CRC32C ", absl::Hex(crc),
                                            ", stored is ", absl::Hex(header.crc32c)));
  }
  // Only now: in a damaged header the version may be the damage.
  KVSTOW_RETURN_IF_ERROR(CheckVersionAndCodecs(header));
  KVSTOW_RETURN_IF_ERROR(CheckHeader(header, bytes.size()));

  RecordView view;
  view.bytes_ = bytes;
  view.units_.reserve(header.num_units);
  uint64_t end = header.prefix_bytes;
  uint64_t payload_bytes = 0;
  const std::byte* table = bytes.data() + kRecordHeaderBytes;
  for (uint32_t i = 0; i < header.num_units; ++i) {
    StoredUnit stored;
    std::memcpy(&stored, table + i * sizeof(stored), sizeof(stored));
    KVSTOW_ASSIGN_OR_RETURN(const UnitEntry entry, CheckUnit(stored, i, end, bytes.size()));
    view.units_.push_back(entry);
    end = entry.offset + entry.length;
    payload_bytes += entry.length;
  }
  if (payload_bytes != header.payload_bytes) {
    return absl::DataLossError(absl::StrCat("units have ", payload_bytes,
                                            " bytes, the header says ", header.payload_bytes));
  }
  view.meta_ = RecordMeta{
      .key = header.key,
      .fingerprint = header.fingerprint,
      .calibration_id = header.calibration_id,
      .plan_id = header.plan_id,
      .codecs = {static_cast<CodecId>(header.k_codec), static_cast<CodecId>(header.v_codec)},
      .num_tokens = static_cast<int32_t>(header.num_tokens),
      .logical_bytes = static_cast<int64_t>(header.logical_bytes)};
  return view;
}

absl::Span<const std::byte> RecordView::unit(uint32_t unit_idx) const {
  const UnitEntry& entry = units_[unit_idx];
  return bytes_.subspan(entry.offset, entry.length);
}

absl::Status RecordView::VerifyUnits() const {
  uint64_t end = static_cast<uint64_t>(RecordPrefixBytes(num_units()));
  for (uint32_t i = 0; i < num_units(); ++i) {
    const UnitEntry& entry = units_[i];
    const uint64_t xxh3 = Xxh3(unit(i));
    if (xxh3 != entry.xxh3) {
      return absl::DataLossError(absl::StrCat("unit ", i, " of ", num_units(), " has XXH3 ",
                                              absl::Hex(xxh3), ", stored is ",
                                              absl::Hex(entry.xxh3)));
    }
    if (!IsZero(bytes_.subspan(end, entry.offset - end))) {
      return absl::DataLossError(absl::StrCat("padding before unit ", i, " is not zero"));
    }
    end = entry.offset + entry.length;
  }
  if (!IsZero(bytes_.subspan(end))) {
    return absl::DataLossError("padding after the last unit is not zero");
  }
  return absl::OkStatus();
}

}  // namespace kvstow
