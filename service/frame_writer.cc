#include "service/frame_writer.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "kernels/codec/codec.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/stream_copy.h"
#include "proto/convert.h"

namespace kvstow {
namespace {

// A unit as it arrived.
struct ArrivedUnit {
  uint32_t unit_idx = 0;
  int64_t offset = 0;  // in the payload
  uint32_t length = 0;
  uint64_t xxh3 = 0;              // that the sender computed
  CodecId codec = CodecId::kRaw;  // of the bytes as sent
};

class FrameWriter {
 public:
  FrameWriter(TieredStore& store, const TicketPlan& plan, const FrameUnits& from,
              TransferCounters& counters)
      : store_(store), plan_(plan), from_(from), payload_(from.payload), counters_(counters) {}

  // The units of the frame, all of them known to fit the block and the payload.
  absl::StatusOr<std::vector<ArrivedUnit>> Check(const PutFrameHeader& header) const;

  // A unit that is somewhere else than in the frame's payload is looked up there from now on.
  absl::Status Find(uint64_t offset, ArrivedUnit& unit);
  // kAlreadyExists: the same bytes are there.
  absl::Status WriteRows(const ArrivedUnit& unit);
  absl::Status WriteEncoded(const ArrivedUnit& unit);

 private:
  absl::Status Fault(absl::StatusCode code, const std::string& text) const {
    return absl::Status(code, absl::StrCat("ticket ", plan_.ticket, ": ", text));
  }
  absl::Status ChecksumFault(const ArrivedUnit& unit, uint64_t found) const {
    counters_.bad_checksums.fetch_add(1, std::memory_order_relaxed);
    return Fault(absl::StatusCode::kDataLoss,
                 absl::StrFormat("unit %u: XXH3 of the bytes is %016x, %016x was sent",
                                 unit.unit_idx, found, unit.xxh3));
  }
  absl::StatusOr<CodecId> CheckEncoded(uint32_t unit_idx, uint32_t bytes, uint32_t codec) const;
  // Bytes of the unit as sent, straight into the store.
  absl::Status Copy(const ArrivedUnit& unit, UnitWriter writer);
  // Before the commit: once a block can be sealed all of its planes have been seen.
  void Observe(const ArrivedUnit& unit, absl::Span<const std::byte> bytes) const {
    if (plan_.watcher == nullptr) return;
    plan_.watcher->Observe(*plan_.model, static_cast<int32_t>(unit.unit_idx), unit.codec, bytes,
                           plan_.calibration.get());
  }
  // The rows of a unit in one piece: in place, or copied into scratch_.
  absl::Span<const std::byte> Rows(const ArrivedUnit& unit);

