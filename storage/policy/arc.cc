#include "storage/policy/arc.h"

#include <algorithm>

namespace kvstow::policy {

ArcPolicy::ArcPolicy(const BlockTree& tree, const std::vector<int64_t>& tier_blocks)
    : tree_(tree), tiers_(tier_blocks.size()) {
  for (size_t i = 0; i < tiers_.size(); ++i) tiers_[i].capacity = tier_blocks[i];
}

bool ArcPolicy::Remembers(BlockNumber block) const {
  return std::any_of(tiers_.begin(), tiers_.end(), [&](const Tier& tier) {
    const int list = tier.lists.ListOf(block);
    return list == kOnceGhost || list == kAgainGhost;
  });
}

void ArcPolicy::OnRequest(const Request& request, OwnerSlot owner) { last_ = {kNone, kNone}; }

void ArcPolicy::Enter(Tier& tier, int list, BlockNumber block, bool in_request) {
  if (!in_request) {
    tier.lists.PushFront(list, block);
    return;
  }
  // Behind the block before it, so that the deepest of a request comes to the back first.
  BlockNumber& last = last_[static_cast<size_t>(list)];
  const bool is_there = last != kNone && last != block && tier.lists.ListOf(last) == list;
  tier.lists.PushBehind(list, is_there ? last : kNone, block);
  last = block;
}

void ArcPolicy::OnHit(BlockNumber block, int from_tier) {
  if (from_tier == 0) {
    Enter(tiers_[0], kAgain, block, true);
    return;
  }
  tiers_[static_cast<size_t>(from_tier)].lists.Remove(block);
  OnInsert(block, 0);
}

void ArcPolicy::OnInsert(BlockNumber block, int tier_idx) {
  Tier& tier = tiers_[static_cast<size_t>(tier_idx)];
  const auto once_ghosts = static_cast<double>(tier.lists.size(kOnceGhost));
  const auto again_ghosts = static_cast<double>(tier.lists.size(kAgainGhost));
  int list = kAgain;
  switch (tier.lists.ListOf(block)) {
    case kOnceGhost:
      tier.once_target = std::min(static_cast<double>(tier.capacity),
                                  tier.once_target + std::max(1.0, again_ghosts / once_ghosts));
      break;
    case kAgainGhost:
      tier.once_target =
          std::max(0.0, tier.once_target - std::max(1.0, once_ghosts / again_ghosts));
      break;
    default:
      list = kOnce;
      break;
  }
  Enter(tier, list, block, tier_idx == 0);
}

void ArcPolicy::OnErase(BlockNumber block, int tier_idx) {
  Tier& tier = tiers_[static_cast<size_t>(tier_idx)];
  const int list = tier.lists.ListOf(block);
  if (list != kOnce && list != kAgain) return;
  tier.lists.PushFront(list == kOnce ? kOnceGhost : kAgainGhost, block);
  while (tier.lists.size(kOnce) + tier.lists.size(kOnceGhost) > tier.capacity &&
         tier.lists.size(kOnceGhost) > 0) {
    tier.lists.Remove(tier.lists.back(kOnceGhost));
  }
  while (tier.lists.size(kOnce) + tier.lists.size(kAgain) + tier.lists.size(kOnceGhost) +
                 tier.lists.size(kAgainGhost) >
             2 * tier.capacity &&
         tier.lists.size(kAgainGhost) > 0) {
    tier.lists.Remove(tier.lists.back(kAgainGhost));
  }
}

BlockNumber ArcPolicy::LeafAtBack(Tier& tier, int list) {
  for (int64_t tries = tier.lists.size(list); tries > 0; --tries) {
    const BlockNumber block = tier.lists.back(list);
    if (tree_.MayLeave(block)) return block;
    tier.lists.PushFront(list, block);
  }
  return kNone;
}

BlockNumber ArcPolicy::ChooseVictim(int tier_idx) {
  Tier& tier = tiers_[static_cast<size_t>(tier_idx)];
  const auto once = static_cast<double>(tier.lists.size(kOnce));
  const int first = once >= 1 && once > tier.once_target ? kOnce : kAgain;
  const BlockNumber block = LeafAtBack(tier, first);
  return block != kNone ? block : LeafAtBack(tier, first == kOnce ? kAgain : kOnce);
}

}  // namespace kvstow::policy
