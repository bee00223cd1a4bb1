#include "storage/dram_arena.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

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
    : base_(base),
      mapped_bytes_(mapped_bytes),
      capacity_bytes_(capacity_bytes),
      holes_(capacity_bytes, kGranuleBytes) {
  ASAN_POISON_MEMORY_REGION(base_, capacity_bytes);
}

DramArena::~DramArena() {
  // Addresses are used again by others: leave no poison on them.
  ASAN_UNPOISON_MEMORY_REGION(base_, mapped_bytes_);
  munmap(base_, static_cast<size_t>(mapped_bytes_));
}

std::optional<ArenaRegion> DramArena::Allocate(int64_t bytes) {
  std::optional<int64_t> offset;
  {
    MutexLock lock(&mutex_);
    offset = holes_.Take(bytes);
  }
  if (!offset.has_value()) return std::nullopt;
  ASAN_UNPOISON_MEMORY_REGION(base_ + *offset, RoundUp(bytes, kGranuleBytes));
  return ArenaRegion(shared_from_this(), {base_ + *offset, static_cast<size_t>(bytes)});
}

void DramArena::Free(absl::Span<std::byte> bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  MutexLock lock(&mutex_);
  // Before it can be taken again.
  ASAN_POISON_MEMORY_REGION(bytes.data(), RoundUp(size, kGranuleBytes));
  holes_.Give(bytes.data() - base_, size);
}

int64_t DramArena::used_bytes() const {
  MutexLock lock(&mutex_);
  return holes_.used_bytes();
}

int64_t DramArena::largest_hole_bytes() const {
  MutexLock lock(&mutex_);
  return holes_.largest_bytes();
}

int64_t DramArena::num_holes() const {
  MutexLock lock(&mutex_);
  return holes_.size();
}

}  // namespace kvstow
