// TieredStore::Impl: the parts of a TieredStore and the steps that several of its methods share.
// Private to the tiered_store*.cc files.
//
// Lock order: move lock, index shard, then ticket, tier or queue, then the
// retention.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/mutex.h"
#include "storage/block_index.h"
#include "storage/dram_tier.h"
#include "storage/hbm_tier.h"
#include "storage/lease_table.h"
#include "storage/load_rates.h"
#include "storage/nvme_tier.h"
#include "storage/retention.h"
#include "storage/ticket_table.h"
#include "storage/tiered_store.h"
#include "storage/write_behind.h"
#include "storage/write_budget.h"

namespace kvstow {

struct StoreCounters {
  using Counter = std::atomic<int64_t>;
  mutable Counter lookups = 0, lookup_hits = 0;
  Counter hbm_hits = 0, dram_hits = 0, nvme_hits = 0, misses = 0;
  Counter seals = 0, aborts = 0, leases_expired = 0;
  Counter hbm_evictions = 0, dram_evictions = 0, nvme_evictions = 0, demotions_dropped = 0;
  Counter corrupt_blocks = 0, raw_fallback_units = 0;
  Counter hbm_bytes_written = 0, hbm_bytes_read = 0, hbm_errors = 0;
  Counter nvme_bytes_written = 0, nvme_bytes_read = 0, nvme_write_errors = 0;
  Counter nvme_writes_filtered = 0, nvme_writes_over_budget = 0;
  Counter policy_files_set_aside = 0, blocks_idle_dropped = 0;
};

struct TieredStore::Impl {
  struct Parts {
    std::unique_ptr<HbmTier> hbm;
    std::unique_ptr<DramTier> dram;
    std::unique_ptr<Retention> retention;
  };
  Impl(const StoreOptions& options, const Clock* clock, Parts parts);
  ~Impl();

  absl::Status OpenDisk();
  void StartBackground();

  // --- room (tiered_store_write.cc) ---
  // Memory for `bytes`, evicting where it must. kInvalidArgument, kResourceExhausted.
  absl::StatusOr<ArenaRegion> MakeRoom(int64_t bytes);
  // Offers blocks of `tier`, in the policy's order, until `take` takes one. Blocks that wait for
  // the disk come last.
  bool Evict(TierKind tier, absl::FunctionRef<bool(IndexedBlock&)> take);
  bool EvictFromDram();
  bool EvictFromNvme();
  Tier& TierOf(TierKind tier);  // which there is
  // Takes the block out of the tier; false where readers hold it.
  bool TakeOut(TierKind tier, IndexedBlock& block);
  // Drops what no turn has used for options.block_ttl.
  void DropIdle();
  // Evicts until dram_headroom_bytes are free.
  void KeepHeadroom();
  // Makes the index hold at most `blocks` blocks by dropping whole blocks.
  absl::Status ShrinkIndex(int64_t blocks);
  // Applies the clocks of tickets and leases.
  void Expire();
  // Puts the record of a ticket that is being sealed (in its own memory, or in `assembled`) where
  // readers find it. On failure nothing has changed.
  absl::Status Publish(Ticket& ticket, std::optional<ArenaRegion>& assembled);
  // A second writer of a block that `writer` writes.
  absl::StatusOr<TicketId> Join(Ticket& writer, const RecordMeta& meta);

  // --- hbm (tiered_store_hbm.cc) ---
  // Marks a block that was hit as waiting for its copy to hbm, if there is room to wait.
  void OfferToHbm(IndexedBlock& block);
  // Moves the next one up. False where none waits.
  bool RaiseOne();
  void Raise(const BlockKey& key, BlockId id, BlockRef memory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(move_mutex);
  bool EvictFromHbm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(move_mutex);
  // Moves a block down; false where host memory has no place for it and no other copy is left.
  bool Lower(const BlockKey& key, BlockId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(move_mutex);
  // The block's bytes, from host memory or hbm. kNotFound: it is in neither. kUnavailable.
  absl::StatusOr<BlockRef> FromMemory(const BlockKey& key, BlockId id);
  // Checked. kNotFound: moved or dropped meanwhile, look again. kUnavailable: the device.
  absl::StatusOr<BlockRef> ReadHbm(const BlockKey& key, BlockId id);
  absl::Status CheckHbm() const;             // kUnavailable while the device is left alone
  void NoteHbm(const absl::Status& status);  // of a call to it

  // --- reading (tiered_store_read.cc) ---
  BlockRef PinnedInDram(const BlockKey& key);  // which is there: index and tier change together
  absl::StatusOr<BlockRef> GetFromDisk(const BlockKey& key, BlockId id);
  BlockRef Promote(const BlockKey& key, BlockId id, const BlockRef& from_disk);
  // Of a copy on a device, which is dropped where it is bad.
  absl::Status VerifyCopy(const BlockKey& key, BlockId id, TierKind tier);
  // Drops one copy after a failed check; true when it was still there.
  bool DropBadCopy(const BlockKey& key, BlockId id, TierKind tier, const absl::Status& why);
  void Unpin(const std::vector<LeasePin>& pins);

  // --- disk (tiered_store_disk.cc) ---
  // Marks the block as waiting for the disk; false where the queue is full.
  bool Enqueue(IndexedBlock& block);
  // The same for a block that nobody asked to persist: filter and budget may refuse it.
  void OfferToDisk(IndexedBlock& block);
  // The same where it is to be written once a second turn has used it.
  void OfferWhenUsedAgain(IndexedBlock& block);
  // Writes the next queued block. False where none waits.
  bool WriteOne();
  absl::Status PutOnDisk(const BlockKey& key, absl::Span<const std::byte> record);
  absl::Status FlushDisk();
  void FlushWhenIdle();
  // What the policy knows lives in a file beside the disk tier (policy_state.h). The result holds
  // what is known of the blocks until they are placed. The turns are saved at the end only.
  std::shared_ptr<const TurnUse> RestorePolicy();
  void SavePolicy(bool is_end);
  void Maintain();
  // Writes and raises as many blocks as wait at its beginning.
  void MoveWaiting();
  // Persist: OK on disk; kCancelled: waits; else the failure.
  absl::Status PersistStep(const BlockKey& key, bool& is_tried);

  const StoreOptions options;
  const Clock* const clock;
  TicketHost host;
  StoreCounters counters;
  const std::unique_ptr<HbmTier> hbm;  // null without a GPU
  const std::unique_ptr<DramTier> dram;
  std::unique_ptr<NvmeTier> nvme;  // null without a disk
  const std::unique_ptr<Retention> retention;
  BlockIndex index;
  TicketTable tickets;
  LeaseTable leases;
  WriteBehindQueue queue;
  WriteBehindQueue rising;  // to hbm
  WriteBudget write_budget;
  LoadRates rates;

  // One thread writes to the disk or moves blocks to and from hbm at a time: so what is written for
  // one incarnation of a key is settled before the next one is.
  Mutex move_mutex;
  absl::Status last_disk_error ABSL_GUARDED_BY(move_mutex);
  absl::Time last_disk_put ABSL_GUARDED_BY(move_mutex);

  std::atomic<int64_t> hbm_paused_until = 0;  // nanoseconds since the epoch

  absl::Time last_policy_save = absl::InfinitePast();  // of the one thread that does maintenance
  std::atomic<bool> is_stopping = false;
  std::thread background;
};

// Header, key and every unit. kDataLoss, kFailedPrecondition (unknown version).
absl::Status CheckRecord(const BlockKey& key, absl::Span<const std::byte> record);

}  // namespace kvstow
