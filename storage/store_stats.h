// StoreStats: what a TieredStore tells of itself. Counters only grow; gauges are never negative.
#pragma once

#include <cstdint>
#include <vector>

#include "storage/block_info.h"
#include "storage/tier.h"

namespace kvstow {

struct TierStats {
  TierKind kind = TierKind::kDram;
  int64_t capacity_bytes = 0;
  int64_t used_bytes = 0;      // everything allocated: sealed, reserved, waiting for reuse
  int64_t sealed_bytes = 0;    // sum of the record sizes
  int64_t reserved_bytes = 0;  // of open and dead tickets
  int64_t num_blocks = 0;
};

// Counters only grow; gauges are never negative.
struct StoreStats {
  std::vector<TierStats> tiers;  // fastest first
  std::vector<CodecStats> codecs;
  int64_t num_blocks = 0;   // distinct keys
  int64_t index_bytes = 0;  // memory of the index
  int64_t open_tickets = 0;
  int64_t open_leases = 0;
  int64_t pinned_bytes = 0;
  int64_t write_behind_bytes = 0;  // waiting for the disk
  int64_t policy_bytes = 0;        // memory of what the policy knows
  int64_t hint_pinned_blocks = 0;
  // Counters.
  int64_t lookups = 0, lookup_hits = 0;                            // keys
  int64_t hbm_hits = 0, dram_hits = 0, nvme_hits = 0, misses = 0;  // blocks asked for by Get
  int64_t seals = 0, aborts = 0, tickets_expired = 0, leases_expired = 0;
  int64_t hbm_evictions = 0, dram_evictions = 0, nvme_evictions = 0;
  int64_t demotions_dropped = 0;   // evicted from memory before the disk had a copy
  int64_t corrupt_blocks = 0;      // dropped after a failed check
  int64_t raw_fallback_units = 0;  // units sealed as raw where the block's codec is not
  int64_t hbm_bytes_written = 0, hbm_bytes_read = 0, hbm_errors = 0;
  int64_t nvme_bytes_written = 0, nvme_bytes_read = 0;
  int64_t nvme_writes_filtered = 0, nvme_writes_over_budget = 0;  // blocks not written unasked
  int64_t turns = 0, follow_up_turns = 0, sessions_over = 0;
  int64_t nvme_write_errors = 0;
  int64_t blocks_idle_dropped = 0;     // copies that no turn used for StoreOptions::block_ttl
  int64_t dirs_set_aside = 0;          // broken disk directories renamed at start
  int64_t policy_files_set_aside = 0;  // likewise, of what the policy had learned
};

}  // namespace kvstow
