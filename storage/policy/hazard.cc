#include "storage/policy/hazard.h"

#include <algorithm>
#include <limits>

namespace kvstow::policy {

HazardPolicy::HazardPolicy(const BlockTree& tree, double window_s)
    : tree_(tree), window_s_(window_s), heaps_(kTiersMax * kClasses) {
  double edge = 5;
  for (size_t k = 1; k < edges_s_.size(); ++k, edge *= 1.35) edges_s_[k] = edge;
}

int HazardPolicy::ClassOf(const Request& request) {
  return std::clamp(request.turn, 1, kClasses) - 1;
}

void HazardPolicy::OnRequest(const Request& request, OwnerSlot owner) {
  if (request.continues) {
    const OwnerSlot parent = tree_.FindOwner(request.parent);
    if (parent != kNone) {
      const Request& before = tree_.owner(parent).request;
      const double gap_s = request.time_s - before.time_s;
      int bin = 0;
      while (bin < kBins - 1 && gap_s > edges_s_[static_cast<size_t>(bin) + 1]) ++bin;
      ++classes_[static_cast<size_t>(ClassOf(before))].returns[static_cast<size_t>(bin)];
    }
  }
  ++classes_[static_cast<size_t>(ClassOf(request))].turns;
}

double HazardPolicy::ReturnsUpTo(const TurnClass& turn_class, double gap_s) const {
  double sum = 0;
  for (size_t bin = 0; bin < kBins; ++bin) {
    const double low = edges_s_[bin];
    if (gap_s <= low) break;
    const double share = std::min(1.0, (gap_s - low) / (edges_s_[bin + 1] - low));
    sum += share * turn_class.returns[bin];
  }
  return sum;
}

double HazardPolicy::Score(int class_idx, double idle_s) const {
  const TurnClass& turn_class = classes_[static_cast<size_t>(class_idx)];
  constexpr double kTurnsMin = 30;
  if (turn_class.turns < kTurnsMin) return 0.3 / (1 + idle_s / window_s_);
  const double before = ReturnsUpTo(turn_class, idle_s);
  const double within = ReturnsUpTo(turn_class, idle_s + window_s_) - before;
  return (within + 1) / (std::max(0.0, turn_class.turns - before) + 2);
}

void HazardPolicy::OnExtent(ExtentSlot slot) {
  if (!tree_.MayShrink(slot)) {
    heaps_.Remove(slot);
    return;
  }
  const Extent& extent = tree_.extent(slot);
  const Request& request = tree_.owner(extent.owner).request;
  heaps_.Set(slot, extent.tier * kClasses + ClassOf(request), {0, request.number});
}

BlockNumber HazardPolicy::ChooseVictim(int tier) {
  double lowest = std::numeric_limits<double>::infinity();
  uint64_t oldest = 0;
  BlockNumber victim = kNone;
  for (int class_idx = 0; class_idx < kClasses; ++class_idx) {
    const int heap = tier * kClasses + class_idx;
    if (heaps_.empty(heap)) continue;
    const Extent& extent = tree_.extent(heaps_.top(heap).element);
    const Request& request = tree_.owner(extent.owner).request;
    const double score = Score(class_idx, now_s_ - request.time_s);
    if (victim == kNone || score < lowest || (score == lowest && request.number < oldest)) {
      lowest = score;
      oldest = request.number;
      victim = extent.deepest;
    }
  }
  return victim;
}

}  // namespace kvstow::policy
