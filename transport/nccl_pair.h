// NcclPair: a communicator of two ranks and its stream: one end of a channel.
//
// One thread uses it. Nothing here waits for the peer but Init, which has a deadline.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/clock.h"
#include "transport/nccl_library.h"

namespace kvstow {

class NcclPair {
 public:
  // Waits end, kCancelled, when `stop_fd` becomes readable; -1: never so.
  NcclPair(const NcclLibrary* library, int32_t device_idx, int stop_fd = -1)
      : library_(library), device_idx_(device_idx), stop_fd_(stop_fd) {}
  // Aborts, where Abort was not called.
  ~NcclPair() { Abort(); }
  NcclPair(const NcclPair&) = delete;
  NcclPair& operator=(const NcclPair&) = delete;

  // Rank 0 is the worker. kDeadlineExceeded, kUnavailable.
  absl::Status Init(const NcclUniqueId& id, int rank, absl::Time deadline);

  // Enqueues one half of a transfer. The event has passed when it is done. Empty spans too.
  absl::StatusOr<CudaEvent> Enqueue(bool is_send, absl::Span<std::byte> memory,
                                    absl::Time deadline);
  // Whether it has passed; if so, it is used up.
  absl::StatusOr<bool> HasPassed(CudaEvent event);
  // What NCCL found on its own: kUnavailable.
  absl::Status AsyncError();

  // Ends all that is enqueued. True: no memory is touched any more. False: NCCL's abort, or a
  // kernel, has not ended within a second; communicator, stream and events are left as they are.
  bool Abort();
  // An event that never passed, after an Abort that was true.
  void Drop(CudaEvent event);

 private:
  absl::Status AwaitReady(absl::Time deadline);
  bool AwaitIdle();

  const NcclLibrary* const library_;
  const int32_t device_idx_;
  const int stop_fd_;
  const RealClock clock_;
  NcclComm comm_ = nullptr;
  CudaStream stream_ = nullptr;
  int peer_rank_ = 0;
  bool is_stuck_ = false;
};

}  // namespace kvstow
