#include "service/frame_source.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/codec/codec.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

// Keeps a frame's header below kMaxFrameHeaderBytes: a unit takes 8 bytes of checksum, at most 5 of
// length and 2 of codec.
constexpr uint32_t kMaxUnitsPerFrame = 4000;
constexpr int64_t kMaxUnitBytes = kMaxFrameBytes - kMaxFrameHeaderBytes;

}  // namespace

absl::StatusOr<grpc::ByteBuffer> FrameSource::Next() {
  if (!record_.has_value()) {
    const absl::Status status = OpenBlock();
    if (status.code() == absl::StatusCode::kResourceExhausted) return status;
    if (!window_fault_.ok()) return window_fault_;
    if (!status.ok()) return EndBlock(status.code());
  }
  const bool is_stored_form =
      form_ == v1::FORM_ENCODED || record_->entry(next_unit_).codec == CodecId::kRaw;
  absl::StatusOr<grpc::ByteBuffer> frame = IsPlaced(next_unit_) ? PlacedFrame()
                                           : is_stored_form     ? StoredFrame()
                                                                : DecodedFrame();
  if (!window_fault_.ok()) return window_fault_;
  if (!frame.ok()) return EndBlock(frame.status().code());
  return frame;
}

absl::Status FrameSource::OpenBlock() {
  const BlockKey& key = keys_[block_idx_];
  if (use_ == nullptr) {
    const BlockKey* after = after_.has_value() ? &*after_ : nullptr;
    use_ = parts_.store->Use({.keys = keys_, .after = after, .hints = hints_});
  }
  KVSTOW_ASSIGN_OR_RETURN(BlockRef block, parts_.store->Read(key));
  // A block larger than all that calls may hold counts as that much: it goes out when it is alone.
  const int64_t held_bytes = std::min(static_cast<int64_t>(block.bytes().size()),
                                      parts_.options->limits.bytes_in_flight_max - kCallBytes);
  KVSTOW_ASSIGN_OR_RETURN(Permit permit, parts_.admission->HoldBytes(held_bytes));
  KVSTOW_ASSIGN_OR_RETURN(const RecordView record, RecordView::Parse(block.bytes()));
  if (!record.meta().calibration_id.is_zero()) {
    // Here or at the client: without it the bytes mean nothing.
    calibration_ = parts_.calibrations->Find(record.meta().calibration_id);
    if (calibration_ == nullptr) {
      parts_.calibrations->CountMiss();
      // Gone, so that whoever computes it again can put it.
      parts_.store->Delete(key).IgnoreError();
      return absl::NotFoundError("the block's calibration is not here");
    }
  }
  if (form_ == v1::FORM_ROWS) {
    absl::StatusOr<ModelRef> model = parts_.models->Find(record.meta().fingerprint);
    // Not kNotFound: the block is here, but nobody here knows how to read it.
    if (!model.ok()) return absl::FailedPreconditionError(model.status().message());
    model_ = *std::move(model);
  }
  if (!ranges_.empty() && ranges_.back().end > record.num_units()) {
    return absl::InvalidArgumentError(absl::StrCat("ranges: units up to ", ranges_.back().end,
                                                   " of a block of ", record.num_units()));
  }
  record_ = record;
  is_started_ = false;
  range_idx_ = 0;
  next_unit_ = ranges_.empty() ? 0 : ranges_[0].first;
  num_done_ = 0;
  const bool has_all = ranges_.empty() && !places_.empty();
  if (has_all && places_.size() != record.num_units()) {
    window_fault_ = absl::InvalidArgumentError(absl::StrCat(
        "unit_place: ", places_.size(), " of a block of ", record.num_units(), " units"));
    return window_fault_;
  }
  pin_ = std::make_shared<PinnedBlock>(PinnedBlock{std::move(block), std::move(permit)});
  return form_ == v1::FORM_ROWS ? CheckShape() : absl::OkStatus();
}

absl::Status FrameSource::CheckShape() const {
  const auto num_planes = static_cast<uint32_t>(model_->layout().num_planes());
  if (record_->num_units() != num_planes) {
    return absl::FailedPreconditionError(absl::StrCat("the record has ", record_->num_units(),
                                                      " units, a block of its model ", num_planes));
  }
  for (uint32_t i = 0; i < num_planes; ++i) {
    const UnitEntry& entry = record_->entry(i);
    const auto plane = static_cast<int32_t>(i);
    const Codec* codec = FindCodec(entry.codec);
    const bool is_readable =
        entry.codec == CodecId::kRaw ||
        (codec != nullptr && codec->accepts(model_->shape(plane, calibration_.get())));
    if (!is_readable || entry.length != model_->unit_bytes(plane, entry.codec)) {
      return absl::FailedPreconditionError(
          absl::StrCat("unit ", i, " of the record is no plane of its model"));
    }
  }
  return absl::OkStatus();
}

