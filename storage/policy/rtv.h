// RtvPolicy (return-time value): what leaves first is what is expected to save the least recompute
// per block and second. The default.
//
// A model learns online when sessions return (return_model.h). Each request carries the index of
// its age bin, computed when it enters the bin; value_order.h turns it into a score per block, with
// a bonus `alpha` for sessions that are whole. A request that was continued, or whose session its
// client called over, is worth next to nothing. One whose client said by when it returns has the
// index of a sure return at that time; once that has passed, the model's again.
//
// Cost: O(log n) per event. A request enters 24 bins in its life; each costs one table of at most
// 24 rows. Bins are walked by one pointer per bin edge over the requests in the order of arrival,
// which is what a timer wheel becomes when all timers of a slot have the same length.
#pragma once

#include <array>
#include <vector>

#include "storage/policy/block_tree.h"
#include "storage/policy/policy.h"
#include "storage/policy/return_model.h"
#include "storage/policy/value_order.h"

namespace kvstow::policy {

class RtvPolicy final : public Policy {
 public:
  RtvPolicy(const BlockTree& tree, double alpha);

  std::string_view name() const override { return "rtv"; }
  void OnTime(double now_s) override;
  void OnRequest(const Request& request, OwnerSlot owner) override;
  void OnRecall(const Request& request, OwnerSlot owner) override;
  void OnSessionOver(OwnerSlot owner) override;
  void OnReturnExpected(OwnerSlot owner, double at_s) override;
  void OnExtent(ExtentSlot extent) override;
  std::vector<double> Learned() const override;
  bool Restore(absl::Span<const double> learned) override;
  BlockNumber ChooseVictim(int tier) override;

 private:
  struct Turn {
    ReturnFeatures features;
    double index = 0;
    double expected_s = -1;  // its client returns by then; in the past: it has not said
    int32_t bin = 0;
    bool is_returned = false;
    bool is_over = false;   // its client said so
    bool is_stale = false;  // has entered a bin; the index follows
  };

  void Observe(int bin, OwnerSlot owner);
  void OnReturn(const Request& request);
  void FileExtents(OwnerSlot owner);
  double IndexOf(const Turn& turn) const;

  const BlockTree& tree_;
  ReturnModel model_;
  ValueOrder order_;
  std::vector<Turn> turns_;  // by owner
  // The next request to leave each bin.
  std::array<OwnerSlot, ReturnModel::kBins> next_;
  std::vector<OwnerSlot> stale_;
  double now_s_ = 0;
};

}  // namespace kvstow::policy
