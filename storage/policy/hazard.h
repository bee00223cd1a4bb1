// HazardPolicy: sessions of each turn class return at their own rate; what is least likely to
// return within the next minute leaves first.
//
// Per class min(turn, 8): a histogram of the gaps after which a turn was continued, and the number
// of turns. The score of an extent idle for `a` seconds is
//   (returns with a gap in (a, a + window]) / (turns - returns with a gap <= a),
// and 0.3 / (1 + a / window) for a class of fewer than 30 turns. The oldest extent of each class
// competes: eight queues per tier. This is the baseline that rtv replaced.
#pragma once

#include <array>

#include "storage/policy/block_tree.h"
#include "storage/policy/keyed_heaps.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

class HazardPolicy final : public Policy {
 public:
  HazardPolicy(const BlockTree& tree, double window_s);

  std::string_view name() const override { return "hazard"; }
  void OnTime(double now_s) override { now_s_ = now_s; }
  void OnRequest(const Request& request, OwnerSlot owner) override;
  void OnExtent(ExtentSlot extent) override;
  BlockNumber ChooseVictim(int tier) override;

 private:
  static constexpr int kClasses = 8;
  static constexpr int kBins = 30;

  struct TurnClass {
    double turns = 0;
    std::array<double, kBins> returns{};  // by gap; the last bin is open
  };

  static int ClassOf(const Request& request);
  // Returns of the class with a gap of at most `gap_s`, spread evenly within a bin.
  double ReturnsUpTo(const TurnClass& turn_class, double gap_s) const;
  double Score(int class_idx, double idle_s) const;

  const BlockTree& tree_;
  const double window_s_;
  std::array<double, kBins + 1> edges_s_{};
  std::array<TurnClass, kClasses> classes_;
  KeyedHeaps heaps_;  // by tier, then class; oldest first
  double now_s_ = 0;
};

}  // namespace kvstow::policy
