// LruPolicy: the extent whose request is oldest gives up its deepest block. The baseline.
#pragma once

#include "storage/policy/block_tree.h"
#include "storage/policy/keyed_heaps.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

class LruPolicy final : public Policy {
 public:
  explicit LruPolicy(const BlockTree& tree) : tree_(tree), heaps_(kTiersMax) {}

  std::string_view name() const override { return "lru"; }
  void OnExtent(ExtentSlot extent) override;
  BlockNumber ChooseVictim(int tier) override;

 private:
  const BlockTree& tree_;
  KeyedHeaps heaps_;  // one per tier, of extents that may shrink
};

}  // namespace kvstow::policy
