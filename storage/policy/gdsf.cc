#include "storage/policy/gdsf.h"

#include <algorithm>

namespace kvstow::policy {

void GdsfPolicy::OnRequest(const Request& request, OwnerSlot owner) {
  if (owner >= value_.size()) value_.resize(static_cast<size_t>(owner) + 1);
  value_[owner] = clock_ + static_cast<double>(request.turn) / std::max(1, request.num_blocks);
}

void GdsfPolicy::OnExtent(ExtentSlot slot) {
  if (!tree_.MayShrink(slot)) {
    heaps_.Remove(slot);
    return;
  }
  const Extent& extent = tree_.extent(slot);
  heaps_.Set(slot, extent.tier, {value_[extent.owner], extent.number});
}

BlockNumber GdsfPolicy::ChooseVictim(int tier) {
  if (heaps_.empty(tier)) return kNone;
  const KeyedHeaps::Entry& top = heaps_.top(tier);
  clock_ = std::max(clock_, top.key.key);
  return tree_.extent(top.element).deepest;
}

}  // namespace kvstow::policy
