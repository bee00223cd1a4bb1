// TicketTable: the tickets that are open or dead, one live ticket per key, and a memory of those
// that have ended, so that a late call is told why.
//
// Thread safety: all methods may be called at once. Lock order: table, then ticket.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/core/block_key.h"
#include "kernels/core/mutex.h"
#include "storage/ticket.h"

namespace kvstow {

class TicketTable {
 public:
  // `reuse_delay`: the second clock, from a ticket's deadline on.
  TicketTable(int32_t tickets_max, absl::Duration reuse_delay);

  //   kAlreadyExists      the key is being written by a live ticket
  //   kResourceExhausted  tickets_max open and dead tickets
  absl::Status Add(const std::shared_ptr<Ticket>& ticket);

  // The live ticket that writes `key`, or null.
  std::shared_ptr<Ticket> WriterOf(const BlockKey& key) const;

  // An open ticket. kNotFound: never seen, or ended long ago; else as TicketStatus.
  absl::StatusOr<std::shared_ptr<Ticket>> Find(TicketId id) const;

  // The ticket has ended in `state`. Later calls on it are told so, as long as it is remembered
  // (the last tickets_max are).
  void End(const Ticket& ticket, TicketState state);
  // As if it had never been.
  void Forget(const Ticket& ticket);

  // Applies both clocks to the tickets whose time has come.
  void Sweep(absl::Time now);

  int64_t num_open() const;  // without the dead

 private:
  void Remove(const Ticket& ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remember(TicketId id, TicketState state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int32_t tickets_max_;
  const absl::Duration reuse_delay_;

  struct Held {
    std::shared_ptr<Ticket> ticket;
    absl::Time next_event;  // first clock, then the second
    bool is_dead = false;
  };

  mutable Mutex mutex_;
  absl::flat_hash_map<TicketId, Held> tickets_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<BlockKey, TicketId, BlockKeyHash> writer_of_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<absl::Time, TicketId>> events_ ABSL_GUARDED_BY(mutex_);
  int64_t num_dead_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<TicketId, TicketState> ended_ ABSL_GUARDED_BY(mutex_);
  std::deque<TicketId> ended_order_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
