#include "storage/load_rates.h"

#include <algorithm>

namespace kvstow {
namespace {

// Less says more of the call than of the bytes.
constexpr int64_t kBytesMin = 4096;
constexpr double kWeight = 0.1;

}  // namespace

void LoadRates::Record(Rate& rate, int64_t bytes, absl::Duration elapsed) {
  const double seconds = absl::ToDoubleSeconds(elapsed);
  if (bytes < kBytesMin || !(seconds > 0)) return;
  // The mean of the times, not of the rates: one fast read does not hide ten slow ones.
  const double s_per_byte = seconds / static_cast<double>(bytes);
  if (rate.is_measured) {
    rate.bytes_per_s = 1 / ((1 - kWeight) / rate.bytes_per_s + kWeight * s_per_byte);
  } else {
    rate = {.bytes_per_s = 1 / s_per_byte, .is_measured = true};
  }
}

void LoadRates::RecordRead(TierKind tier, int64_t bytes, absl::Duration elapsed) {
  if (tier != TierKind::kNvme) return;
  MutexLock lock(&mutex_);
  Record(disk_, bytes, elapsed);
}

void LoadRates::RecordSend(int64_t bytes, absl::Duration elapsed) {
  MutexLock lock(&mutex_);
  Record(send_, bytes, elapsed);
}

LoadRates::Rate LoadRates::of(TierKind tier) const {
  MutexLock lock(&mutex_);
  if (tier != TierKind::kNvme) return send_;
  return {.bytes_per_s = std::min(disk_.bytes_per_s, send_.bytes_per_s),
          .is_measured = disk_.is_measured && send_.is_measured};
}

LoadEstimate EstimateLoad(const LoadRates& rates, absl::Span<const BlockInfo> blocks,
                          double prefill_tokens_per_s) {
  const LoadRates::Rate dram = rates.of(TierKind::kDram);
  const LoadRates::Rate nvme = rates.of(TierKind::kNvme);
  LoadEstimate estimate{.is_measured = true};
  double saved_ms = 0;
  double most_saved_ms = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const bool is_in_memory = blocks[i].location.in_dram || blocks[i].location.in_hbm;
    const LoadRates::Rate& rate = is_in_memory ? dram : nvme;
    const double load_ms = 1e3 * static_cast<double>(blocks[i].record_bytes) / rate.bytes_per_s;
    const double recompute_ms = 1e3 * blocks[i].num_tokens / prefill_tokens_per_s;
    estimate.load_ms += load_ms;
    estimate.recompute_ms += recompute_ms;
    estimate.load_bytes += blocks[i].record_bytes;
    estimate.is_measured = estimate.is_measured && rate.is_measured;
    saved_ms += recompute_ms - load_ms;
    if (saved_ms <= most_saved_ms) continue;
    most_saved_ms = saved_ms;
    estimate.num_worth_loading = static_cast<int32_t>(i) + 1;
  }
  return estimate;
}

}  // namespace kvstow
