// StoreOptions: the bounds of a TieredStore.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace kvstow {

// Which sealed blocks are written to disk without being asked for.
enum class DiskAdmission : uint8_t {
  kAll,
  kSecondSight,  // those that a second turn has used
};

struct StoreOptions {
  int64_t dram_bytes = int64_t{1} << 30;
  // Of a GPU's memory, above host memory; 0 for none. Open is given the device.
  int64_t hbm_bytes = 0;
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
  // Bounds the index, open tickets included. At the limit a block leaves.
  int64_t blocks_max = 10'000'000;
  // Which block leaves next: "lru", "s3fifo", "arc", "gdsf", "hazard" or "rtv" (policy/README.md).
  std::string policy = "rtv";
  // rtv: weight of whole sessions against single blocks, in [0, 1].
  double policy_alpha = 0.1;
  // Calls that name the same prompt, or a longer one, within this time are one turn.
  absl::Duration turn_gap = absl::Seconds(5);
  // Blocks that no turn has used for so long leave by themselves; 0: only when room is needed.
  absl::Duration block_ttl = absl::ZeroDuration();
  // Memory kept free between turns. New blocks then find room at once and compete with the old ones
  // when their turn has ended, instead of replacing them unseen.
  int64_t dram_headroom_bytes = 0;
  // What a service keeps free unless told otherwise: what is kept hardly shrinks, and `rtv` finds,
  // within 1 %, what it finds in the simulator (README.md).
  static constexpr int64_t UsualHeadroomBytes(int64_t dram_bytes) { return dram_bytes / 128; }
  DiskAdmission disk_admission = DiskAdmission::kAll;
  // Bytes per day written to disk unasked; 0 for no limit.
  int64_t disk_write_bytes_per_day = 0;
  // Background thread for write-behind and expiry. Tests turn it off and call RunMaintenance().
  bool background = true;

  // Host memory that each block takes beside its own bytes, in prompts of 20 blocks or more: in the
  // index, in the policy of each tier, in memory and on disk. README.md has the parts; tests hold
  // it.
  int64_t BytesPerBlock() const;

  // kInvalidArgument names the field and the limit.
  absl::Status Validate() const;
};

}  // namespace kvstow
