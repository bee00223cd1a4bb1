// SeenTable: for blocks that are gone, the last request that used them. Bounded and forgetful: an
// entry may be lost to another one, and with a chance of 2^-32 one is found that never was.
//
//   SeenTable seen(1 << 20);
//   seen.Put(hash, request_number);
//   uint64_t number = seen.Find(hash);   // 0: not known
//
// Eight bytes per entry, four entries to a row; a row gives up its oldest request. Request numbers
// are kept in 32 bits: what is 2^32 requests old is not told from what is new. Thread safety: none.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace kvstow::policy {

class SeenTable {
 public:
  // Rounded up to a power of two.
  explicit SeenTable(uint64_t num_entries)
      : rows_(std::bit_ceil(std::max<uint64_t>(num_entries / kWays, 1))) {}

  void Put(uint64_t hash, uint64_t request_number) {
    Row& row = rows_[hash & (rows_.size() - 1)];
    Entry* place = &row[0];
    for (Entry& entry : row) {
      if (entry.tag == TagOf(hash)) {
        place = &entry;
        break;
      }
      if (entry.number < place->number) place = &entry;
    }
    *place = {TagOf(hash), static_cast<uint32_t>(request_number)};
  }

  uint64_t Find(uint64_t hash) const {
    for (const Entry& entry : rows_[hash & (rows_.size() - 1)]) {
      if (entry.tag == TagOf(hash)) return entry.number;
    }
    return 0;
  }

  int64_t memory_bytes() const { return static_cast<int64_t>(rows_.size() * sizeof(Row)); }

 private:
  static constexpr uint64_t kWays = 4;
  struct Entry {
    uint32_t tag = 0;
    uint32_t number = 0;  // 0: empty
  };
  using Row = std::array<Entry, kWays>;

  static uint32_t TagOf(uint64_t hash) { return static_cast<uint32_t>(hash >> 32) | 1; }

  std::vector<Row> rows_;
};

}  // namespace kvstow::policy
