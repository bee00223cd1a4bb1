#include "client/cpp/block_receiver.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_state.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"
#include "proto/convert.h"

namespace kvstow {

absl::Status ChecksumDiffers(int32_t plane_idx) {
  return absl::DataLossError(absl::StrCat("unit ", plane_idx, ": its checksum differs"));
}

// Codecs are smaller than the rows or a few bytes larger; those with a calibration are smaller.
int64_t MaxBlockBytes(const BlockLayout& layout, absl::Span<const int32_t> planes) {
  int64_t bytes = 0;
  for (const int32_t plane_idx : planes) {
    const PlaneInfo& plane = layout.plane(plane_idx);
    const PlaneShape shape = CalibratedShape(layout, plane, nullptr);
    int64_t largest = plane.row_bytes;
    for (const Codec& codec : AllCodecs()) {
      if (codec.accepts(shape)) largest = std::max(largest, codec.plane_bytes(shape));
    }
    bytes += AlignPayload(largest);
  }
  return bytes;
}

BlockReceiver::BlockReceiver(const Model& model, CalibrationCache& calibrations,
                             absl::Span<const int32_t> planes, absl::Span<const BlockKey> keys,
                             absl::Span<const int32_t> places)
    : model_(model),
      calibrations_(calibrations),
      planes_(planes),
      keys_(keys),
      places_(places),
      statuses_(keys.size()),
      memory_bytes_(MaxBlockBytes(*model.layout, planes)) {
  memory_.reset(new std::byte[memory_bytes_]);
}

void BlockReceiver::End(absl::StatusCode code, const std::string& why) {
  statuses_[block_idx_] =
      absl::Status(code, absl::StrCat("block ", places_[block_idx_], ": ", why));
  progress_ = Progress::kDone;
}

void BlockReceiver::EndCorrupt(const std::string& why) {
  corrupt_.push_back(keys_[block_idx_]);
  End(absl::StatusCode::kDataLoss, why);
}

absl::StatusOr<const ReceivedBlock*> BlockReceiver::OnFrame(const GetFrameHeader& header,
                                                            const FramePayload& payload) {
  received_bytes_ += payload.size();
  const int64_t block_idx = header.block_idx;
  if (block_idx >= static_cast<int64_t>(keys_.size()) || block_idx < block_idx_) {
    return absl::InternalError(absl::StrCat("get: a frame of block ", block_idx, " after block ",
                                            block_idx_, ", with ", keys_.size(), " asked for"));
  }
  if (block_idx != block_idx_) StartBlock(block_idx);
  if (progress_ == Progress::kDone) return nullptr;  // refused before: the rest of it is no news
  if (header.code != 0) {
    const bool is_known = header.code >= 1 && header.code <= 16;
    End(is_known ? static_cast<absl::StatusCode>(header.code) : absl::StatusCode::kUnknown,
        header.code == static_cast<int>(absl::StatusCode::kNotFound)
            ? "not stored"
            : absl::StrCat("the service answered code ", header.code));
    return nullptr;
  }
  absl::Status status;
  if (progress_ == Progress::kNone) {
    status = CheckFirstFrame(header);
    const absl::Status found = status.ok() ? FindCalibration(header) : absl::OkStatus();
    if (!found.ok()) {  // the block may be sound, but nobody here can read it: a miss
      End(found.code(), std::string(found.message()));
      return nullptr;
    }
  }
  if (status.ok()) status = TakeUnits(header, payload);
  if (!status.ok()) {
    EndCorrupt(std::string(status.message()));
    return nullptr;
  }
  progress_ = Progress::kSome;
  if (block_.units.size() < planes_.size()) return nullptr;
  progress_ = Progress::kDone;
  return &block_;
}

// Ends the block before, where it is not complete.
void BlockReceiver::StartBlock(int64_t block_idx) {
  if (progress_ != Progress::kDone) EndCorrupt("the service sent no end of it");
  for (++block_idx_; block_idx_ < block_idx; ++block_idx_) {
    End(absl::StatusCode::kDataLoss, "the service sent nothing of it");
  }
  ++num_answered_;
  progress_ = Progress::kNone;
  used_bytes_ = 0;
  block_.block_idx = places_[block_idx_];
  block_.units.clear();
  block_.calibration.reset();
  payloads_.clear();
}

absl::Status BlockReceiver::CheckFirstFrame(const GetFrameHeader& header) const {
  if (header.key != keys_[block_idx_].AsStringView()) {
    return absl::DataLossError("its key is another one");
  }
  if (header.fingerprint != model_.fingerprint.AsStringView()) {
    return absl::DataLossError("it belongs to another model");
  }
  const BlockLayout& layout = *model_.layout;
  if (header.num_units != static_cast<uint32_t>(layout.num_planes())) {
    return absl::DataLossError(
        absl::StrCat(header.num_units, " units, want ", layout.num_planes()));
  }
  if (header.num_tokens != static_cast<uint32_t>(layout.tokens_per_block())) {
    return absl::DataLossError(
        absl::StrCat(header.num_tokens, " tokens, want ", layout.tokens_per_block()));
  }
  return absl::OkStatus();
}

absl::Status BlockReceiver::FindCalibration(const GetFrameHeader& header) {
  if (header.calibration_id.empty()) return absl::OkStatus();
  KVSTOW_ASSIGN_OR_RETURN(const Digest id,
                          Digest::FromBytes(header.calibration_id, "calibration_id"));
  KVSTOW_ASSIGN_OR_RETURN(block_.calibration, calibrations_.Find(model_, id));
  return absl::OkStatus();
}

absl::StatusOr<CodecId> BlockReceiver::CheckUnit(int32_t plane_idx, uint32_t codec,
                                                 uint32_t unit_bytes) const {
  KVSTOW_ASSIGN_OR_RETURN(const CodecId id, CodecIdFromWire(codec));
  const PlaneInfo& plane = model_.layout->plane(plane_idx);
  const PlaneShape shape = CalibratedShape(*model_.layout, plane, block_.calibration.get());
  int64_t want_bytes = plane.row_bytes;
  if (id != CodecId::kRaw) {
    const Codec& known = *FindCodec(id);
    if (!known.accepts(shape)) {
      return absl::DataLossError(absl::StrCat("unit ", plane_idx, ": codec ",
                                              std::string(known.name), " does not fit the plane"));
    }
    want_bytes = known.plane_bytes(shape);
  }
  if (unit_bytes != want_bytes) {
    return absl::DataLossError(
        absl::StrCat("unit ", plane_idx, ": ", unit_bytes, " bytes, want ", want_bytes));
  }
  return id;
}

absl::Status BlockReceiver::TakeUnits(const GetFrameHeader& header, const FramePayload& frame) {
  const size_t num_units = header.unit_xxh3.size();
  const absl::Span<const int32_t> missing = planes_.subspan(block_.units.size());
  const auto first_unit = static_cast<uint32_t>(missing[0]);
  if (header.first_unit != first_unit) {
    return absl::DataLossError(
        absl::StrCat("unit ", header.first_unit, " came, want unit ", first_unit));
  }
  // Units of a frame follow each other, also where those that were asked for do not.
  if (num_units == 0 || header.unit_bytes.size() != num_units ||
      header.unit_codec.size() != num_units || num_units > missing.size() ||
      missing[num_units - 1] - missing[0] != static_cast<int32_t>(num_units) - 1) {
    return absl::DataLossError(
        absl::StrCat("a frame of ", num_units, " checksums, ", header.unit_bytes.size(),
                     " lengths and ", header.unit_codec.size(), " codecs at unit ", first_unit));
  }
  if (header.is_placed) return TakePlaced(header);
  const FramePayload& payload = payloads_.emplace_back(frame);
  int64_t at = 0;  // in the payload
  for (size_t i = 0; i < num_units; ++i) {
    const int32_t plane_idx = static_cast<int32_t>(first_unit + i);
    const int64_t unit_bytes = header.unit_bytes[i];
    KVSTOW_ASSIGN_OR_RETURN(const CodecId codec,
                            CheckUnit(plane_idx, header.unit_codec[i], header.unit_bytes[i]));
    at = AlignPayload(at);
    if (at + unit_bytes > payload.size()) {
      return absl::DataLossError(absl::StrCat("unit ", plane_idx, ": cut short"));
    }
    // In place where it arrived in one piece, as most do: hashed once, read again only to be
    // written.
    absl::Span<const std::byte> unit = payload.Contiguous(at, unit_bytes);
    const bool is_copy = unit.empty() && unit_bytes > 0;
    if (is_copy) {
      const absl::Span<std::byte> copy(memory_.get() + used_bytes_, unit_bytes);
      payload.CopyTo(at, copy);
      used_bytes_ = AlignPayload(used_bytes_ + unit_bytes);
      unit = copy;
    }
    const uint64_t xxh3 = header.unit_xxh3[i];
    const bool is_checked = is_copy || !payload.is_shared();
    if (is_checked && Xxh3(unit) != xxh3) return ChecksumDiffers(plane_idx);
    block_.units.push_back({.codec = codec, .xxh3 = xxh3, .is_checked = is_checked, .bytes = unit});
    at += unit_bytes;
  }
  if (payload.size() > AlignPayload(at)) {
    return absl::DataLossError(
        absl::StrCat(payload.size() - at, " bytes follow the frame's last unit"));
  }
  return absl::OkStatus();
}

// They are where they will be read: checked there.
absl::Status BlockReceiver::TakePlaced(const GetFrameHeader& header) {
  for (size_t i = 0; i < header.unit_xxh3.size(); ++i) {
    const int32_t plane_idx = static_cast<int32_t>(header.first_unit + i);
    const uint64_t xxh3 = header.unit_xxh3[i];
    KVSTOW_ASSIGN_OR_RETURN(const CodecId codec,
                            CheckUnit(plane_idx, header.unit_codec[i], header.unit_bytes[i]));
    if (placed_ == nullptr || codec != CodecId::kRaw) {
      return absl::DataLossError(absl::StrCat("unit ", plane_idx, ": placed, but nowhere"));
    }
    const size_t bytes = header.unit_bytes[i];
    const uint64_t offset = placed_->OffsetOf(block_.units.size(), block_idx_, bytes);
    const absl::Span<const std::byte> unit = placed_->memory.subspan(offset, bytes);
    if (Xxh3(unit) != xxh3) return ChecksumDiffers(plane_idx);
    block_.units.push_back({.codec = codec, .xxh3 = xxh3, .bytes = unit});
    received_bytes_ += static_cast<int64_t>(bytes);
  }
  return absl::OkStatus();
}

void BlockReceiver::OnEnd(const absl::Status& status) {
  num_finished_ = block_idx_ + (progress_ == Progress::kDone ? 1 : 0);
  if (progress_ != Progress::kDone) {
    if (status.ok()) EndCorrupt("the service sent no end of it");
    if (!status.ok()) statuses_[block_idx_] = status;
  }
  for (++block_idx_; block_idx_ < static_cast<int64_t>(keys_.size()); ++block_idx_) {
    if (status.ok()) End(absl::StatusCode::kDataLoss, "the service sent nothing of it");
    if (!status.ok()) statuses_[block_idx_] = status;
  }
}

}  // namespace kvstow
