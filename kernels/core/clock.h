// Clock: the time, passed in so that tests own it. Nothing in the tree reads the time elsewhere
// when a decision depends on it; metrics and benchmarks may.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace kvstow {

class Clock {
 public:
  virtual ~Clock() = default;
  // Never goes backwards for RealClock: taken from the monotonic clock, so its origin is arbitrary.
  virtual absl::Time Now() const = 0;
};

// The monotonic clock of this machine. A step of the wall clock does not expire leases.
class RealClock final : public Clock {
 public:
  absl::Time Now() const override;
};

}  // namespace kvstow
