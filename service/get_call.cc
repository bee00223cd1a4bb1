#include "service/get_call.h"

#include <grpcpp/impl/codegen/proto_utils.h>

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kvstow/v1/data.pb.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "service/turns.h"

namespace kvstow {

GetCall* GetCall::Start(const ServiceParts& parts, const CallDeadline& deadline,
                        const grpc::ByteBuffer& request) {
  auto* call = new GetCall(parts);
  const absl::Status status = call->Open(deadline, request);
  if (!status.ok()) call->End(status);
  if (status.ok() && call->FillFromPeers()) return call;
  call->Continue(/*refill_is_over=*/false);
  return call;
}

// Frames are made when the fetch is over, whatever came of it.
bool GetCall::FillFromPeers() {
  if (missing_.empty()) return false;
  {
    MutexLock lock(&mutex_);
    refill_is_out_ = true;
  }
  const absl::Status submitted = parts_.fetchers->Submit([this] {
    Fill();
    Continue(/*refill_is_over=*/true);
  });
  if (submitted.ok()) return true;
  MutexLock lock(&mutex_);
  refill_is_out_ = false;  // then what is missing is missing
  return false;
}

// An engine may ask before it has put anything, and so before anybody registered its model here:
// the peer that has the blocks knows it.
void GetCall::Fill() {
  absl::StatusOr<ModelRef> model = parts_.models->Find(fingerprint_);
  if (!model.ok()) {
    const std::optional<ModelSpec> spec = parts_.peers->FindModel(fingerprint_);
    if (spec.has_value()) model = parts_.models->Register(*spec);
  }
  if (model.ok())
    parts_.peers->Fill(**model, missing_, {*parts_.store, *parts_.calibrations, *parts_.models});
}

absl::Status GetCall::FindMissing(const v1::GetRequest& request, absl::Span<const BlockKey> keys) {
  if (parts_.peers->empty() || request.local_only() || request.fingerprint().empty()) {
    return absl::OkStatus();
  }
  KVSTOW_ASSIGN_OR_RETURN(fingerprint_, Digest::FromBytes(request.fingerprint(), "fingerprint"));
  const std::vector<Location> locations = parts_.store->Lookup(keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!locations[i].present()) missing_.push_back(keys[i]);
  }
  return absl::OkStatus();
}

namespace {

absl::Status CheckPlaces(const v1::GetRequest& request, absl::Span<const UnitRange> ranges) {
  const auto count = static_cast<uint64_t>(request.unit_place_size());
  if (count == 0) return absl::OkStatus();
  if (request.channel() == 0) return absl::InvalidArgumentError("unit_place: without a channel");
  if (request.place_xxh3() != PlaceXxh3(request)) {
    return absl::DataLossError("place_xxh3 is not that of channel, keys, ranges and unit_place");
  }
  uint64_t num_units = 0;
  for (const UnitRange& range : ranges) num_units += range.end - range.first;
  if (ranges.empty() || count == num_units) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("unit_place: ", count, ", want one for each of ", num_units, " units"));
}

}  // namespace

absl::Status GetCall::Open(const CallDeadline& deadline, const grpc::ByteBuffer& request) {
  grpc::ByteBuffer copy(request);  // shares the bytes; parsing empties the buffer
  v1::GetRequest message;
  if (!grpc::SerializationTraits<v1::GetRequest>::Deserialize(&copy, &message).ok()) {
    return absl::InvalidArgumentError("the request is no GetRequest");
  }
  KVSTOW_ASSIGN_OR_RETURN(std::vector<BlockKey> keys, KeysFromBytes(message.keys(), "keys", 1));
  KVSTOW_ASSIGN_OR_RETURN(const v1::Form form, FormFromProto(message.form(), v1::FORM_ENCODED));
  KVSTOW_ASSIGN_OR_RETURN(const TurnHints hints, ReadHints(message.hints(), 0));
  KVSTOW_ASSIGN_OR_RETURN(std::vector<UnitRange> ranges, UnitRangesFromProto(message.ranges()));
  std::optional<BlockKey> after;
  if (!message.after().empty()) {
    KVSTOW_ASSIGN_OR_RETURN(after, Digest::FromBytes(message.after(), "after"));
  }
  KVSTOW_ASSIGN_OR_RETURN(permit_, parts_.admission->AdmitCall(kCallBytes));
  KVSTOW_RETURN_IF_ERROR(FindMissing(message, keys));
  std::vector<uint64_t> places(message.unit_place().begin(), message.unit_place().end());
  KVSTOW_RETURN_IF_ERROR(CheckPlaces(message, ranges));
  FrameSource::WindowRange window{.offset = message.window_offset(),
                                  .bytes = message.window_bytes()};
  if (message.channel() != 0) {
    KVSTOW_ASSIGN_OR_RETURN(window.channel, parts_.channels->Find(message.channel()));
    KVSTOW_RETURN_IF_ERROR(window.channel->CheckRange(window.offset, window.bytes));
  }
  source_ = std::make_unique<FrameSource>(
      parts_, deadline,
      FrameSource::Question{std::move(keys), form, hints, after, std::move(window),
                            std::move(ranges), std::move(places)});
  return absl::OkStatus();
}

