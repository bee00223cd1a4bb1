#include "transport/held_memory.h"

#include <algorithm>

#include "kernels/core/clock.h"

namespace kvstow {

void HeldMemory::OnPosted() {
  MutexLock lock(&mutex_);
  ++num_posted_;
}

void HeldMemory::OnCompleted(bool is_released) {
  MutexLock lock(&mutex_);
  --num_posted_;
  if (!is_released) ++num_held_;
  released_.SignalAll();
}

void HeldMemory::OnReleased() {
  MutexLock lock(&mutex_);
  --num_held_;
  released_.SignalAll();
}

bool HeldMemory::AwaitReleased(bool all, absl::Duration timeout) {
  const RealClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  MutexLock lock(&mutex_);
  while (num_held_ > 0 || (all && num_posted_ > 0)) {
    const absl::Duration left = deadline - clock.Now();
    if (left <= absl::ZeroDuration()) return false;
    released_.WaitFor(&mutex_, std::min(left, absl::Hours(1)));
  }
  return true;
}

}  // namespace kvstow
