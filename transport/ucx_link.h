// UcxLink: a service's connection to a worker's window and the transfers on it.
//
// Everything runs on the thread of the engine, apart from is_alive. An operation completes exactly
// once: with its result, or before, when it is cancelled, late, or the link ends. In the second
// case its memory is released later, when UCX gives back the requests that use it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "transport/transport.h"
#include "transport/ucx_message.h"
#include "transport/ucx_ticket.h"

namespace kvstow {

struct UcxOperation {
  TransferOp op = TransferOp::kRead;
  uint64_t window_offset = 0;
  absl::Span<std::byte> local;
  absl::Time deadline;
  // `is_released`: `local` is not touched any more. If not, on_released is called when that is so,
  // which with a faulty transport may be never.
  std::function<void(const absl::Status& status, bool is_released)> on_completed;
  std::function<void()> on_released;
};

class UcxLink {
 public:
  UcxLink() = default;
  UcxLink(const UcxLink&) = delete;
  UcxLink& operator=(const UcxLink&) = delete;

  // Connects to the worker's listener and asks for its window. Calls `on_opened` once, now or
  // later; nothing may be started before it said that all is well.
  //   kNotFound  the window is not there, or attached before
  void Open(ucp_worker* worker, const UcxTicket& ticket,
            std::function<void(const absl::Status&)> on_opened);
  void Start(TransferId id, UcxOperation operation);
  void Cancel(TransferId id);
  // Completes everything with `why` and closes the endpoint by force.
  void Close(const absl::Status& why);
  // Deadlines, and what the callbacks left to do. Returns when to come again at the latest.
  absl::Time Tick(absl::Time now);
  // True when the link is closed and UCX has given back every request: nothing of it is left there.
  bool TryFinish();

  // What the worker says. Messages of other endpoints are not for this link.
  bool IsAt(const ucp_ep* endpoint) const { return endpoint_ != nullptr && endpoint == endpoint_; }
  void OnMessage(const UcxMessage& message, UcxData& data);

  bool is_alive() const { return is_alive_.load(std::memory_order_acquire); }

 private:
  struct Running {
    TransferId id = 0;
    UcxOperation operation;
    uint64_t bytes_left = 0;
    int num_requests = 0;  // that UCX has not given back
    absl::Status error;    // the first
    bool is_completed = false;
  };

  friend struct UcxLinkCallbacks;  // what UCX calls

  absl::Status Connect(ucp_worker* worker, const std::string& listener);
  void OnAttached(const UcxMessage& message);
  void OnData(const UcxMessage& message, UcxData& data);
  void OnDone(const UcxMessage& message);
  void Submit(Running& running);
  // A piece has ended, with `bytes` of progress.
  void OnPiece(TransferId id, const absl::Status& status, uint64_t bytes, bool is_request);
  void FinishIfDone(Running& running);
  void CompleteEarly(Running& running, const absl::Status& status);

  ucp_ep* endpoint_ = nullptr;
  UcxWindowId window_id_{};
  std::function<void(const absl::Status&)> on_opened_;  // until it was called
  int num_own_requests_ = 0;                            // of the attach and of the close
  int broken_by_ = 0;  // UCX's error, as it numbers them, until Tick closes
  std::map<TransferId, Running> running_;
  std::set<std::pair<absl::Time, TransferId>> deadlines_;
  std::atomic<bool> is_alive_{false};
};

}  // namespace kvstow
