// DramArena: one region of host memory, mapped and touched at start, that never grows.
//
//   KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<DramArena> arena, DramArena::Create(1 << 30));
//   std::optional<ArenaRegion> region = arena->Allocate(record_bytes);   // nullopt: no hole
//   ... region->bytes() ...                                              // freed when it goes
//
// Contiguous best-fit with coalescing at a granularity of 64 bytes, the alignment of a record's
// units: a record of 400 KiB wastes nothing. Allocate and free are O(log holes). The memory is
// shared-anonymous, so a fork() does not bring copy-on-write, and populated, so that no request
// pays for the first touch. Under the address sanitizer, free memory is poisoned.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/mutex.h"
#include "storage/hole_list.h"

namespace kvstow {

class DramArena;

// Memory of an arena, given back at the end of its life. Keeps the arena alive.
class ArenaRegion {
 public:
  ArenaRegion(ArenaRegion&& other) noexcept;
  ArenaRegion& operator=(ArenaRegion&& other) noexcept;
  ~ArenaRegion();

  absl::Span<std::byte> bytes() const { return bytes_; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }

 private:
  friend class DramArena;
  ArenaRegion(std::shared_ptr<DramArena> arena, absl::Span<std::byte> bytes);
  void Free();

  std::shared_ptr<DramArena> arena_;  // null after a move
  absl::Span<std::byte> bytes_;       // as asked for, without rounding
};

class DramArena : public std::enable_shared_from_this<DramArena> {
 public:
  static constexpr int64_t kGranuleBytes = 64;

  // `capacity_bytes` is rounded down to whole granules.
  //   kInvalidArgument    less than one granule
  //   kResourceExhausted  the machine does not give that much memory
  static absl::StatusOr<std::shared_ptr<DramArena>> Create(int64_t capacity_bytes);
  ~DramArena();
  DramArena(const DramArena&) = delete;
  DramArena& operator=(const DramArena&) = delete;

  // The smallest hole that fits, lowest address first; its content is arbitrary. nullopt where no
  // hole fits. `bytes` > 0.
  std::optional<ArenaRegion> Allocate(int64_t bytes);

  int64_t capacity_bytes() const { return capacity_bytes_; }
  int64_t used_bytes() const;  // rounded to granules
  int64_t largest_hole_bytes() const;
  int64_t num_holes() const;

 private:
  friend class ArenaRegion;
  DramArena(std::byte* base, int64_t mapped_bytes, int64_t capacity_bytes);
  void Free(absl::Span<std::byte> bytes);

  std::byte* const base_;
  const int64_t mapped_bytes_;
  const int64_t capacity_bytes_;

  mutable Mutex mutex_;
  HoleList holes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
