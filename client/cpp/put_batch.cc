#include "client/cpp/put_batch.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/parallel.h"
#include "client/cpp/raw_stream.h"
#include "kernels/core/status_macros.h"
#include "kvstow/v1/data.pb.h"
#include "proto/convert.h"
#include "proto/status.h"

namespace kvstow {
namespace {

constexpr char kPutMethod[] = "/kvstow.v1.Data/Put";
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
  for (const PutTicket& ticket : tickets_) ids.push_back(ticket.id);
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
  request.set_shared(plan_.is_shared());
  *request.mutable_hints() = HintsToProto(plan_.conversation);
  if (!plan_.calibration_id.is_zero()) {
    request.set_calibration_id(std::string(plan_.calibration_id.AsStringView()));
  }
  int32_t previous = -1;
  for (const int32_t block_idx : block_idxs) {
    v1::ReserveBlock* block = request.add_blocks();
    block->set_key(std::string(plan_.keys[block_idx].AsStringView()));
    block->set_codec(plan_.CodecName(block_idx));
    // Where it is not the one listed before it: which block it stands behind.
    const bool is_next = block != &request.blocks(0) && previous == block_idx - 1;
    if (block_idx > 0 && !is_next) {
      block->set_after(std::string(plan_.keys[block_idx - 1].AsStringView()));
    }
    previous = block_idx;
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
  std::shared_ptr<const CodecPlan> model_plan;
  if (!response.plan().empty()) {
    KVSTOW_ASSIGN_OR_RETURN(CodecPlan parsed, CodecPlan::Parse(response.plan()));
    model_plan = std::make_shared<const CodecPlan>(std::move(parsed));
  }
  for (size_t i = 0; i < block_idxs.size(); ++i) {
    const v1::ReserveResult& result = response.results(static_cast<int>(i));
    const absl::Status status = FromItemStatus(result.status());
    if (status.ok()) {
      tickets_.push_back(
          {.block_idx = block_idxs[i], .id = result.ticket(), .model_plan = model_plan});
    } else {
      outcomes_.push_back({.block_idx = block_idxs[i], .status = status});
    }
  }
  return absl::OkStatus();
}

absl::Status PutBatch::Send(const RowsOfLayers& rows, absl::Time deadline) {
  if (tickets_.empty() || rows.rows.empty()) return absl::OkStatus();
  std::vector<PutFramePlan> frames;
  for (const PutTicket& ticket : tickets_) {
    const std::vector<PutFramePlan> more = PlanPutFrames(plan_, ticket, rows);
    frames.insert(frames.end(), more.begin(), more.end());
  }
  KVSTOW_RETURN_IF_ERROR(SendFrames(frames, rows, deadline));
  // A frame that was damaged on its way was dropped by the service: once more, then it is refused.
  std::erase_if(frames, [&](const PutFramePlan& frame) {
    return !absl::IsDataLoss(statuses_[frame.ticket.id]);
  });
  if (!frames.empty()) KVSTOW_RETURN_IF_ERROR(SendFrames(frames, rows, deadline));
  DropFailedTickets();
  return absl::OkStatus();
}

int PutBatch::NumStreamsOf(absl::Span<const PutFramePlan> frames) const {
  int64_t num_planes = 0;
  for (const PutFramePlan& frame : frames) num_planes += frame.num_planes;
  const BlockLayout& layout = *plan_.model.layout;
  const int64_t bytes = num_planes * layout.block_bytes() / layout.num_planes();
  return NumStreams(static_cast<int64_t>(frames.size()), bytes,
                    plan_.client->connection->options().num_channels);
}

// Over several channels where that pays: each stream carries a stretch of the frames.
absl::Status PutBatch::SendFrames(absl::Span<const PutFramePlan> frames, const RowsOfLayers& rows,
                                  absl::Time deadline) {
  Connection& connection = *plan_.client->connection;
  if (const absl::Status allowed = connection.Allow(); !allowed.ok()) {
    is_unreachable_ = true;
    return allowed;
  }
  const int num_streams = NumStreamsOf(frames);
  const auto frames_of = [&](int i) { return Stretch(frames, i, num_streams); };
  std::vector<StreamResult> results(num_streams);
  RunParallel(num_streams, [&](int i) { results[i] = SendStream(frames_of(i), rows, deadline); });

  absl::Status status;
  absl::Duration longest_wait = absl::ZeroDuration();
  for (const PutFramePlan& frame : frames) statuses_[frame.ticket.id] = absl::OkStatus();
  for (int i = 0; i < num_streams; ++i) {
    StreamResult& result = results[i];
    longest_wait = std::max(longest_wait, result.longest_wait);
    sent_bytes_ += result.sent_bytes;
    for (const PutFramePlan& frame : frames_of(i)) {
      // Who is not named in the answer was not heard.
      const auto answer = result.tickets.try_emplace(
          frame.ticket.id, absl::InternalError("put: the service sent no answer"));
      statuses_[frame.ticket.id].Update(
          absl::IsResourceExhausted(result.status) ? result.status : answer.first->second);
    }
    // The service takes no more calls now: that was an answer, for each block of this one.
    if (!absl::IsResourceExhausted(result.status)) status.Update(result.status);
  }
  connection.Record(status, longest_wait);
  is_unreachable_ = IsNoAnswer(status);
  return status;
}

void PutBatch::StreamResult::Add(const StreamResult& other) {
  status.Update(other.status);
  for (const auto& [ticket, answer] : other.tickets) tickets[ticket].Update(answer);
  longest_wait = std::max(longest_wait, other.longest_wait);
  sent_bytes += other.sent_bytes;
  used_window = used_window || other.used_window;
}

// Planes are idempotent, so a stream that was cut is sent once more as a whole; and one whose
// window failed once more by gRPC, as the window is not used again.
PutBatch::StreamResult PutBatch::SendStream(absl::Span<const PutFramePlan> frames,
                                            const RowsOfLayers& rows, absl::Time deadline) const {
  StreamResult result = TrySendStream(frames, rows, deadline);
  const bool window_failed = result.used_window && !result.status.ok();
  if ((!window_failed && !IsDropped(result.status)) || Left(deadline) <= absl::ZeroDuration()) {
    return result;
  }
  StreamResult again = TrySendStream(frames, rows, deadline);
  again.sent_bytes += result.sent_bytes;
  again.longest_wait = std::max(again.longest_wait, result.longest_wait);
  return again;
}

// One call, or with a window as many as it takes to pass all frames through an area of it.
PutBatch::StreamResult PutBatch::TrySendStream(absl::Span<const PutFramePlan> frames,
                                               const RowsOfLayers& rows,
                                               absl::Time deadline) const {
  StreamResult result;
  if (const auto buffer = BufferOf(plan_, frames, rows); buffer != nullptr) {
    result = SendCall(frames, rows, {.buffer = buffer.get()}, Left(deadline));
    if (!result.status.ok() && !absl::IsResourceExhausted(result.status)) buffer->Abandon();
    return result;
  }
  std::optional<BulkArea> area = plan_.client->windows->Take(kMaxFrameBytes, deadline);
  while (!frames.empty() && result.status.ok()) {
    size_t count = area.has_value() ? 0 : frames.size();
    int64_t bytes = 0;
    while (area.has_value() && count < frames.size()) {
      bytes += MaxPayloadBytes(plan_, frames[count]);
      if (bytes > std::min<int64_t>(area->memory().size(), kBulkCallBytes)) break;
      ++count;
    }
    if (count == 0) {  // a frame larger than an area
      area.reset();
      continue;
    }
    const PutPlace place{.area = area.has_value() ? &*area : nullptr};
    result.Add(SendCall(frames.subspan(0, count), rows, place, Left(deadline)));
    frames.remove_prefix(count);
  }
  if (area.has_value() && !result.status.ok()) area->Abandon();
  return result;
}

PutBatch::StreamResult PutBatch::SendCall(absl::Span<const PutFramePlan> frames,
                                          const RowsOfLayers& rows, const PutPlace& place,
                                          absl::Duration timeout) const {
  Connection& connection = *plan_.client->connection;
  PutFrameMaker maker(plan_, rows, place);
  RawStream stream(connection.NextDataStub(), {.method = kPutMethod, .timeout = timeout});
  for (const PutFramePlan& frame : frames) {
    if (!stream.Write(maker.Make(frame))) break;
  }
  stream.WritesDone();
  grpc::ByteBuffer response;
  const bool has_response = stream.Read(response);
  StreamResult result{.status = connection.WithTarget(stream.Finish(), timeout)};
  result.longest_wait = stream.longest_wait();
  result.sent_bytes = maker.payload_bytes();
  result.used_window = place.has_window();
  if (!result.status.ok() || !has_response) return result;
  v1::PutResponse message;
  result.status = FromByteBuffer(response, "PutResponse", message);
  for (const v1::PutResult& ticket : message.results()) {
    const absl::Status answer = FromItemStatus(ticket.status());
    // The service answered: what it could not reach is the window.
    if (place.has_window() && absl::IsUnavailable(answer)) result.status.Update(answer);
    result.tickets[ticket.ticket()].Update(answer);
  }
  return result;
}

void PutBatch::DropFailedTickets() {
  std::vector<uint64_t> failed;
  std::erase_if(tickets_, [&](const PutTicket& ticket) {
    const absl::Status& status = statuses_[ticket.id];
    if (status.ok()) return false;
    failed.push_back(ticket.id);
    outcomes_.push_back({.block_idx = ticket.block_idx, .status = status});
    return true;
  });
  Abort(failed);
}

absl::Status PutBatch::Seal(absl::Time deadline) {
  const absl::Span<const PutTicket> all = tickets_;
  for (size_t i = 0; i < all.size(); i += kMaxTicketsPerCall) {
    KVSTOW_RETURN_IF_ERROR(SealSome(all.subspan(i, kMaxTicketsPerCall), deadline));
  }
  std::vector<uint64_t> failed;
  for (const PutTicket& ticket : tickets_) {
    const absl::Status& status = statuses_[ticket.id];
    const bool is_shared = plan_.is_shared() && absl::IsFailedPrecondition(status);
    outcomes_.push_back({.block_idx = ticket.block_idx, .status = status, .is_shared = is_shared});
    if (!status.ok()) failed.push_back(ticket.id);
  }
  tickets_.clear();
  Abort(failed);
  return absl::OkStatus();
}

absl::Status PutBatch::SealSome(absl::Span<const PutTicket> tickets, absl::Time deadline) {
  Connection& connection = *plan_.client->connection;
  v1::SealRequest request;
  request.set_durable(plan_.durable);
  for (const PutTicket& ticket : tickets) request.add_tickets(ticket.id);
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
  if (response.results_size() != static_cast<int>(tickets.size())) {
    return absl::InternalError(absl::StrCat("seal: ", response.results_size(), " answers for ",
                                            tickets.size(), " tickets"));
  }
  for (size_t i = 0; i < tickets.size(); ++i) {
    statuses_[tickets[i].id] = FromItemStatus(response.results(static_cast<int>(i)));
  }
  return absl::OkStatus();
}

void PutBatch::Abort(absl::Span<const uint64_t> ids) {
  if (plan_.is_shared()) return;  // others write to them too; they die by their own deadline
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
