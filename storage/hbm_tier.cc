#include "storage/hbm_tier.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "storage/hole_list.h"

namespace kvstow {

class HbmTier::Arena {
 public:
  Arena(DeviceSlab slab, int64_t capacity_bytes)
      : slab_(std::move(slab)), holes_(capacity_bytes, kGranuleBytes) {}

  std::optional<int64_t> Take(int64_t bytes) {
    MutexLock lock(&mutex_);
    return holes_.Take(bytes);
  }
  void Give(int64_t offset, int64_t bytes) {
    MutexLock lock(&mutex_);
    holes_.Give(offset, bytes);
  }
  DeviceAddress At(int64_t offset) const {
    return slab_.address + static_cast<DeviceAddress>(offset);
  }
  int64_t used_bytes() const {
    MutexLock lock(&mutex_);
    return holes_.used_bytes();
  }
  int64_t largest_hole_bytes() const {
    MutexLock lock(&mutex_);
    return holes_.largest_bytes();
  }

 private:
  const DeviceSlab slab_;
  mutable Mutex mutex_;
  HoleList holes_ ABSL_GUARDED_BY(mutex_);
};

struct HbmTier::Block {
  Block(std::shared_ptr<Arena> arena, int64_t offset, int64_t bytes)
      : arena(std::move(arena)), offset(offset), bytes(bytes) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { arena->Give(offset, bytes); }
  DeviceAddress address() const { return arena->At(offset); }

  const std::shared_ptr<Arena> arena;
  const int64_t offset;
  const int64_t bytes;
};

class HbmTier::Loan {
 public:
  Loan(HbmTier* tier, std::unique_ptr<Lane> lane) : tier_(tier), lane_(std::move(lane)) {}
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan() { tier_->GiveLane(std::move(lane_)); }
  Lane& lane() { return *lane_; }

 private:
  HbmTier* const tier_;
  std::unique_ptr<Lane> lane_;
};

// --- life ---

absl::StatusOr<std::unique_ptr<HbmTier>> HbmTier::Create(std::shared_ptr<DeviceMemory> device,
                                                         const Options& options) {
  Options rounded = options;
  rounded.capacity_bytes = options.capacity_bytes / kGranuleBytes * kGranuleBytes;
  if (rounded.capacity_bytes <= 0 || options.staging_bytes <= 0 || options.num_lanes <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hbm tier of ", options.capacity_bytes, " bytes with ", options.num_lanes, " lanes of ",
        options.staging_bytes, ", want at least ", kGranuleBytes, ", one and one"));
  }
  KVSTOW_ASSIGN_OR_RETURN(DeviceSlab slab, device->Allocate(rounded.capacity_bytes));
  auto arena = std::make_shared<Arena>(std::move(slab), rounded.capacity_bytes);
  std::unique_ptr<HbmTier> tier(new HbmTier(device, rounded, std::move(arena)));
  for (int32_t i = 0; i < options.num_lanes; ++i) {
    auto lane = std::make_unique<Lane>();
    KVSTOW_ASSIGN_OR_RETURN(lane->stream, device->CreateStream());
    KVSTOW_ASSIGN_OR_RETURN(lane->staging, device->AllocateHost(options.staging_bytes));
    tier->GiveLane(std::move(lane));
  }
  return tier;
}

HbmTier::HbmTier(std::shared_ptr<DeviceMemory> device, const Options& options,
                 std::shared_ptr<Arena> arena)
    : device_(std::move(device)), options_(options), arena_(std::move(arena)) {}

HbmTier::~HbmTier() {
  MutexLock lock(&mutex_);
  for (std::unique_ptr<Lane>& lane : stuck_) {
    // Freeing memory under a copy would be wrong, and waiting for a dead device has no end.
    if (!HasEnded(*lane, options_.wait_max)) (void)lane.release();
  }
}

// --- lanes ---

bool HbmTier::HasEnded(const Lane& lane, absl::Duration timeout) const {
  // An error of the device ends nothing that could be relied on.
  return lane.event != nullptr && device_->Wait(lane.event, timeout).ok();
}

absl::StatusOr<std::unique_ptr<HbmTier::Lane>> HbmTier::TakeLane() {
  RecoverLanes();
  MutexLock lock(&mutex_);
  while (lanes_.empty()) {
    if (!lane_given_.WaitFor(&mutex_, options_.wait_max) && lanes_.empty()) {
      return absl::UnavailableError(
          absl::StrCat("hbm tier: none of ", options_.num_lanes, " lanes is free within ",
                       absl::FormatDuration(options_.wait_max),
                       ", the device does not end the copies of ", stuck_.size()));
    }
  }
  std::unique_ptr<Lane> lane = std::move(lanes_.back());
  lanes_.pop_back();
  return lane;
}

void HbmTier::GiveLane(std::unique_ptr<Lane> lane) {
  std::shared_ptr<const Block> used;  // freed, where it was the last, after the lock
  MutexLock lock(&mutex_);
  if (lane->is_stuck) {
    stuck_.push_back(std::move(lane));
    return;
  }
  used = std::move(lane->block);
  lanes_.push_back(std::move(lane));
  lane_given_.Signal();
}