  TieredStore& store_;
  const TicketPlan& plan_;
  const FrameUnits& from_;
  FramePayload payload_;  // of the frame, or of one unit
  TransferCounters& counters_;
  std::unique_ptr<std::byte[]> scratch_;
  size_t scratch_bytes_ = 0;
};

absl::StatusOr<CodecId> FrameWriter::CheckEncoded(uint32_t unit_idx, uint32_t bytes,
                                                  uint32_t codec_number) const {
  const auto plane = static_cast<int32_t>(unit_idx);
  absl::StatusOr<CodecId> codec = CodecIdFromWire(codec_number);
  if (!codec.ok()) {
    return Fault(absl::StatusCode::kInvalidArgument,
                 absl::StrCat("unit ", unit_idx, ": ", codec.status().message()));
  }
  const CodecId reserved =
      plan_.model->codec_of(plane, plan_.CodecsOf(plane), plan_.calibration.get());
  if (*codec != reserved && *codec != CodecId::kRaw) {
    return Fault(absl::StatusCode::kInvalidArgument,
                 absl::StrFormat("unit %u: codec %s, reserved is %s, want that or raw", unit_idx,
                                 std::string(FindCodec(*codec)->name),
                                 std::string(FindCodec(reserved)->name)));
  }
  const uint32_t want = plan_.model->unit_bytes(plane, *codec);
  if (bytes != want) {
    return Fault(absl::StatusCode::kInvalidArgument,
                 absl::StrFormat("unit %u: %u bytes of %s, want %u", unit_idx, bytes,
                                 std::string(FindCodec(*codec)->name), want));
  }
  return *codec;
}

absl::StatusOr<std::vector<ArrivedUnit>> FrameWriter::Check(const PutFrameHeader& header) const {
  const size_t num_units = header.unit_xxh3.size();
  const auto num_planes = static_cast<uint32_t>(plan_.model->layout().num_planes());
  if (num_units == 0) return Fault(absl::StatusCode::kInvalidArgument, "a frame without units");
  if (header.first_unit >= num_planes || num_units > num_planes - header.first_unit) {
    return Fault(absl::StatusCode::kInvalidArgument,
                 absl::StrCat("units ", header.first_unit, " to ",
                              uint64_t{header.first_unit} + num_units - 1, " of a block of ",
                              num_planes, " units"));
  }
  const bool is_encoded = !header.unit_bytes.empty();
  std::vector<ArrivedUnit> units(num_units);
  int64_t end = 0;
  for (size_t i = 0; i < num_units; ++i) {
    ArrivedUnit& unit = units[i];
    unit.unit_idx = header.first_unit + static_cast<uint32_t>(i);
    unit.offset = AlignPayload(end);
    unit.xxh3 = header.unit_xxh3[i];
    if (is_encoded) {
      unit.length = header.unit_bytes[i];
      KVSTOW_ASSIGN_OR_RETURN(unit.codec,
                              CheckEncoded(unit.unit_idx, unit.length, header.unit_codec[i]));
    } else {
      unit.length = plan_.model->unit_bytes(static_cast<int32_t>(unit.unit_idx), CodecId::kRaw);
    }
    end = unit.offset + unit.length;
  }
  const bool is_one_piece = header.unit_offset.empty();
  if (is_one_piece && payload_.size() != end && payload_.size() != AlignPayload(end)) {
    return Fault(absl::StatusCode::kInvalidArgument,
                 absl::StrCat("units ", header.first_unit, " to ", units.back().unit_idx, " take ",
                              end, " bytes, the payload has ", payload_.size()));
  }
  return units;
}

absl::Status FrameWriter::Find(uint64_t offset, ArrivedUnit& unit) {
  KVSTOW_ASSIGN_OR_RETURN(payload_, from_.load(offset, unit.length));
  unit.offset = 0;
  return absl::OkStatus();
}

absl::Span<const std::byte> FrameWriter::Rows(const ArrivedUnit& unit) {
  const absl::Span<const std::byte> in_place = payload_.Contiguous(unit.offset, unit.length);
  // What another process may change between the check and the encoder is copied first.
  if (!in_place.empty() && !payload_.is_shared()) return in_place;
  if (scratch_bytes_ < unit.length) {
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(unit.length);
    scratch_bytes_ = unit.length;
  }
  const absl::Span<std::byte> copy(scratch_.get(), unit.length);
  payload_.CopyTo(unit.offset, copy);
  return copy;
}

absl::Status FrameWriter::Copy(const ArrivedUnit& unit, UnitWriter writer) {
  // What is checked is what will be kept.
  const absl::Span<std::byte> out = writer.Buffer(unit.length);
  const absl::Span<const std::byte> in_place = payload_.Contiguous(unit.offset, unit.length);
  uint64_t found = 0;
  if (in_place.empty()) {
    payload_.CopyTo(unit.offset, out);
    found = Xxh3(out);
  } else {
    found = CopyHashed(in_place, out.data());
  }
  if (found != unit.xxh3) return ChecksumFault(unit, found);
  Observe(unit, out);
  KVSTOW_RETURN_IF_ERROR(writer.Commit(unit.codec, found));
  counters_.put_unit_bytes.fetch_add(unit.length, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status FrameWriter::WriteEncoded(const ArrivedUnit& unit) {
  KVSTOW_ASSIGN_OR_RETURN(UnitWriter writer,
                          store_.BeginUnit(plan_.ticket, unit.unit_idx, unit.xxh3));
  KVSTOW_RETURN_IF_ERROR(Copy(unit, std::move(writer)));
  counters_.put_encoded_bytes.fetch_add(unit.length, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status FrameWriter::WriteRows(const ArrivedUnit& unit) {
  const auto plane = static_cast<int32_t>(unit.unit_idx);
  KVSTOW_ASSIGN_OR_RETURN(UnitWriter writer,
                          store_.BeginUnit(plan_.ticket, unit.unit_idx, unit.xxh3));
  const Calibration* calibration = plan_.calibration.get();
  const CodecId codec_id = plan_.model->codec_of(plane, plan_.CodecsOf(plane), calibration);
  if (codec_id == CodecId::kRaw) {
    KVSTOW_RETURN_IF_ERROR(Copy(unit, std::move(writer)));
  } else {
    const absl::Span<const std::byte> rows = Rows(unit);
    const uint64_t found = Xxh3(rows);
    if (found != unit.xxh3) return ChecksumFault(unit, found);
    Observe(unit, rows);
    const absl::Span<std::byte> out = writer.Buffer(plan_.model->unit_bytes(plane, codec_id));
    const CodecBackend& backend = BestBackend(*FindCodec(codec_id));
    if (backend.encode(plan_.model->shape(plane, calibration), rows.data(), out.data()) ==
        EncodeResult::kKeepRaw) {
      counters_.raw_fallback_planes.fetch_add(1, std::memory_order_relaxed);
      KVSTOW_RETURN_IF_ERROR(Copy(unit, std::move(writer)));
    } else {
      KVSTOW_RETURN_IF_ERROR(writer.Commit(codec_id, Xxh3(out)));
      counters_.put_unit_bytes.fetch_add(static_cast<int64_t>(out.size()),
                                         std::memory_order_relaxed);
    }
  }
  counters_.put_rows_bytes.fetch_add(unit.length, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TicketPlan> FindTicketPlan(const ServiceParts& parts, TicketId ticket) {
  TicketPlan plan = {.ticket = ticket};
  KVSTOW_ASSIGN_OR_RETURN(plan.meta, parts.store->TicketMeta(ticket));
  const Digest& fingerprint = plan.meta.fingerprint;
  KVSTOW_ASSIGN_OR_RETURN(plan.model, parts.models->Find(fingerprint));
  KVSTOW_ASSIGN_OR_RETURN(plan.layers, parts.plans->Find(fingerprint, plan.meta.plan_id));
  if (parts.plans->IsWatching(fingerprint)) plan.watcher = parts.plans;
  if (plan.meta.calibration_id.is_zero()) return plan;
  KVSTOW_ASSIGN_OR_RETURN(plan.calibration,
                          parts.calibrations->Choose(fingerprint, plan.meta.calibration_id));
  return plan;
}

WriteOutcome WriteFrame(TieredStore& store, const TicketPlan& plan, const PutFrameHeader& header,
                        const FrameUnits& from, TransferCounters& counters) {
  WriteOutcome outcome;
  FrameWriter writer(store, plan, from, counters);
  absl::StatusOr<std::vector<ArrivedUnit>> units = writer.Check(header);
  if (!units.ok()) {
    outcome.fault = units.status();
    return outcome;
  }
  const bool is_encoded = !header.unit_bytes.empty();
  for (size_t i = 0; i < units->size(); ++i) {
    ArrivedUnit& unit = (*units)[i];
    absl::Status status;
    if (!header.unit_offset.empty()) status = writer.Find(header.unit_offset[i], unit);
    if (status.ok()) status = is_encoded ? writer.WriteEncoded(unit) : writer.WriteRows(unit);
    // The same bytes are there: a repeat, which is fine.
    if (!status.ok() && status.code() != absl::StatusCode::kAlreadyExists) {
      outcome.fault = status;
      return outcome;
    }
    ++outcome.num_units;
  }
  return outcome;
}

}  // namespace kvstow
