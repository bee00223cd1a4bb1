// Tier: a place that keeps sealed records, such as host memory or a local disk.
//
// A tier stores what it is given and forgets it when told to. Which block to keep is the policy's
// decision, and moving blocks between tiers is tiered_store.h's.
//
// Thread safety: all methods may be called at once. None blocks on the network.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/block_key.h"
#include "storage/block_ref.h"

namespace kvstow {

// Fastest first. Stored in the index and sent on the wire: never renumber.
enum class TierKind : uint8_t { kHbm = 1, kDram = 2, kNvme = 3, kShared = 4 };

// Those that a TieredStore may have, as places of an array: hbm, dram, nvme.
inline constexpr size_t kNumStoreTiers = 3;
constexpr size_t TierIdx(TierKind kind) { return static_cast<size_t>(kind) - 1; }

std::string_view TierName(TierKind kind);  // "hbm", "dram", "nvme", "shared"

class Tier {
 public:
  virtual ~Tier() = default;

  virtual TierKind kind() const = 0;

  // Stores a copy of `record` under `key`.
  //   kAlreadyExists      something is stored under `key`; it is unchanged
  //   kResourceExhausted  no room: the message gives bytes wanted and bytes free; drop something
  //   kInvalidArgument    larger than the tier will ever hold, or no record
  //   kUnavailable        the device failed; nothing is stored
  virtual absl::Status Put(const BlockKey& key, absl::Span<const std::byte> record) = 0;

  // The record, pinned, exactly as it was put. A disk tier does not check units: the caller does,
  // before any byte goes out. The result may outlive the tier.
  //   kNotFound     nothing is stored under `key`
  //   kDataLoss     something is, but it cannot be read: drop it
  //   kUnavailable  the device failed
  virtual absl::StatusOr<BlockRef> Get(const BlockKey& key) = 0;

  // Forgets the block. A pinned block disappears from Get now; its memory is freed at the last
  // unpin and counts as used until then. Dropping an unknown key is fine. Touches memory only: a
  // tier on a device frees the room later, at the latest when Put or Flush needs it.
  virtual void Drop(const BlockKey& key) = 0;

  // Calls `visit` once for each stored block, in any order, with its size.
  virtual void ForEach(
      const std::function<void(const BlockKey& key, int64_t record_bytes)>& visit) const = 0;

  // Makes everything put so far survive a crash of the process. A no-op where nothing survives.
  virtual absl::Status Flush() = 0;

  virtual int64_t used_bytes() const = 0;  // never above capacity_bytes()
  virtual int64_t capacity_bytes() const = 0;
};

}  // namespace kvstow
