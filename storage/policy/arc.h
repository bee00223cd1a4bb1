// ArcPolicy: blocks used once against blocks used again, with a border that follows the ghosts.
//
// Source: ARC (Megiddo and Modha, FAST 2003), on blocks, one instance per tier. We differ by the
// leaf rule (a block with a resident child goes back to the front of its queue when its turn comes)
// and by inserting a whole request before evicting. Within a request the deepest block is the first
// to leave.
#pragma once

#include <array>
#include <vector>

#include "storage/policy/block_lists.h"
#include "storage/policy/block_tree.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

class ArcPolicy final : public Policy {
 public:
  // `tier_blocks`: capacities, which bound the ghosts.
  ArcPolicy(const BlockTree& tree, const std::vector<int64_t>& tier_blocks);

  std::string_view name() const override { return "arc"; }
  void OnRequest(const Request& request, OwnerSlot owner) override;
  void OnHit(BlockNumber block, int from_tier) override;
  void OnInsert(BlockNumber block, int tier) override;
  void OnErase(BlockNumber block, int tier) override;
  bool Remembers(BlockNumber block) const override;
  void SetTierBlocks(int tier, int64_t blocks) override {
    tiers_[static_cast<size_t>(tier)].capacity = blocks;
  }
  BlockNumber ChooseVictim(int tier) override;

 private:
  enum List { kOnce, kAgain, kOnceGhost, kAgainGhost, kNumLists };
  struct Tier {
    BlockLists lists{kNumLists};
    int64_t capacity = 0;
    double once_target = 0;  // blocks
  };

  void Enter(Tier& tier, int list, BlockNumber block, bool in_request);
  BlockNumber LeafAtBack(Tier& tier, int list);

  const BlockTree& tree_;
  std::vector<Tier> tiers_;
  std::array<BlockNumber, 2> last_{kNone, kNone};  // of the arriving request, by list of tier 0
};

}  // namespace kvstow::policy
