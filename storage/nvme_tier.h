// NvmeTier: sealed records on a local disk, in RocksDB with its values in blob files.
//
//   KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<NvmeTier> tier,
//                           NvmeTier::Open(options, [&](const BlockInfo& block) { ... }));
//
// FORMAT.md has the directory's layout. Records live in *segments* (column families) of about 1/16
// of the capacity. A segment without living records is deleted as a whole, and when the disk is
// full of dead records the living ones of the deadest segment move, so files really go away.
//
// capacity_bytes bounds used_bytes(): table and blob files plus what waits in memory to become one.
// The folder may exceed it by SlackBytes (logs, manifests, options) and, after a broken database
// was set aside, by that one. Living records take at most live_bytes_max(), about 3/4 of the
// capacity: the rest is room to clean. Above it, Put answers kResourceExhausted: drop something.
//
// Cost: Put copies into memory and, every few dozen MiB, writes and syncs; Get reads the record
// with one or two disk reads into memory of its own. Survives a restart: all that a Flush followed.
// The checksums inside the record are not looked at (but the meta entries at start): the caller
// checks.
//
// Errors of the device: kUnavailable, nothing is stored, and the next Put tries again (at most once
// a second). What was stored before stays readable.
//
// Thread safety: all methods may be called at once. Drop, and everything that only asks, does not
// touch the disk; the others may.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/block_key.h"
#include "kernels/core/clock.h"
#include "storage/block_info.h"
#include "storage/block_ref.h"
#include "storage/tier.h"

namespace kvstow {

struct NvmeOptions {
  std::string path;  // directory; made where it is missing
  int64_t capacity_bytes = int64_t{8} << 30;
  const Clock* clock = nullptr;  // must outlive the tier

  // kInvalidArgument names the field and the limit.
  absl::Status Validate() const;
};

class NvmeTier final : public Tier {
 public:
  static constexpr int64_t kCapacityMin = int64_t{32} << 20;
  // By how much the folder may exceed the capacity: logs, two manifests, options. 16 MiB for small
  // tiers, a 64th of the capacity for large ones, 76 MiB at most.
  static int64_t SlackBytes(int64_t capacity_bytes);

  // Calls `found` for each block that is there (again with newer values where a block was found
  // twice). Errors as TieredStore::Open; kUnavailable where the disk fails.
  static absl::StatusOr<std::unique_ptr<NvmeTier>> Open(
      const NvmeOptions& options, const std::function<void(const BlockInfo&)>& found);
  // Flushes.
  ~NvmeTier() override;

  // What opening met.
  struct OpenReport {
    int64_t dirs_set_aside = 0;  // broken databases
    int64_t blocks_lost = 0;     // entries that could not be read
  };
  const OpenReport& open_report() const;

  // Moves or deletes dead records until `bytes` more fit. kResourceExhausted: too much lives.
  absl::Status MakeRoom(int64_t bytes);

  // Makes drops survive a crash too; Flush alone does not (a dropped block may come back).
  absl::Status FlushDrops();
  bool has_unflushed() const;  // puts or drops
  int64_t live_bytes() const;
  int64_t live_bytes_max() const;

  TierKind kind() const override { return TierKind::kNvme; }
  // Also kInvalidArgument: not a record, or larger than live_bytes_max().
  absl::Status Put(const BlockKey& key, absl::Span<const std::byte> record) override;
  // Also kDataLoss: there is something, but it cannot be read; kUnavailable: the device failed.
  absl::StatusOr<BlockRef> Get(const BlockKey& key) override;
  void Drop(const BlockKey& key) override;
  void ForEach(
      const std::function<void(const BlockKey& key, int64_t record_bytes)>& visit) const override;
  absl::Status Flush() override;
  int64_t used_bytes() const override;
  int64_t capacity_bytes() const override;

 private:
  struct Parts;
  explicit NvmeTier(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace kvstow
