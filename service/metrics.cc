#include "service/metrics.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "kernels/codec/codec.h"
#include "kernels/core/status_macros.h"
#include "service/admin_page.h"
#include "service/server_config.h"

namespace kvstow {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr std::array<std::string_view, kNumMethods> kMethodNames = {"RegisterModel",
                                                                    "GetModel",
                                                                    "ListModels",
                                                                    "SetPlan",
                                                                    "Lookup",
                                                                    "Reserve",
                                                                    "Seal",
                                                                    "Abort",
                                                                    "Acquire",
                                                                    "Release",
                                                                    "Delete",
                                                                    "List",
                                                                    "Stat",
                                                                    "Verify",
                                                                    "Put",
                                                                    "Get",
                                                                    "ListPaths",
                                                                    "OpenChannel",
                                                                    "CloseChannel",
                                                                    "PutCalibration",
                                                                    "GetCalibration",
                                                                    "ListCalibrations",
                                                                    "DeleteCalibration"};

constexpr std::array<std::string_view, 17> kCodeNames = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

struct Label {
  std::string_view name;
  std::string value;
};

// Adds up families in the order in which they are first named.
class Families {
 public:
  void Gauge(std::string_view name, std::string_view help, double value,
             std::vector<Label> labels = {}) {
    Add(name, help, MetricType::Gauge, std::move(labels)).gauge.value = value;
  }
  void Counter(std::string_view name, std::string_view help, double value,
               std::vector<Label> labels = {}) {
    Add(name, help, MetricType::Counter, std::move(labels)).counter.value = value;
  }
  ClientMetric& Add(std::string_view name, std::string_view help, MetricType type,
                    std::vector<Label> labels) {
    const std::string full = "kvstow_" + std::string(name);
    auto found = std::find_if(families_.begin(), families_.end(),
                              [&](const MetricFamily& family) { return family.name == full; });
    if (found == families_.end()) {
      families_.push_back({full, std::string(help), type, {}});
      found = families_.end() - 1;
    }
    ClientMetric& metric = found->metric.emplace_back();
    for (Label& label : labels) {
      metric.label.push_back({std::string(label.name), std::move(label.value)});
    }
    return metric;
  }
  // `counts`: by upper bound in kLatencyBounds, and above.
  void Histogram(std::string_view name, std::string_view help, std::vector<Label> labels,
                 absl::Span<const int64_t> counts, double sum) {
    auto& histogram = Add(name, help, MetricType::Histogram, std::move(labels)).histogram;
    uint64_t count = 0;
    for (size_t b = 0; b < counts.size(); ++b) {
      count += static_cast<uint64_t>(counts[b]);
      const double bound =
          b < kLatencyBounds.size() ? kLatencyBounds[b] : std::numeric_limits<double>::infinity();
      histogram.bucket.push_back({count, bound});
    }
    histogram.sample_count = count;
    histogram.sample_sum = sum;
  }
  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  std::vector<MetricFamily> families_;
};

void AddStore(const StoreStats& stats, Families& out) {
  for (const TierStats& tier : stats.tiers) {
    const std::vector<Label> labels = {{"tier", std::string(TierName(tier.kind))}};
    out.Gauge("tier_capacity_bytes", "Bytes the tier may hold.", tier.capacity_bytes, labels);
    out.Gauge("tier_used_bytes", "Bytes allocated: sealed, reserved, waiting for reuse.",
              tier.used_bytes, labels);
    out.Gauge("tier_sealed_bytes", "Sum of the record sizes.", tier.sealed_bytes, labels);
    out.Gauge("tier_reserved_bytes", "Bytes of open and dead tickets.", tier.reserved_bytes,
              labels);
    out.Gauge("tier_blocks", "Blocks in the tier.", tier.num_blocks, labels);
  }
  for (const CodecStats& codec : stats.codecs) {
    const std::vector<Label> labels = {{"codec", CodecPairName(codec.codecs)}};
    out.Gauge("codec_blocks", "Blocks stored with the codecs.", codec.num_blocks, labels);
    out.Gauge("codec_record_bytes", "Bytes of their records.", codec.record_bytes, labels);
    out.Gauge("codec_logical_bytes", "Bytes of their rows.", codec.logical_bytes, labels);
  }
  out.Gauge("blocks", "Distinct keys.", stats.num_blocks);
  out.Gauge("index_bytes", "Memory of the index.", stats.index_bytes);
  out.Gauge("policy_bytes", "Memory of what the policy knows.", stats.policy_bytes);
  out.Gauge("hint_pinned_blocks", "Blocks that clients asked to keep.", stats.hint_pinned_blocks);
  out.Gauge("open_tickets", "Reservations that are neither sealed nor aborted.",
            stats.open_tickets);
  out.Gauge("open_leases", "Leases that are neither released nor expired.", stats.open_leases);
  out.Gauge("pinned_bytes", "Bytes that readers hold.", stats.pinned_bytes);
  out.Gauge("write_behind_bytes", "Sealed bytes that wait for the disk.", stats.write_behind_bytes);
  for (const auto& [name, value] : StoreCounters(stats)) {
    out.Counter(std::string(name) + "_total", "See StoreStats in storage/tiered_store.h.", value);
  }
}

void AddExecutor(const Executor& executor, const std::string& name, Families& out) {
  const std::vector<Label> labels = {{"executor", name}};
  out.Gauge("executor_queued", "Work items that wait.", executor.num_queued(), labels);
  out.Gauge("executor_running", "Work items being done.", executor.num_running(), labels);
  out.Counter("executor_refused_total", "Work items refused by a full queue.",
              executor.num_refused(), labels);
}

void AddAdmission(const Admission& admission, Families& out) {
  out.Gauge("calls_in_flight", "Put, Get and Verify calls.", admission.calls_in_flight());
  out.Gauge("bytes_in_flight", "Bytes held for them.", admission.bytes_in_flight());
  constexpr std::string_view kHelp = "Calls refused with RESOURCE_EXHAUSTED.";
  out.Counter("admission_refused_total", kHelp, admission.num_refused_by_calls(),
              {{"limit", "calls"}});
  out.Counter("admission_refused_total", kHelp, admission.num_refused_by_bytes(),
              {{"limit", "bytes"}});
}

}  // namespace

