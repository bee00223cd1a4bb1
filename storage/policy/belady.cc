#include "storage/policy/belady.h"

#include "storage/policy/sessions.h"

namespace kvstow::policy {

void BeladyPolicy::OnInsert(BlockNumber block, int tier) {
  if (block >= next_use_.size()) next_use_.resize(static_cast<size_t>(block) + 1);
  const int32_t chain_idx = tree_.IndexOf(block);
  if (tier == 0) next_use_[block] = future_.NextUse(request_, chain_idx);
  heaps_.Set(
      block, tier,
      {-static_cast<double>(next_use_[block]), uint64_t{kNone} - static_cast<uint64_t>(chain_idx)});
}

void BeladyPolicy::OnErase(BlockNumber block, int tier) { heaps_.Remove(block); }

BlockNumber BeladyPolicy::ChooseVictim(int tier) {
  return heaps_.empty(tier) ? kNone : heaps_.top(tier).element;
}

}  // namespace kvstow::policy
