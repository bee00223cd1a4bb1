// Simulate: a trace replayed in virtual time through tiers under a policy, and what came of it.
//
//   const std::vector<Request> requests = FindSessions(trace);
//   KVSTOW_ASSIGN_OR_RETURN(SimResult result,
//                           Simulate(trace, requests, "rtv", {.tier_blocks = {800, 4096, 12288}}));
//
// For each request: its leading resident blocks are hits, counted by tier; the rest is recomputed.
// All its blocks are then in tier 0, and tiers over their capacity demote to the next one; the last
// drops. Tiers are exclusive. The time to first token is loads plus recompute, whole blocks,
// without queueing. Blocks of a running request are not pinned.
//
// The first part of the trace warms the tiers up and is not scored.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/policy/policy.h"
#include "storage/policy/sessions.h"
#include "storage/policy/trace.h"

namespace kvstow::policy {

// Milliseconds per block. The defaults are those of 512-token blocks of an 8B model in bf16, 64
// MiB: host memory at 50 GB/s, disk at 12 GB/s, prefill at 20,000 tokens/s.
struct CostModel {
  std::array<double, kTiersMax> load_ms{0, 1.34, 5.6, 5.6};
  double recompute_ms = 25.6;
};

struct SimOptions {
  std::vector<int64_t> tier_blocks{5000};  // capacities, fastest first
  double warmup = 0.2;                     // share of the requests that is not scored, [0, 1)
  CostModel cost;
  double alpha = 0.1;           // PolicyOptions
  double hazard_window_s = 60;  // PolicyOptions
  // Requests after which the client says "session over", by request; empty: none does.
  std::vector<bool> announced_ends;
  // For the oracles; made from the trace when null and needed.
  const Future* future = nullptr;
  // Called now and then with the number of requests done.
  std::function<void(int64_t)> progress;

  // kInvalidArgument names the field and the limit.
  absl::Status Validate() const;
};

// Rates are shares of 1; times are seconds; all over the scored requests only.
struct SimResult {
  int64_t requests = 0;
  int64_t follow_ups = 0;
  int64_t blocks = 0;
  std::array<int64_t, kTiersMax> hits{};  // blocks, by tier
  // Follow-ups that found every whole block of their parent's prompt.
  int64_t full_hits = 0;
  double mean_ttft_s = 0;
  double p95_ttft_s = 0;
  double mean_follow_up_ttft_s = 0;
  double p95_follow_up_ttft_s = 0;
  std::array<int64_t, kTiersMax>
      written{};          // blocks that entered each tier: new, promoted, demoted
  int64_t evictions = 0;  // decisions, over the whole trace

  double full_hit_rate() const;
  double block_hit_rate() const;
  double tier_hit_rate(int tier) const;
};

//   kInvalidArgument  options, unknown policy, `requests` not of this trace
absl::StatusOr<SimResult> Simulate(const Trace& trace, const std::vector<Request>& requests,
                                   std::string_view policy, const SimOptions& options);

}  // namespace kvstow::policy
