// BlockTree: the resident blocks as a tree of prefixes, who owns each, and in which tier it is.
//
//   OwnerSlot owner = tree.AddOwner(request);
//   for (block of the prompt) {
//     if (!tree.IsResident(block)) tree.Link(block, previous_block, chain_idx);
//     tree.Take(owner, block);
//   }
//   ... tree.Move(block, 1); tree.Drop(block); ...
//
// Every resident block belongs to the last request that used it. The blocks a request owns in a
// tier are an extent: part of its chain, taken from above by newer requests and emptied from below
// by eviction. Only an extent whose deepest block has no resident child in that tier may give one
// up, so shared prefixes leave last.
//
// Bounded: 32 bytes per block number, one record per extent, and one per request while it owns
// blocks or is younger than `remember_s`.
//
// Thread safety: none.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

struct Owner {
  Request request;
  std::array<ExtentSlot, kTiersMax> extents{kNone, kNone, kNone, kNone};
  int32_t num_extents = 0;
  OwnerSlot next = kNone;     // the next arrival
  bool is_remembered = true;  // younger than remember_s
};

struct Extent {
  OwnerSlot owner = kNone;
  BlockNumber deepest = kNone;
  int32_t count = 0;        // blocks
  int32_t deepest_idx = 0;  // of the deepest block in the request's chain
  int32_t full_blocks = 0;  // of the request; here because it is needed with every change
  uint64_t number = 0;      // of the request
  int32_t tier = 0;
  bool is_changed = false;  // waits for Flush
};

class BlockTree {
 public:
  // Requests stay findable for `remember_s` even without blocks: longer than any policy looks back.
  explicit BlockTree(double remember_s = 5000) : remember_s_(remember_s) {}

  BlockTree(const BlockTree&) = delete;
  BlockTree& operator=(const BlockTree&) = delete;

  // --- requests ---

  OwnerSlot AddOwner(const Request& request);
  // kNone: never seen, or forgotten.
  OwnerSlot FindOwner(uint64_t number) const;
  // Forgets requests that arrived more than remember_s before and own nothing.
  void Forget(double now_s);
  const Owner& owner(OwnerSlot slot) const { return owners_[slot]; }

  // --- blocks ---

  // Says where in its chain a block stands that is in no tier: behind `parent`, kNone for the first
  // that is known. Whatever is taken must be linked, and so must all blocks above it.
  void Link(BlockNumber block, BlockNumber parent, int32_t chain_idx);
  // `block` now belongs to `owner` and is in tier 0. All blocks that an owner takes lie on one
  // chain. Returns the tier where it was, or -1.
  int Take(OwnerSlot owner, BlockNumber block);
  // Moves a resident block to another tier; the owner stays.
  void Move(BlockNumber block, int tier);
  // The block is in no tier any more.
  void Drop(BlockNumber block);
  void SetPinned(BlockNumber block, bool is_pinned);

  bool IsResident(BlockNumber block) const {
    return block < blocks_.size() && blocks_[block].extent != kNone;
  }
  int TierOf(BlockNumber block) const {
    return IsResident(block) ? extents_[blocks_[block].extent].tier : -1;
  }
  int32_t IndexOf(BlockNumber block) const { return blocks_[block].chain_idx; }
  BlockNumber ParentOf(BlockNumber block) const { return blocks_[block].parent; }
  // Resident, not pinned, and without a resident child in its tier.
  bool MayLeave(BlockNumber block) const;
  int64_t num_blocks(int tier) const { return tier_blocks_[static_cast<size_t>(tier)]; }
  int64_t memory_bytes() const;  // about

  // --- extents ---

  const Extent& extent(ExtentSlot slot) const { return extents_[slot]; }
  // Slots are below this; those not in use have count 0.
  ExtentSlot num_extent_slots() const { return static_cast<ExtentSlot>(extents_.size()); }
  bool MayShrink(ExtentSlot slot) const {
    return extents_[slot].count > 0 && MayLeave(extents_[slot].deepest);
  }

  // Calls `visit(slot)` once for each extent that changed since the last time, then reuses the
  // slots of those that are gone.
  template <typename Visit>
  void Flush(Visit visit) {
    for (size_t i = 0; i < changed_.size(); ++i) {
      const ExtentSlot slot = changed_[i];
      extents_[slot].is_changed = false;
      visit(slot);
      if (extents_[slot].count == 0) free_extents_.push_back(slot);
    }
    changed_.clear();
  }

 private:
  struct Block {
    BlockNumber parent = kNone;
    ExtentSlot extent = kNone;
    int32_t chain_idx = 0;
    uint32_t is_pinned = 0;
    std::array<uint32_t, kTiersMax> children{};  // resident ones, by their tier
  };
  static_assert(sizeof(Block) == 32);

  ExtentSlot ExtentFor(OwnerSlot owner, int tier);
  void Attach(BlockNumber block, OwnerSlot owner, int tier);
  void Detach(BlockNumber block);
  void Change(ExtentSlot slot);
  void FreeOwner(OwnerSlot slot);

  const double remember_s_;
  std::vector<Block> blocks_;
  std::vector<Extent> extents_;
  std::vector<ExtentSlot> free_extents_;
  std::vector<ExtentSlot> changed_;
  std::vector<Owner> owners_;
  std::vector<OwnerSlot> free_owners_;
  absl::flat_hash_map<uint64_t, OwnerSlot> owner_of_number_;
  OwnerSlot oldest_ = kNone;  // of the remembered ones
  OwnerSlot newest_ = kNone;
  std::array<int64_t, kTiersMax> tier_blocks_{};
};

}  // namespace kvstow::policy
