// TieredStore: reserve, write, seal, find, pin and evict blocks over the tiers of one machine. The
// one class the service calls.
//
// Writing a block:
//   KVSTOW_ASSIGN_OR_RETURN(TicketId ticket, store.Reserve(request));
//   for each unit, in any order, from any thread:
//     KVSTOW_ASSIGN_OR_RETURN(UnitWriter unit, store.BeginUnit(ticket, unit_idx, source_xxh3));
//     absl::Span<std::byte> out = unit.Buffer(unit_bytes);   // in place where the size is as
//     planned
//     ... encode into out ...
//     KVSTOW_RETURN_IF_ERROR(unit.Commit(codec, Xxh3(out)));
//   KVSTOW_RETURN_IF_ERROR(store.Seal(ticket));               // now visible
//
// A reserved block is invisible. A ticket has two clocks: after `write_deadline` it is dead (its
// calls answer kDeadlineExceeded) and another writer may reserve the key; its memory is used again
// only after `reuse_delay` more, so a late writer never lands in a stranger's block.
//
// Thread safety: all methods may be called at once. Get, Verify and Persist may read or wait for
// the disk: not for RPC threads. The others do not block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/block_key.h"
#include "kernels/core/clock.h"
#include "storage/block_info.h"
#include "storage/block_ref.h"
#include "storage/record.h"
#include "storage/tier.h"

namespace kvstow {

using TicketId = uint64_t;  // random, never 0: not guessable by another client
using LeaseId = uint64_t;   // likewise

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
  int64_t blocks_max = 10'000'000;  // bounds the index
  // Background thread for write-behind and expiry. Tests turn it off and call RunMaintenance().
  bool background = true;

  // kInvalidArgument names the field and the limit.
  absl::Status Validate() const;
};

struct ReserveRequest {
  RecordMeta meta;
  // Planned bytes of each unit; 0 where the codec's units vary. Shared by all blocks of a shape.
  std::shared_ptr<const std::vector<uint32_t>> unit_bytes;
  // 0: StoreOptions::write_deadline. Longer ones are cut to it.
  absl::Duration write_deadline = absl::ZeroDuration();
};

class Ticket;  // in ticket.h, private to storage

// The right to write one unit of a ticket. Dropped without Commit, the unit is open again.
class UnitWriter {
 public:
  UnitWriter(UnitWriter&&) noexcept;
  UnitWriter& operator=(UnitWriter&&) noexcept;
  ~UnitWriter();

  // Memory for `length` bytes: the unit's planned place when `length` is the planned length, else
  // heap memory that Seal assembles. 64-byte aligned in the planned place. A second call replaces
  // the first. Valid until Commit or destruction.
  absl::Span<std::byte> Buffer(uint32_t length);

  // The buffer now holds the unit. `xxh3` is over the buffer's bytes.
  //   kDeadlineExceeded, kFailedPrecondition  the ticket died or was sealed meanwhile
  absl::Status Commit(CodecId codec, uint64_t xxh3);

 private:
  friend class TieredStore;
  UnitWriter(std::shared_ptr<Ticket> ticket, uint32_t unit_idx, uint64_t source_xxh3);

  std::shared_ptr<Ticket> ticket_;
  uint32_t unit_idx_ = 0;
  uint64_t source_xxh3_ = 0;
  absl::Span<std::byte> buffer_;
  std::unique_ptr<std::byte[]> heap_;
};

struct AcquireResult {
  LeaseId lease = 0;  // 0 when no key was present
  absl::Time deadline;
  std::vector<bool> held;  // per key
};

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
  std::vector<TierStats> tiers;
  std::vector<CodecStats> codecs;
  int64_t num_blocks = 0;   // distinct keys
  int64_t index_bytes = 0;  // memory of the index
  int64_t open_tickets = 0;
  int64_t open_leases = 0;
  int64_t pinned_bytes = 0;
  int64_t write_behind_bytes = 0;  // waiting for the disk
  // Counters.
  int64_t lookups = 0, lookup_hits = 0;              // keys
  int64_t dram_hits = 0, nvme_hits = 0, misses = 0;  // blocks asked for by Get
  int64_t seals = 0, aborts = 0, tickets_expired = 0, leases_expired = 0;
  int64_t dram_evictions = 0, nvme_evictions = 0;
  int64_t demotions_dropped = 0;   // evicted from memory before the disk had a copy
  int64_t corrupt_blocks = 0;      // dropped after a failed check
  int64_t raw_fallback_units = 0;  // units sealed as raw where the block's codec is not
  int64_t nvme_bytes_written = 0, nvme_bytes_read = 0;
  int64_t nvme_write_errors = 0;
  int64_t dirs_set_aside = 0;  // broken disk directories renamed at start
};

