// What the RPC handlers work with: built and owned by server.cc, borrowed by every call.
#pragma once

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "service/admission.h"
#include "service/calibration_store.h"
#include "service/channel_table.h"
#include "service/executor.h"
#include "service/metrics.h"
#include "service/model_registry.h"
#include "service/peer_set.h"
#include "service/plan_book.h"
#include "service/server_config.h"
#include "storage/tiered_store.h"

namespace kvstow {

// A data call holds at most one frame that is being received or written and about a frame's worth
// of work before or behind it.
inline constexpr int64_t kCallBytes = int64_t{8} << 20;

struct ServiceParts {
  const ServerOptions* options = nullptr;
  TieredStore* store = nullptr;
  ModelRegistry* models = nullptr;
  CalibrationStore* calibrations = nullptr;
  PlanBook* plans = nullptr;
  Executor* workers = nullptr;  // planes: encode, decode, read
  Executor* control =
      nullptr;  // everything else that may wait, so that planes never queue behind it
  std::shared_ptr<Admission> admission;
  Metrics* metrics = nullptr;
  ChannelTable* channels = nullptr;
  PeerSet* peers = nullptr;
  Executor* fetchers = nullptr;  // what waits for peers
  std::chrono::steady_clock::time_point started_at;
};

// Measures one call. Done records it, once.
class CallTimer {
 public:
  CallTimer(Metrics* metrics, Method method)
      : metrics_(metrics), method_(method), start_(std::chrono::steady_clock::now()) {}
  void Done(absl::StatusCode code) const {
    metrics_->RecordCall(method_, code,
                         absl::FromChrono(std::chrono::steady_clock::now() - start_));
  }

 private:
  Metrics* metrics_;
  Method method_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace kvstow
