#include "storage/write_behind.h"

#include "kernels/core/check.h"

namespace kvstow {

bool WriteBehindQueue::Push(const WriteBehindItem& item) {
  MutexLock lock(&mutex_);
  if (waiting_bytes_ > 0 && waiting_bytes_ + item.record_bytes > bytes_max_) return false;
  items_.push_back(item);
  waiting_bytes_ += item.record_bytes;
  has_work_.Signal();
  return true;
}

std::optional<WriteBehindItem> WriteBehindQueue::Pop() {
  MutexLock lock(&mutex_);
  if (items_.empty()) return std::nullopt;
  const WriteBehindItem item = items_.front();
  items_.pop_front();
  return item;
}

void WriteBehindQueue::Done(const WriteBehindItem& item) {
  MutexLock lock(&mutex_);
  waiting_bytes_ -= item.record_bytes;
  KVSTOW_CHECK(waiting_bytes_ >= 0);
  has_progress_.SignalAll();
}

int64_t WriteBehindQueue::waiting_bytes() const {
  MutexLock lock(&mutex_);
  return waiting_bytes_;
}

int64_t WriteBehindQueue::num_items() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(items_.size());
}

void WriteBehindQueue::WaitForWork(absl::Duration timeout) {
  MutexLock lock(&mutex_);
  if (items_.empty() && !is_woken_) has_work_.WaitFor(&mutex_, timeout);
  is_woken_ = false;
}

void WriteBehindQueue::WaitForProgress(absl::Duration timeout) {
  MutexLock lock(&mutex_);
  has_progress_.WaitFor(&mutex_, timeout);
}

void WriteBehindQueue::Wake() {
  MutexLock lock(&mutex_);
  is_woken_ = true;
  has_work_.SignalAll();
}

}  // namespace kvstow
