// TieredStore: reserve, write, seal, find, pin and evict blocks over the tiers of one machine. The
// one class the service calls.
//
// Writing a block:
//   KVSTOW_ASSIGN_OR_RETURN(TicketId ticket, store.Reserve(request));
//   for each unit, in any order, from any thread:
//     KVSTOW_ASSIGN_OR_RETURN(UnitWriter unit, store.BeginUnit(ticket, unit_idx, source_xxh3));
//     absl::Span<std::byte> out = unit.Buffer(unit_bytes);   // in place where as planned
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
#include "kernels/core/device_memory.h"
#include "storage/block_info.h"
#include "storage/block_ref.h"
#include "storage/load_rates.h"
#include "storage/record.h"
#include "storage/store_options.h"
#include "storage/store_stats.h"
#include "storage/tier.h"
#include "storage/turn.h"
#include "storage/unit_writer.h"

namespace kvstow {

using TicketId = uint64_t;  // random, never 0: not guessable by another client
using LeaseId = uint64_t;   // likewise

class TurnUse;  // in retention.h, private to storage: a turn that is under way

struct ReserveRequest {
  RecordMeta meta;
  // Planned bytes of each unit; 0 where the codec's units vary. Shared by all blocks of a shape.
  std::shared_ptr<const std::vector<uint32_t>> unit_bytes;
  // 0: StoreOptions::write_deadline. Longer ones are cut to it.
  absl::Duration write_deadline = absl::ZeroDuration();
  // What Use gave for the prompt of the block; null: the block is a turn of its own.
  std::shared_ptr<const TurnUse> use;
  // One of several writers, each of which brings some of the units: where a live ticket of the same
  // codecs writes the block already, that ticket is the answer.
  bool is_shared = false;
};

struct AcquireResult {
  LeaseId lease = 0;  // 0 when no key was present
  absl::Time deadline;
  std::vector<bool> held;  // per key
};

class TieredStore {
 public:
  // Opens the tiers and rebuilds the index from disk.
  //   kInvalidArgument     options, or hbm_bytes without a device
  //   kPermissionDenied    the directory cannot be written; the message names it
  //   kFailedPrecondition  another process holds the directory; the message names the lock file
  //   kResourceExhausted   the machine has no memory for dram_bytes, the device none for hbm_bytes
  //   kUnavailable         the disk is full or fails
  // A database that RocksDB finds broken is renamed to `<path>/rocksdb.broken-<n>`, counted, and
  // the store starts empty. `clock` must outlive the store.
  static absl::StatusOr<std::unique_ptr<TieredStore>> Open(
      const StoreOptions& options, const Clock* clock,
      std::shared_ptr<DeviceMemory> device = nullptr);
  // Flushes to disk what is queued.
  ~TieredStore();

  // --- turns ---

  // A turn of a conversation uses these blocks: says so to the policy, which decides what leaves.
  // Keep the result until the turn's blocks are reserved; it must not outlive the store.
  std::shared_ptr<const TurnUse> Use(const TurnRequest& request);
  // Hints without a use: to the session's last turn, or to the one that used the keys. False: not
  // known, or forgotten.
  bool Tell(const TurnRequest& request);

  // --- writing ---

  //   kAlreadyExists      sealed already (nothing to do), or being written by a live ticket
  //   kFailedPrecondition shared, but the live ticket is of other codecs
  //   kResourceExhausted  memory, tickets or index at their limit and nothing may leave; says which
  //                       and how much
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
  //   kNotFound, kDeadlineExceeded as above
  //   kResourceExhausted  no room to assemble odd units, or the index is full of pinned blocks; the
  //                       ticket lives on
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
  // lease and is no use.
  std::vector<Location> Lookup(absl::Span<const BlockKey> keys) const;

  // What loading the keys up to the first that is absent would take, against computing their
  // tokens. `prefill_tokens_per_s` is more than 0.
  LoadEstimate Estimate(absl::Span<const BlockKey> keys, double prefill_tokens_per_s) const;
  // Tells the rates of an answer that was sent: they are part of Estimate.
  void RecordSend(int64_t bytes, absl::Duration elapsed);

  // The sealed record, pinned while the result lives. From disk it is checked (header, key, every
  // unit) and promoted to memory when there is room; a bad one is dropped, counted and kNotFound.
  absl::StatusOr<BlockRef> Get(const BlockKey& key);
  // The same for a block that Use was told of: Get is a turn of its own, this is none.
  absl::StatusOr<BlockRef> Read(const BlockKey& key);

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
