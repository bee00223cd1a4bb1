// Ticket: one block being written. Private to storage; callers see TicketId and UnitWriter.
//
// States: open -> sealing -> sealed, or back to open when Seal finds no room; open -> aborted; open
// -> dead when the first clock passes. Memory of an aborted ticket goes back once no unit is being
// written; that of a dead one also not before the second clock.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"
#include "storage/dram_arena.h"
#include "storage/record.h"

namespace kvstow {

using TicketId = uint64_t;  // random, never 0: not guessable by another client

enum class TicketState : uint8_t { kOpen, kSealing, kSealed, kAborted, kDead };

// What a call on a ticket in `state` is told; OK for kOpen.
absl::Status TicketStatus(TicketState state, TicketId id);

// An arena region that counts in a gauge of reserved bytes while it is a ticket's.
class ReservedRegion {
 public:
  ReservedRegion(ArenaRegion region, std::atomic<int64_t>* reserved_bytes);
  ReservedRegion(const ReservedRegion&) = delete;
  ReservedRegion& operator=(const ReservedRegion&) = delete;
  ~ReservedRegion();

  absl::Span<std::byte> bytes() const { return region_.bytes(); }
  ArenaRegion Take();  // no longer reserved

 private:
  ArenaRegion region_;
  std::atomic<int64_t>* reserved_bytes_;  // null once taken
};

// What tickets need of the store. Must outlive them.
struct TicketHost {
  const Clock* clock = nullptr;
  // Makes room in memory for a unit whose size was not planned.
  std::function<absl::StatusOr<ArenaRegion>(int64_t bytes)> make_room;
  std::atomic<int64_t> reserved_bytes = 0;
  std::atomic<int64_t> tickets_expired = 0;
};

class Ticket {
 public:
  // `unit_bytes` as in ReserveRequest, not empty.
  Ticket(TicketId id, const RecordMeta& meta,
         std::shared_ptr<const std::vector<uint32_t>> unit_bytes, absl::Time deadline,
         TicketHost* host);

  TicketId id() const { return id_; }
  const RecordMeta& meta() const { return meta_; }
  uint32_t num_units() const { return static_cast<uint32_t>(unit_bytes_->size()); }
  absl::Time deadline() const { return deadline_; }
  // Size of the record when every unit has its planned size (0 for those that vary).
  int64_t planned_bytes() const { return planned_bytes_; }

  // The memory; once, before the id is given out: or that there is none. `kept` lives as long as
  // the ticket.
  void GiveMemory(ArenaRegion region);
  void GiveUp();
  // For a second writer: OK once there is memory. kResourceExhausted: none, or not soon.
  absl::Status AwaitMemory(absl::Duration timeout);
  void Keep(std::shared_ptr<const void> kept) { kept_ = std::move(kept); }

  // OK while open; applies the first clock.
  absl::Status CheckOpen();

  // --- units: BeginUnit is followed by either CommitUnit or CancelUnit ---
  absl::Status BeginUnit(uint32_t unit_idx, uint64_t source_xxh3);
  // The planned place of a unit being written; empty where `length` is not the planned one.
  absl::Span<std::byte> PlannedPlace(uint32_t unit_idx, uint32_t length);
  // `odd`: the bytes, where they are not in the planned place.
  absl::Status CommitUnit(uint32_t unit_idx, const UnitEntry& written, const std::byte* odd);
  void CancelUnit(uint32_t unit_idx);

  // --- sealing: StartSeal is followed by either FinishSeal or CancelSeal ---
  absl::Status StartSeal();
  // While sealing: size of the finished record, with the units as they are; whether its bytes can
  // stay where they are.
  int64_t SealedBytes() const;
  bool is_in_place() const;
  // Writes the whole record into `record`, which is SealedBytes() long: the planned place when
  // `is_in_place`, or other memory.
  void WriteRecord(absl::Span<std::byte> record);
  absl::Span<std::byte> memory();
  // Units stored raw though the block's codecs are others.
  int64_t CountRawFallbacks() const;
  std::optional<ArenaRegion> FinishSeal();  // hands the memory over
  void CancelSeal();

  // kFailedPrecondition, kDeadlineExceeded.
  absl::Status Abort();
  // First clock: true once dead. Does not kill a ticket that is being sealed.
  bool IsDead();
  // Second clock: gives the memory back as soon as no unit is being written.
  void Reap();

 private:
  enum class UnitState : uint8_t { kEmpty, kWriting, kWritten };
  struct Unit {
    UnitState state = UnitState::kEmpty;
    uint64_t source_xxh3 = 0;
    UnitEntry entry;                      // offset: the planned one
    std::unique_ptr<ReservedRegion> odd;  // bytes of a size that was not planned
  };

  absl::Status CheckOpenLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndWriter(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FreeIfIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<uint32_t> Lengths() const;

  const TicketId id_;
  const RecordMeta meta_;
  const std::shared_ptr<const std::vector<uint32_t>> unit_bytes_;
  const absl::Time deadline_;
  TicketHost* const host_;
  std::vector<uint64_t> offsets_;  // planned
  int64_t planned_bytes_ = 0;
  std::shared_ptr<const void> kept_;  // set before anybody else knows the ticket

  mutable Mutex mutex_;
  CondVar memory_given_;
  // While kSealing the units and the memory belong to the sealing thread.
  TicketState state_ ABSL_GUARDED_BY(mutex_) = TicketState::kOpen;
  std::vector<Unit> units_;
  std::unique_ptr<ReservedRegion> memory_;
  int32_t num_writers_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_reaped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvstow
