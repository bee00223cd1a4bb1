// CompletionQueue: the transfers of one channel from Post to Poll: numbers, bound, and the
// completions that wait to be taken. Each transfer begun is completed exactly once.
//
//   KVSTOW_ASSIGN_OR_RETURN(TransferId id, queue.Begin());
//   ... queue.Complete(id, status);       // any thread
//   queue.Take(completions, timeout);     // Channel::Poll
//
// Thread safety: all methods may be called at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/mutex.h"
#include "transport/transport.h"

namespace kvstow {

class CompletionQueue {
 public:
  // Ids begin at 1 and are never used twice. kResourceExhausted when kMaxTransfersInFlight are
  // begun and not taken.
  absl::StatusOr<TransferId> Begin();
  void Complete(TransferId id, absl::Status status);
  // Up to completions.size(), in order of completion; waits for the first of them.
  size_t Take(absl::Span<Completion> completions, absl::Duration timeout);

 private:
  Mutex mutex_;
  CondVar completed_;
  TransferId last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  int32_t num_begun_ ABSL_GUARDED_BY(mutex_) = 0;  // and not taken
  std::deque<Completion> done_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
