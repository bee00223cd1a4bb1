// S3FifoPolicy: a small queue for new blocks, a main queue for those used again, a ghost queue.
//
// Source: S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi, SOSP 2023), on blocks, one instance per tier:
// small queue 10 % of the tier, frequency capped at 3, as many ghosts as the main queue holds. We
// differ by the leaf rule, as in arc.h.
#pragma once

#include <vector>

#include "storage/policy/block_lists.h"
#include "storage/policy/block_tree.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

class S3FifoPolicy final : public Policy {
 public:
  S3FifoPolicy(const BlockTree& tree, const std::vector<int64_t>& tier_blocks);

  std::string_view name() const override { return "s3fifo"; }
  void OnRequest(const Request& request, OwnerSlot owner) override { last_ = kNone; }
  void OnHit(BlockNumber block, int from_tier) override;
  void OnInsert(BlockNumber block, int tier) override;
  void OnErase(BlockNumber block, int tier) override;
  bool Remembers(BlockNumber block) const override;
  void SetTierBlocks(int tier, int64_t blocks) override;
  BlockNumber ChooseVictim(int tier) override;

 private:
  enum List { kSmall, kMain, kGhost, kNumLists };
  struct Tier {
    BlockLists lists{kNumLists};
    std::vector<uint8_t> uses;  // by block, since it entered, at most 3
    int64_t small_blocks = 0;
    int64_t ghosts_max = 0;
  };

  BlockNumber FromSmall(Tier& tier);
  BlockNumber FromMain(Tier& tier);

  const BlockTree& tree_;
  std::vector<Tier> tiers_;
  BlockNumber last_ = kNone;  // of the arriving request
};

}  // namespace kvstow::policy
