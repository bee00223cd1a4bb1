// Executor: a fixed number of threads behind a bounded queue, for work that RPC threads must not
// do: encoding, decoding, checksums, waiting for the disk.
//
//   Executor workers("worker", /*num_threads=*/2, /*queue_max=*/4096);
//   KVSTOW_RETURN_IF_ERROR(workers.Submit([=] { ... }));
//
// Work runs in the order of submission, on any thread, with no lock held. Thread safety: all
// methods may be called at once, from work items too.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "kernels/core/mutex.h"

namespace kvstow {

class Executor {
 public:
  using Work = absl::AnyInvocable<void() &&>;

  // `name` stands in messages. num_threads and queue_max are at least 1.
  Executor(std::string_view name, int32_t num_threads, int32_t queue_max);
  // Runs what is queued, then joins. Nobody may submit any more but the work itself.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // kResourceExhausted, with a retry hint, when the queue is full; `work` is dropped then.
  absl::Status Submit(Work work);

  int64_t num_queued() const;
  int64_t num_running() const;
  int64_t num_refused() const;

 private:
  void Run();

  const std::string name_;
  const int32_t queue_max_;
  mutable Mutex mutex_;
  CondVar wake_;
  std::deque<Work> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t num_running_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_refused_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // last: they use everything above
};

}  // namespace kvstow
