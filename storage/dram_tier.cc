#include "storage/dram_tier.h"

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"

namespace kvstow {

// What a BlockRef owns.
class DramTier::Pin {
 public:
  explicit Pin(std::shared_ptr<Block> block) : block_(std::move(block)) {
    if (block_->pins.fetch_add(1, std::memory_order_relaxed) == 0) {
      block_->pinned_bytes->fetch_add(block_->region.size(), std::memory_order_relaxed);
    }
  }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  ~Pin() {
    // Release: what the holder read happens before the memory is used again.
    if (block_->pins.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      block_->pinned_bytes->fetch_sub(block_->region.size(), std::memory_order_relaxed);
    }
  }

 private:
  const std::shared_ptr<Block> block_;
};

absl::StatusOr<std::unique_ptr<DramTier>> DramTier::Create(int64_t capacity_bytes) {
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<DramArena> arena, DramArena::Create(capacity_bytes));
  return std::unique_ptr<DramTier>(new DramTier(std::move(arena)));
}

DramTier::DramTier(std::shared_ptr<DramArena> arena) : arena_(std::move(arena)) {}

absl::StatusOr<ArenaRegion> DramTier::Allocate(int64_t bytes) {
  if (bytes <= 0 || bytes > arena_->capacity_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "record of ", bytes, " bytes, the dram tier holds 1 to ", arena_->capacity_bytes()));
  }
  std::optional<ArenaRegion> region = arena_->Allocate(bytes);
  if (!region.has_value()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "dram tier: ", bytes, " bytes wanted, ", arena_->capacity_bytes() - arena_->used_bytes(),
        " of ", arena_->capacity_bytes(), " free, the largest hole is ",
        arena_->largest_hole_bytes()));
  }
  return std::move(*region);
}

absl::Status DramTier::Adopt(const BlockKey& key, ArenaRegion region) {
  auto block = std::make_shared<Block>(std::move(region), pinned_bytes_);
  MutexLock lock(&mutex_);
  if (!blocks_.try_emplace(key, std::move(block)).second) {
    return absl::AlreadyExistsError(absl::StrCat("dram tier: block ", key.ToHex(), " is stored"));
  }
  return absl::OkStatus();
}

absl::Status DramTier::Put(const BlockKey& key, absl::Span<const std::byte> record) {
  {
    MutexLock lock(&mutex_);
    if (blocks_.contains(key)) {
      return absl::AlreadyExistsError(absl::StrCat("dram tier: block ", key.ToHex(), " is stored"));
    }
  }
  KVSTOW_ASSIGN_OR_RETURN(ArenaRegion region, Allocate(static_cast<int64_t>(record.size())));
  std::memcpy(region.bytes().data(), record.data(), record.size());
  return Adopt(key, std::move(region));
}

absl::StatusOr<BlockRef> DramTier::Get(const BlockKey& key) {
  MutexLock lock(&mutex_);
  const auto found = blocks_.find(key);
  if (found == blocks_.end()) {
    return absl::NotFoundError(absl::StrCat("dram tier: no block ", key.ToHex()));
  }
  return BlockRef(std::make_shared<Pin>(found->second), found->second->region.bytes());
}

void DramTier::Drop(const BlockKey& key) {
  std::shared_ptr<Block> dropped;  // freed, where it was the last, after the lock
  MutexLock lock(&mutex_);
  const auto found = blocks_.find(key);
  if (found == blocks_.end()) return;
  dropped = std::move(found->second);
  blocks_.erase(found);
}

bool DramTier::DropIfUnpinned(const BlockKey& key) {
  std::shared_ptr<Block> dropped;
  MutexLock lock(&mutex_);
  const auto found = blocks_.find(key);
  // Acquire: pairs with the last unpin.
  if (found == blocks_.end() || found->second->pins.load(std::memory_order_acquire) > 0) {
    return false;
  }
  dropped = std::move(found->second);
  blocks_.erase(found);
  return true;
}

bool DramTier::IsPinned(const BlockKey& key) const {
  MutexLock lock(&mutex_);
  const auto found = blocks_.find(key);
  return found != blocks_.end() && found->second->pins.load(std::memory_order_relaxed) > 0;
}

void DramTier::ForEach(
    const std::function<void(const BlockKey& key, int64_t record_bytes)>& visit) const {
  std::vector<std::pair<BlockKey, int64_t>> blocks;
  {
    MutexLock lock(&mutex_);
    blocks.reserve(blocks_.size());
    for (const auto& [key, block] : blocks_) blocks.emplace_back(key, block->region.size());
  }
  for (const auto& [key, record_bytes] : blocks) visit(key, record_bytes);
}

}  // namespace kvstow
