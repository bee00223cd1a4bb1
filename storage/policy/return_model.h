// ReturnModel: when a session sends its next turn, learned online; and how much that is worth now.
//
// Time since the last turn is cut into 24 bins. The hazard h(bin) is the probability that the
// session returns in that bin, given that it has not before: a logistic model over nine categorical
// features, with the bin's own smoothed rate as offset. One pass of stochastic gradient steps with
// a learning rate of its own for each weight (AdaGrad: Duchi, Hazan, Singer, JMLR 2011).
//
// The index is Gittins' for one-armed waiting: the best ratio, over all stopping bins, of the
// probability to return until then to the expected time that the blocks are held until then.
//
// State: 230 weights and their gradient sums, and two counts per bin. Thread safety: none.
#pragma once

#include <array>
#include <cstdint>

#include "storage/policy/policy.h"

namespace kvstow::policy {

// The features of a request that do not depend on the bin, as offsets of their weights.
struct ReturnFeatures {
  std::array<uint8_t, 7> weight{};
  uint8_t output_log2 = 0;
};

class ReturnModel {
 public:
  static constexpr int kBins = 24;
  static constexpr int kWeights = 230;

  ReturnModel();

  // In seconds: bin b is [EdgeOf(b), EdgeOf(b + 1)), b < kBins. 0, 5, 6.75, ..., about 4,970.
  double EdgeOf(int bin) const { return edges_s_[static_cast<size_t>(bin)]; }

  static ReturnFeatures FeaturesOf(const Request& request);

  double Hazard(const ReturnFeatures& features, int bin) const;

  // One observation: the session was in `bin` and left it by returning, or by ageing out of it.
  void Learn(const ReturnFeatures& features, int bin, bool is_return);

  // What was learned: two counts per bin, then weights and gradient sums.
  static constexpr int kLearned = 2 * kBins + 2 * kWeights;
  std::array<double, kLearned> Learned() const;
  // False: not what can have been learned; nothing has changed.
  bool Restore(const std::array<double, kLearned>& learned);

  // The index of a session that is in `bin` now; kBins: older than the last edge.
  double Index(const ReturnFeatures& features, int bin) const;

 private:
  double BaseSum(const ReturnFeatures& features) const;
  double HazardFrom(double base_sum, const ReturnFeatures& features, int bin) const;

  std::array<double, kBins + 1> edges_s_{};
  std::array<double, kBins> returns_{};    // D
  std::array<double, kBins> exposures_{};  // N
  std::array<double, kBins> offset_{};     // logit of the smoothed rate
  std::array<double, kWeights> weights_{};
  std::array<double, kWeights> gradients_{};  // sums of squares
};

}  // namespace kvstow::policy
