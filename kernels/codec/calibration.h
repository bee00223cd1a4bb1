// Calibration: what a calibrated codec needs of a model, and the bundle it is kept in.
//
//   KVSTOW_ASSIGN_OR_RETURN(Calibration calibration, Calibration::Parse(bytes, fingerprint));
//   shape.rotation = calibration.Find({.layer_idx = 3, .role = Role::kKey, .head_idx = 0});
//
// One rotation per layer, role and KV head, of all tensor-parallel ranks. The bundle's hash is its
// name: it goes into every record that was encoded with it (RecordMeta::calibration_id).
//
// Bundle, version 1, integers little-endian:
//
//   0   8   magic "KVSTOWC" and a newline
//   8   4   version: 1
//   12  4   number of rotations
//   16  8   bytes of the whole bundle
//   24  8   zero
//   32  32  fingerprint of the ModelSpec
//   64  32  digest of what the rotations were computed from
//   96  32  per rotation: layer (4), head (4), role (1), rotation kind 3 (1), zero (2), dim (4),
//           offset of its matrix (8), zero (8); ascending by layer, role, head
//   ..      matrices, int16, row-major, each at the next multiple of 64; zeros between
//   ..  32  SHA-256 of all bytes before: the calibration's id
//
// Thread safety: immutable.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/rotation.h"
#include "kernels/core/block_layout.h"
#include "kernels/core/digest.h"

namespace kvstow {

struct RotationPlace {
  int32_t layer_idx = 0;
  Role role = Role::kKey;
  int32_t head_idx = 0;  // KV head
  auto operator<=>(const RotationPlace&) const = default;
};

class Calibration {
 public:
  static constexpr int32_t kMaxRotations = 1 << 20;

  struct Entry {
    RotationPlace place;
    Rotation rotation;
  };

  // Any order. kInvalidArgument: none or too many, a negative index, or a place given twice.
  static absl::StatusOr<Calibration> Create(const Digest& fingerprint, const Digest& source,
                                            std::vector<Entry> entries);

  // The inverse of Serialize.
  //   kDataLoss            cut short, longer than it says, or its hash does not fit: get it again
  //   kFailedPrecondition  a version this build does not know, or a bundle of another model
  //   kInvalidArgument     whole, but not a calibration: a matrix that is not orthogonal, ...
  static absl::StatusOr<Calibration> Parse(std::string_view bytes, const Digest& fingerprint);

  std::string Serialize() const;

  const Digest& id() const { return id_; }
  const Digest& fingerprint() const { return fingerprint_; }
  const Digest& source() const { return source_; }
  int32_t num_rotations() const { return static_cast<int32_t>(entries_.size()); }

  const std::vector<Entry>& entries() const { return entries_; }  // ascending by place
  // nullptr where there is none: the plane stays raw.
  const Rotation* Find(const RotationPlace& place) const;

  // The model that a bundle says it is of; nothing else of it is checked. kDataLoss.
  static absl::StatusOr<Digest> ModelOf(std::string_view bytes);

  // kFailedPrecondition names the first plane of `layout` without a rotation of its dim.
  absl::Status CheckCovers(const BlockLayout& layout) const;

 private:
  Calibration() = default;

  Digest id_;
  Digest fingerprint_;
  Digest source_;
  std::vector<Entry> entries_;  // ascending
};

// The shape of a plane with its rotation, which `calibration`'s life bounds. Null: without one.
PlaneShape CalibratedShape(const BlockLayout& layout, const PlaneInfo& plane,
                           const Calibration* calibration);

}  // namespace kvstow