void HbmTier::RecoverLanes() {
  std::vector<std::unique_ptr<Lane>> stuck;
  {
    MutexLock lock(&mutex_);
    stuck.swap(stuck_);
  }
  for (std::unique_ptr<Lane>& lane : stuck) {
    if (HasEnded(*lane, absl::ZeroDuration())) lane->is_stuck = false;
    GiveLane(std::move(lane));
  }
}

// --- copies ---

absl::Status HbmTier::Await(Lane& lane) {
  lane.is_stuck = true;  // until the device says otherwise
  lane.event.reset();
  absl::StatusOr<DeviceEvent> event = device_->Record(lane.stream);
  absl::Status status = event.status();
  if (event.ok()) {
    lane.event = *std::move(event);
    status = device_->Wait(lane.event, options_.wait_max);
  }
  if (!status.ok()) return absl::UnavailableError(absl::StrCat("hbm tier: ", status.message()));
  lane.is_stuck = false;
  return status;
}

absl::Status HbmTier::CopyIn(Lane& lane, absl::Span<const std::byte> record) {
  DeviceAddress target = lane.block->address();
  while (!record.empty()) {
    const size_t bytes = std::min(record.size(), static_cast<size_t>(options_.staging_bytes));
    std::memcpy(lane.staging.get(), record.data(), bytes);
    KVSTOW_RETURN_IF_ERROR(device_->CopyToDevice(lane.stream, target, lane.staging.get(),
                                                 static_cast<int64_t>(bytes)));
    KVSTOW_RETURN_IF_ERROR(Await(lane));
    target += bytes;
    record.remove_prefix(bytes);
  }
  return absl::OkStatus();
}

absl::Status HbmTier::CopyOut(Lane& lane, absl::Span<std::byte> record) {
  DeviceAddress source = lane.block->address();
  while (!record.empty()) {
    const size_t bytes = std::min(record.size(), static_cast<size_t>(options_.staging_bytes));
    KVSTOW_RETURN_IF_ERROR(
        device_->CopyToHost(lane.stream, lane.staging.get(), source, static_cast<int64_t>(bytes)));
    KVSTOW_RETURN_IF_ERROR(Await(lane));
    std::memcpy(record.data(), lane.staging.get(), bytes);
    source += bytes;
    record.remove_prefix(bytes);
  }
  return absl::OkStatus();
}

// --- Tier ---

absl::Status HbmTier::Put(const BlockKey& key, absl::Span<const std::byte> record) {
  const auto bytes = static_cast<int64_t>(record.size());
  if (bytes <= 0 || bytes > options_.capacity_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "record of ", bytes, " bytes, the hbm tier holds 1 to ", options_.capacity_bytes));
  }
  const auto exists = [&key] {
    return absl::AlreadyExistsError(absl::StrCat("hbm tier: block ", key.ToHex(), " is stored"));
  };
  {
    MutexLock lock(&mutex_);
    if (blocks_.contains(key)) return exists();
  }
  const std::optional<int64_t> offset = arena_->Take(bytes);
  if (!offset.has_value()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "hbm tier: ", bytes, " bytes wanted, ", options_.capacity_bytes - arena_->used_bytes(),
        " of ", options_.capacity_bytes, " free, the largest hole is ",
        arena_->largest_hole_bytes()));
  }
  auto block = std::make_shared<const Block>(arena_, *offset, bytes);
  KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, TakeLane());
  Loan loan(this, std::move(lane));
  loan.lane().block = block;
  KVSTOW_RETURN_IF_ERROR(CopyIn(loan.lane(), record));
  MutexLock lock(&mutex_);
  if (!blocks_.try_emplace(key, std::move(block)).second) return exists();
  return absl::OkStatus();
}

absl::StatusOr<BlockRef> HbmTier::Get(const BlockKey& key) {
  std::shared_ptr<const Block> block;
  {
    MutexLock lock(&mutex_);
    const auto found = blocks_.find(key);
    if (found == blocks_.end()) {
      return absl::NotFoundError(absl::StrCat("hbm tier: no block ", key.ToHex()));
    }
    block = found->second;
  }
  KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, TakeLane());
  Loan loan(this, std::move(lane));
  loan.lane().block = block;
  const auto size = static_cast<size_t>(block->bytes);
  std::shared_ptr<std::byte[]> record(new std::byte[size]);
  KVSTOW_RETURN_IF_ERROR(CopyOut(loan.lane(), {record.get(), size}));
  return BlockRef(record, {record.get(), size});
}

void HbmTier::Drop(const BlockKey& key) {
  std::shared_ptr<const Block> dropped;  // freed, where it was the last, after the lock
  MutexLock lock(&mutex_);
  const auto found = blocks_.find(key);
  if (found == blocks_.end()) return;
  dropped = std::move(found->second);
  blocks_.erase(found);
}

void HbmTier::ForEach(
    const std::function<void(const BlockKey& key, int64_t record_bytes)>& visit) const {
  std::vector<std::pair<BlockKey, int64_t>> blocks;
  {
    MutexLock lock(&mutex_);
    blocks.reserve(blocks_.size());
    for (const auto& [key, block] : blocks_) blocks.emplace_back(key, block->bytes);
  }
  for (const auto& [key, record_bytes] : blocks) visit(key, record_bytes);
}

int64_t HbmTier::used_bytes() const { return arena_->used_bytes(); }

}  // namespace kvstow
