// HeldMemory: how many transfers of a channel hold local memory: posted, or completed before the
// path gave the memory back. Behind Channel::Quiesce and the end of a channel.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/core/mutex.h"

namespace kvstow {

class HeldMemory {
 public:
  void OnPosted();
  void OnCompleted(bool is_released);
  // Of a transfer that was completed before.
  void OnReleased();
  // True when no transfer that has completed, or with `all` none at all, holds memory.
  bool AwaitReleased(bool all, absl::Duration timeout);

 private:
  Mutex mutex_;
  CondVar released_;
  int32_t num_posted_ ABSL_GUARDED_BY(mutex_) = 0;  // and not completed
  int32_t num_held_ ABSL_GUARDED_BY(mutex_) = 0;    // completed and not released
};

}  // namespace kvstow
