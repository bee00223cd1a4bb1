// HoleList: which parts of a region of memory are free. Best fit, lowest address first; neighbours
// that are free become one hole. It knows offsets only, so the memory may be anywhere.
//
//   HoleList holes(1 << 30, 64);
//   std::optional<int64_t> offset = holes.Take(bytes);   // nullopt: no hole is that large
//   holes.Give(*offset, bytes);
//
// Take and Give are O(log holes). Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace kvstow {

class HoleList {
 public:
  // All free. `capacity_bytes` is a multiple of `granule_bytes`; sizes are rounded up to it.
  HoleList(int64_t capacity_bytes, int64_t granule_bytes);

  // `bytes` > 0.
  std::optional<int64_t> Take(int64_t bytes);
  // What Take gave, with the size it was asked for.
  void Give(int64_t offset, int64_t bytes);

  int64_t Rounded(int64_t bytes) const {
    return (bytes + granule_bytes_ - 1) / granule_bytes_ * granule_bytes_;
  }
  int64_t capacity_bytes() const { return capacity_bytes_; }
  int64_t used_bytes() const { return used_bytes_; }  // rounded
  int64_t largest_bytes() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  int64_t size() const { return static_cast<int64_t>(by_offset_.size()); }

 private:
  void Add(int64_t offset, int64_t size);
  void Remove(int64_t offset, int64_t size);

  const int64_t capacity_bytes_;
  const int64_t granule_bytes_;
  int64_t used_bytes_ = 0;
  std::map<int64_t, int64_t> by_offset_;           // offset -> size
  std::set<std::pair<int64_t, int64_t>> by_size_;  // (size, offset)
};

}  // namespace kvstow
