#include "client/cpp/raw_stream.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "client/cpp/connection.h"
#include "kernels/core/check.h"
#include "proto/status.h"

namespace kvstow {
namespace {

// gRPC ends a call at its deadline by itself. Should it ever not, this much later we cancel.
constexpr absl::Duration kGrace = absl::Seconds(1);

}  // namespace

RawStream::RawStream(grpc::GenericStub& stub, const RawStreamOptions& options) : options_(options) {
  context_.set_deadline(GrpcDeadline(options_.timeout));
  call_ = stub.PrepareCall(&context_, options_.method, &queue_);
  call_->StartCall(Begin(kStart));
  Wait(kStart);
}

RawStream::~RawStream() {
  if (!is_finished_) {
    context_.TryCancel();
    WaitForEnd();
  }
  queue_.Shutdown();
  Drain();
}

void* RawStream::Begin(Op op) {
  KVSTOW_CHECK(!is_pending_[op]);
  is_pending_[op] = true;
  return reinterpret_cast<void*>(static_cast<intptr_t>(op));
}

bool RawStream::Wait(Op op) {
  const absl::Time start = clock_.Now();
  // Operations end at the deadline; cancelled ones end at once.
  absl::Duration limit = std::min(options_.timeout + kGrace, options_.wait_limit);
  while (is_pending_[op]) {
    void* tag = nullptr;
    bool ok = false;
    const grpc::CompletionQueue::NextStatus next = queue_.AsyncNext(&tag, &ok, GrpcDeadline(limit));
    if (next == grpc::CompletionQueue::TIMEOUT) {
      gave_up_waiting_ = true;
      context_.TryCancel();
      limit = kGrace;
      continue;
    }
    KVSTOW_CHECK(next == grpc::CompletionQueue::GOT_EVENT);
    const auto done = static_cast<size_t>(reinterpret_cast<intptr_t>(tag));
    is_pending_[done] = false;
    was_ok_[done] = ok;
  }
  longest_wait_ = std::max(longest_wait_, clock_.Now() - start);
  return was_ok_[op];
}

void RawStream::Drain() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

bool RawStream::Write(const grpc::ByteBuffer& message) {
  if (!was_ok_[kStart] || writes_done_) return false;
  if (is_pending_[kWrite] && !Wait(kWrite)) {
    writes_done_ = true;
    return false;
  }
  call_->Write(message, Begin(kWrite));
  return true;
}

void RawStream::WritesDone() {
  if (!was_ok_[kStart] || writes_done_) return;
  writes_done_ = true;
  if (is_pending_[kWrite] && !Wait(kWrite)) return;
  call_->WritesDone(Begin(kWritesDone));
}

void RawStream::StartRead() {
  if (!was_ok_[kStart] || is_pending_[kRead]) return;
  read_message_.Clear();
  call_->Read(&read_message_, Begin(kRead));
}

bool RawStream::Read(grpc::ByteBuffer& message) {
  if (!was_ok_[kStart]) return false;
  StartRead();
  if (!Wait(kRead)) return false;
  message.Swap(&read_message_);
  return true;
}

void RawStream::Cancel() { context_.TryCancel(); }

void RawStream::WaitForEnd() {
  KVSTOW_CHECK(!is_finished_);
  is_finished_ = true;
  call_->Finish(&status_, Begin(kFinish));
  Wait(kFinish);
  for (const Op op : {kWrite, kWritesDone, kRead}) Wait(op);
}

absl::Status RawStream::Finish() {
  WaitForEnd();
  if (gave_up_waiting_) {
    return absl::DeadlineExceededError(
        absl::StrCat("nothing came for ", absl::FormatDuration(options_.wait_limit)));
  }
  return FromGrpcStatus(status_);
}

}  // namespace kvstow