class TieredStore {
 public:
  // Opens the tiers and rebuilds the index from disk.
  //   kInvalidArgument     options
  //   kPermissionDenied    the directory cannot be written; the message names it
  //   kFailedPrecondition  another process holds the directory; the message names the lock file
  // A directory that RocksDB cannot open (kCorruption) is renamed to `<path>.broken-<n>`, counted,
  // and the store starts empty. `clock` must outlive the store.
  static absl::StatusOr<std::unique_ptr<TieredStore>> Open(const StoreOptions& options,
                                                           const Clock* clock);
  // Flushes to disk what is queued.
  ~TieredStore();

  // --- writing ---

  //   kAlreadyExists      sealed already (nothing to do), or being written by a live ticket
  //   kResourceExhausted  memory, tickets or index at their limit; says which and how much
  //   kInvalidArgument    no units, too many, a block larger than the tier
  absl::StatusOr<TicketId> Reserve(const ReserveRequest& request);

  // `source_xxh3`: checksum of what the client sent for this unit, to tell a repeat from a
  // conflict.
  //   kNotFound           unknown ticket    kDeadlineExceeded  the ticket has died
  //   kFailedPrecondition sealed or aborted
  //   kInvalidArgument    unit_idx out of range, or the unit was written with another checksum
  //   kAlreadyExists      the unit was written with the same checksum: nothing to do
  absl::StatusOr<UnitWriter> BeginUnit(TicketId ticket, uint32_t unit_idx, uint64_t source_xxh3);

  // Makes the block visible.
  //   kFailedPrecondition units are missing (the first is named; the ticket lives on), or already
  //                       sealed or aborted
  //   kNotFound, kDeadlineExceeded as above     kResourceExhausted no room to assemble odd units
  absl::Status Seal(TicketId ticket);

  // Gives the memory back at once, unless a unit is being written right now: then after it.
  //   kNotFound unknown   kFailedPrecondition already sealed or aborted
  absl::Status Abort(TicketId ticket);

  // What a ticket was reserved with. kNotFound, kDeadlineExceeded.
  absl::StatusOr<RecordMeta> TicketMeta(TicketId ticket) const;

  // Waits until the blocks are on disk and would survive kill -9. Absent keys: kNotFound.
  //   kFailedPrecondition no disk tier   kDeadlineExceeded   kUnavailable the disk failed
  absl::Status Persist(absl::Span<const BlockKey> keys, absl::Duration timeout);

  // --- reading ---

  // Where each block is. One call for any number of keys; no lock is held across shards; extends no
  // lease and does not count as use.
  std::vector<Location> Lookup(absl::Span<const BlockKey> keys) const;

  // The sealed record, pinned while the result lives. From disk it is checked (header, key, every
  // unit) and promoted to memory when there is room; a bad one is dropped, counted and kNotFound.
  absl::StatusOr<BlockRef> Get(const BlockKey& key);

  // Pins what is present of `keys` until Release or the deadline, whichever is first. Blocks on
  // disk are pinned there. kResourceExhausted: leases at their limit.
  absl::StatusOr<AcquireResult> Acquire(absl::Span<const BlockKey> keys, absl::Duration ttl);
  // kNotFound: unknown, expired or already released.
  absl::Status Release(LeaseId lease);

  // --- keeping ---

  // kNotFound. A pinned block is gone from lookups now, its memory at the last unpin.
  absl::Status Delete(const BlockKey& key);

  // Blocks with key > `after` in ascending key order, at most `limit`.
  std::vector<BlockInfo> List(const BlockKey& after, int64_t limit) const;

  // Reads the block from every tier that has it and checks everything. A bad copy is dropped and
  // counted. kNotFound, kDataLoss (dropped), kFailedPrecondition (unknown version).
  absl::Status Verify(const BlockKey& key);

  StoreStats Stats() const;

  // Expires tickets and leases, frees dead memory, writes queued blocks to disk. What the
  // background thread does, once.
  void RunMaintenance();

 private:
  struct Impl;
  explicit TieredStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstow
