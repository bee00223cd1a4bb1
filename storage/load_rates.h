// LoadRates: how fast bytes have lately come from each tier and gone to readers; LoadEstimate: what
// that says of loading a prefix instead of computing it.
//
//   rates.RecordRead(TierKind::kNvme, bytes, elapsed);
//   rates.RecordSend(bytes, elapsed);
//   LoadEstimate estimate = EstimateLoad(rates, blocks, prefill_tokens_per_s);
//
// Means over reads, each weighted with a tenth: a disk that turns slow is noticed within some ten
// reads. Guesses hold until the first read. Thread safety: all methods may be called at once.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/mutex.h"
#include "storage/block_info.h"
#include "storage/tier.h"

namespace kvstow {

struct LoadEstimate {
  double load_ms = 0;       // of all blocks
  double recompute_ms = 0;  // likewise
  int64_t load_bytes = 0;
  int32_t num_worth_loading = 0;  // leading blocks: loading these and computing the rest is fastest
  bool is_measured = false;       // all rates used are measured
};

class LoadRates {
 public:
  struct Rate {
    double bytes_per_s = 0;
    bool is_measured = false;
  };

  // Memory, also a GPU's, is as fast as the way to the reader; only other tiers are recorded.
  void RecordRead(TierKind tier, int64_t bytes, absl::Duration elapsed);
  // A whole answer on its way to a reader.
  void RecordSend(int64_t bytes, absl::Duration elapsed);

  // What loading from `tier` to a reader comes to: the slower of both.
  Rate of(TierKind tier) const;

 private:
  static void Record(Rate& rate, int64_t bytes, absl::Duration elapsed);

  mutable Mutex mutex_;
  Rate disk_ ABSL_GUARDED_BY(mutex_) = {.bytes_per_s = 500e6};
  Rate send_ ABSL_GUARDED_BY(mutex_) = {.bytes_per_s = 1e9};
};

// `blocks`: a leading part of a prompt, all present. `prefill_tokens_per_s` is more than 0.
LoadEstimate EstimateLoad(const LoadRates& rates, absl::Span<const BlockInfo> blocks,
                          double prefill_tokens_per_s);

}  // namespace kvstow
