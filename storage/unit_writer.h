// UnitWriter: the right to write one unit of a ticket; given out by TieredStore::BeginUnit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/codec/codec.h"

namespace kvstow {

class Ticket;  // in ticket.h, private to storage

// The right to write one unit of a ticket. Dropped without Commit, the unit is open again. Must not
// outlive the store.
class UnitWriter {
 public:
  UnitWriter(UnitWriter&&) noexcept;
  UnitWriter& operator=(UnitWriter&&) noexcept;
  ~UnitWriter();

  // Memory for `length` bytes: the unit's planned place when `length` is the planned length, else
  // heap memory that Seal assembles. 64-byte aligned in the planned place. A second call replaces
  // the first. Valid until Commit or destruction.
  absl::Span<std::byte> Buffer(uint32_t length);

  // The buffer now holds the unit. `xxh3` is over the buffer's bytes. Whatever the answer, the
  // writer is spent; after an error the unit is open again, as far as the ticket lives.
  //   kDeadlineExceeded, kFailedPrecondition  the ticket died or was sealed meanwhile
  //   kResourceExhausted  no room for a unit that has not its planned length
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

}  // namespace kvstow
