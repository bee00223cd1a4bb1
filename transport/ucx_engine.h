// UcxEngine: a UCX context, its worker, and the thread that drives them; nothing else calls UCX's
// worker. The thread spins for some microseconds after traffic, then sleeps until UCX's or our
// descriptor wakes it.
//
//   KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<UcxEngine> engine, UcxEngine::Open({}));
//   engine->Start();
//   engine->Do([link] { link->Cancel(7); });
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"
#include "transport/owned_fd.h"
#include "transport/ucx.h"
#include "transport/ucx_link.h"
#include "transport/ucx_listener.h"

struct ucp_context;  // of UCX
struct ucp_worker;

namespace kvstow {

class UcxEngine {
 public:
  // kUnavailable says what UCX could not do.
  static absl::StatusOr<std::shared_ptr<UcxEngine>> Open(const UcxNetwork& network);
  // Before Start: takes connections at `ip`, and returns where. See UcxListener.
  absl::StatusOr<std::string> Listen(const std::string& ip, UcxServedWindow* window);
  // Starts the thread.
  void Start();
  // Not on the engine's own thread.
  ~UcxEngine();
  // Ends every link and connection, waits a second at most for UCX to give back their requests,
  // ends the thread and then the worker. Nothing is moved any more; the context stays. Once, or by
  // the destructor.
  void Stop();

  // Runs `command` on the thread, soon and in order.
  void Do(std::function<void()> command);
  // On the thread only: drives the link until it is finished.
  void Drive(std::shared_ptr<UcxLink> link) { links_.push_back(std::move(link)); }

  ucp_worker* worker() { return worker_; }

 private:
  UcxEngine() = default;
  void LeaveWorker();
  friend struct UcxEngineCallbacks;  // what UCX calls
  void OnMessage(const ucp_ep* from, const UcxMessage& message, UcxData& data);
  absl::Status Initialize(const UcxNetwork& network);
  void Run();
  bool RunCommands();
  absl::Time TickLinks(absl::Time now);
  void Sleep(absl::Duration at_most);
  void EndLinks();

  ucp_context* context_ = nullptr;
  ucp_worker* worker_ = nullptr;
  bool is_context_left_ = false;  // to a worker that is not destroyed
  int event_fd_ = -1;             // UCX's own
  OwnedFd wake_fd_;               // eventfd
  const RealClock clock_;
  std::vector<std::shared_ptr<UcxLink>> links_;  // of the thread
  std::unique_ptr<UcxListener> listener_;        // of the thread, once there is one
  Mutex mutex_;
  std::vector<std::function<void()>> commands_ ABSL_GUARDED_BY(mutex_);
  bool is_asleep_ ABSL_GUARDED_BY(mutex_) = false;  // or about to be: commands wake it
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kvstow
