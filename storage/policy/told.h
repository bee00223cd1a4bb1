// ToldPolicy: the oracles that are told about sessions. They show what knowing would be worth.
//
// `who`: whether the session sends another turn; those that do not leave first, oldest first.
// `both`: also when; among those that return, the latest leaves first. Scores as value_order.h,
// with index 1 (who) or 1 / (seconds until the return). They look at returns only, so other
// sessions' use of the same blocks is not foreseen.
#pragma once

#include <vector>

#include "storage/policy/block_tree.h"
#include "storage/policy/policy.h"
#include "storage/policy/value_order.h"

namespace kvstow::policy {

class ToldPolicy final : public Policy {
 public:
  enum class Knows { kWho, kBoth };

  // `future` must outlive the policy. `alpha` as in PolicyOptions.
  ToldPolicy(const BlockTree& tree, const Future& future, Knows knows, double alpha);

  std::string_view name() const override;
  void OnTime(double now_s) override { now_s_ = now_s; }
  void OnRequest(const Request& request, OwnerSlot owner) override;
  void OnExtent(ExtentSlot extent) override;
  BlockNumber ChooseVictim(int tier) override;

 private:
  struct Turn {
    double return_s = 0;
    bool is_done = false;  // has returned, or never will
  };

  void File(ExtentSlot slot, const Turn& turn);

  const BlockTree& tree_;
  const Future& future_;
  const Knows knows_;
  const bool is_per_size_;
  ValueOrder order_;
  std::vector<Turn> turns_;  // by owner
  double now_s_ = 0;
};

}  // namespace kvstow::policy
