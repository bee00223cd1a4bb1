#include "storage/hole_list.h"

#include <iterator>

#include "kernels/core/check.h"

namespace kvstow {

HoleList::HoleList(int64_t capacity_bytes, int64_t granule_bytes)
    : capacity_bytes_(capacity_bytes), granule_bytes_(granule_bytes) {
  Add(0, capacity_bytes);
}

std::optional<int64_t> HoleList::Take(int64_t bytes) {
  KVSTOW_CHECK(bytes > 0);
  if (bytes > capacity_bytes_) return std::nullopt;
  const int64_t size = Rounded(bytes);
  const auto best = by_size_.lower_bound({size, 0});
  if (best == by_size_.end()) return std::nullopt;
  const auto [hole_size, offset] = *best;
  Remove(offset, hole_size);
  if (hole_size > size) Add(offset + size, hole_size - size);
  used_bytes_ += size;
  return offset;
}

void HoleList::Give(int64_t offset, int64_t bytes) {
  int64_t size = Rounded(bytes);
  KVSTOW_CHECK(offset >= 0 && offset % granule_bytes_ == 0 && offset + size <= capacity_bytes_);
  used_bytes_ -= size;
  KVSTOW_CHECK(used_bytes_ >= 0);
  const auto next = by_offset_.lower_bound(offset);
  const bool has_next = next != by_offset_.end();
  // A hole inside the region would mean that it was given twice.
  KVSTOW_CHECK(!has_next || next->first >= offset + size);
  std::pair<int64_t, int64_t> after{-1, 0};
  if (has_next) after = *next;
  if (next != by_offset_.begin()) {
    const auto [before_offset, before_size] = *std::prev(next);
    KVSTOW_CHECK(before_offset + before_size <= offset);
    if (before_offset + before_size == offset) {
      Remove(before_offset, before_size);
      offset = before_offset;
      size += before_size;
    }
  }
  if (has_next && after.first == offset + size) {
    Remove(after.first, after.second);
    size += after.second;
  }
  Add(offset, size);
}

void HoleList::Add(int64_t offset, int64_t size) {
  by_offset_.emplace(offset, size);
  by_size_.emplace(size, offset);
}

void HoleList::Remove(int64_t offset, int64_t size) {
  by_offset_.erase(offset);
  by_size_.erase({size, offset});
}

}  // namespace kvstow
