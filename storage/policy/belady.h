// BeladyPolicy: the block that is used again last, or never, leaves first. Optimal for block hits
// in one tier, and the ceiling that every table shows.
//
// Source: Belady, IBM Systems Journal 5(2), 1966. A block's next use is never later than its
// child's, and at a tie the deeper one leaves, so the leaf rule holds by itself.
#pragma once

#include "storage/policy/block_tree.h"
#include "storage/policy/keyed_heaps.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

class BeladyPolicy final : public Policy {
 public:
  // `future` must outlive the policy.
  BeladyPolicy(const BlockTree& tree, const Future& future)
      : tree_(tree), future_(future), heaps_(kTiersMax) {}

  std::string_view name() const override { return "belady"; }
  void OnRequest(const Request& request, OwnerSlot owner) override { request_ = request.number; }
  void OnHit(BlockNumber block, int from_tier) override { OnInsert(block, 0); }
  void OnInsert(BlockNumber block, int tier) override;
  void OnErase(BlockNumber block, int tier) override;
  BlockNumber ChooseVictim(int tier) override;

 private:
  const BlockTree& tree_;
  const Future& future_;
  KeyedHeaps heaps_;                // one per tier, of blocks
  std::vector<uint32_t> next_use_;  // by block
  uint64_t request_ = 0;
};

}  // namespace kvstow::policy
