#include "storage/policy/block_tree.h"

#include "kernels/core/check.h"

namespace kvstow::policy {

OwnerSlot BlockTree::AddOwner(const Request& request) {
  OwnerSlot slot;
  if (free_owners_.empty()) {
    slot = static_cast<OwnerSlot>(owners_.size());
    owners_.emplace_back();
  } else {
    slot = free_owners_.back();
    free_owners_.pop_back();
    owners_[slot] = Owner();
  }
  owners_[slot].request = request;
  owner_of_number_[request.number] = slot;
  if (oldest_ == kNone) {
    oldest_ = slot;
  } else {
    owners_[newest_].next = slot;
  }
  newest_ = slot;
  return slot;
}

OwnerSlot BlockTree::FindOwner(uint64_t number) const {
  const auto it = owner_of_number_.find(number);
  return it == owner_of_number_.end() ? kNone : it->second;
}

void BlockTree::FreeOwner(OwnerSlot slot) {
  owner_of_number_.erase(owners_[slot].request.number);
  free_owners_.push_back(slot);
}

void BlockTree::Forget(double now_s) {
  while (oldest_ != kNone && owners_[oldest_].request.time_s + remember_s_ < now_s) {
    const OwnerSlot slot = oldest_;
    oldest_ = owners_[slot].next;
    owners_[slot].is_remembered = false;
    if (owners_[slot].num_extents == 0) FreeOwner(slot);
  }
  if (oldest_ == kNone) newest_ = kNone;
}

bool BlockTree::MayLeave(BlockNumber block) const {
  if (!IsResident(block)) return false;
  const Block& b = blocks_[block];
  return b.is_pinned == 0 && b.children[static_cast<size_t>(extents_[b.extent].tier)] == 0;
}

void BlockTree::Change(ExtentSlot slot) {
  if (extents_[slot].is_changed) return;
  extents_[slot].is_changed = true;
  changed_.push_back(slot);
}

ExtentSlot BlockTree::ExtentFor(OwnerSlot owner, int tier) {
  ExtentSlot& slot = owners_[owner].extents[static_cast<size_t>(tier)];
  if (slot != kNone) return slot;
  if (free_extents_.empty()) {
    slot = static_cast<ExtentSlot>(extents_.size());
    extents_.emplace_back();
  } else {
    slot = free_extents_.back();
    free_extents_.pop_back();
    extents_[slot] = Extent();
  }
  extents_[slot].owner = owner;
  extents_[slot].number = owners_[owner].request.number;
  extents_[slot].full_blocks = owners_[owner].request.full_blocks;
  extents_[slot].tier = tier;
  extents_[slot].deepest_idx = -1;
  ++owners_[owner].num_extents;
  return slot;
}

void BlockTree::Attach(BlockNumber block, OwnerSlot owner, int tier) {
  const ExtentSlot slot = ExtentFor(owner, tier);
  Extent& extent = extents_[slot];
  Block& b = blocks_[block];
  b.extent = slot;
  ++extent.count;
  if (b.chain_idx > extent.deepest_idx) {
    extent.deepest = block;
    extent.deepest_idx = b.chain_idx;
  }
  ++tier_blocks_[static_cast<size_t>(tier)];
  Change(slot);
  if (b.parent == kNone) return;
  Block& parent = blocks_[b.parent];
  ++parent.children[static_cast<size_t>(tier)];
  // The parent's extent may have been free to shrink until now.
  if (parent.extent != kNone && parent.extent != slot) Change(parent.extent);
}

void BlockTree::Detach(BlockNumber block) {
  Block& b = blocks_[block];
  const ExtentSlot slot = b.extent;
  Extent& extent = extents_[slot];
  const int tier = extent.tier;
  b.extent = kNone;
  --extent.count;
  --tier_blocks_[static_cast<size_t>(tier)];
  Change(slot);
  if (extent.count == 0) {
    Owner& owner = owners_[extent.owner];
    owner.extents[static_cast<size_t>(tier)] = kNone;
    if (--owner.num_extents == 0 && !owner.is_remembered) FreeOwner(extent.owner);
  } else if (extent.deepest == block) {
    // All blocks of an extent lie on one chain, so the new deepest one is an ancestor.
    BlockNumber up = b.parent;
    while (blocks_[up].extent != slot) up = blocks_[up].parent;
    extent.deepest = up;
    extent.deepest_idx = blocks_[up].chain_idx;
  }
  if (b.parent == kNone) return;
  Block& parent = blocks_[b.parent];
  --parent.children[static_cast<size_t>(tier)];
  if (parent.extent != kNone && parent.extent != slot) Change(parent.extent);
}

void BlockTree::Link(BlockNumber block, BlockNumber parent, int32_t chain_idx) {
  if (block >= blocks_.size()) blocks_.resize(static_cast<size_t>(block) + 1);
  KVSTOW_DCHECK(!IsResident(block));
  blocks_[block].parent = parent;
  blocks_[block].chain_idx = chain_idx;
}

int BlockTree::Take(OwnerSlot owner, BlockNumber block) {
  KVSTOW_CHECK(block < blocks_.size());
  const int from = TierOf(block);
  if (from >= 0) Detach(block);
  Attach(block, owner, 0);
  return from;
}

void BlockTree::Move(BlockNumber block, int tier) {
  KVSTOW_CHECK(IsResident(block) && tier >= 0 && tier < kTiersMax);
  const OwnerSlot owner = extents_[blocks_[block].extent].owner;
  // Attach first: the owner must not be forgotten in between.
  const ExtentSlot target = ExtentFor(owner, tier);
  if (target == blocks_[block].extent) return;
  Detach(block);
  Attach(block, owner, tier);
}

void BlockTree::Drop(BlockNumber block) {
  KVSTOW_CHECK(IsResident(block));
  Detach(block);
}

int64_t BlockTree::memory_bytes() const {
  constexpr size_t kMapEntry = 2 * (sizeof(uint64_t) + sizeof(OwnerSlot));
  return static_cast<int64_t>(blocks_.capacity() * sizeof(Block) +
                              extents_.capacity() * sizeof(Extent) +
                              owners_.capacity() * (sizeof(Owner) + kMapEntry));
}

void BlockTree::SetPinned(BlockNumber block, bool is_pinned) {
  KVSTOW_CHECK(IsResident(block));
  blocks_[block].is_pinned = is_pinned ? 1 : 0;
  Change(blocks_[block].extent);
}

}  // namespace kvstow::policy
