#include "transport/ucx_channel.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/clock.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr absl::Duration kFarewell = absl::Milliseconds(300);
constexpr absl::Duration kReleasePatience = absl::Milliseconds(700);
// Ids of the operations on the control block, which no transfer has: those count up from 1.
constexpr TransferId kControlId = ~TransferId{0};

// Waits for the one completion of an operation of our own.
absl::Status AwaitOne(CompletionQueue& queue, absl::Duration timeout) {
  Completion completion;
  if (queue.Take({&completion, 1}, timeout) == 1) return completion.status;
  return absl::DeadlineExceededError("the thread that drives UCX does not answer");
}

}  // namespace

UcxChannel::UcxChannel(std::shared_ptr<UcxEngine> engine, const UcxTicket& ticket,
                       std::function<void()> on_close)
    : engine_(std::move(engine)),
      window_address_(ticket.address),
      window_bytes_(static_cast<int64_t>(ticket.bytes)),
      on_close_(std::move(on_close)) {
  control_.window_id = ticket.window_id;
}

absl::StatusOr<std::unique_ptr<UcxChannel>> UcxChannel::Attach(std::shared_ptr<UcxEngine> engine,
                                                               const UcxTicket& ticket,
                                                               absl::Duration timeout,
                                                               std::function<void()> on_close) {
  const RealClock clock;
  std::unique_ptr<UcxChannel> channel(
      new UcxChannel(std::move(engine), ticket, std::move(on_close)));
  KVSTOW_RETURN_IF_ERROR(channel->Open(ticket, clock.Now() + timeout));
  return channel;
}

absl::Status UcxChannel::Open(const UcxTicket& ticket, absl::Time deadline) {
  const RealClock clock;
  const auto opened = std::make_shared<CompletionQueue>();
  KVSTOW_RETURN_IF_ERROR(opened->Begin().status());
  engine_->Do([engine = engine_.get(), link = link_, ticket, opened] {
    const absl::Status status = link->Open(engine->worker(), ticket.worker_address, ticket.rkey);
    if (!status.ok()) link->Close(status);
    engine->Drive(link);
    opened->Complete(1, status);
  });
  KVSTOW_RETURN_IF_ERROR(AwaitOne(*opened, deadline - clock.Now() + absl::Seconds(1)));
  UcxControl found;
  KVSTOW_RETURN_IF_ERROR(MoveControl(TransferOp::kRead, found, deadline));
  if (found.magic != control_.magic || found.window_id != control_.window_id) {
    return absl::NotFoundError("the UCX window of this ticket is not there any more");
  }
  if (found.state != UcxWindowState::kOffered) {
    return absl::NotFoundError("the UCX window of this ticket was attached before");
  }
  control_.state = UcxWindowState::kAttached;
  KVSTOW_RETURN_IF_ERROR(MoveControl(TransferOp::kWrite, control_, deadline));
  is_attached_ = true;
  return absl::OkStatus();
}

absl::Status UcxChannel::MoveControl(TransferOp op, UcxControl& control, absl::Time deadline) {
  // Owned by the operation: where it is late, its memory outlives this call.
  struct Move {
    UcxControl control;
    CompletionQueue done;
  };
  const auto move = std::make_shared<Move>();
  move->control = control;
  KVSTOW_RETURN_IF_ERROR(move->done.Begin().status());
  UcxOperation operation = {
      .op = op,
      .address = window_address_ - uint64_t{kUcxControlBytes},
      .local = {reinterpret_cast<std::byte*>(&move->control), sizeof(UcxControl)},
      .deadline = deadline,
      .on_completed = [move](const absl::Status& status, bool) { move->done.Complete(1, status); },
      .on_released = [move] {}};
  engine_->Do(
      [link = link_, operation = std::move(operation)] { link->Start(kControlId, operation); });
  const RealClock clock;
  KVSTOW_RETURN_IF_ERROR(AwaitOne(move->done, deadline - clock.Now() + absl::Seconds(1)));
  control = move->control;
  return absl::OkStatus();
}

UcxChannel::~UcxChannel() {
  const RealClock clock;
  if (is_attached_ && is_alive()) {
    control_.state = UcxWindowState::kClosed;
    MoveControl(TransferOp::kWrite, control_, clock.Now() + kFarewell).IgnoreError();
  }
  engine_->Do([link = link_] { link->Close(absl::CancelledError("the channel was closed")); });
  if (!memory_->AwaitReleased(/*all=*/true, kReleasePatience)) {
    Log(Severity::kError, "memory of transfers is still in use after their UCX channel ended",
        {{"window_bytes", absl::StrCat(window_bytes_)}});
  }
  on_close_();
}

absl::StatusOr<TransferId> UcxChannel::Post(const Transfer& transfer) {
  KVSTOW_RETURN_IF_ERROR(CheckTransfer(transfer, window_bytes_));
  if (!is_alive()) return absl::UnavailableError("the UCX channel has ended");
  KVSTOW_ASSIGN_OR_RETURN(const TransferId id, queue_->Begin());
  memory_->OnPosted();
  const RealClock clock;
  UcxOperation operation = {
      .op = transfer.op,
      .address = window_address_ + static_cast<uint64_t>(transfer.window_offset),
      .local = transfer.local,
      .deadline = clock.Now() + transfer.timeout,
      .on_completed =
          [queue = queue_, memory = memory_, id](const absl::Status& status, bool is_released) {
            memory->OnCompleted(is_released);
            queue->Complete(id, status);
          },
      .on_released = [memory = memory_] { memory->OnReleased(); }};
  engine_->Do([link = link_, id, operation = std::move(operation)] { link->Start(id, operation); });
  return id;
}

size_t UcxChannel::Poll(absl::Span<Completion> completions, absl::Duration timeout) {
  return queue_->Take(completions, timeout);
}

void UcxChannel::Cancel(TransferId id) {
  if (id == kControlId) return;
  engine_->Do([link = link_, id] { link->Cancel(id); });
}

absl::Status UcxChannel::Quiesce(absl::Duration timeout) {
  if (memory_->AwaitReleased(/*all=*/false, timeout)) return absl::OkStatus();
  return absl::DeadlineExceededError("UCX has not given back the memory of an ended transfer");
}

}  // namespace kvstow
