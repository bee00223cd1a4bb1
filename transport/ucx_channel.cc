#include "transport/ucx_channel.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/clock.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr absl::Duration kReleasePatience = absl::Milliseconds(700);

}  // namespace

UcxChannel::UcxChannel(std::shared_ptr<UcxEngine> engine, const UcxTicket& ticket,
                       std::function<void()> on_close)
    : engine_(std::move(engine)),
      window_bytes_(static_cast<int64_t>(ticket.bytes)),
      on_close_(std::move(on_close)) {}

absl::StatusOr<std::unique_ptr<UcxChannel>> UcxChannel::Attach(std::shared_ptr<UcxEngine> engine,
                                                               const UcxTicket& ticket,
                                                               absl::Duration timeout,
                                                               std::function<void()> on_close) {
  std::unique_ptr<UcxChannel> channel(
      new UcxChannel(std::move(engine), ticket, std::move(on_close)));
  KVSTOW_RETURN_IF_ERROR(channel->Open(ticket, timeout));
  return channel;
}

absl::Status UcxChannel::Open(const UcxTicket& ticket, absl::Duration timeout) {
  const auto opened = std::make_shared<CompletionQueue>();
  KVSTOW_RETURN_IF_ERROR(opened->Begin().status());
  engine_->Do([engine = engine_.get(), link = link_, ticket, opened] {
    engine->Drive(link);
    link->Open(engine->worker(), ticket,
               [opened](const absl::Status& status) { opened->Complete(1, status); });
  });
  Completion completion;
  if (opened->Take({&completion, 1}, timeout) == 1) return completion.status;
  return absl::DeadlineExceededError("the worker of the UCX window does not answer");
}

UcxChannel::~UcxChannel() {
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
      .window_offset = static_cast<uint64_t>(transfer.window_offset),
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
  engine_->Do([link = link_, id] { link->Cancel(id); });
}

absl::Status UcxChannel::Quiesce(absl::Duration timeout) {
  if (memory_->AwaitReleased(/*all=*/false, timeout)) return absl::OkStatus();
  return absl::DeadlineExceededError("UCX has not given back the memory of an ended transfer");
}

}  // namespace kvstow
