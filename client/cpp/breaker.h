// Breaker: stops calling a service that fails or has become slow, and lets it recover.
//
//   if (!breaker.Allow()) return absl::UnavailableError(...);   // at once, no call is made
//   ... call ...
//   breaker.Record(status.ok(), elapsed);
//
// Closed: calls pass. It opens after `errors_to_open` failures in a row, or when `slow_to_open`
// calls in a row took longer than `slow_call`. Open: calls are refused for `cool_down`. Then
// half-open: one call passes as a probe; its success closes the breaker, its failure or slowness
// opens it again.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"

namespace kvstow {

struct BreakerOptions {
  int errors_to_open = 5;
  int slow_to_open = 8;
  absl::Duration slow_call = absl::Seconds(10);
  absl::Duration cool_down = absl::Seconds(2);
};

enum class BreakerState { kClosed, kOpen, kHalfOpen };

std::string_view BreakerStateName(BreakerState state);

class Breaker {
 public:
  Breaker(const BreakerOptions& options, const Clock* clock) : options_(options), clock_(clock) {}

  // False while open, and while half-open with the probe still out.
  bool Allow();
  // `ok`: the service answered (a miss or a refusal of bad input is an answer).
  void Record(bool ok, absl::Duration elapsed);
  BreakerState state() const;

 private:
  const BreakerOptions options_;
  const Clock* const clock_;
  mutable Mutex mutex_;
  BreakerState state_ ABSL_GUARDED_BY(mutex_) = BreakerState::kClosed;
  int errors_in_row_ ABSL_GUARDED_BY(mutex_) = 0;
  int slow_in_row_ ABSL_GUARDED_BY(mutex_) = 0;
  bool probe_is_out_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time opened_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
