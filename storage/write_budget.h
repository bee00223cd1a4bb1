// WriteBudget: bytes per day that may be written to the disk unasked, so that a cache does not wear
// it out.
//
//   WriteBudget budget(bytes_per_day);
//   if (budget.Take(record_bytes, clock->Now())) { ... write ... }
//
// The day's bytes come evenly; what is not used is kept for at most an hour. A block is let through
// while anything is left, and what it takes too much is missing later. Writes that somebody asked
// for are charged and never refused.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"
#include "kernels/core/mutex.h"

namespace kvstow {

class WriteBudget {
 public:
  // 0: no limit.
  explicit WriteBudget(int64_t bytes_per_day)
      : bytes_per_s_(static_cast<double>(bytes_per_day) / 86400),
        bytes_left_(bytes_per_s_ * 3600) {}

  bool Take(int64_t bytes, absl::Time now) {
    if (bytes_per_s_ == 0) return true;
    MutexLock lock(&mutex_);
    Refill(now);
    if (bytes_left_ <= 0) return false;
    bytes_left_ -= static_cast<double>(bytes);
    return true;
  }

  void Charge(int64_t bytes, absl::Time now) {
    if (bytes_per_s_ == 0) return;
    MutexLock lock(&mutex_);
    Refill(now);
    bytes_left_ -= static_cast<double>(bytes);
  }

 private:
  void Refill(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // A clock that was set back gives nothing, and takes nothing away.
    if (now > last_ && last_ > absl::InfinitePast()) {
      const double more = absl::ToDoubleSeconds(now - last_) * bytes_per_s_;
      bytes_left_ = std::min(bytes_left_ + more, bytes_per_s_ * 3600);
    }
    last_ = now;
  }

  const double bytes_per_s_;
  Mutex mutex_;
  double bytes_left_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace kvstow
