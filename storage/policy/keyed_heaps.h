// KeyedHeaps: several min-heaps over small numbers, in which a number sits in at most one heap and
// can be moved or taken out wherever it is.
//
//   KeyedHeaps heaps(8);
//   heaps.Set(extent, 3, {.key = score, .tie = age});   // files it, or moves it from another heap
//   if (!heaps.empty(3)) victim = heaps.top(3).element;
//
// Set and Remove cost O(log n), top O(1). Four children per node: half the depth of a binary heap,
// and the children share a cache line or two.
//
// Thread safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/policy/policy.h"

namespace kvstow::policy {

struct HeapKey {
  double key = 0;    // lowest first
  uint64_t tie = 0;  // then lowest first: the number of a request, so older first
};

class KeyedHeaps {
 public:
  struct Entry {
    HeapKey key;
    uint32_t element = kNone;
  };

  explicit KeyedHeaps(int num_heaps) : heaps_(static_cast<size_t>(num_heaps)) {}

  void Set(uint32_t element, int heap, const HeapKey& key);
  // Fine for a number that is in none.
  void Remove(uint32_t element);

  bool Contains(uint32_t element) const {
    return element < places_.size() && places_[element].heap != kNone;
  }
  // The heap of `element`, or -1.
  int HeapOf(uint32_t element) const {
    return Contains(element) ? static_cast<int>(places_[element].heap) : -1;
  }
  bool empty(int heap) const { return heaps_[static_cast<size_t>(heap)].empty(); }
  size_t size(int heap) const { return heaps_[static_cast<size_t>(heap)].size(); }
  // Undefined for an empty heap.
  const Entry& top(int heap) const { return heaps_[static_cast<size_t>(heap)].front(); }

 private:
  struct Place {
    uint32_t heap = kNone;
    uint32_t index = 0;
  };
  using Heap = std::vector<Entry>;

  static bool Less(const HeapKey& a, const HeapKey& b) {
    return a.key < b.key || (a.key == b.key && a.tie < b.tie);
  }
  void Write(Heap& heap, size_t index, const Entry& entry) {
    heap[index] = entry;
    places_[entry.element].index = static_cast<uint32_t>(index);
  }
  void SiftUp(Heap& heap, size_t index);
  void SiftDown(Heap& heap, size_t index);

  std::vector<Heap> heaps_;
  std::vector<Place> places_;  // by element
};

}  // namespace kvstow::policy
