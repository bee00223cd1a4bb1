// TierLedger: what happens in the tiers, told to the block tree and to the policy in the right
// order.
//
//   ledger.BeginRequest(request);
//   for (BlockNumber block : chain) tier = ledger.Touch(block);   // where it was; -1: recompute it
//   while (ledger.num_blocks(0) > capacity) ledger.Evict(0);      // after the whole request
//
// The newest request competes with the others: a policy may evict what was just inserted, which is
// how it refuses admission.
//
// Thread safety: none.
#pragma once

#include <cstdint>

#include "storage/policy/block_tree.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

class TierLedger {
 public:
  // `tree` and `policy` must outlive the ledger, and belong to it alone.
  TierLedger(int num_tiers, BlockTree* tree, Policy* policy);

  // Time passes without a request. A step back counts as none.
  void Advance(double now_s);

  void BeginRequest(const Request& request);
  // The next block of the request's chain. Returns the tier where it was, or -1.
  int Touch(BlockNumber block);

  // For a store, where blocks of a request arrive after it, and some never. `Link` as in
  // BlockTree; Use: a resident block of the arriving request; Insert: a block of an earlier
  // request, or of one that is forgotten, has come.
  void Link(BlockNumber block, BlockNumber parent, int32_t chain_idx) {
    tree_->Link(block, parent, chain_idx);
  }
  void Use(BlockNumber block);
  void Insert(BlockNumber block, const Request& request);
  // A request of an earlier process: its blocks follow by Insert. Oldest first, before all others.
  void Recall(const Request& request) { policy_->OnRecall(request, tree_->AddOwner(request)); }
  // nullptr: never seen, or forgotten.
  const Request* FindRequest(uint64_t request_number) const;

  // A hint. Unknown requests are ignored: their blocks are gone.
  void SessionOver(uint64_t request_number);
  void ReturnExpected(uint64_t request_number, double at_s);
  void SetPinned(BlockNumber block, bool is_pinned) { tree_->SetPinned(block, is_pinned); }

  // The block that `tier` should give up, or kNone.
  BlockNumber ChooseVictim(int tier);
  // Chooses, and moves the block to the next tier or, from the last one, out. Returns it; kNone
  // when everything there is pinned or the tier is empty.
  BlockNumber Evict(int tier);
  // The store moved or dropped a block on its own.
  void Demote(BlockNumber block, int to_tier);
  void Erase(BlockNumber block);

  bool IsResident(BlockNumber block) const { return tree_->IsResident(block); }
  int64_t num_blocks(int tier) const { return tree_->num_blocks(tier); }

 private:
  const int num_tiers_;
  BlockTree* const tree_;
  Policy* const policy_;
  double now_s_ = 0;
  OwnerSlot owner_ = kNone;       // the request that arrives
  BlockNumber previous_ = kNone;  // its last touched block
  int32_t chain_idx_ = 0;         // of the next one
};

}  // namespace kvstow::policy
