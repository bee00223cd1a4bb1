#include "kernels/codec/calibration.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/codec/rows.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

static_assert(std::endian::native == std::endian::little, "the bundle is little-endian");

constexpr std::string_view kMagic("KVSTOWC\n", 8);
constexpr uint32_t kVersion = 1;
constexpr uint8_t kDenseKind = 3;
constexpr int64_t kHeaderBytes = 96;
constexpr int64_t kEntryBytes = 32;
constexpr int64_t kHashBytes = 32;
constexpr int64_t kMatrixAlignment = 64;

template <class T>
void Append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <class T>
T ReadAt(std::string_view bytes, int64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

Digest DigestAt(std::string_view bytes, int64_t at) {
  Digest digest;
  std::memcpy(digest.bytes.data(), bytes.data() + at, digest.bytes.size());
  return digest;
}

std::string NameOf(const RotationPlace& place) {
  return absl::StrCat("layer ", place.layer_idx, ", ", place.role == Role::kKey ? "keys" : "values",
                      ", head ", place.head_idx);
}

absl::Status BadBundle(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("calibration: ", ToAbsl(what)));
}

absl::Status CheckBeginning(std::string_view bytes) {
  if (bytes.size() >= kHeaderBytes + kHashBytes && bytes.starts_with(kMagic)) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("calibration: ", bytes.size(),
                                          " bytes that do not begin like a bundle, want at least ",
                                          kHeaderBytes + kHashBytes));
}

// Size, hash, version and model: what can be said before the table is read.
absl::Status CheckEnvelope(std::string_view bytes, const Digest& fingerprint) {
  KVSTOW_RETURN_IF_ERROR(CheckBeginning(bytes));
  const auto size = static_cast<int64_t>(bytes.size());
  if (const auto version = ReadAt<uint32_t>(bytes, 8); version != kVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("calibration: version ", version, ", this build reads ", kVersion));
  }
  if (const auto whole = ReadAt<uint64_t>(bytes, 16); whole != bytes.size()) {
    return absl::DataLossError(
        absl::StrCat("calibration: ", size, " bytes, the bundle has ", whole));
  }
  const Digest hash = Sha256(bytes.substr(0, size - kHashBytes));
  if (hash != DigestAt(bytes, size - kHashBytes)) {
    return absl::DataLossError(absl::StrCat("calibration: its bytes hash to ", hash.ToHex(),
                                            ", the bundle says ",
                                            DigestAt(bytes, size - kHashBytes).ToHex()));
  }
  if (const Digest model = DigestAt(bytes, 32); model != fingerprint) {
    return absl::FailedPreconditionError(absl::StrCat("calibration of model ", model.ToHex(),
                                                      ", want one of ", fingerprint.ToHex()));
  }
  return absl::OkStatus();
}

struct TableEntry {
  RotationPlace place;
  int32_t dim = 0;
  int64_t offset = 0;
};

absl::StatusOr<TableEntry> ReadEntry(std::string_view bytes, int64_t at) {
  TableEntry entry;
  entry.place.layer_idx = ReadAt<int32_t>(bytes, at);
  entry.place.head_idx = ReadAt<int32_t>(bytes, at + 4);
  const auto role = ReadAt<uint8_t>(bytes, at + 8);
  const auto kind = ReadAt<uint8_t>(bytes, at + 9);
  entry.dim = ReadAt<int32_t>(bytes, at + 12);
  entry.offset = ReadAt<int64_t>(bytes, at + 16);
  if (role > 1) return BadBundle(absl::StrCat("role ", role, ", want 0 (keys) or 1 (values)"));
  entry.place.role = static_cast<Role>(role);
  if (kind != kDenseKind) {
    return BadBundle(
        absl::StrCat(NameOf(entry.place), ": rotation kind ", kind, ", want ", kDenseKind));
  }
  if (ReadAt<uint16_t>(bytes, at + 10) != 0 || ReadAt<uint64_t>(bytes, at + 24) != 0) {
    return BadBundle(absl::StrCat(NameOf(entry.place), ": reserved bytes are not zero"));
  }
  if (entry.dim < Rotation::kMinDim || entry.dim > Rotation::kMaxDim) {
    return BadBundle(absl::StrCat(NameOf(entry.place), ": dim is ", entry.dim, ", want ",
                                  Rotation::kMinDim, " to ", Rotation::kMaxDim));
  }
  return entry;
}

absl::StatusOr<Rotation> ReadMatrix(std::string_view bytes, const TableEntry& entry) {
  const int64_t count = int64_t{entry.dim} * entry.dim;
  const auto room = static_cast<int64_t>(bytes.size()) - kHashBytes;
  if (entry.offset < 0 || entry.offset % kMatrixAlignment != 0 || entry.offset > room ||
      2 * count > room - entry.offset) {
    return BadBundle(absl::StrCat(NameOf(entry.place), ": a matrix of dim ", entry.dim, " at ",
                                  entry.offset, " of ", bytes.size(), " bytes"));
  }
  std::vector<int16_t> matrix(count);
  std::memcpy(matrix.data(), bytes.data() + entry.offset, 2 * count);
  absl::StatusOr<Rotation> rotation = Rotation::Create(entry.dim, matrix);
  if (rotation.ok()) return rotation;
  return BadBundle(absl::StrCat(NameOf(entry.place), ": ", rotation.status().message()));
}

}  // namespace

