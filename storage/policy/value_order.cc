#include "storage/policy/value_order.h"

#include <algorithm>

namespace kvstow::policy {

ValueOrder::ValueOrder(const BlockTree& tree, double alpha)
    : tree_(tree), alpha_(alpha), heaps_(kTiersMax * kKinds), tops_(kTiersMax) {
  constexpr int32_t kExact = 256;
  for (int32_t n = 1; static_cast<int>(owned_.size()) < kKinds - kWhole;) {
    owned_.push_back(n);
    n = n < kExact ? n + 1 : n + n / 20;
  }
}

void ValueOrder::OnRequest(const Request& request) {
  blocks_per_request_ += 0.005 * (request.num_blocks - blocks_per_request_);
  ++version_;
}

void ValueOrder::OnReturn(bool has_hit_tail) {
  ++version_;
  returns_ += 1;
  tail_hits_ += has_hit_tail ? 1 : 0;
}

bool ValueOrder::Restore(const std::array<double, kMeans>& means) {
  constexpr double kMost = 0x1p53;
  const auto [blocks_per_request, returns, tail_hits] = means;
  if (!(blocks_per_request > 0 && blocks_per_request <= kMost)) return false;
  if (!(tail_hits >= 0 && tail_hits <= returns && returns <= kMost)) return false;
  blocks_per_request_ = blocks_per_request;
  returns_ = returns;
  tail_hits_ = tail_hits;
  ++version_;
  return true;
}

int ValueOrder::KindOf(ExtentSlot slot) const {
  const Extent& extent = tree_.extent(slot);
  const int32_t need = extent.full_blocks;
  if (extent.deepest_idx >= need && need >= 1) return kTail;
  if (extent.deepest_idx + 1 < need) return kPart;
  // The deepest block is the last whole one, or the prompt has no whole block.
  const int32_t owned = need == 0 ? 1 : extent.count;
  const auto at = std::upper_bound(owned_.begin(), owned_.end(), std::max(1, owned));
  return kWhole + static_cast<int>(at - owned_.begin()) - 1;
}

double ValueOrder::Factor(int kind) const {
  if (kind == kTail) return (1 + tail_hits_) / (10 + returns_) / blocks_per_request_;
  const double per_block = (1 - alpha_) / blocks_per_request_;
  if (kind == kPart) return per_block;
  return per_block + alpha_ / owned_[static_cast<size_t>(kind - kWhole)];
}

double ValueOrder::DoneIndex(ExtentSlot slot, double now_s) const {
  const double age_s = now_s - tree_.owner(tree_.extent(slot).owner).request.time_s;
  return 1e-6 / (1 + age_s);
}

void ValueOrder::Mark(int tier, int kind) {
  Tops& tops = tops_[static_cast<size_t>(tier)];
  const auto word = static_cast<size_t>(kind / 64);
  const uint64_t bit = uint64_t{1} << (kind % 64);
  tops.stale[word] |= bit;
  if (heaps_.empty(tier * kKinds + kind)) {
    tops.filled[word] &= ~bit;
  } else {
    tops.filled[word] |= bit;
  }
}

ValueOrder::Top ValueOrder::BestOfWord(const Tops& tops, size_t word) {
  Top best;
  for (uint64_t bits = tops.filled[word]; bits != 0; bits &= bits - 1) {
    const Top& top = tops.of_kind[word * 64 + static_cast<size_t>(std::countr_zero(bits))];
    if (top.IsBefore(best)) best = top;
  }
  return best;
}

void ValueOrder::Rekey(ExtentSlot slot, double key) {
  const int heap = heaps_.HeapOf(slot);
  if (heap < 0 || heap % kKinds == kDone) return;
  heaps_.Set(slot, heap, {key, tree_.extent(slot).number});
  Mark(heap / kKinds, heap % kKinds);
}

void ValueOrder::Set(ExtentSlot slot, double key, bool is_done) {
  const int before = heaps_.HeapOf(slot);
  if (!tree_.MayShrink(slot)) {
    heaps_.Remove(slot);
  } else {
    const Extent& extent = tree_.extent(slot);
    const int kind = is_done ? kDone : KindOf(slot);
    // Done: the index falls with age, so the oldest is the lowest.
    heaps_.Set(slot, extent.tier * kKinds + kind, {is_done ? 0 : key, extent.number});
    Mark(extent.tier, kind);
  }
  if (before >= 0) Mark(before / kKinds, before % kKinds);
}

}  // namespace kvstow::policy
