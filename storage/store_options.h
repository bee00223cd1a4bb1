// StoreOptions: the bounds of a TieredStore.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace kvstow {

struct StoreOptions {
  int64_t dram_bytes = int64_t{1} << 30;
  // Directory of the disk tier; empty for none.
  std::string nvme_path;
  int64_t nvme_bytes = int64_t{8} << 30;
  // How long a writer may hold a ticket. Longer keeps dead writers' memory; shorter hurts slow
  // ones.
  absl::Duration write_deadline = absl::Seconds(30);
  // Second clock: added to write_deadline before the memory of a dead ticket is used again.
  absl::Duration reuse_delay = absl::Seconds(30);
  // Longest lease that Acquire grants.
  absl::Duration lease_max = absl::Minutes(5);
  int32_t leases_max = 65536;
  int32_t tickets_max = 65536;
  // Bytes waiting to be written to disk. Above it, sealed blocks stay in memory only and are lost
  // on eviction (counted in `demotions_dropped`).
  int64_t write_behind_bytes_max = int64_t{256} << 20;
  // Bounds the index, open tickets included. At the limit the oldest block leaves.
  int64_t blocks_max = 10'000'000;
  // Background thread for write-behind and expiry. Tests turn it off and call RunMaintenance().
  bool background = true;

  // kInvalidArgument names the field and the limit.
  absl::Status Validate() const;
};

}  // namespace kvstow
