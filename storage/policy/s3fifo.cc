#include "storage/policy/s3fifo.h"

#include <algorithm>

namespace kvstow::policy {
namespace {

constexpr uint8_t kUsesMax = 3;

}  // namespace

S3FifoPolicy::S3FifoPolicy(const BlockTree& tree, const std::vector<int64_t>& tier_blocks)
    : tree_(tree), tiers_(tier_blocks.size()) {
  for (size_t i = 0; i < tiers_.size(); ++i) SetTierBlocks(static_cast<int>(i), tier_blocks[i]);
}

bool S3FifoPolicy::Remembers(BlockNumber block) const {
  return std::any_of(tiers_.begin(), tiers_.end(),
                     [&](const Tier& tier) { return tier.lists.ListOf(block) == kGhost; });
}

void S3FifoPolicy::SetTierBlocks(int tier_idx, int64_t blocks) {
  Tier& tier = tiers_[static_cast<size_t>(tier_idx)];
  tier.small_blocks = std::max<int64_t>(1, blocks / 10);
  tier.ghosts_max = std::max<int64_t>(0, blocks - tier.small_blocks);
}

void S3FifoPolicy::OnHit(BlockNumber block, int from_tier) {
  Tier& tier = tiers_[static_cast<size_t>(from_tier)];
  if (from_tier == 0) {
    tier.uses[block] = std::min<uint8_t>(kUsesMax, static_cast<uint8_t>(tier.uses[block] + 1));
    return;
  }
  tier.lists.Remove(block);
  OnInsert(block, 0);
}

void S3FifoPolicy::OnInsert(BlockNumber block, int tier_idx) {
  Tier& tier = tiers_[static_cast<size_t>(tier_idx)];
  if (block >= tier.uses.size()) tier.uses.resize(static_cast<size_t>(block) + 1);
  const int list = tier.lists.ListOf(block) == kGhost ? kMain : kSmall;
  const bool is_behind =
      tier_idx == 0 && last_ != kNone && last_ != block && tier.lists.ListOf(last_) == list;
  tier.lists.PushBehind(list, is_behind ? last_ : kNone, block);
  tier.uses[block] = 0;
  if (tier_idx == 0) last_ = block;
}

void S3FifoPolicy::OnErase(BlockNumber block, int tier_idx) {
  Tier& tier = tiers_[static_cast<size_t>(tier_idx)];
  if (tier.lists.ListOf(block) != kSmall) {
    tier.lists.Remove(block);
    return;
  }
  tier.lists.PushFront(kGhost, block);
  while (tier.lists.size(kGhost) > tier.ghosts_max) tier.lists.Remove(tier.lists.back(kGhost));
}

BlockNumber S3FifoPolicy::FromSmall(Tier& tier) {
  for (int64_t tries = tier.lists.size(kSmall); tries > 0; --tries) {
    const BlockNumber block = tier.lists.back(kSmall);
    if (tier.uses[block] > 1) {
      tier.uses[block] = 0;
      tier.lists.PushFront(kMain, block);
    } else if (tree_.MayLeave(block)) {
      return block;
    } else {
      tier.lists.PushFront(kSmall, block);
    }
  }
  return kNone;
}

BlockNumber S3FifoPolicy::FromMain(Tier& tier) {
  for (int64_t tries = (kUsesMax + 1) * tier.lists.size(kMain); tries > 0; --tries) {
    const BlockNumber block = tier.lists.back(kMain);
    if (tier.uses[block] == 0 && tree_.MayLeave(block)) return block;
    if (tier.uses[block] > 0) --tier.uses[block];
    tier.lists.PushFront(kMain, block);
  }
  return kNone;
}

BlockNumber S3FifoPolicy::ChooseVictim(int tier_idx) {
  Tier& tier = tiers_[static_cast<size_t>(tier_idx)];
  BlockNumber block = kNone;
  if (tier.lists.size(kSmall) >= tier.small_blocks) block = FromSmall(tier);
  if (block == kNone) block = FromMain(tier);
  if (block == kNone) block = FromSmall(tier);
  // All that could leave may have been moved to the main queue just now.
  return block != kNone ? block : FromMain(tier);
}

}  // namespace kvstow::policy
