#include "storage/policy/told.h"

#include <algorithm>

#include "storage/policy/sessions.h"

namespace kvstow::policy {
namespace {

constexpr double kSoonestS = 1e-3;  // keeps 1 / wait finite

}  // namespace

ToldPolicy::ToldPolicy(const BlockTree& tree, const Future& future, Knows knows, double alpha)
    : tree_(tree), future_(future), knows_(knows), is_per_size_(alpha > 0), order_(tree, alpha) {}

std::string_view ToldPolicy::name() const {
  if (knows_ == Knows::kWho) return "told-who";
  return is_per_size_ ? "told-both-size" : "told-both";
}

void ToldPolicy::File(ExtentSlot slot, const Turn& turn) {
  order_.Set(slot, knows_ == Knows::kWho ? 0 : -turn.return_s, turn.is_done);
}

void ToldPolicy::OnRequest(const Request& request, OwnerSlot owner) {
  if (request.continues) {
    const OwnerSlot parent = tree_.FindOwner(request.parent);
    if (parent != kNone) {
      const Request& before = tree_.owner(parent).request;
      if (before.num_blocks > before.full_blocks) {
        order_.OnReturn(request.seen_blocks >= before.num_blocks);
      }
      turns_[parent].is_done = true;
      for (const ExtentSlot slot : tree_.owner(parent).extents) {
        if (slot != kNone) File(slot, turns_[parent]);
      }
    }
  }
  order_.OnRequest(request);
  if (owner >= turns_.size()) turns_.resize(static_cast<size_t>(owner) + 1);
  const double return_s = future_.ReturnTime(request.number);
  turns_[owner] = {return_s, return_s == Future::kNever};
}

void ToldPolicy::OnExtent(ExtentSlot slot) { File(slot, turns_[tree_.extent(slot).owner]); }

BlockNumber ToldPolicy::ChooseVictim(int tier) {
  return order_.ChooseVictim(tier, now_s_, [this](double key) {
    return knows_ == Knows::kWho ? 1.0 : 1 / std::max(kSoonestS, -key - now_s_);
  });
}

}  // namespace kvstow::policy
