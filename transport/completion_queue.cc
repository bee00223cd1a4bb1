#include "transport/completion_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/clock.h"

namespace kvstow {

absl::StatusOr<TransferId> CompletionQueue::Begin() {
  MutexLock lock(&mutex_);
  if (num_begun_ >= kMaxTransfersInFlight) {
    return absl::ResourceExhaustedError(
        absl::StrCat(num_begun_, " transfers of this channel wait to be polled, at most ",
                     kMaxTransfersInFlight, ": poll first"));
  }
  ++num_begun_;
  return ++last_id_;
}

void CompletionQueue::Complete(TransferId id, absl::Status status) {
  MutexLock lock(&mutex_);
  done_.push_back({id, std::move(status)});
  KVSTOW_CHECK(done_.size() <= static_cast<size_t>(num_begun_));
  completed_.Signal();
}

size_t CompletionQueue::Take(absl::Span<Completion> completions, absl::Duration timeout) {
  if (completions.empty()) return 0;
  const RealClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  MutexLock lock(&mutex_);
  while (done_.empty()) {
    const absl::Duration left = deadline - clock.Now();
    if (left <= absl::ZeroDuration()) return 0;
    completed_.WaitFor(&mutex_, std::min(left, absl::Hours(1)));
  }
  const size_t taken = std::min(completions.size(), done_.size());
  for (size_t i = 0; i < taken; ++i) {
    completions[i] = std::move(done_.front());
    done_.pop_front();
  }
  num_begun_ -= static_cast<int32_t>(taken);
  return taken;
}

}  // namespace kvstow