void GetCall::OnWriteDone(bool ok) {
  writing_ += absl::FromChrono(std::chrono::steady_clock::now() - write_start_);
  // Before the write counts as done: from then on a worker may put the next frame there.
  current_.Clear();
  {
    MutexLock lock(&mutex_);
    write_is_out_ = false;
    if (!ok && end_.ok()) end_ = absl::CancelledError("the client is gone");
  }
  Continue(/*refill_is_over=*/false);
}

void GetCall::OnCancel() {
  End(absl::CancelledError("the client is gone"));
  Continue(/*refill_is_over=*/false);
}

void GetCall::End(const absl::Status& status) {
  std::deque<grpc::ByteBuffer> dropped;  // with their pins, after the lock
  MutexLock lock(&mutex_);
  if (end_.ok()) end_ = status;
  dropped.swap(ready_);
}

GetCall::Steps GetCall::Decide() {
  Steps steps;
  if (is_finished_) return steps;
  const bool is_ending = !end_.ok();
  if (!is_ending && !write_is_out_ && !ready_.empty()) {
    current_ = std::move(ready_.front());
    ready_.pop_front();
    write_is_out_ = steps.write = true;
  }
  if (!is_ending && !refill_is_out_ && !source_is_done_ && ready_.size() < kRefillBelow) {
    refill_is_out_ = steps.refill = true;
  }
  if (!write_is_out_ && !refill_is_out_ && (is_ending || (source_is_done_ && ready_.empty()))) {
    is_finished_ = steps.finish = true;
  }
  return steps;
}

void GetCall::Continue(bool refill_is_over) {
  const ServiceParts& parts = parts_;
  for (;;) {
    Steps steps;
    absl::Status end;
    {
      // One critical section: once `refill_is_out_` is false and seen so, another thread may finish
      // the call, and with that delete it.
      MutexLock lock(&mutex_);
      if (refill_is_over) refill_is_out_ = false;
      steps = Decide();
      end = end_;
    }
    if (steps.finish) {
      timer_.Done(end.code());
      if (end.ok()) parts.store->RecordSend(written_bytes_, writing_);
      permit_ = Permit();
      Finish(ToGrpcStatus(end));
      return;
    }
    if (steps.write) {
      write_start_ = std::chrono::steady_clock::now();
      written_bytes_ += static_cast<int64_t>(current_.Length());
      StartWrite(&current_);
    }
    if (!steps.refill) return;
    const absl::Status submitted = parts.workers->Submit([this] { Refill(); });
    if (submitted.ok()) return;
    End(submitted);
    refill_is_over = true;
  }
}

bool GetCall::HasEnded() {
  MutexLock lock(&mutex_);
  return !end_.ok();
}

void GetCall::Refill() {
  for (bool is_enough = false; !is_enough;) {
    // Not one more frame for who has gone: it may write to memory that has another use by now.
    if (HasEnded()) return Continue(/*refill_is_over=*/true);
    absl::StatusOr<grpc::ByteBuffer> frame = source_->Next();
    if (!frame.ok()) End(frame.status());
    {
      MutexLock lock(&mutex_);
      if (frame.ok() && end_.ok()) ready_.push_back(*std::move(frame));
      source_is_done_ = source_->done();
      is_enough = source_is_done_ || !end_.ok() || ready_.size() >= kFramesAhead;
    }
    Continue(/*refill_is_over=*/is_enough);
  }
}

}  // namespace kvstow
