#include "kernels/core/clock.h"

#include <time.h>

namespace kvstow {

absl::Time RealClock::Now() const {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::UnixEpoch() + absl::DurationFromTimespec(now);
}

}  // namespace kvstow
