// LeaseTable: read leases and what they pin.
//
// A block in memory is pinned by a BlockRef; one on disk by a count in the index, which whoever
// takes the lease out of the table gives back.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/core/block_key.h"
#include "kernels/core/mutex.h"
#include "storage/block_ref.h"
#include "storage/index_shard.h"

namespace kvstow {

using LeaseId = uint64_t;  // random, never 0

struct LeasePin {
  BlockKey key;
  BlockId id = 0;   // the incarnation that is pinned
  BlockRef memory;  // set: pinned in memory; else pinned on disk
};

class LeaseTable {
 public:
  // Pins over all leases: bounds the table's memory at about 100 MB.
  static constexpr int64_t kPinsMax = 1'000'000;

  explicit LeaseTable(int32_t leases_max) : leases_max_(leases_max) {}

  // OK when one more lease of `num_keys` keys fits; kResourceExhausted names the limit.
  absl::Status CheckRoom(int64_t num_keys) const;
  // Adds the lease and moves `pins` in. kResourceExhausted: `pins` are untouched.
  absl::StatusOr<LeaseId> Add(std::vector<LeasePin>& pins, absl::Time deadline);
  // Takes the lease out. nullopt: unknown, expired or released.
  std::optional<std::vector<LeasePin>> Remove(LeaseId id);
  // Takes out one lease whose deadline is `now` or earlier.
  std::optional<std::vector<LeasePin>> RemoveExpired(absl::Time now);

  int64_t num_leases() const;

 private:
  absl::Status CheckRoomLocked(int64_t num_keys) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  struct Lease {
    std::vector<LeasePin> pins;
    absl::Time deadline;
  };

  const int32_t leases_max_;
  mutable Mutex mutex_;
  absl::flat_hash_map<LeaseId, Lease> leases_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<absl::Time, LeaseId>> deadlines_ ABSL_GUARDED_BY(mutex_);
  int64_t num_pins_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvstow
