#include "storage/index_shard.h"

#include <algorithm>
#include <cstring>

#include "kernels/core/check.h"

namespace kvstow {
namespace {

constexpr size_t kFirstBuckets = 64;

uint64_t Load64(const std::byte* bytes) {
  uint64_t value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

}  // namespace

// --- IndexedBlock ---

const BlockKey& IndexedBlock::key() const { return shard_->entry(slot_).key; }
BlockId IndexedBlock::id() const { return shard_->entry(slot_).id; }
int64_t IndexedBlock::record_bytes() const { return shard_->entry(slot_).record_bytes; }
bool IndexedBlock::in(TierKind tier) const { return shard_->entry(slot_).in_tier[TierIdx(tier)]; }
bool IndexedBlock::is_queued() const { return shard_->entry(slot_).is_queued; }
bool IndexedBlock::is_rising() const { return shard_->entry(slot_).is_rising; }
bool IndexedBlock::is_pinned() const { return shard_->entry(slot_).pins > 0; }
void IndexedBlock::SetQueued(bool is_queued) { shard_->entry(slot_).is_queued = is_queued; }

void IndexedBlock::SetRising(bool is_rising) { shard_->entry(slot_).is_rising = is_rising; }

void IndexedBlock::Place(TierKind tier) {
  const size_t tier_idx = TierIdx(tier);
  IndexShard::Entry& entry = shard_->entry(slot_);
  if (entry.in_tier[tier_idx]) return;
  entry.in_tier[tier_idx] = true;
  ++shard_->totals_.blocks_in[tier_idx];
  shard_->totals_.bytes_in[tier_idx] += entry.record_bytes;
  if (shard_->listener_ != nullptr) {
    shard_->listener_->OnPlaced(entry.key, tier, entry.record_bytes);
  }
}

void IndexedBlock::Remove(TierKind tier) {
  const size_t tier_idx = TierIdx(tier);
  IndexShard::Entry& entry = shard_->entry(slot_);
  if (!entry.in_tier[tier_idx]) return;
  entry.in_tier[tier_idx] = false;
  --shard_->totals_.blocks_in[tier_idx];
  shard_->totals_.bytes_in[tier_idx] -= entry.record_bytes;
  if (shard_->listener_ != nullptr) {
    shard_->listener_->OnRemoved(entry.key, tier, entry.record_bytes);
  }
}

void IndexedBlock::Pin() {
  IndexShard::Entry& entry = shard_->entry(slot_);
  if (entry.pins++ == 0) shard_->totals_.pinned_bytes += entry.record_bytes;
}

void IndexedBlock::Unpin() {
  IndexShard::Entry& entry = shard_->entry(slot_);
  KVSTOW_CHECK(entry.pins > 0);
  if (--entry.pins == 0) shard_->totals_.pinned_bytes -= entry.record_bytes;
}

// --- IndexShard ---

IndexShard::IndexShard(uint64_t hash_seed, ResidencyListener* listener)
    : hash_seed_(hash_seed), listener_(listener), buckets_(kFirstBuckets, 0) {}

bool IndexShard::Insert(const BlockInfo& block, BlockId id,
                        absl::FunctionRef<void(IndexedBlock&)> placed) {
  MutexLock lock(&mutex_);
  if (FindSlot(block.key) != kNone) return false;
  const uint32_t slot = TakeSlot();
  Entry& added = entry(slot);
  added = Entry{};
  added.key = block.key;
  added.id = id;
  added.logical_bytes = block.logical_bytes;
  added.record_bytes = static_cast<uint32_t>(block.record_bytes);
  added.model_idx = TakeModel(block.fingerprint);
  added.num_tokens = static_cast<uint16_t>(block.num_tokens);
  added.k_codec = block.codecs.k;
  added.v_codec = block.codecs.v;
  ++totals_.num_blocks;
  CountCodec(added, +1);
  if (static_cast<uint64_t>(totals_.num_blocks) * 4 > buckets_.size() * 3) {
    std::vector<Bucket> old(buckets_.size() * 2, 0);
    old.swap(buckets_);
    for (const Bucket bucket : old) {
      if (bucket != 0) AddBucket(bucket >> 32, static_cast<uint32_t>(bucket) - 1);
    }
  }
  AddBucket(Hash(block.key), slot);
  IndexedBlock handle(this, slot);
  if (block.location.in_hbm) handle.Place(TierKind::kHbm);
  if (block.location.in_dram) handle.Place(TierKind::kDram);
  if (block.location.in_nvme) handle.Place(TierKind::kNvme);
  placed(handle);
  return true;
}

Location IndexShard::Lookup(const BlockKey& key) const {
  MutexLock lock(&mutex_);
  const uint32_t slot = FindSlot(key);
  if (slot == kNone) return {};
  return LocationOf(entry(slot));
}

bool IndexShard::Find(const BlockKey& key, BlockInfo& block) const {
  MutexLock lock(&mutex_);
  const uint32_t slot = FindSlot(key);
  if (slot == kNone) return false;
  block = Describe(entry(slot));
  return true;
}

bool IndexShard::Visit(const BlockKey& key, absl::FunctionRef<void(IndexedBlock&)> visit,
                       bool& erased) {
  MutexLock lock(&mutex_);
  const uint32_t slot = FindSlot(key);
  if (slot == kNone) return false;
  IndexedBlock handle(this, slot);
  visit(handle);
  EraseIfNowhere(slot, erased);
  return true;
}

void IndexShard::List(const BlockKey& after, int64_t limit, std::vector<BlockInfo>& blocks) const {
  MutexLock lock(&mutex_);
  std::vector<uint32_t> slots;
  for (const Bucket bucket : buckets_) {
    if (bucket == 0) continue;
    const uint32_t slot = static_cast<uint32_t>(bucket) - 1;
    if (entry(slot).key > after) slots.push_back(slot);
  }
  const auto by_key = [this](uint32_t a, uint32_t b) { return entry(a).key < entry(b).key; };
  if (static_cast<int64_t>(slots.size()) > limit) {
    std::nth_element(slots.begin(), slots.begin() + limit, slots.end(), by_key);
    slots.resize(static_cast<size_t>(limit));
  }
  std::sort(slots.begin(), slots.end(), by_key);
  for (const uint32_t slot : slots) blocks.push_back(Describe(entry(slot)));
}

Location IndexShard::LocationOf(const Entry& entry) {
  return {.in_hbm = entry.in_tier[TierIdx(TierKind::kHbm)],
          .in_dram = entry.in_tier[TierIdx(TierKind::kDram)],
          .in_nvme = entry.in_tier[TierIdx(TierKind::kNvme)]};
}

BlockInfo IndexShard::Describe(const Entry& entry) const {
  return {.key = entry.key,
          .fingerprint = models_[entry.model_idx].fingerprint,
          .codecs = {entry.k_codec, entry.v_codec},
          .location = LocationOf(entry),
          .num_tokens = entry.num_tokens,
          .record_bytes = entry.record_bytes,
          .logical_bytes = entry.logical_bytes,
          .is_pinned = entry.pins > 0};
}

IndexShard::Totals IndexShard::totals() const {
  MutexLock lock(&mutex_);
  Totals totals = totals_;
  totals.index_bytes = static_cast<int64_t>(
      sizeof(*this) + buckets_.capacity() * sizeof(Bucket) +
      chunks_.size() * (kSlotsPerChunk * sizeof(Entry) + sizeof(chunks_[0])) +
      free_slots_.capacity() * sizeof(uint32_t) +
      models_.capacity() * (sizeof(Model) + sizeof(Digest) + 2 * sizeof(uint32_t)));
  return totals;
}

// --- hash table: linear probing, backward-shift deletion ---

// Keyed, so that chosen keys do not collide on purpose.
uint32_t IndexShard::Hash(const BlockKey& key) const {
  const uint64_t a = Load64(key.bytes.data() + 8) ^ hash_seed_;
  const uint64_t b = Load64(key.bytes.data() + 16) ^ 0x9e3779b97f4a7c15u;
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint32_t>((static_cast<uint64_t>(product) ^ (product >> 64)) >> 16);
}

uint32_t IndexShard::FindSlot(const BlockKey& key) const {
  const uint32_t hash = Hash(key);
  const size_t mask = buckets_.size() - 1;
  for (size_t i = hash & mask; buckets_[i] != 0; i = (i + 1) & mask) {
    if (buckets_[i] >> 32 != hash) continue;
    const uint32_t slot = static_cast<uint32_t>(buckets_[i]) - 1;
    if (entry(slot).key == key) return slot;
  }
  return kNone;
}

void IndexShard::AddBucket(uint32_t hash, uint32_t slot) {
  const size_t mask = buckets_.size() - 1;
  size_t i = hash & mask;
  while (buckets_[i] != 0) i = (i + 1) & mask;
  buckets_[i] = uint64_t{hash} << 32 | (slot + 1);
}

void IndexShard::RemoveBucket(const BlockKey& key) {
  const uint32_t slot = FindSlot(key);
  const size_t mask = buckets_.size() - 1;
  size_t hole = Hash(key) & mask;
  while (static_cast<uint32_t>(buckets_[hole]) != slot + 1) hole = (hole + 1) & mask;
  // Close the gap: a bucket may move into the hole unless its home lies behind the hole.
  for (size_t i = (hole + 1) & mask; buckets_[i] != 0; i = (i + 1) & mask) {
    const size_t home = (buckets_[i] >> 32) & mask;
    if (((i - home) & mask) < ((i - hole) & mask)) continue;
    buckets_[hole] = buckets_[i];
    hole = i;
  }
  buckets_[hole] = 0;
}

// --- slab, models, codecs ---

uint32_t IndexShard::TakeSlot() {
  if (!free_slots_.empty()) {
    const uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
  if (num_slots_ % kSlotsPerChunk == 0)
    chunks_.push_back(std::make_unique<Entry[]>(kSlotsPerChunk));
  return num_slots_++;
}

uint32_t IndexShard::TakeModel(const Digest& fingerprint) {
  const auto known = model_idx_.find(fingerprint);
  if (known != model_idx_.end()) {
    ++models_[known->second].num_blocks;
    return known->second;
  }
  uint32_t model_idx;
  if (free_models_.empty()) {
    model_idx = static_cast<uint32_t>(models_.size());
    models_.emplace_back();
  } else {
    model_idx = free_models_.back();
    free_models_.pop_back();
  }
  models_[model_idx] = {fingerprint, 1};
  model_idx_.emplace(fingerprint, model_idx);
  return model_idx;
}

void IndexShard::DropModel(uint32_t model_idx) {
  if (--models_[model_idx].num_blocks > 0) return;
  model_idx_.erase(models_[model_idx].fingerprint);
  free_models_.push_back(model_idx);
}

void IndexShard::CountCodec(const Entry& entry, int64_t sign) {
  const CodecPair codecs{entry.k_codec, entry.v_codec};
  auto stats = std::find_if(totals_.codecs.begin(), totals_.codecs.end(),
                            [&](const CodecStats& s) { return s.codecs == codecs; });
  if (stats == totals_.codecs.end()) {
    totals_.codecs.push_back({.codecs = codecs});
    stats = std::prev(totals_.codecs.end());
  }
  stats->num_blocks += sign;
  stats->record_bytes += sign * int64_t{entry.record_bytes};
  stats->logical_bytes += sign * entry.logical_bytes;
}

void IndexShard::EraseIfNowhere(uint32_t slot, bool& erased) {
  Entry& gone = entry(slot);
  if (LocationOf(gone).present()) return;
  if (gone.pins > 0) totals_.pinned_bytes -= gone.record_bytes;
  CountCodec(gone, -1);
  DropModel(gone.model_idx);
  RemoveBucket(gone.key);
  --totals_.num_blocks;
  free_slots_.push_back(slot);
  erased = true;
}

}  // namespace kvstow
