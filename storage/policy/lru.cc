#include "storage/policy/lru.h"

namespace kvstow::policy {

void LruPolicy::OnExtent(ExtentSlot slot) {
  if (!tree_.MayShrink(slot)) {
    heaps_.Remove(slot);
    return;
  }
  const Extent& extent = tree_.extent(slot);
  heaps_.Set(slot, extent.tier, {0, extent.number});
}

BlockNumber LruPolicy::ChooseVictim(int tier) {
  return heaps_.empty(tier) ? kNone : tree_.extent(heaps_.top(tier).element).deepest;
}

}  // namespace kvstow::policy
