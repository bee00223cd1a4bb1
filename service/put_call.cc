#include "service/put_call.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "kvstow/v1/data.pb.h"
#include "proto/status.h"

namespace kvstow {

PutCall* PutCall::Start(const ServiceParts& parts, const CallDeadline& deadline,
                        grpc::ByteBuffer* response) {
  auto* call = new PutCall(parts, deadline, response);
  absl::StatusOr<Permit> permit = parts.admission->AdmitCall(kCallBytes);
  {
    MutexLock lock(&call->mutex_);
    if (permit.ok()) {
      call->permit_ = *std::move(permit);
    } else {
      call->end_ = permit.status();
      call->reads_are_done_ = true;
    }
  }
  call->Continue(nullptr);
  return call;
}

void PutCall::OnReadDone(bool ok) {
  const absl::Status status = ok ? Accept() : absl::OkStatus();
  {
    MutexLock lock(&mutex_);
    read_is_out_ = false;
    if (!ok || !status.ok()) reads_are_done_ = true;
    if (end_.ok()) end_ = status;
  }
  Continue(nullptr);
}

absl::Status PutCall::Accept() {
  Frame frame;
  const absl::Status parsed = ParseFrame(buffer_, frame.header, frame.payload);
  buffer_.Clear();
  KVSTOW_RETURN_IF_ERROR(parsed);
  KVSTOW_RETURN_IF_ERROR(FindPayload(frame));
  const int64_t bytes = frame.payload_bytes;
  {
    MutexLock lock(&mutex_);
    KVSTOW_ASSIGN_OR_RETURN(frame.ticket_idx, FindOrAddTicket(frame.header.ticket));
    ++frames_in_work_;
    bytes_in_work_ += bytes;
  }
  const size_t idx = frame.ticket_idx;
  const absl::Status submitted =
      parts_.workers->Submit([this, frame = std::move(frame)]() { Work(frame); });
  if (!submitted.ok()) {
    RecordFault(idx, submitted);
    MutexLock lock(&mutex_);
    --frames_in_work_;
    bytes_in_work_ -= bytes;
  }
  return absl::OkStatus();
}

absl::Status PutCall::FindPayload(Frame& frame) const {
  const PutFrameHeader& header = frame.header;
  frame.payload_bytes = frame.payload.size();
  if (header.channel == 0) {
    if (header.unit_offset.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError("frame: unit_offset without a channel");
  }
  if (frame.payload.size() > 0) {
    return absl::InvalidArgumentError("frame: a channel and a payload, want one of them");
  }
  if (header.window_bytes > static_cast<uint64_t>(kMaxFrameBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("frame: window_bytes ", header.window_bytes,
                                                   ", want at most ", kMaxFrameBytes));
  }
  frame.payload_bytes = static_cast<int64_t>(header.window_bytes);
  KVSTOW_ASSIGN_OR_RETURN(frame.channel, parts_.channels->Find(header.channel));
  return absl::OkStatus();
}

absl::StatusOr<size_t> PutCall::FindOrAddTicket(TicketId ticket) {
  const auto [entry, is_new] = ticket_idx_.try_emplace(ticket, tickets_.size());
  if (!is_new) return entry->second;
  if (static_cast<int64_t>(tickets_.size()) >= kMaxTickets) {
    return absl::InvalidArgumentError(
        absl::StrCat("more than ", kMaxTickets, " tickets in one call"));
  }
  tickets_.push_back({.ticket = ticket});
  return entry->second;
}

void PutCall::Work(const Frame& frame) {
  const std::shared_ptr<const TicketPlan> plan = PlanOf(frame.ticket_idx);
  if (plan != nullptr) {
    const absl::Status status = Write(frame, *plan);
    if (!status.ok()) RecordFault(frame.ticket_idx, status);
  }
  Continue(&frame);
}

absl::Status PutCall::Write(const Frame& frame, const TicketPlan& plan) {
  TransferCounters& counters = parts_.metrics->transfer();
  const PutFrameHeader& header = frame.header;
  FrameUnits from{.payload = frame.payload};
  uint64_t bytes_left = header.window_bytes;
  const auto load = [&](uint64_t offset, uint64_t bytes) -> absl::StatusOr<FramePayload> {
    if (bytes > bytes_left) {
      return absl::InvalidArgumentError(
          absl::StrCat("frame: window_bytes ", header.window_bytes, ", its units are larger"));
    }
    bytes_left -= bytes;
    const absl::Duration left = deadline_.Left();
    if (left <= absl::ZeroDuration()) return absl::DeadlineExceededError("the call is over");
    counters.put_channel_bytes.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    return frame.channel->Load(offset, bytes, left);
  };
  if (!header.unit_offset.empty()) {
    from.load = load;
  } else if (frame.channel != nullptr) {
    KVSTOW_ASSIGN_OR_RETURN(from.payload, load(header.window_offset, header.window_bytes));
  }
  const WriteOutcome outcome = WriteFrame(*parts_.store, plan, header, from, counters);
  MutexLock lock(&mutex_);
  tickets_[frame.ticket_idx].num_units += outcome.num_units;
  return outcome.fault;
}

std::shared_ptr<const TicketPlan> PutCall::PlanOf(size_t ticket_idx) {
  TicketId ticket = 0;
  {
    MutexLock lock(&mutex_);
    const TicketState& state = tickets_[ticket_idx];
    if (state.plan != nullptr) return state.plan;
    ticket = state.ticket;
  }
  absl::StatusOr<TicketPlan> found = FindTicketPlan(parts_, ticket);
  if (!found.ok()) {
    RecordFault(ticket_idx, found.status());
    return nullptr;
  }
  auto plan = std::make_shared<const TicketPlan>(*std::move(found));
  MutexLock lock(&mutex_);
  tickets_[ticket_idx].plan = plan;
  return plan;
}

void PutCall::RecordFault(size_t ticket_idx, const absl::Status& fault) {
  MutexLock lock(&mutex_);
  absl::Status& first = tickets_[ticket_idx].fault;
  if (first.ok()) first = WithRetryHint(fault);
}

void PutCall::Continue(const Frame* finished) {
  bool may_read = false;
  {
    // One critical section: once no frame is in work and that is seen, another thread may finish
    // the call, and with that delete it.
    MutexLock lock(&mutex_);
    if (finished != nullptr) {
      --frames_in_work_;
      bytes_in_work_ -= finished->payload_bytes;
    }
    if (read_is_out_) return;
    if (reads_are_done_) {
      if (frames_in_work_ > 0) return;
    } else {
      may_read = frames_in_work_ < kFramesInWork && bytes_in_work_ < kMaxFrameBytes;
      if (!may_read) return;
    }
    // A second thread that comes here while this one reads or finishes stops at the first line.
    read_is_out_ = true;
  }
  if (may_read) {
    StartRead(&buffer_);
  } else {
    FinishCall();
  }
}

void PutCall::FinishCall() {
  absl::Status end;
  v1::PutResponse response;
  {
    MutexLock lock(&mutex_);
    end = end_;
    for (const TicketState& state : tickets_) {
      v1::PutResult* result = response.add_results();
      result->set_ticket(state.ticket);
      *result->mutable_status() = ToItemStatus(state.fault);
      result->set_num_units(state.num_units);
    }
  }
  if (end.ok()) {
    const grpc::Slice slice(response.SerializeAsString());
    *response_ = grpc::ByteBuffer(&slice, 1);
  }
  timer_.Done(end.code());
  permit_ = Permit();
  Finish(ToGrpcStatus(end));
}

}  // namespace kvstow
