#include "storage/policy/keyed_heaps.h"

#include <algorithm>

namespace kvstow::policy {

void KeyedHeaps::Set(uint32_t element, int heap, const HeapKey& key) {
  if (element >= places_.size()) places_.resize(static_cast<size_t>(element) + 1);
  const auto target = static_cast<uint32_t>(heap);
  Heap& entries = heaps_[target];
  if (places_[element].heap == target) {
    const size_t index = places_[element].index;
    const HeapKey before = entries[index].key;
    entries[index].key = key;
    if (Less(key, before)) {
      SiftUp(entries, index);
    } else if (Less(before, key)) {
      SiftDown(entries, index);
    }
    return;
  }
  Remove(element);
  places_[element].heap = target;
  entries.push_back({key, element});
  places_[element].index = static_cast<uint32_t>(entries.size() - 1);
  SiftUp(entries, entries.size() - 1);
}

void KeyedHeaps::Remove(uint32_t element) {
  if (!Contains(element)) return;
  Heap& heap = heaps_[places_[element].heap];
  const size_t index = places_[element].index;
  places_[element].heap = kNone;
  const Entry last = heap.back();
  heap.pop_back();
  if (index == heap.size()) return;
  const bool is_lower = Less(last.key, heap[index].key);
  Write(heap, index, last);
  if (is_lower) {
    SiftUp(heap, index);
  } else {
    SiftDown(heap, index);
  }
}

void KeyedHeaps::SiftUp(Heap& heap, size_t index) {
  const Entry entry = heap[index];
  while (index > 0) {
    const size_t up = (index - 1) / 4;
    if (!Less(entry.key, heap[up].key)) break;
    Write(heap, index, heap[up]);
    index = up;
  }
  Write(heap, index, entry);
}

void KeyedHeaps::SiftDown(Heap& heap, size_t index) {
  const Entry entry = heap[index];
  for (;;) {
    const size_t first = 4 * index + 1;
    if (first >= heap.size()) break;
    const size_t end = std::min(first + 4, heap.size());
    size_t best = first;
    for (size_t child = first + 1; child < end; ++child) {
      if (Less(heap[child].key, heap[best].key)) best = child;
    }
    if (!Less(heap[best].key, entry.key)) break;
    Write(heap, index, heap[best]);
    index = best;
  }
  Write(heap, index, entry);
}

}  // namespace kvstow::policy
