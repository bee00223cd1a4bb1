#include "transport/nccl_pair.h"

#include <poll.h>

#include <thread>
#include <utility>

#include "kernels/core/log.h"
#include "kernels/core/mutex.h"
#include "kernels/core/status_macros.h"
#include "transport/completion_queue.h"

namespace kvstow {
namespace {

constexpr absl::Duration kAbortPatience = absl::Seconds(1);
constexpr int kPollMs = 1;  // NCCL has no descriptor to wait on

}  // namespace

absl::Status NcclPair::Init(const NcclUniqueId& id, int rank, absl::Time deadline) {
  if (library_->is_stuck) {
    return absl::UnavailableError("NCCL hung in this process before; the path is closed");
  }
  int result = library_->set_device(device_idx_);
  if (result != kCudaSuccess) return NcclLibrary::CudaError("choosing the device", result);
  result = library_->stream_create(&stream_, kCudaStreamNonBlocking);
  if (result != kCudaSuccess) {
    stream_ = nullptr;
    return NcclLibrary::CudaError("creating a stream", result);
  }
  peer_rank_ = 1 - rank;
  NcclConfig config;
  result = library_->comm_init_rank_config(&comm_, 2, id, rank, &config);
  if (result != kNcclSuccess && result != kNcclInProgress) {
    comm_ = nullptr;
    return library_->NcclError("connecting", result);
  }
  return AwaitReady(deadline);
}

absl::Status NcclPair::AwaitReady(absl::Time deadline) {
  while (true) {
    int state = kNcclSuccess;
    const int result = library_->comm_get_async_error(comm_, &state);
    if (result != kNcclSuccess) return library_->NcclError("asking for its state", result);
    if (state == kNcclSuccess) return absl::OkStatus();
    if (state != kNcclInProgress) return library_->NcclError("communicator", state);
    if (clock_.Now() >= deadline) return absl::DeadlineExceededError("NCCL does not get ready");
    pollfd stop = {.fd = stop_fd_, .events = POLLIN};
    if (poll(&stop, 1, kPollMs) > 0) return absl::CancelledError("this end is being closed");
  }
}

absl::StatusOr<CudaEvent> NcclPair::Enqueue(bool is_send, absl::Span<std::byte> memory,
                                            absl::Time deadline) {
  int result = kNcclSuccess;
  if (!memory.empty() && is_send) {
    result = library_->send(memory.data(), memory.size(), kNcclUint8, peer_rank_, comm_, stream_);
  } else if (!memory.empty()) {
    result = library_->recv(memory.data(), memory.size(), kNcclUint8, peer_rank_, comm_, stream_);
  }
  if (result != kNcclSuccess && result != kNcclInProgress) {
    return library_->NcclError("enqueuing", result);
  }
  KVSTOW_RETURN_IF_ERROR(AwaitReady(deadline));
  CudaEvent event = nullptr;
  result = library_->event_create(&event, kCudaEventDisableTiming);
  if (result != kCudaSuccess) return NcclLibrary::CudaError("creating an event", result);
  result = library_->event_record(event, stream_);
  if (result == kCudaSuccess) return event;
  library_->event_destroy(event);
  return NcclLibrary::CudaError("recording an event", result);
}

absl::StatusOr<bool> NcclPair::HasPassed(CudaEvent event) {
  const int result = library_->event_query(event);
  if (result == kCudaErrorNotReady) return false;
  library_->event_destroy(event);
  if (result != kCudaSuccess) return NcclLibrary::CudaError("moving bytes", result);
  return true;
}

absl::Status NcclPair::AsyncError() {
  int state = kNcclSuccess;
  const int result = library_->comm_get_async_error(comm_, &state);
  if (result != kNcclSuccess) return library_->NcclError("asking for its state", result);
  if (state == kNcclSuccess || state == kNcclInProgress) return absl::OkStatus();
  return library_->NcclError("moving bytes", state);
}

// The stream has run dry: kernels of an aborted communicator have ended too.
bool NcclPair::AwaitIdle() {
  CudaEvent event = nullptr;
  if (library_->event_create(&event, kCudaEventDisableTiming) != kCudaSuccess) return false;
  if (library_->event_record(event, stream_) != kCudaSuccess) return false;
  const absl::Time deadline = clock_.Now() + kAbortPatience;
  while (library_->event_query(event) == kCudaErrorNotReady) {
    if (clock_.Now() >= deadline) return false;
    poll(nullptr, 0, kPollMs);
  }
  library_->event_destroy(event);
  return true;
}

void NcclPair::Drop(CudaEvent event) { library_->event_destroy(event); }

bool NcclPair::Abort() {
  if (is_stuck_) return false;
  if (comm_ != nullptr) {
    // On a thread of its own: it is known to hang. The thread is left behind if it does.
    const auto returned = std::make_shared<CompletionQueue>();
    returned->Begin().IgnoreError();
    std::thread([returned, library = library_, comm = std::exchange(comm_, nullptr),
                 device = device_idx_] {
      library->set_device(device);
      library->comm_abort(comm);
      returned->Complete(1, absl::OkStatus());
    }).detach();
    Completion completion;
    if (returned->Take({&completion, 1}, kAbortPatience) == 0 || !AwaitIdle()) {
      is_stuck_ = true;
      library_->is_stuck = true;
      Log(Severity::kError, "NCCL hangs in an abort; the path is closed",
          {{"version", std::to_string(library_->version)}});
      return false;
    }
  }
  if (stream_ != nullptr) library_->stream_destroy(std::exchange(stream_, nullptr));
  return true;
}

}  // namespace kvstow