GetFrameHeader FrameSource::StartHeader() const {
  GetFrameHeader header;
  header.block_idx = static_cast<uint32_t>(block_idx_);
  header.first_unit = next_unit_;
  if (!is_started_) {
    const RecordMeta& meta = record_->meta();
    header.key = std::string(meta.key.AsStringView());
    header.fingerprint = std::string(meta.fingerprint.AsStringView());
    header.num_units = record_->num_units();
    header.num_tokens = static_cast<uint32_t>(meta.num_tokens);
    if (!meta.calibration_id.is_zero()) {
      header.calibration_id = std::string(meta.calibration_id.AsStringView());
    }
  }
  return header;
}

absl::StatusOr<grpc::ByteBuffer> FrameSource::StoredFrame() {
  GetFrameHeader header = StartHeader();
  const uint64_t begin = record_->entry(next_unit_).offset;
  uint64_t end = begin;
  int64_t unit_bytes = 0;
  for (uint32_t i = next_unit_; i < range_end(); ++i) {
    const UnitEntry& entry = record_->entry(i);
    const uint64_t bytes = entry.offset + entry.length - begin;
    if (i > next_unit_) {
      // Units of a frame stand in the payload as they do in the record: next to each other.
      const bool is_adjacent = entry.offset == static_cast<uint64_t>(AlignUnit(end));
      const bool is_wanted =
          !IsPlaced(i) && (form_ == v1::FORM_ENCODED || entry.codec == CodecId::kRaw);
      if (!is_adjacent || !is_wanted || i - next_unit_ >= kMaxUnitsPerFrame ||
          bytes > static_cast<uint64_t>(kTargetPayloadBytes)) {
        break;
      }
    } else if (entry.length > kMaxUnitBytes) {
      return absl::FailedPreconditionError(absl::StrCat("unit ", i, " is larger than a frame"));
    }
    header.unit_xxh3.push_back(entry.xxh3);
    header.unit_bytes.push_back(entry.length);
    header.unit_codec.push_back(static_cast<uint32_t>(entry.codec));
    end = entry.offset + entry.length;
    unit_bytes += entry.length;
  }
  TransferCounters& counters = parts_.metrics->transfer();
  (form_ == v1::FORM_ENCODED ? counters.get_encoded_bytes : counters.get_rows_bytes)
      .fetch_add(unit_bytes, std::memory_order_relaxed);
  counters.get_unit_bytes.fetch_add(unit_bytes, std::memory_order_relaxed);
  return Finish(std::move(header), pin_, record_->bytes().subspan(begin, end - begin));
}

// Raw units straight to where the reader wants them, each by itself.
absl::StatusOr<grpc::ByteBuffer> FrameSource::PlacedFrame() {
  GetFrameHeader header = StartHeader();
  header.is_placed = true;
  uint64_t bytes = 0;
  for (uint32_t i = next_unit_; i < range_end() && IsPlaced(i); ++i) {
    const UnitEntry& entry = record_->entry(i);
    const size_t num_units = header.unit_xxh3.size();
    if (num_units == kMaxUnitsPerFrame || bytes >= static_cast<uint64_t>(kTargetPayloadBytes)) {
      break;
    }
    const uint64_t place = places_[num_done_ + num_units] + block_idx_ * uint64_t{entry.length};
    window_fault_ = window_.channel->Store(place, record_->unit(i), pin_, deadline_.Left());
    KVSTOW_RETURN_IF_ERROR(window_fault_);
    header.unit_xxh3.push_back(entry.xxh3);
    header.unit_bytes.push_back(entry.length);
    header.unit_codec.push_back(static_cast<uint32_t>(entry.codec));
    bytes += entry.length;
  }
  TransferCounters& counters = parts_.metrics->transfer();
  for (auto* const counter :
       {&counters.get_channel_bytes, &counters.get_unit_bytes,
        form_ == v1::FORM_ENCODED ? &counters.get_encoded_bytes : &counters.get_rows_bytes}) {
    counter->fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }
  Advance(static_cast<uint32_t>(header.unit_xxh3.size()));
  return BuildFrame(header, {});
}

