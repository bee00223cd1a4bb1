#include "storage/policy/rtv.h"

#include <algorithm>

namespace kvstow::policy {
namespace {

// Shortest wait for an announced return that counts: the first bin's.
constexpr double kSoonestS = 5;

}  // namespace

RtvPolicy::RtvPolicy(const BlockTree& tree, double alpha) : tree_(tree), order_(tree, alpha) {
  next_.fill(kNone);
}

void RtvPolicy::FileExtents(OwnerSlot owner) {
  const Turn& turn = turns_[owner];
  for (const ExtentSlot slot : tree_.owner(owner).extents) {
    if (slot != kNone) order_.Set(slot, turn.index, turn.is_returned || turn.is_over);
  }
}

void RtvPolicy::Observe(int bin, OwnerSlot owner) {
  Turn& turn = turns_[owner];
  turn.bin = bin + 1;
  if (turn.is_returned || turn.is_over) return;
  model_.Learn(turn.features, bin, false);
  if (turn.is_stale || tree_.owner(owner).num_extents == 0) return;
  turn.is_stale = true;
  stale_.push_back(owner);
}

void RtvPolicy::OnTime(double now_s) {
  now_s_ = now_s;
  for (int bin = 0; bin < ReturnModel::kBins; ++bin) {
    OwnerSlot& next = next_[static_cast<size_t>(bin)];
    const double before_s = now_s - model_.EdgeOf(bin + 1);
    while (next != kNone && tree_.owner(next).request.time_s <= before_s) {
      Observe(bin, next);
      next = tree_.owner(next).next;
    }
  }
  for (const OwnerSlot owner : stale_) {
    Turn& turn = turns_[owner];
    turn.is_stale = false;
    turn.index = IndexOf(turn);
    for (const ExtentSlot slot : tree_.owner(owner).extents) {
      if (slot != kNone) order_.Rekey(slot, turn.index);
    }
  }
  stale_.clear();
}

void RtvPolicy::OnReturn(const Request& request) {
  const OwnerSlot parent = tree_.FindOwner(request.parent);
  if (parent == kNone) return;
  const Request& before = tree_.owner(parent).request;
  Turn& turn = turns_[parent];
  if (before.num_blocks > before.full_blocks) {
    order_.OnReturn(request.seen_blocks >= before.num_blocks);
  }
  if (turn.is_returned) return;
  if (turn.bin < ReturnModel::kBins) model_.Learn(turn.features, turn.bin, true);
  turn.is_returned = true;
  FileExtents(parent);
}

void RtvPolicy::OnRequest(const Request& request, OwnerSlot owner) {
  if (request.continues) OnReturn(request);
  order_.OnRequest(request);
  if (owner >= turns_.size()) turns_.resize(static_cast<size_t>(owner) + 1);
  turns_[owner] = Turn();
  turns_[owner].features = ReturnModel::FeaturesOf(request);
  turns_[owner].index = model_.Index(turns_[owner].features, 0);
  for (OwnerSlot& next : next_) {
    if (next == kNone) next = owner;
  }
}

// Nothing is learned here: the exposures that have passed, and the returns, are in the model.
void RtvPolicy::OnRecall(const Request& request, OwnerSlot owner) {
  if (owner >= turns_.size()) turns_.resize(static_cast<size_t>(owner) + 1);
  Turn& turn = turns_[owner];
  turn = Turn();
  turn.features = ReturnModel::FeaturesOf(request);
  const double age_s = now_s_ - request.time_s;
  while (turn.bin < ReturnModel::kBins && model_.EdgeOf(turn.bin + 1) <= age_s) ++turn.bin;
  turn.index = IndexOf(turn);
  for (auto bin = static_cast<size_t>(turn.bin); bin < next_.size(); ++bin) {
    if (next_[bin] == kNone) next_[bin] = owner;
  }
  const OwnerSlot parent = request.continues ? tree_.FindOwner(request.parent) : kNone;
  if (parent != kNone) turns_[parent].is_returned = true;
}

double RtvPolicy::IndexOf(const Turn& turn) const {
  if (turn.expected_s > now_s_) return 1 / std::max(kSoonestS, turn.expected_s - now_s_);
  return model_.Index(turn.features, turn.bin);
}

void RtvPolicy::OnReturnExpected(OwnerSlot owner, double at_s) {
  Turn& turn = turns_[owner];
  turn.expected_s = at_s;
  turn.index = IndexOf(turn);
  FileExtents(owner);
}

void RtvPolicy::OnSessionOver(OwnerSlot owner) {
  turns_[owner].is_over = true;
  FileExtents(owner);
}

void RtvPolicy::OnExtent(ExtentSlot slot) {
  const Extent& extent = tree_.extent(slot);
  const Turn& turn = turns_[extent.owner];
  order_.Set(slot, turn.index, turn.is_returned || turn.is_over);
}

std::vector<double> RtvPolicy::Learned() const {
  const auto model = model_.Learned();
  const auto means = order_.Means();
  std::vector<double> learned(model.begin(), model.end());
  learned.insert(learned.end(), means.begin(), means.end());
  return learned;
}

bool RtvPolicy::Restore(absl::Span<const double> learned) {
  std::array<double, ReturnModel::kLearned> model;
  std::array<double, ValueOrder::kMeans> means;
  if (learned.size() != model.size() + means.size()) return false;
  std::copy_n(learned.begin(), model.size(), model.begin());
  std::copy_n(learned.begin() + model.size(), means.size(), means.begin());
  ReturnModel restored;
  if (!restored.Restore(model) || !order_.Restore(means)) return false;
  model_ = restored;
  return true;
}

BlockNumber RtvPolicy::ChooseVictim(int tier) {
  return order_.ChooseVictim(tier, now_s_, [](double key) { return key; });
}

}  // namespace kvstow::policy
