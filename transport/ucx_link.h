// UcxLink: one endpoint to a worker's window and the operations on it.
//
// Everything runs on the thread of the engine, apart from is_alive. An operation completes exactly
// once: with its result, or before, when it is cancelled, late, or the link ends. In the second
// case its memory is released later, when UCX gives the request back.
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

struct ucp_ep;  // of UCX
struct ucp_rkey;
struct ucp_worker;

namespace kvstow {

struct UcxOperation {
  TransferOp op = TransferOp::kRead;
  uint64_t address = 0;  // in the worker
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

  absl::Status Open(ucp_worker* worker, const std::string& worker_address, const std::string& rkey);
  void Start(TransferId id, UcxOperation operation);
  void Cancel(TransferId id);
  // Completes everything with `why` and closes the endpoint by force.
  void Close(const absl::Status& why);
  // Deadlines, and what the callbacks left to do. Returns when to come again at the latest.
  absl::Time Tick(absl::Time now);
  // True when the link is closed and UCX has given back every request: nothing of it is left there.
  bool TryFinish();

  bool is_alive() const { return is_alive_.load(std::memory_order_acquire); }

 private:
  struct Running {
    UcxLink* link = nullptr;
    TransferId id = 0;
    UcxOperation operation;
    int num_requests = 0;  // that UCX has not given back
    int error = 0;         // the first, as UCX numbers it
    bool is_completed = false;
  };

  friend struct UcxCallbacks;  // what UCX calls

  void Submit(Running& running);
  void OnPart(Running& running, int status);
  void Finish(Running& running);
  void CompleteEarly(Running& running, const absl::Status& status);

  ucp_ep* endpoint_ = nullptr;
  ucp_rkey* rkey_ = nullptr;
  bool is_closing_ = false;  // the request of the close is out
  int broken_by_ = 0;        // UCX's error, as it numbers them, until Tick closes
  std::map<TransferId, Running> running_;
  std::set<std::pair<absl::Time, TransferId>> deadlines_;
  std::atomic<bool> is_alive_{false};
};

}  // namespace kvstow
