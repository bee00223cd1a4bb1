// NcclChannel: the service's end of one NCCL window. A thread of its own sends the requests,
// enqueues our half of each and waits for both halves.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"
#include "transport/completion_queue.h"
#include "transport/held_memory.h"
#include "transport/nccl_pair.h"
#include "transport/nccl_wire.h"
#include "transport/owned_fd.h"
#include "transport/transport.h"

namespace kvstow {

class NcclChannel final : public Channel {
 public:
  // `on_close` is called once, by the destructor or where this is not OK.
  static absl::StatusOr<std::unique_ptr<NcclChannel>> Attach(const NcclLibrary* library,
                                                             int32_t device_idx,
                                                             const NcclTicket& ticket,
                                                             absl::Duration timeout,
                                                             std::function<void()> on_close);
  ~NcclChannel() override;

  PathKind path() const override { return PathKind::kNccl; }
  int64_t window_bytes() const override { return window_bytes_; }
  absl::StatusOr<TransferId> Post(const Transfer& transfer) override;
  size_t Poll(absl::Span<Completion> completions, absl::Duration timeout) override;
  void Cancel(TransferId id) override;
  absl::Status Quiesce(absl::Duration timeout) override;
  bool is_alive() override { return is_alive_; }

 private:
  struct Running {
    TransferId id = 0;
    TransferOp op = TransferOp::kRead;
    int64_t window_offset = 0;
    absl::Span<std::byte> local;
    absl::Time deadline;
    CudaEvent event = nullptr;  // null: not enqueued, or passed
    bool is_enqueued = false;
    bool is_answered = false;   // the worker's half is done
    bool is_completed = false;  // told to the caller, before it was done
  };
  // A new transfer, or a cancellation: `is_cancel` and the id.
  struct Command {
    bool is_cancel = false;
    Running transfer;
  };

  NcclChannel(const NcclLibrary* library, int32_t device_idx, int64_t window_bytes,
              std::function<void()> on_close)
      : window_bytes_(window_bytes), on_close_(std::move(on_close)), pair_(library, device_idx) {}
  absl::Status Open(const NcclLibrary& library, const NcclTicket& ticket, absl::Time deadline);
  void Send(Command command);
  void Run();
  bool TakeCommands();
  absl::Status Begin(Running& running);
  absl::Status TakeAnswers();
  absl::Status FinishPassed();
  absl::Status CheckDeadlines();
  void Complete(Running& running, const absl::Status& status, bool is_released);
  // Ends every transfer and the communicator.
  void Break(const absl::Status& why);

  const int64_t window_bytes_;
  const std::function<void()> on_close_;
  const RealClock clock_;
  CompletionQueue queue_;
  HeldMemory memory_;
  std::atomic<bool> is_alive_{false};
  // Of the thread.
  NcclPair pair_;
  std::unique_ptr<NcclSocket> socket_;
  std::deque<Running> running_;
  OwnedFd wake_;  // eventfd
  Mutex mutex_;
  std::vector<Command> commands_ ABSL_GUARDED_BY(mutex_);
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kvstow
