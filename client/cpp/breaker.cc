#include "client/cpp/breaker.h"

namespace kvstow {

std::string_view BreakerStateName(BreakerState state) {
  switch (state) {
    case BreakerState::kClosed:
      return "closed";
    case BreakerState::kOpen:
      return "open";
    case BreakerState::kHalfOpen:
      return "half-open";
  }
  return "unknown";
}

bool Breaker::Allow() {
  MutexLock lock(&mutex_);
  const absl::Time now = clock_->Now();
  switch (state_) {
    case BreakerState::kClosed:
      return true;
    case BreakerState::kOpen:
      if (now - opened_at_ < options_.cool_down) return false;
      state_ = BreakerState::kHalfOpen;
      probe_is_out_ = true;
      return true;
    case BreakerState::kHalfOpen:
      if (probe_is_out_) return false;
      probe_is_out_ = true;
      return true;
  }
  return false;
}

void Breaker::Record(bool ok, absl::Duration elapsed) {
  MutexLock lock(&mutex_);
  const bool is_slow = elapsed > options_.slow_call;
  switch (state_) {
    case BreakerState::kClosed:
      errors_in_row_ = ok ? 0 : errors_in_row_ + 1;
      slow_in_row_ = is_slow ? slow_in_row_ + 1 : 0;
      if (errors_in_row_ < options_.errors_to_open && slow_in_row_ < options_.slow_to_open) return;
      break;
    case BreakerState::kOpen:
      return;  // a call that began before it opened: the cool-down stands
    case BreakerState::kHalfOpen:
      probe_is_out_ = false;
      if (!ok || is_slow) break;
      state_ = BreakerState::kClosed;
      errors_in_row_ = 0;
      slow_in_row_ = 0;
      return;
  }
  state_ = BreakerState::kOpen;
  opened_at_ = clock_->Now();
  errors_in_row_ = 0;
  slow_in_row_ = 0;
}

BreakerState Breaker::state() const {
  MutexLock lock(&mutex_);
  return state_;
}

}  // namespace kvstow
