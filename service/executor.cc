#include "service/executor.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "service/admission.h"

namespace kvstow {

Executor::Executor(std::string_view name, int32_t num_threads, int32_t queue_max)
    : name_(name), queue_max_(queue_max) {
  KVSTOW_CHECK(num_threads >= 1 && queue_max >= 1);
  for (int32_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
}

Executor::~Executor() {
  {
    MutexLock lock(&mutex_);
    is_stopping_ = true;
  }
  wake_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status Executor::Submit(Work work) {
  {
    MutexLock lock(&mutex_);
    if (static_cast<int64_t>(queue_.size()) >= queue_max_) {
      ++num_refused_;
      return WithRetryHint(absl::ResourceExhaustedError(absl::StrCat(
          "the queue of the ", name_, " threads is full: ", queue_max_, " items wait")));
    }
    queue_.push_back(std::move(work));
  }
  wake_.Signal();
  return absl::OkStatus();
}

void Executor::Run() {
  for (;;) {
    Work work;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty()) {
        // Work that runs elsewhere may still submit more.
        if (is_stopping_ && num_running_ == 0) return;
        wake_.WaitFor(&mutex_, absl::Seconds(1));
      }
      work = std::move(queue_.front());
      queue_.pop_front();
      ++num_running_;
    }
    std::move(work)();
    work = nullptr;  // what it owns goes before it stops counting as running
    bool is_last = false;
    {
      MutexLock lock(&mutex_);
      --num_running_;
      is_last = is_stopping_ && num_running_ == 0 && queue_.empty();
    }
    if (is_last) wake_.SignalAll();
  }
}

int64_t Executor::num_queued() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(queue_.size());
}

int64_t Executor::num_running() const {
  MutexLock lock(&mutex_);
  return num_running_;
}

int64_t Executor::num_refused() const {
  MutexLock lock(&mutex_);
  return num_refused_;
}

}  // namespace kvstow
