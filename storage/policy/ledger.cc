#include "storage/policy/ledger.h"

#include <algorithm>

#include "kernels/core/check.h"

namespace kvstow::policy {

TierLedger::TierLedger(int num_tiers, BlockTree* tree, Policy* policy)
    : num_tiers_(num_tiers), tree_(tree), policy_(policy) {
  KVSTOW_CHECK(num_tiers >= 1 && num_tiers <= kTiersMax);
}

void TierLedger::Advance(double now_s) {
  now_s_ = std::max(now_s_, now_s);
  policy_->OnTime(now_s_);
  // After the policy, whose pointers may still stand on what is forgotten here.
  tree_->Forget(now_s_);
}

void TierLedger::BeginRequest(const Request& request) {
  Advance(request.time_s);
  Request timed = request;
  timed.time_s = now_s_;
  owner_ = tree_->AddOwner(timed);
  previous_ = kNone;
  chain_idx_ = 0;
  policy_->OnRequest(timed, owner_);
}

int TierLedger::Touch(BlockNumber block) {
  if (!tree_->IsResident(block)) tree_->Link(block, previous_, chain_idx_);
  const int from = tree_->Take(owner_, block);
  previous_ = block;
  ++chain_idx_;
  if (from >= 0) {
    policy_->OnHit(block, from);
  } else {
    policy_->OnInsert(block, 0);
  }
  return from;
}

void TierLedger::Use(BlockNumber block) {
  const int from = tree_->Take(owner_, block);
  policy_->OnHit(block, from);
}

void TierLedger::Insert(BlockNumber block, const Request& request) {
  OwnerSlot owner = tree_->FindOwner(request.number);
  if (owner == kNone) {
    Request late = request;
    late.time_s = now_s_;
    late.continues = false;  // its parent is forgotten too
    owner = tree_->AddOwner(late);
    policy_->OnRequest(late, owner);
  }
  tree_->Take(owner, block);
  policy_->OnInsert(block, 0);
}

const Request* TierLedger::FindRequest(uint64_t request_number) const {
  const OwnerSlot owner = tree_->FindOwner(request_number);
  return owner == kNone ? nullptr : &tree_->owner(owner).request;
}

void TierLedger::ReturnExpected(uint64_t request_number, double at_s) {
  const OwnerSlot owner = tree_->FindOwner(request_number);
  if (owner != kNone) policy_->OnReturnExpected(owner, at_s);
}

void TierLedger::SessionOver(uint64_t request_number) {
  const OwnerSlot owner = tree_->FindOwner(request_number);
  if (owner != kNone) policy_->OnSessionOver(owner);
}

BlockNumber TierLedger::ChooseVictim(int tier) {
  tree_->Flush([this](ExtentSlot slot) { policy_->OnExtent(slot); });
  return policy_->ChooseVictim(tier);
}

BlockNumber TierLedger::Evict(int tier) {
  const BlockNumber block = ChooseVictim(tier);
  if (block == kNone) return kNone;
  if (tier + 1 < num_tiers_) {
    Demote(block, tier + 1);
  } else {
    Erase(block);
  }
  return block;
}

void TierLedger::Demote(BlockNumber block, int to_tier) {
  const int from = tree_->TierOf(block);
  tree_->Move(block, to_tier);
  policy_->OnErase(block, from);
  policy_->OnInsert(block, to_tier);
}

void TierLedger::Erase(BlockNumber block) {
  const int from = tree_->TierOf(block);
  tree_->Drop(block);
  policy_->OnErase(block, from);
}

}  // namespace kvstow::policy
