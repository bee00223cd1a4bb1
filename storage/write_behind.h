// WriteBehindQueue: sealed blocks that wait to be written to disk, in order, bounded in bytes.
//
// The queue names blocks and does not pin them: memory under pressure may evict a block before its
// turn, and the writer finds it gone.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "absl/time/time.h"
#include "kernels/core/block_key.h"
#include "kernels/core/mutex.h"
#include "storage/index_shard.h"

namespace kvstow {

struct WriteBehindItem {
  BlockKey key;
  BlockId id = 0;
  int64_t record_bytes = 0;
};

class WriteBehindQueue {
 public:
  explicit WriteBehindQueue(int64_t bytes_max) : bytes_max_(bytes_max) {}

  // False where it would hold more than bytes_max; the one block that is larger fits when alone.
  bool Push(const WriteBehindItem& item);
  // The oldest; it counts as waiting until Done.
  std::optional<WriteBehindItem> Pop();
  void Done(const WriteBehindItem& item);

  int64_t waiting_bytes() const;
  int64_t num_items() const;  // that Pop would give

  // Waits until there is an item, Wake was called, or `timeout`.
  void WaitForWork(absl::Duration timeout);
  // Waits until an item is done or `timeout`.
  void WaitForProgress(absl::Duration timeout);
  void Wake();

 private:
  const int64_t bytes_max_;
  mutable Mutex mutex_;
  CondVar has_work_;
  CondVar has_progress_;
  std::deque<WriteBehindItem> items_ ABSL_GUARDED_BY(mutex_);
  int64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_woken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvstow
