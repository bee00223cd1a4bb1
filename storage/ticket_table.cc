#include "storage/ticket_table.h"

#include "absl/strings/str_cat.h"

namespace kvstow {

TicketTable::TicketTable(int32_t tickets_max, absl::Duration reuse_delay)
    : tickets_max_(tickets_max), reuse_delay_(reuse_delay) {}

absl::Status TicketTable::Add(const std::shared_ptr<Ticket>& ticket) {
  MutexLock lock(&mutex_);
  const auto writer = writer_of_.find(ticket->meta().key);
  if (writer != writer_of_.end()) {
    // The first clock lets another writer in, whether or not a sweep has passed since.
    const auto held = tickets_.find(writer->second);
    if (held != tickets_.end() && !held->second.ticket->IsDead()) {
      return absl::AlreadyExistsError(
          absl::StrCat("block ", ticket->meta().key.ToHex(), " is being written"));
    }
  }
  if (static_cast<int64_t>(tickets_.size()) >= tickets_max_) {
    return absl::ResourceExhaustedError(
        absl::StrCat(tickets_.size(), " tickets are open or wait for their memory, the limit is ",
                     tickets_max_));
  }
  writer_of_[ticket->meta().key] = ticket->id();
  tickets_.emplace(ticket->id(), Held{ticket, ticket->deadline(), false});
  events_.emplace(ticket->deadline(), ticket->id());
  return absl::OkStatus();
}

std::shared_ptr<Ticket> TicketTable::WriterOf(const BlockKey& key) const {
  MutexLock lock(&mutex_);
  const auto writer = writer_of_.find(key);
  if (writer == writer_of_.end()) return nullptr;
  const auto held = tickets_.find(writer->second);
  if (held == tickets_.end() || held->second.ticket->IsDead()) return nullptr;
  return held->second.ticket;
}

absl::StatusOr<std::shared_ptr<Ticket>> TicketTable::Find(TicketId id) const {
  std::shared_ptr<Ticket> ticket;
  {
    MutexLock lock(&mutex_);
    const auto held = tickets_.find(id);
    if (held == tickets_.end()) {
      const auto ended = ended_.find(id);
      if (ended != ended_.end()) return TicketStatus(ended->second, id);
      return absl::NotFoundError(absl::StrCat("no ticket ", id));
    }
    ticket = held->second.ticket;
  }
  const absl::Status status = ticket->CheckOpen();
  if (!status.ok()) return status;
  return ticket;
}

void TicketTable::End(const Ticket& ticket, TicketState state) {
  MutexLock lock(&mutex_);
  Remove(ticket);
  Remember(ticket.id(), state);
}

void TicketTable::Forget(const Ticket& ticket) {
  MutexLock lock(&mutex_);
  Remove(ticket);
}

void TicketTable::Remove(const Ticket& ticket) {
  const auto held = tickets_.find(ticket.id());
  if (held == tickets_.end()) return;
  events_.erase({held->second.next_event, ticket.id()});
  if (held->second.is_dead) --num_dead_;
  const auto writer = writer_of_.find(ticket.meta().key);
  if (writer != writer_of_.end() && writer->second == ticket.id()) writer_of_.erase(writer);
  tickets_.erase(held);
}

void TicketTable::Remember(TicketId id, TicketState state) {
  if (!ended_.emplace(id, state).second) return;
  ended_order_.push_back(id);
  if (static_cast<int64_t>(ended_order_.size()) > tickets_max_) {
    ended_.erase(ended_order_.front());
    ended_order_.pop_front();
  }
}

void TicketTable::Sweep(absl::Time now) {
  MutexLock lock(&mutex_);
  while (!events_.empty() && events_.begin()->first <= now) {
    const TicketId id = events_.begin()->second;
    events_.erase(events_.begin());
    Held& held = tickets_.find(id)->second;
    const std::shared_ptr<Ticket> ticket = held.ticket;
    if (held.is_dead) {
      ticket->Reap();
      Remember(id, TicketState::kDead);
      held.next_event = absl::InfinitePast();  // its event is gone already
      Remove(*ticket);
      continue;
    }
    if (ticket->IsDead()) {
      held.is_dead = true;
      ++num_dead_;
      held.next_event = ticket->deadline() + reuse_delay_;
      const auto writer = writer_of_.find(ticket->meta().key);
      if (writer != writer_of_.end() && writer->second == id) writer_of_.erase(writer);
    } else {
      // Being sealed at this moment, or ended and about to be removed: look again later.
      held.next_event = now + absl::Seconds(1);
    }
    events_.emplace(held.next_event, id);
  }
}

int64_t TicketTable::num_open() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(tickets_.size()) - num_dead_;
}

}  // namespace kvstow
