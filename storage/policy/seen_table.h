// SeenTable: for blocks that are gone, the last request that used them. Bounded and forgetful: an
// entry may be lost to another one, and with a chance of 2^-29 one is found that never was.
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
#include <cstdlib>
#include <memory>

#include "kernels/core/check.h"

namespace kvstow::policy {

class SeenTable {
 public:
  // Rounded up to a power of two.
  explicit SeenTable(uint64_t num_entries)
      : num_rows_(std::bit_ceil(std::max<uint64_t>(num_entries / kWays, 1))),
        // Zeros of the kernel: a page that was never written takes no memory.
        rows_(static_cast<Row*>(std::calloc(num_rows_, sizeof(Row)))) {
    KVSTOW_CHECK(rows_ != nullptr);
  }

  void Put(uint64_t hash, uint64_t request_number) {
    Row& row = rows_[hash & (num_rows_ - 1)];
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
    for (const Entry& entry : rows_[hash & (num_rows_ - 1)]) {
      if (entry.tag == TagOf(hash)) return entry.number;
    }
    return 0;
  }

  // At most; less while few blocks have gone.
  int64_t memory_bytes() const { return static_cast<int64_t>(num_rows_ * sizeof(Row)); }

 private:
  static constexpr uint64_t kWays = 4;
  struct Entry {
    uint32_t tag;
    uint32_t number;  // 0: empty
  };
  using Row = std::array<Entry, kWays>;

  static uint32_t TagOf(uint64_t hash) { return static_cast<uint32_t>(hash >> 32) | 1; }

  struct Free {
    void operator()(Row* rows) const { std::free(rows); }
  };

  const uint64_t num_rows_;
  const std::unique_ptr<Row[], Free> rows_;
};

}  // namespace kvstow::policy