std::string_view MethodName(Method method) { return kMethodNames[static_cast<size_t>(method)]; }

std::vector<std::pair<std::string_view, int64_t>> StoreCounters(const StoreStats& stats) {
  return {
      {"lookups", stats.lookups},
      {"lookup_hits", stats.lookup_hits},
      {"hbm_hits", stats.hbm_hits},
      {"dram_hits", stats.dram_hits},
      {"nvme_hits", stats.nvme_hits},
      {"misses", stats.misses},
      {"seals", stats.seals},
      {"aborts", stats.aborts},
      {"tickets_expired", stats.tickets_expired},
      {"leases_expired", stats.leases_expired},
      {"hbm_evictions", stats.hbm_evictions},
      {"dram_evictions", stats.dram_evictions},
      {"nvme_evictions", stats.nvme_evictions},
      {"demotions_dropped", stats.demotions_dropped},
      {"corrupt_blocks", stats.corrupt_blocks},
      {"raw_fallback_units", stats.raw_fallback_units},
      {"hbm_bytes_written", stats.hbm_bytes_written},
      {"hbm_bytes_read", stats.hbm_bytes_read},
      {"hbm_errors", stats.hbm_errors},
      {"nvme_bytes_written", stats.nvme_bytes_written},
      {"nvme_bytes_read", stats.nvme_bytes_read},
      {"nvme_write_errors", stats.nvme_write_errors},
      {"nvme_writes_filtered", stats.nvme_writes_filtered},
      {"nvme_writes_over_budget", stats.nvme_writes_over_budget},
      {"turns", stats.turns},
      {"follow_up_turns", stats.follow_up_turns},
      {"sessions_over", stats.sessions_over},
      {"blocks_idle_dropped", stats.blocks_idle_dropped},
      {"dirs_set_aside", stats.dirs_set_aside},
      {"policy_files_set_aside", stats.policy_files_set_aside},
  };
}

Metrics::Metrics() = default;
Metrics::~Metrics() { Stop(); }

