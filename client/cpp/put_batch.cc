#include "client/cpp/put_batch.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/raw_stream.h"
#include "kernels/core/check.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"
#include "kernels/layout/planes.h"
#include "kvstow/v1/data.pb.h"
#include "proto/convert.h"
#include "proto/status.h"

namespace kvstow {
namespace {

constexpr char kPutMethod[] = "/kvstow.v1.Data/Put";
// Room for the header of a frame of kMaxUnitsPerFrame units: 8 bytes of checksum, at most 4 of
// length and 2 of codec each, stay below kMaxFrameHeaderBytes.
constexpr int32_t kMaxUnitsPerFrame = 4000;
constexpr int64_t kMaxPayloadBytes = kMaxFrameBytes - kMaxFrameHeaderBytes;
// Nobody waits for an Abort's answer longer than this: the ticket's deadline does the same.
constexpr absl::Duration kAbortTimeout = absl::Seconds(1);

// What ended a call between the two ends rather than by the service's decision.
bool IsDropped(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsInternal(status) || absl::IsCancelled(status);
}

bool IsNoAnswer(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

}  // namespace

PutBatch::~PutBatch() {
  if (is_unreachable_) return;
  std::vector<uint64_t> ids;
  for (const Ticket& ticket : tickets_) ids.push_back(ticket.id);
  Abort(ids);
}

absl::Duration PutBatch::Left(absl::Time deadline) const {
  return std::max(deadline - plan_.client->connection->clock().Now(), absl::ZeroDuration());
}

absl::Status PutBatch::Reserve(absl::Span<const int32_t> block_idxs, absl::Time deadline) {
  while (!block_idxs.empty()) {
    const size_t count = std::min<size_t>(block_idxs.size(), kMaxBlocksPerReserve);
    KVSTOW_RETURN_IF_ERROR(ReserveSome(block_idxs.subspan(0, count), deadline));
    block_idxs.remove_prefix(count);
  }
  return absl::OkStatus();
}

absl::Status PutBatch::ReserveSome(absl::Span<const int32_t> block_idxs, absl::Time deadline) {
  Connection& connection = *plan_.client->connection;
  v1::ReserveRequest request;
  request.set_fingerprint(std::string(plan_.model.fingerprint.AsStringView()));
  request.set_form(plan_.compress_at == CompressAt::kWorker ? v1::FORM_ENCODED : v1::FORM_ROWS);
  for (const int32_t block_idx : block_idxs) {
    v1::ReserveBlock* block = request.add_blocks();
    block->set_key(std::string(plan_.keys[block_idx].AsStringView()));
    block->set_codec(CodecPairName(plan_.CodecsOf(block_idx)));
  }
  v1::ReserveResponse response;
  const absl::Duration timeout = std::min(connection.options().control_timeout, Left(deadline));
  KVSTOW_RETURN_IF_ERROR(connection.Call(timeout, [&](grpc::ClientContext* context) {
    return connection.control().Reserve(context, request, &response);
  }));
  if (response.results_size() != static_cast<int>(block_idxs.size())) {
    return absl::InternalError(absl::StrCat("reserve: ", response.results_size(), " answers for ",
                                            block_idxs.size(), " blocks"));
  }
  for (size_t i = 0; i < block_idxs.size(); ++i) {
    const v1::ReserveResult& result = response.results(static_cast<int>(i));
    const absl::Status status = FromItemStatus(result.status());
    if (status.ok()) {
      tickets_.push_back({.block_idx = block_idxs[i], .id = result.ticket()});
    } else {
      outcomes_.push_back({.block_idx = block_idxs[i], .status = status});
    }
  }
  return absl::OkStatus();
}

int64_t PutBatch::PlannedBytes(int32_t block_idx, const PlaneInfo& plane) const {
  if (plan_.compress_at == CompressAt::kService) return plane.row_bytes;
  const PlaneShape shape = ShapeOf(*plan_.model.layout, plane);
  const CodecId codec = EffectiveCodec(plan_.CodecsOf(block_idx).of(plane.role), shape);
  return FindCodec(codec)->plane_bytes(shape);
}

// Aligned, and enough where the plane cannot be encoded.
int64_t PutBatch::UnitBytesMax(int32_t block_idx, const PlaneInfo& plane) const {
  return AlignPayload(std::max(plane.row_bytes, PlannedBytes(block_idx, plane)));
}

// Frames of about kTargetPayloadBytes each, none of them small where they could be even.
std::vector<PutBatch::FrameRange> PutBatch::PlanFrames(size_t ticket_idx,
                                                       const RowsOfLayers& rows) const {
  const BlockLayout& layout = *plan_.model.layout;
  const int32_t block_idx = tickets_[ticket_idx].block_idx;
  const int32_t first = layout.first_plane_of_layer(rows.first_layer);
  const int32_t last_layer = rows.first_layer + static_cast<int32_t>(rows.rows.size()) - 1;
  const int32_t end =
      layout.first_plane_of_layer(last_layer) + layout.num_planes_of_layer(last_layer);
  int64_t all_bytes = 0;
  for (int32_t i = first; i < end; ++i) all_bytes += PlannedBytes(block_idx, layout.plane(i));
  const int64_t num_frames =
      std::max<int64_t>(1, (all_bytes + kTargetPayloadBytes / 2) / kTargetPayloadBytes);
  const int64_t target_bytes = (all_bytes + num_frames - 1) / num_frames;

  std::vector<FrameRange> frames;
  FrameRange frame{.ticket_idx = ticket_idx, .first_plane = first};
  int64_t planned_bytes = 0;
  int64_t largest_bytes = 0;
  for (int32_t i = first; i < end; ++i) {
    const PlaneInfo& plane = layout.plane(i);
    const int64_t plane_max = UnitBytesMax(block_idx, plane);
    if (frame.num_planes > 0 &&
        (planned_bytes >= target_bytes || largest_bytes + plane_max > kMaxPayloadBytes ||
         frame.num_planes == kMaxUnitsPerFrame)) {
      frames.push_back(frame);
      frame = {.ticket_idx = ticket_idx, .first_plane = i};
      planned_bytes = largest_bytes = 0;
    }
    ++frame.num_planes;
    planned_bytes += PlannedBytes(block_idx, plane);
    largest_bytes += plane_max;
  }
  frames.push_back(frame);
  return frames;
}

// Reads the rows of one plane once: gathered, or encoded from cache.
PutBatch::Unit PutBatch::WriteUnit(int32_t block_idx, int32_t plane_idx, const RowsView& rows,
                                   std::byte* out) {
  const BlockLayout& layout = *plan_.model.layout;
  const PlaneInfo& plane = layout.plane(plane_idx);
  const PlaneShape shape = ShapeOf(layout, plane);
  const int64_t first_token = int64_t{block_idx} * layout.tokens_per_block();
  CodecId codec = CodecId::kRaw;
  if (plan_.compress_at == CompressAt::kWorker) {
    codec = EffectiveCodec(plan_.CodecsOf(block_idx).of(plane.role), shape);
  }
  if (codec == CodecId::kRaw) {
    GatherPlane(layout, plane_idx, rows, first_token, out);
    return {.codec = CodecId::kRaw, .bytes = plane.row_bytes};
  }
  scratch_.resize(std::max<size_t>(scratch_.size(), plane.row_bytes));
  GatherPlane(layout, plane_idx, rows, first_token, scratch_.data());
  const Codec& encoder = *FindCodec(codec);
  if (BestBackend(encoder).encode(shape, scratch_.data(), out) == EncodeResult::kKeepRaw) {
    std::memcpy(out, scratch_.data(), plane.row_bytes);
    return {.codec = CodecId::kRaw, .bytes = plane.row_bytes};
  }
  return {.codec = codec, .bytes = encoder.plane_bytes(shape)};
}

// One pooled buffer, each unit hashed while it is in cache.
grpc::ByteBuffer PutBatch::MakeFrame(const FrameRange& frame, const RowsOfLayers& rows) {
  const BlockLayout& layout = *plan_.model.layout;
  const Ticket& ticket = tickets_[frame.ticket_idx];
  int64_t max_bytes = 0;
  for (int32_t i = 0; i < frame.num_planes; ++i) {
    max_bytes += UnitBytesMax(ticket.block_idx, layout.plane(frame.first_plane + i));
  }
  BufferPool::Buffer buffer = plan_.client->connection->buffers().Take(max_bytes);
  std::byte* const payload = buffer.bytes().data();
  PutFrameHeader header{.ticket = ticket.id,
                        .first_unit = static_cast<uint32_t>(frame.first_plane)};
  int64_t used_bytes = 0;
  for (int32_t i = 0; i < frame.num_planes; ++i) {
    const int32_t plane_idx = frame.first_plane + i;
    const PlaneInfo& plane = layout.plane(plane_idx);
    const RowsView& view = RowsOf(plane, rows.rows[plane.layer_idx - rows.first_layer]);
    const int64_t start = AlignPayload(used_bytes);
    std::memset(payload + used_bytes, 0, start - used_bytes);
    const Unit unit = WriteUnit(ticket.block_idx, plane_idx, view, payload + start);
    header.unit_xxh3.push_back(Xxh3({payload + start, static_cast<size_t>(unit.bytes)}));
    if (plan_.compress_at == CompressAt::kWorker) {
      header.unit_bytes.push_back(static_cast<uint32_t>(unit.bytes));
      header.unit_codec.push_back(static_cast<uint32_t>(unit.codec));
    }
    used_bytes = start + unit.bytes;
  }
  sent_bytes_ += used_bytes;
  std::vector<grpc::Slice> slices;
  slices.push_back(std::move(buffer).ToSlice(used_bytes));
  return BuildFrame(header, std::move(slices));
}

absl::Status PutBatch::Send(const RowsOfLayers& rows, absl::Time deadline) {
  if (tickets_.empty() || rows.rows.empty()) return absl::OkStatus();
  std::vector<FrameRange> frames;
  for (size_t i = 0; i < tickets_.size(); ++i) {
    const std::vector<FrameRange> more = PlanFrames(i, rows);
    frames.insert(frames.end(), more.begin(), more.end());
  }
  KVSTOW_RETURN_IF_ERROR(SendFrames(frames, rows, deadline));
  // A frame that was damaged on its way was dropped by the service: once more, then it is refused.
  std::erase_if(frames, [&](const FrameRange& frame) {
    return !absl::IsDataLoss(tickets_[frame.ticket_idx].status);
  });
  if (!frames.empty()) KVSTOW_RETURN_IF_ERROR(SendFrames(frames, rows, deadline));
  DropFailedTickets();
  return absl::OkStatus();
}

// Planes are idempotent, so a stream that was cut is sent once more as a whole.
absl::Status PutBatch::SendFrames(const std::vector<FrameRange>& frames, const RowsOfLayers& rows,
                                  absl::Time deadline) {
  absl::Status status = TrySendFrames(frames, rows, Left(deadline));
  if (IsDropped(status) && Left(deadline) > absl::ZeroDuration()) {
    status = TrySendFrames(frames, rows, Left(deadline));
  }
  is_unreachable_ = IsNoAnswer(status);
  if (!absl::IsResourceExhausted(status)) return status;
  // The service takes no more calls now: an answer, for each block of this one.
  for (const FrameRange& frame : frames) tickets_[frame.ticket_idx].status = status;
  return absl::OkStatus();
}

absl::Status PutBatch::TrySendFrames(const std::vector<FrameRange>& frames,
                                     const RowsOfLayers& rows, absl::Duration timeout) {
  Connection& connection = *plan_.client->connection;
  KVSTOW_RETURN_IF_ERROR(connection.Allow());
  RawStream stream(connection.NextDataStub(), {.method = kPutMethod, .timeout = timeout});
  for (const FrameRange& frame : frames) {
    if (!stream.Write(MakeFrame(frame, rows))) break;
  }
  stream.WritesDone();
  grpc::ByteBuffer response;
  const bool has_response = stream.Read(response);
  const absl::Status status = connection.WithTarget(stream.Finish(), timeout);
  connection.Record(status, stream.longest_wait());
  KVSTOW_RETURN_IF_ERROR(status);
  if (!has_response) return absl::InternalError("put: the service sent no answer");
  // Who is not named in the answer was not heard.
  for (const FrameRange& frame : frames) {
    tickets_[frame.ticket_idx].status = absl::InternalError("put: the service sent no answer");
  }
  return TakeResults(response);
}

absl::Status PutBatch::TakeResults(const grpc::ByteBuffer& response) {
  v1::PutResponse message;
  KVSTOW_RETURN_IF_ERROR(FromByteBuffer(response, "PutResponse", message));
  std::unordered_map<uint64_t, absl::Status> results;
  for (const v1::PutResult& result : message.results()) {
    results[result.ticket()] = FromItemStatus(result.status());
  }
  for (Ticket& ticket : tickets_) {
    const auto found = results.find(ticket.id);
    if (found != results.end()) ticket.status = found->second;
  }
  return absl::OkStatus();
}

void PutBatch::DropFailedTickets() {
  std::vector<uint64_t> failed;
  for (const Ticket& ticket : tickets_) {
    if (ticket.status.ok()) continue;
    failed.push_back(ticket.id);
    outcomes_.push_back({.block_idx = ticket.block_idx, .status = ticket.status});
  }
  std::erase_if(tickets_, [](const Ticket& ticket) { return !ticket.status.ok(); });
  Abort(failed);
}

absl::Status PutBatch::Seal(absl::Time deadline) {
  for (size_t i = 0; i < tickets_.size(); i += kMaxTicketsPerCall) {
    const size_t count = std::min<size_t>(tickets_.size() - i, kMaxTicketsPerCall);
    KVSTOW_RETURN_IF_ERROR(SealSome(i, count, deadline));
  }
  std::vector<uint64_t> failed;
  for (const Ticket& ticket : tickets_) {
    outcomes_.push_back({.block_idx = ticket.block_idx, .status = ticket.status});
    if (!ticket.status.ok()) failed.push_back(ticket.id);
  }
  tickets_.clear();
  Abort(failed);
  return absl::OkStatus();
}

absl::Status PutBatch::SealSome(size_t first_ticket, size_t num_tickets, absl::Time deadline) {
  Connection& connection = *plan_.client->connection;
  v1::SealRequest request;
  request.set_durable(plan_.durable);
  for (size_t i = 0; i < num_tickets; ++i) request.add_tickets(tickets_[first_ticket + i].id);
  // A durable one waits for the disk.
  const absl::Duration timeout =
      plan_.durable ? Left(deadline)
                    : std::min(connection.options().control_timeout, Left(deadline));
  v1::SealResponse response;
  const absl::Status status = connection.Call(timeout, [&](grpc::ClientContext* context) {
    return connection.control().Seal(context, request, &response);
  });
  is_unreachable_ = IsNoAnswer(status);
  KVSTOW_RETURN_IF_ERROR(status);
  if (response.results_size() != static_cast<int>(num_tickets)) {
    return absl::InternalError(
        absl::StrCat("seal: ", response.results_size(), " answers for ", num_tickets, " tickets"));
  }
  for (size_t i = 0; i < num_tickets; ++i) {
    tickets_[first_ticket + i].status = FromItemStatus(response.results(static_cast<int>(i)));
  }
  return absl::OkStatus();
}

void PutBatch::Abort(absl::Span<const uint64_t> ids) {
  Connection& connection = *plan_.client->connection;
  const absl::Duration timeout = std::min(connection.options().control_timeout, kAbortTimeout);
  while (!ids.empty()) {
    const absl::Span<const uint64_t> some = ids.subspan(0, kMaxTicketsPerCall);
    v1::AbortRequest request;
    request.mutable_tickets()->Assign(some.begin(), some.end());
    v1::AbortResponse response;
    // Best effort: what is not aborted dies by the ticket's own deadline.
    if (!connection
             .Call(timeout,
                   [&](grpc::ClientContext* context) {
                     return connection.control().Abort(context, request, &response);
                   })
             .ok()) {
      return;
    }
    ids.remove_prefix(some.size());
  }
}

}  // namespace kvstow