absl::StatusOr<Calibration> Calibration::Create(const Digest& fingerprint, const Digest& source,
                                                std::vector<Entry> entries) {
  if (entries.empty() || entries.size() > static_cast<size_t>(kMaxRotations)) {
    return BadBundle(absl::StrCat(entries.size(), " rotations, want 1 to ", kMaxRotations));
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.place < b.place; });
  for (size_t i = 0; i < entries.size(); ++i) {
    const RotationPlace& place = entries[i].place;
    if (place.layer_idx < 0 || place.head_idx < 0) {
      return BadBundle(absl::StrCat(NameOf(place), ": an index is negative"));
    }
    if (i > 0 && entries[i - 1].place == place) {
      return BadBundle(absl::StrCat(NameOf(place), " is given twice"));
    }
  }
  Calibration calibration;
  calibration.fingerprint_ = fingerprint;
  calibration.source_ = source;
  calibration.entries_ = std::move(entries);
  const std::string bytes = calibration.Serialize();
  calibration.id_ = DigestAt(bytes, static_cast<int64_t>(bytes.size()) - kHashBytes);
  return calibration;
}

absl::StatusOr<Calibration> Calibration::Parse(std::string_view bytes, const Digest& fingerprint) {
  KVSTOW_RETURN_IF_ERROR(CheckEnvelope(bytes, fingerprint));
  const auto count = ReadAt<uint32_t>(bytes, 12);
  const auto room = static_cast<int64_t>(bytes.size()) - kHeaderBytes - kHashBytes;
  if (count > kMaxRotations || count * kEntryBytes > room) {
    return BadBundle(absl::StrCat(count, " rotations in ", bytes.size(), " bytes"));
  }
  std::vector<Entry> entries;
  entries.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    KVSTOW_ASSIGN_OR_RETURN(const TableEntry entry,
                            ReadEntry(bytes, kHeaderBytes + i * kEntryBytes));
    KVSTOW_ASSIGN_OR_RETURN(Rotation rotation, ReadMatrix(bytes, entry));
    entries.push_back({entry.place, std::move(rotation)});
  }
  KVSTOW_ASSIGN_OR_RETURN(Calibration calibration,
                          Create(fingerprint, DigestAt(bytes, 64), std::move(entries)));
  // One calibration has one bundle: order, offsets and zeros are those that Serialize writes.
  if (calibration.id_ != DigestAt(bytes, static_cast<int64_t>(bytes.size()) - kHashBytes)) {
    return BadBundle("rotations or matrices are not where they belong");
  }
  return calibration;
}

absl::StatusOr<Digest> Calibration::ModelOf(std::string_view bytes) {
  KVSTOW_RETURN_IF_ERROR(CheckBeginning(bytes));
  return DigestAt(bytes, 32);
}

std::string Calibration::Serialize() const {
  const auto count = static_cast<int64_t>(entries_.size());
  int64_t end = kHeaderBytes + count * kEntryBytes;
  std::vector<int64_t> offsets;
  for (const Entry& entry : entries_) {
    offsets.push_back(AlignUp(end, kMatrixAlignment));
    end = offsets.back() + 2 * int64_t{entry.rotation.dim()} * entry.rotation.dim();
  }
  std::string bytes(kMagic);
  Append(bytes, kVersion);
  Append(bytes, static_cast<uint32_t>(count));
  Append(bytes, static_cast<uint64_t>(end + kHashBytes));
  Append(bytes, uint64_t{0});
  bytes.append(fingerprint_.AsStringView());
  bytes.append(source_.AsStringView());
  for (int64_t i = 0; i < count; ++i) {
    Append(bytes, entries_[i].place.layer_idx);
    Append(bytes, entries_[i].place.head_idx);
    Append(bytes, static_cast<uint8_t>(entries_[i].place.role));
    Append(bytes, kDenseKind);
    Append(bytes, uint16_t{0});
    Append(bytes, int32_t{entries_[i].rotation.dim()});
    Append(bytes, offsets[i]);
    Append(bytes, uint64_t{0});
  }
  for (int64_t i = 0; i < count; ++i) {
    bytes.resize(offsets[i]);
    const absl::Span<const int16_t> matrix = entries_[i].rotation.matrix();
    bytes.append(reinterpret_cast<const char*>(matrix.data()), 2 * matrix.size());
  }
  bytes.append(Sha256(bytes).AsStringView());
  return bytes;
}

const Rotation* Calibration::Find(const RotationPlace& place) const {
  const auto found = std::lower_bound(
      entries_.begin(), entries_.end(), place,
      [](const Entry& entry, const RotationPlace& wanted) { return entry.place < wanted; });
  return found != entries_.end() && found->place == place ? &found->rotation : nullptr;
}

absl::Status Calibration::CheckCovers(const BlockLayout& layout) const {
  for (const PlaneInfo& plane : layout.planes()) {
    const RotationPlace place{plane.layer_idx, plane.role, plane.head_idx};
    const Rotation* rotation = Find(place);
    if (rotation != nullptr && rotation->dim() == plane.dim) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "calibration ", id_.ToHex(), ": ", NameOf(place), " has ",
        rotation == nullptr ? "no rotation" : absl::StrCat("a rotation of dim ", rotation->dim()),
        ", want one of dim ", plane.dim));
  }
  return absl::OkStatus();
}

PlaneShape CalibratedShape(const BlockLayout& layout, const PlaneInfo& plane,
                           const Calibration* calibration) {
  PlaneShape shape{.num_tokens = layout.tokens_per_block(),
                   .dim = plane.dim,
                   .role = plane.role,
                   .dtype = layout.dtype()};
  if (calibration != nullptr) {
    shape.rotation = calibration->Find(
        {.layer_idx = plane.layer_idx, .role = plane.role, .head_idx = plane.head_idx});
  }
  return shape;
}

}  // namespace kvstow