void Metrics::RecordCall(Method method, absl::StatusCode code, absl::Duration elapsed) {
  Calls& calls = calls_[static_cast<size_t>(method)];
  const auto code_idx = std::min<size_t>(static_cast<size_t>(code), calls.by_code.size() - 1);
  calls.by_code[code_idx].fetch_add(1, std::memory_order_relaxed);
  const double seconds = absl::ToDoubleSeconds(elapsed);
  const auto bucket = std::lower_bound(kLatencyBounds.begin(), kLatencyBounds.end(), seconds) -
                      kLatencyBounds.begin();
  calls.by_latency[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  calls.nanoseconds.fetch_add(absl::ToInt64Nanoseconds(elapsed), std::memory_order_relaxed);
}

std::vector<std::pair<std::string_view, int64_t>> Metrics::Counters() const {
  return {
      {"put_rows_bytes", transfer_.put_rows_bytes.load()},
      {"put_encoded_bytes", transfer_.put_encoded_bytes.load()},
      {"put_unit_bytes", transfer_.put_unit_bytes.load()},
      {"get_rows_bytes", transfer_.get_rows_bytes.load()},
      {"get_encoded_bytes", transfer_.get_encoded_bytes.load()},
      {"get_unit_bytes", transfer_.get_unit_bytes.load()},
      {"put_channel_bytes", transfer_.put_channel_bytes.load()},
      {"get_channel_bytes", transfer_.get_channel_bytes.load()},
      {"raw_fallback_planes", transfer_.raw_fallback_planes.load()},
      {"bad_checksums", transfer_.bad_checksums.load()},
      {"plan_refusals", transfer_.plan_refusals.load()},
  };
}

std::vector<std::pair<std::string_view, int64_t>> PeerCounterList(const PeerCounters& counters) {
  return {{"peer_hits", counters.peer_hits.load()},
          {"peer_fetched", counters.peer_fetched.load()},
          {"peer_refused", counters.peer_refused.load()},
          {"peer_failures", counters.peer_failures.load()}};
}

std::string Metrics::MetricsText(const MetricSources& sources) const {
  Families out;
  out.Gauge("build_info", "Always 1.", 1, {{"version", std::string(ServerVersion())}});
  AddStore(sources.store->Stats(), out);
  AddAdmission(*sources.admission, out);
  out.Gauge("open_channels", "Windows of workers.", sources.channels->num_open());
  AddExecutor(*sources.workers, "workers", out);
  AddExecutor(*sources.control, "control", out);
  for (const auto& [name, value] : Counters()) {
    out.Counter(std::string(name) + "_total", "See TransferCounters in service/metrics.h.", value);
  }
  for (const auto& [name, value] : PeerCounterList(sources.peers->counters())) {
    out.Counter(std::string(name) + "_total", "See PeerCounters in service/peer_set.h.", value);
  }
  const CalibrationStore& calibrations = *sources.calibrations;
  out.Gauge("calibrations", "Bundles of calibrated codecs.", calibrations.num_held());
  out.Gauge("calibration_bytes", "Bytes of their files.", calibrations.num_bytes());
  for (const auto& [name, value] : calibrations.Counters()) {
    out.Counter(std::string(name) + "_total", "See service/calibration_store.h.", value);
  }
  for (int i = 0; i < kNumMethods; ++i) {
    const Calls& calls = calls_[i];
    const std::string method(kMethodNames[i]);
    for (size_t code = 0; code < calls.by_code.size(); ++code) {
      const int64_t count = calls.by_code[code].load(std::memory_order_relaxed);
      if (count == 0 && code != 0) continue;
      out.Counter("rpc_total", "Calls that ended, by method and code.", count,
                  {{"method", method}, {"code", std::string(kCodeNames[code])}});
    }
    std::array<int64_t, kLatencyBounds.size() + 1> by_latency;
    for (size_t b = 0; b < by_latency.size(); ++b) {
      by_latency[b] = calls.by_latency[b].load(std::memory_order_relaxed);
    }
    out.Histogram("rpc_seconds", "From the call's arrival to its end.", {{"method", method}},
                  by_latency, 1e-9 * calls.nanoseconds.load(std::memory_order_relaxed));
  }
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, out.Take());
  return text.str();
}

std::string Metrics::StatJson(const MetricSources& sources) const {
  AdminView view{.version = ServerVersion(),
                 .policy = sources.policy,
                 .uptime_s = std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                                           sources.started_at)
                                 .count(),
                 .store = sources.store->Stats(),
                 .calls_in_flight = sources.admission->calls_in_flight(),
                 .bytes_in_flight = sources.admission->bytes_in_flight(),
                 .open_channels = sources.channels->num_open()};
  for (const auto& counters :
       {StoreCounters(view.store), Counters(), PeerCounterList(sources.peers->counters()),
        sources.calibrations->Counters()}) {
    view.counters.insert(view.counters.end(), counters.begin(), counters.end());
  }
  for (int i = 0; i < kNumMethods; ++i) {
    AdminMethod method{.name = kMethodNames[i],
                       .seconds = 1e-9 * calls_[i].nanoseconds.load(std::memory_order_relaxed)};
    for (const auto& count : calls_[i].by_code) method.calls += count;
    method.failed = method.calls - calls_[i].by_code[0];
    view.methods.push_back(method);
  }
  return AdminJson(view);
}

absl::Status Metrics::Serve(const std::string& address, const MetricSources& sources) {
  std::vector<HttpPages::Page> pages = AdminPages([this, sources] { return StatJson(sources); });
  pages.push_back(
      {"/metrics", "text/plain; version=0.0.4", [this, sources] { return MetricsText(sources); }});
  KVSTOW_ASSIGN_OR_RETURN(pages_, HttpPages::Serve("metrics.address", address, std::move(pages)));
  return absl::OkStatus();
}

void Metrics::Stop() { pages_.reset(); }  // waits for scrapes

int Metrics::port() const { return pages_ == nullptr ? 0 : pages_->port(); }

}  // namespace kvstow
