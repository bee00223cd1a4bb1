// Metrics: what the service counts, and the pages that show it together with the store's own
// numbers: for Prometheus (/metrics; names are listed in service/README.md), and for people
// (admin_page.h).
//
//   Metrics metrics;
//   KVSTOW_RETURN_IF_ERROR(metrics.Serve("127.0.0.1:9400", sources));
//   metrics.RecordCall(Method::kGet, absl::StatusCode::kOk, elapsed);
//
// Counters only grow. Thread safety: all methods may be called at once, except Serve and Stop.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "service/admission.h"
#include "service/calibration_store.h"
#include "service/channel_table.h"
#include "service/executor.h"
#include "service/http_pages.h"
#include "service/peer_set.h"
#include "storage/tiered_store.h"

namespace kvstow {

enum class Method : uint8_t {
  kRegisterModel,
  kGetModel,
  kListModels,
  kSetPlan,
  kLookup,
  kReserve,
  kSeal,
  kAbort,
  kAcquire,
  kRelease,
  kDelete,
  kList,
  kStat,
  kVerify,
  kPut,
  kGet,
  kListPaths,
  kOpenChannel,
  kCloseChannel,
  kPutCalibration,
  kGetCalibration,
  kListCalibrations,
  kDeleteCalibration,
};
inline constexpr int kNumMethods = 23;
std::string_view MethodName(Method method);  // "Lookup"

// Upper bounds of the latency buckets in seconds; one more for everything above.
inline constexpr std::array<double, 14> kLatencyBounds = {
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30};

// Bytes and planes that went through Put and Get. "Wire" is the payload's units as sent, without
// gaps; "units" are the same planes as stored.
struct TransferCounters {
  std::atomic<int64_t> put_rows_bytes{0};       // accepted in FORM_ROWS
  std::atomic<int64_t> put_encoded_bytes{0};    // accepted in FORM_ENCODED
  std::atomic<int64_t> put_unit_bytes{0};       // stored by both
  std::atomic<int64_t> get_rows_bytes{0};       // sent in FORM_ROWS
  std::atomic<int64_t> get_encoded_bytes{0};    // sent in FORM_ENCODED
  std::atomic<int64_t> get_unit_bytes{0};       // read from records by both
  std::atomic<int64_t> put_channel_bytes{0};    // payload read from windows
  std::atomic<int64_t> get_channel_bytes{0};    // payload written into windows
  std::atomic<int64_t> raw_fallback_planes{0};  // rows that their codec could not take
  std::atomic<int64_t> bad_checksums{0};        // units that arrived with another XXH3
  std::atomic<int64_t> plan_refusals{0};        // seals of blocks that a new plan stores otherwise
};

// Where the page takes the rest from. All must outlive Stop().
struct MetricSources {
  const TieredStore* store = nullptr;
  const Admission* admission = nullptr;
  const Executor* workers = nullptr;
  const Executor* control = nullptr;
  const ChannelTable* channels = nullptr;
  const PeerSet* peers = nullptr;
  const CalibrationStore* calibrations = nullptr;
  std::string policy;  // "rtv"
  std::chrono::steady_clock::time_point started_at;
};

// Counters of the peers by the names of PeerCounters.
std::vector<std::pair<std::string_view, int64_t>> PeerCounterList(const PeerCounters& counters);

// Counters of the store by the names of StoreStats: "seals", "raw_fallback_units".
std::vector<std::pair<std::string_view, int64_t>> StoreCounters(const StoreStats& stats);

class Metrics {
 public:
  Metrics();
  ~Metrics();

  void RecordCall(Method method, absl::StatusCode code, absl::Duration elapsed);
  TransferCounters& transfer() { return transfer_; }
  // Counters of this class in the manner of StoreCounters.
  std::vector<std::pair<std::string_view, int64_t>> Counters() const;

  // Opens the pages. kUnavailable: the address is in use or not ours.
  absl::Status Serve(const std::string& address, const MetricSources& sources);
  void Stop();
  int port() const;  // of the pages; 0 when there are none

 private:
  struct Calls {
    std::array<std::atomic<int64_t>, 17> by_code{};
    std::array<std::atomic<int64_t>, kLatencyBounds.size() + 1> by_latency{};
    std::atomic<int64_t> nanoseconds{0};
  };

  std::string MetricsText(const MetricSources& sources) const;
  std::string StatJson(const MetricSources& sources) const;

  std::array<Calls, kNumMethods> calls_;
  TransferCounters transfer_;
  std::unique_ptr<HttpPages> pages_;
};

}  // namespace kvstow