absl::StatusOr<grpc::ByteBuffer> FrameSource::DecodedFrame() {
  GetFrameHeader header = StartHeader();
  // How many units: those that are encoded, up to the target.
  uint32_t last = next_unit_;
  int64_t payload_bytes = 0;
  for (; last < range_end() && last - next_unit_ < kMaxUnitsPerFrame; ++last) {
    if (record_->entry(last).codec == CodecId::kRaw) break;
    const int64_t end =
        AlignPayload(payload_bytes) + model_->layout().plane(static_cast<int32_t>(last)).row_bytes;
    if (last > next_unit_ && end > kTargetPayloadBytes) break;
    payload_bytes = end;
  }
  const auto bytes = static_cast<size_t>(payload_bytes);
  std::shared_ptr<std::byte[]> rows(new std::byte[bytes]);
  int64_t end = 0;
  int64_t unit_bytes = 0;
  for (uint32_t i = next_unit_; i < last; ++i) {
    const UnitEntry& entry = record_->entry(i);
    const absl::Span<const std::byte> unit = record_->unit(i);
    if (Xxh3(unit) != entry.xxh3) return absl::DataLossError("a stored unit has changed");
    const auto plane = static_cast<int32_t>(i);
    const PlaneShape shape = model_->shape(plane, calibration_.get());
    const int64_t offset = AlignPayload(end);
    std::memset(rows.get() + end, 0, static_cast<size_t>(offset - end));
    const absl::Span<std::byte> out(rows.get() + offset,
                                    static_cast<size_t>(model_->layout().plane(plane).row_bytes));
    BestBackend(*FindCodec(entry.codec)).decode(shape, unit.data(), out.data());
    header.unit_xxh3.push_back(Xxh3(out));
    header.unit_bytes.push_back(static_cast<uint32_t>(out.size()));
    header.unit_codec.push_back(static_cast<uint32_t>(CodecId::kRaw));
    end = offset + static_cast<int64_t>(out.size());
    unit_bytes += entry.length;
    parts_.metrics->transfer().get_rows_bytes.fetch_add(static_cast<int64_t>(out.size()),
                                                        std::memory_order_relaxed);
  }
  parts_.metrics->transfer().get_unit_bytes.fetch_add(unit_bytes, std::memory_order_relaxed);
  const absl::Span<const std::byte> payload(rows.get(), bytes);
  return Finish(std::move(header), std::move(rows), payload);
}

absl::Status FrameSource::StoreInWindow(GetFrameHeader& header, std::shared_ptr<const void> owner,
                                        absl::Span<const std::byte> payload) {
  if (payload.size() > window_.bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("window_bytes: the range is full at block ", block_idx_, ": ", window_.bytes,
                     " bytes are left, the next frame has ", payload.size()));
  }
  KVSTOW_RETURN_IF_ERROR(
      window_.channel->Store(window_.offset, payload, std::move(owner), deadline_.Left()));
  header.window_offset = window_.offset;
  header.window_bytes = payload.size();
  const uint64_t taken = std::min<uint64_t>(AlignPayload(payload.size()), window_.bytes);
  window_.offset += taken;
  window_.bytes -= taken;
  parts_.metrics->transfer().get_channel_bytes.fetch_add(payload.size(), std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::StatusOr<grpc::ByteBuffer> FrameSource::Finish(GetFrameHeader header,
                                                     std::shared_ptr<const void> owner,
                                                     absl::Span<const std::byte> payload) {
  std::vector<grpc::Slice> slices;
  // With places the range may be empty: then what is not placed goes in the message.
  if (window_.channel != nullptr && (places_.empty() || window_.bytes > 0)) {
    window_fault_ = StoreInWindow(header, std::move(owner), payload);
    KVSTOW_RETURN_IF_ERROR(window_fault_);
  } else {
    slices.push_back(OwnedSlice(std::move(owner), payload));
  }
  Advance(static_cast<uint32_t>(header.unit_xxh3.size()));
  return BuildFrame(header, std::move(slices));
}

void FrameSource::Advance(uint32_t num_units) {
  is_started_ = true;
  next_unit_ += num_units;
  num_done_ += num_units;
  if (next_unit_ < range_end()) return;
  if (range_idx_ + 1 < ranges_.size()) {
    next_unit_ = ranges_[++range_idx_].first;
    return;
  }
  record_.reset();
  pin_.reset();  // the slices keep it
  model_.reset();
  calibration_.reset();
  ++block_idx_;
}

grpc::ByteBuffer FrameSource::EndBlock(absl::StatusCode code) {
  // Drops and counts the bad copy, so that the next reader gets a miss or another tier's copy. What
  // Verify finds is the same that was found here.
  if (code == absl::StatusCode::kDataLoss) parts_.store->Verify(keys_[block_idx_]).IgnoreError();
  record_.reset();
  pin_.reset();
  model_.reset();
  calibration_.reset();
  GetFrameHeader header;
  header.block_idx = static_cast<uint32_t>(block_idx_++);
  header.code = static_cast<int32_t>(code);
  return BuildFrame(header, {});
}

}  // namespace kvstow
