// GdsfPolicy: keeps small sessions of many turns. The value of an extent is the tier's clock when
// it came, plus turns / blocks of its prompt; the clock is the value of the last victim.
//
// Source: GreedyDual-Size-Frequency (Cherkasova, HP Labs HPL-98-69R1), with cost 1 per session and
// the turn number as frequency. We differ by the leaf rule: an extent leaves block by block.
#pragma once

#include <vector>

#include "storage/policy/block_tree.h"
#include "storage/policy/keyed_heaps.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

class GdsfPolicy final : public Policy {
 public:
  explicit GdsfPolicy(const BlockTree& tree) : tree_(tree), heaps_(kTiersMax) {}

  std::string_view name() const override { return "gdsf"; }
  void OnRequest(const Request& request, OwnerSlot owner) override;
  void OnExtent(ExtentSlot extent) override;
  BlockNumber ChooseVictim(int tier) override;

 private:
  const BlockTree& tree_;
  KeyedHeaps heaps_;           // one per tier
  std::vector<double> value_;  // by owner
  double clock_ = 0;
};

}  // namespace kvstow::policy
