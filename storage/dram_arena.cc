#include "storage/dram_arena.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace kvstow {
namespace {

constexpr int kMadvPopulateWrite = 23;  // Linux 5.14; not in every libc header

int64_t RoundUp(int64_t bytes, int64_t granule) {
  return (bytes + granule - 1) / granule * granule;
}

// Makes the kernel give every page now. A read-modify-write keeps what is there (zeros) and cannot
// be optimised away.
void TouchPages(std::byte* base, int64_t bytes, int64_t page_bytes) {
  for (int64_t offset = 0; offset < bytes; offset += page_bytes) {
    volatile std::byte* page = base + offset;
    *page = *page;
  }
}

}  // namespace

ArenaRegion::ArenaRegion(std::shared_ptr<DramArena> arena, absl::Span<std::byte> bytes)
    : arena_(std::move(arena)), bytes_(bytes) {}

ArenaRegion::ArenaRegion(ArenaRegion&& other) noexcept
    : arena_(std::move(other.arena_)), bytes_(std::exchange(other.bytes_, {})) {}

ArenaRegion& ArenaRegion::operator=(ArenaRegion&& other) noexcept {
  if (this != &other) {
    Free();
    arena_ = std::move(other.arena_);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

ArenaRegion::~ArenaRegion() { Free(); }

void ArenaRegion::Free() {
  if (arena_ == nullptr) return;
  arena_->Free(bytes_);
  arena_.reset();
  bytes_ = {};
}

absl::StatusOr<std::shared_ptr<DramArena>> DramArena::Create(int64_t capacity_bytes) {
  const int64_t capacity = capacity_bytes / kGranuleBytes * kGranuleBytes;
  if (capacity <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("arena of ", capacity_bytes, " bytes, want at least ", kGranuleBytes));
  }
  const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const int64_t mapped = RoundUp(capacity, page_bytes);
  void* base = mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("arena of ", capacity, " bytes: mmap: ", strerror(errno)));
  }
  // A hint: shared memory has huge pages only where the machine allows it.
  madvise(base, static_cast<size_t>(mapped), MADV_HUGEPAGE);
  if (madvise(base, static_cast<size_t>(mapped), kMadvPopulateWrite) != 0) {
    if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) {
      const int error = errno;
      munmap(base, static_cast<size_t>(mapped));
      return absl::ResourceExhaustedError(absl::StrCat(
          "arena of ", capacity, " bytes: the machine has no memory for it: ", strerror(error)));
    }
    TouchPages(static_cast<std::byte*>(base), mapped, page_bytes);
  }
  return std::shared_ptr<DramArena>(new DramArena(static_cast<std::byte*>(base), mapped, capacity));
}

DramArena::DramArena(std::byte* base, int64_t mapped_bytes, int64_t capacity_bytes)
    : base_(base), mapped_bytes_(mapped_bytes), capacity_bytes_(capacity_bytes) {
  MutexLock lock(&mutex_);
  AddHole(0, capacity_bytes_);
}

DramArena::~DramArena() {
  // Addresses are used again by others: leave no poison on them.
  ASAN_UNPOISON_MEMORY_REGION(base_, mapped_bytes_);
  munmap(base_, static_cast<size_t>(mapped_bytes_));
}

std::optional<ArenaRegion> DramArena::Allocate(int64_t bytes) {
  KVSTOW_CHECK(bytes > 0);
  if (bytes > capacity_bytes_) return std::nullopt;
  const int64_t size = RoundUp(bytes, kGranuleBytes);
  int64_t offset;
  {
    MutexLock lock(&mutex_);
    const auto best = holes_by_size_.lower_bound({size, 0});
    if (best == holes_by_size_.end()) return std::nullopt;
    const int64_t hole_size = best->first;
    offset = best->second;
    RemoveHole(offset, hole_size);
    if (hole_size > size) AddHole(offset + size, hole_size - size);
    used_bytes_ += size;
  }
  ASAN_UNPOISON_MEMORY_REGION(base_ + offset, size);
  return ArenaRegion(shared_from_this(), {base_ + offset, static_cast<size_t>(bytes)});
}

void DramArena::Free(absl::Span<std::byte> bytes) {
  int64_t offset = bytes.data() - base_;
  int64_t size = RoundUp(static_cast<int64_t>(bytes.size()), kGranuleBytes);
  KVSTOW_CHECK(offset >= 0 && offset % kGranuleBytes == 0 && offset + size <= capacity_bytes_);
  MutexLock lock(&mutex_);
  used_bytes_ -= size;
  KVSTOW_CHECK(used_bytes_ >= 0);
  const auto next = holes_.lower_bound(offset);
  const bool has_next = next != holes_.end();
  // A hole inside the region would mean that it was freed twice.
  KVSTOW_CHECK(!has_next || next->first >= offset + size);
  std::pair<int64_t, int64_t> after{-1, 0};
  if (has_next) after = *next;
  if (next != holes_.begin()) {
    const auto [before_offset, before_size] = *std::prev(next);
    KVSTOW_CHECK(before_offset + before_size <= offset);
    if (before_offset + before_size == offset) {
      RemoveHole(before_offset, before_size);
      offset = before_offset;
      size += before_size;
    }
  }
  if (has_next && after.first == offset + size) {
    RemoveHole(after.first, after.second);
    size += after.second;
  }
  AddHole(offset, size);
}

void DramArena::AddHole(int64_t offset, int64_t size) {
  ASAN_POISON_MEMORY_REGION(base_ + offset, size);
  holes_.emplace(offset, size);
  holes_by_size_.emplace(size, offset);
}

void DramArena::RemoveHole(int64_t offset, int64_t size) {
  holes_.erase(offset);
  holes_by_size_.erase({size, offset});
}

int64_t DramArena::used_bytes() const {
  MutexLock lock(&mutex_);
  return used_bytes_;
}

int64_t DramArena::largest_hole_bytes() const {
  MutexLock lock(&mutex_);
  return holes_by_size_.empty() ? 0 : holes_by_size_.rbegin()->first;
}

int64_t DramArena::num_holes() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(holes_.size());
}

}  // namespace kvstow
