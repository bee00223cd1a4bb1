// FakeClock: time that moves only when a test says so.
#pragma once

#include "absl/time/time.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"

namespace kvstow::testing {

class FakeClock final : public Clock {
 public:
  absl::Time Now() const override {
    MutexLock lock(&mutex_);
    return now_;
  }
  void Advance(absl::Duration by) {
    MutexLock lock(&mutex_);
    now_ += by;
  }

 private:
  mutable Mutex mutex_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(24);
};

}  // namespace kvstow::testing
