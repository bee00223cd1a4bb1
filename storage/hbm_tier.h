// HbmTier: sealed records in one slab of a GPU's memory.
//
//   KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<DeviceMemory> device, OpenDeviceMemory(0));
//   KVSTOW_ASSIGN_OR_RETURN(auto tier, HbmTier::Create(device, {.capacity_bytes = 8LL << 30}));
//
// The slab is taken at start and never grows; best fit in granules of 256 bytes. The host reads and
// writes it through page-locked staging of a fixed size, piece by piece: Put and Get copy a record
// twice. They wait for the device, at most `wait_max`, on one of `num_lanes` lanes (a stream and
// its staging); while all lanes are busy they wait for one, as long at most. What Get returns is
// host memory of the reader's own. Nothing survives a restart. Bytes are not checked here.
//
// A copy that has not ended by then keeps its lane, and the block its memory, until it has: the
// call answers kUnavailable, and nothing is stored.
//
// Thread safety: all methods may be called at once. Drop, ForEach and Flush touch host memory only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/block_key.h"
#include "kernels/core/device_memory.h"
#include "kernels/core/mutex.h"
#include "storage/block_ref.h"
#include "storage/tier.h"

namespace kvstow {

class HbmTier final : public Tier {
 public:
  static constexpr int64_t kGranuleBytes = 256;

  struct Options {
    int64_t capacity_bytes = 0;                // rounded down to whole granules
    int64_t staging_bytes = int64_t{4} << 20;  // of each lane
    int32_t num_lanes = 4;
    absl::Duration wait_max = absl::Seconds(2);  // a healthy device needs milliseconds
  };
  // kInvalidArgument: less than one granule, staging or lane. kResourceExhausted: the device has
  // not that much free memory. kUnavailable: the device failed.
  static absl::StatusOr<std::unique_ptr<HbmTier>> Create(std::shared_ptr<DeviceMemory> device,
                                                         const Options& options);
  // What a device that hangs still holds is not given back.
  ~HbmTier() override;

  TierKind kind() const override { return TierKind::kHbm; }
  absl::Status Put(const BlockKey& key, absl::Span<const std::byte> record) override;
  absl::StatusOr<BlockRef> Get(const BlockKey& key) override;
  void Drop(const BlockKey& key) override;
  void ForEach(
      const std::function<void(const BlockKey& key, int64_t record_bytes)>& visit) const override;
  absl::Status Flush() override { return absl::OkStatus(); }
  int64_t used_bytes() const override;
  int64_t capacity_bytes() const override { return options_.capacity_bytes; }

 private:
  class Arena;
  struct Block;  // a region of the arena, given back with the last copy
  struct Lane {
    DeviceStream stream;
    HostBuffer staging;
    std::shared_ptr<const Block> block;  // whose bytes are under way
    // The device may still be at the last copy, until `event`; null: nobody knows until when.
    bool is_stuck = false;
    DeviceEvent event;
  };
  // A lane on loan, given back at its end.
  class Loan;

  HbmTier(std::shared_ptr<DeviceMemory> device, const Options& options,
          std::shared_ptr<Arena> arena);

  // kUnavailable: none became free in time.
  absl::StatusOr<std::unique_ptr<Lane>> TakeLane();
  void GiveLane(std::unique_ptr<Lane> lane);
  // Lanes whose copy has ended meanwhile are of use again.
  void RecoverLanes();
  bool HasEnded(const Lane& lane, absl::Duration timeout) const;
  absl::Status Await(Lane& lane);
  absl::Status CopyIn(Lane& lane, absl::Span<const std::byte> record);
  absl::Status CopyOut(Lane& lane, absl::Span<std::byte> record);

  const std::shared_ptr<DeviceMemory> device_;
  const Options options_;
  const std::shared_ptr<Arena> arena_;

  mutable Mutex mutex_;
  CondVar lane_given_;
  absl::flat_hash_map<BlockKey, std::shared_ptr<const Block>, BlockKeyHash> blocks_
      ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mutex_);  // free
  std::vector<std::unique_ptr<Lane>> stuck_ ABSL_GUARDED_BY(mutex_);  // the device has them
};

}  // namespace kvstow
