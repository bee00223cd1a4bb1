#include "transport/nccl_channel.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr int kPollMs = 1;  // while transfers run: NCCL has no descriptor to wait on

}  // namespace

absl::StatusOr<std::unique_ptr<NcclChannel>> NcclChannel::Attach(const NcclLibrary* library,
                                                                 int32_t device_idx,
                                                                 const NcclTicket& ticket,
                                                                 absl::Duration timeout,
                                                                 std::function<void()> on_close) {
  const RealClock clock;
  std::unique_ptr<NcclChannel> channel(
      new NcclChannel(library, device_idx, ticket.bytes, std::move(on_close)));
  KVSTOW_RETURN_IF_ERROR(channel->Open(*library, ticket, clock.Now() + timeout));
  return channel;
}

absl::Status NcclChannel::Open(const NcclLibrary& library, const NcclTicket& ticket,
                               absl::Time deadline) {
  wake_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.is_open()) return absl::ResourceExhaustedError("eventfd: no descriptors left");
  KVSTOW_ASSIGN_OR_RETURN(NcclSocket socket,
                          NcclSocket::Connect(ticket.host, ticket.port, deadline));
  socket_ = std::make_unique<NcclSocket>(std::move(socket));
  KVSTOW_ASSIGN_OR_RETURN(const NcclMessage greeting,
                          socket_->Receive(NcclMessageKind::kGreeting, deadline));
  if (greeting.status != 0) {
    return absl::NotFoundError("the NCCL window of this ticket was attached before");
  }
  if (greeting.version != library.version) {
    return absl::UnavailableError(absl::StrCat("NCCL ", library.version, " here and ",
                                               greeting.version,
                                               " at the worker: they must be the same"));
  }
  KVSTOW_RETURN_IF_ERROR(socket_->Send(
      {.kind = NcclMessageKind::kHello, .version = library.version, .secret = ticket.secret},
      deadline));
  absl::StatusOr<NcclMessage> accept = socket_->Receive(NcclMessageKind::kAccept, deadline);
  if (absl::IsUnavailable(accept.status())) {
    return absl::NotFoundError("the worker has no NCCL window with this ticket");
  }
  KVSTOW_RETURN_IF_ERROR(accept.status());
  KVSTOW_RETURN_IF_ERROR(pair_.Init(accept->unique_id, 1, deadline));
  is_alive_ = true;
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

NcclChannel::~NcclChannel() {
  if (thread_.joinable()) {
    {
      MutexLock lock(&mutex_);
      is_stopping_ = true;
    }
    Send({.is_cancel = true});
    thread_.join();
  }
  on_close_();
}

void NcclChannel::Send(Command command) {
  {
    MutexLock lock(&mutex_);
    commands_.push_back(std::move(command));
  }
  const uint64_t one = 1;
  // A full counter would mean that the thread is about to wake anyhow.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

absl::StatusOr<TransferId> NcclChannel::Post(const Transfer& transfer) {
  KVSTOW_RETURN_IF_ERROR(CheckTransfer(transfer, window_bytes_));
  if (!is_alive()) return absl::UnavailableError("the NCCL channel has ended");
  KVSTOW_ASSIGN_OR_RETURN(const TransferId id, queue_.Begin());
  memory_.OnPosted();
  Send({.transfer = {.id = id,
                     .op = transfer.op,
                     .window_offset = transfer.window_offset,
                     .local = transfer.local,
                     .deadline = clock_.Now() + transfer.timeout}});
  return id;
}

size_t NcclChannel::Poll(absl::Span<Completion> completions, absl::Duration timeout) {
  return queue_.Take(completions, timeout);
}

void NcclChannel::Cancel(TransferId id) { Send({.is_cancel = true, .transfer = {.id = id}}); }

absl::Status NcclChannel::Quiesce(absl::Duration timeout) {
  if (memory_.AwaitReleased(/*all=*/false, timeout)) return absl::OkStatus();
  return absl::DeadlineExceededError("NCCL has not given back the memory of an ended transfer");
}

void NcclChannel::Complete(Running& running, const absl::Status& status, bool is_released) {
  if (running.is_completed) {
    if (is_released) memory_.OnReleased();
    return;
  }
  running.is_completed = true;
  memory_.OnCompleted(is_released);
  queue_.Complete(running.id, status);
}

// False: the channel is to end.
bool NcclChannel::TakeCommands() {
  std::vector<Command> commands;
  bool is_stopping = false;
  {
    MutexLock lock(&mutex_);
    commands.swap(commands_);
    is_stopping = is_stopping_;
  }
  for (Command& command : commands) {
    if (command.is_cancel) {
      for (Running& running : running_) {
        if (running.id != command.transfer.id || running.is_completed) continue;
        Complete(running, absl::CancelledError("cancelled"), false);
      }
      continue;
    }
    if (!is_alive_) {
      Complete(command.transfer, absl::UnavailableError("the NCCL channel has ended"), true);
      continue;
    }
    running_.push_back(command.transfer);
    if (const absl::Status status = Begin(running_.back()); !status.ok()) Break(status);
  }
  return !is_stopping;
}

absl::Status NcclChannel::Begin(Running& running) {
  KVSTOW_RETURN_IF_ERROR(socket_->Send({.kind = NcclMessageKind::kRequest,
                                        .id = running.id,
                                        .offset = running.window_offset,
                                        .bytes = static_cast<int64_t>(running.local.size()),
                                        .op = static_cast<uint32_t>(running.op)},
                                       running.deadline));
  const bool is_send = running.op == TransferOp::kWrite;
  KVSTOW_ASSIGN_OR_RETURN(running.event, pair_.Enqueue(is_send, running.local, running.deadline));
  running.is_enqueued = true;
  return absl::OkStatus();
}

absl::Status NcclChannel::TakeAnswers() {
  while (true) {
    KVSTOW_ASSIGN_OR_RETURN(const std::optional<NcclMessage> message, socket_->TryReceive());
    if (!message.has_value()) return absl::OkStatus();
    for (Running& running : running_) {
      if (running.id == message->id) running.is_answered = true;
    }
  }
}

absl::Status NcclChannel::FinishPassed() {
  for (Running& running : running_) {
    if (running.event == nullptr) continue;
    const CudaEvent event = running.event;
    const absl::StatusOr<bool> has_passed = pair_.HasPassed(event);
    if (has_passed.ok() && !*has_passed) break;  // the later ones have not either
    running.event = nullptr;
    KVSTOW_RETURN_IF_ERROR(has_passed.status());
  }
  while (!running_.empty()) {
    Running& first = running_.front();
    if (first.event != nullptr || !first.is_enqueued || !first.is_answered) break;
    Complete(first, absl::OkStatus(), true);
    running_.pop_front();
  }
  return absl::OkStatus();
}

// Transfers run in order: nothing but aborting gives back the memory of one that does not end.
absl::Status NcclChannel::CheckDeadlines() {
  const absl::Time now = clock_.Now();
  bool is_late = false;
  for (Running& running : running_) {
    if (running.deadline > now) continue;
    is_late = true;
    if (!running.is_completed) {
      Complete(running, absl::DeadlineExceededError("the transfer took too long"), false);
    }
  }
  if (!is_late) return absl::OkStatus();
  return absl::UnavailableError("the channel was given up: another transfer took too long");
}

void NcclChannel::Break(const absl::Status& why) {
  is_alive_ = false;
  for (Running& running : running_) {
    if (!running.is_completed) Complete(running, why, false);
  }
  if (socket_ != nullptr) socket_->Close();
  // Held for ever where NCCL does not let go.
  if (!pair_.Abort()) return;
  for (Running& running : running_) {
    if (running.event != nullptr) pair_.Drop(running.event);
    memory_.OnReleased();
  }
  running_.clear();
}

void NcclChannel::Run() {
  while (TakeCommands()) {
    std::array<pollfd, 2> entries = {{{.fd = wake_.get(), .events = POLLIN},
                                      {.fd = is_alive_ ? socket_->fd() : -1, .events = POLLIN}}};
    poll(entries.data(), entries.size(), running_.empty() || !is_alive_ ? 1000 : kPollMs);
    if ((entries[0].revents & POLLIN) != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof(count));
    }
    if (!is_alive_) continue;
    absl::Status status = TakeAnswers();
    if (status.ok()) status = FinishPassed();
    if (status.ok()) status = pair_.AsyncError();
    if (status.ok()) status = CheckDeadlines();
    if (!status.ok()) Break(absl::UnavailableError(status.message()));
  }
  if (is_alive_) Break(absl::CancelledError("the channel was closed"));
}

}  // namespace kvstow
