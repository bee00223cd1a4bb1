#include "storage/policy/simulator.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "storage/policy/block_tree.h"
#include "storage/policy/ledger.h"

namespace kvstow::policy {
namespace {

constexpr int64_t kProgressEvery = 4096;  // requests

double Share(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

// Nearest rank.
double Percentile95(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto rank = static_cast<size_t>(std::ceil(0.95 * static_cast<double>(values.size()))) - 1;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(rank),
                   values.end());
  return values[rank];
}

bool NeedsFuture(std::string_view policy) {
  const auto& kinds = AllPolicies();
  return std::any_of(kinds.begin(), kinds.end(),
                     [&](const PolicyKind& kind) { return kind.name == policy && kind.is_oracle; });
}

// One run. Keeps the tiers and what is counted.
class Replay {
 public:
  Replay(const Trace& trace, const std::vector<Request>& requests, const SimOptions& options,
         TierLedger* ledger)
      : trace_(trace),
        requests_(requests),
        options_(options),
        ledger_(ledger),
        first_scored_(static_cast<size_t>(options.warmup * static_cast<double>(requests.size()))) {}

  void Step(size_t i) {
    const Request& request = requests_[i];
    ledger_->BeginRequest(request);
    std::array<int64_t, kTiersMax> hits{};
    int32_t leading = 0;
    bool is_leading = true;
    const bool is_scored = i >= first_scored_;
    for (const BlockNumber block : trace_.Chain(i)) {
      const int tier = ledger_->Touch(block);
      is_leading = is_leading && tier >= 0;
      if (is_leading) {
        ++leading;
        ++hits[static_cast<size_t>(tier)];
      }
      if (is_scored && tier != 0) ++result_.written[0];
    }
    if (!options_.announced_ends.empty() && options_.announced_ends[i]) {
      ledger_->SessionOver(request.number);
    }
    Shrink(is_scored);
    if (is_scored) Score(request, hits, leading);
  }

  SimResult Finish() {
    result_.mean_ttft_s = Mean(ttft_s_);
    result_.mean_follow_up_ttft_s = Mean(follow_up_ttft_s_);
    result_.p95_ttft_s = Percentile95(ttft_s_);
    result_.p95_follow_up_ttft_s = Percentile95(follow_up_ttft_s_);
    return result_;
  }

 private:
  void Shrink(bool is_scored) {
    for (size_t t = 0; t < options_.tier_blocks.size(); ++t) {
      const int tier = static_cast<int>(t);
      while (ledger_->num_blocks(tier) > options_.tier_blocks[t]) {
        KVSTOW_CHECK(ledger_->Evict(tier) != kNone);
        ++result_.evictions;
        if (is_scored && t + 1 < options_.tier_blocks.size()) ++result_.written[t + 1];
      }
    }
  }

  void Score(const Request& request, const std::array<int64_t, kTiersMax>& hits, int32_t leading) {
    double ms = options_.cost.recompute_ms * (request.num_blocks - leading);
    for (size_t t = 0; t < kTiersMax; ++t) {
      ms += options_.cost.load_ms[t] * static_cast<double>(hits[t]);
      result_.hits[t] += hits[t];
    }
    ++result_.requests;
    result_.blocks += request.num_blocks;
    ttft_s_.push_back(ms / 1000);
    if (!request.continues) return;
    ++result_.follow_ups;
    if (leading >= requests_[request.parent].full_blocks) ++result_.full_hits;
    follow_up_ttft_s_.push_back(ms / 1000);
  }

  const Trace& trace_;
  const std::vector<Request>& requests_;
  const SimOptions& options_;
  TierLedger* const ledger_;
  const size_t first_scored_;
  SimResult result_;
  std::vector<double> ttft_s_;
  std::vector<double> follow_up_ttft_s_;
};

}  // namespace

absl::Status SimOptions::Validate() const {
  if (!(warmup >= 0 && warmup < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("warmup is ", warmup, ", must be at least 0 and below 1"));
  }
  const auto is_time = [](double ms) { return ms >= 0 && ms <= 1e9; };
  if (!is_time(cost.recompute_ms) ||
      !std::all_of(cost.load_ms.begin(), cost.load_ms.end(), is_time)) {
    return absl::InvalidArgumentError("cost: milliseconds per block must be in [0, 10^9]");
  }
  return absl::OkStatus();
}

double SimResult::full_hit_rate() const { return Share(full_hits, follow_ups); }

double SimResult::block_hit_rate() const {
  int64_t sum = 0;
  for (const int64_t count : hits) sum += count;
  return Share(sum, blocks);
}

double SimResult::tier_hit_rate(int tier) const {
  return Share(hits[static_cast<size_t>(tier)], blocks);
}

absl::StatusOr<SimResult> Simulate(const Trace& trace, const std::vector<Request>& requests,
                                   std::string_view policy, const SimOptions& options) {
  KVSTOW_RETURN_IF_ERROR(options.Validate());
  if (requests.size() != trace.requests.size() ||
      (!options.announced_ends.empty() && options.announced_ends.size() != requests.size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the trace has ", trace.requests.size(), " requests, but ", requests.size(),
        " were annotated and ", options.announced_ends.size(), " have an end announced or not"));
  }
  std::optional<Future> own_future;
  const Future* future = options.future;
  if (future == nullptr && NeedsFuture(policy)) {
    own_future.emplace(trace, requests);
    future = &*own_future;
  }
  BlockTree tree;
  KVSTOW_ASSIGN_OR_RETURN(const std::unique_ptr<Policy> chosen,
                          MakePolicy(policy,
                                     {.tier_blocks = options.tier_blocks,
                                      .alpha = options.alpha,
                                      .hazard_window_s = options.hazard_window_s,
                                      .future = future},
                                     tree));
  TierLedger ledger(static_cast<int>(options.tier_blocks.size()), &tree, chosen.get());
  Replay replay(trace, requests, options, &ledger);
  for (size_t i = 0; i < requests.size(); ++i) {
    replay.Step(i);
    const auto done = static_cast<int64_t>(i) + 1;
    if (options.progress && done % kProgressEvery == 0) options.progress(done);
  }
  return replay.Finish();
}

}  // namespace kvstow::policy
