// Admission: how many calls, and how many bytes held for them, may be in flight. Over the limit the
// answer is kResourceExhausted at once, with a hint when to try again: nobody waits in line.
//
//   auto admission = std::make_shared<Admission>(/*calls_max=*/256, /*bytes_max=*/512 << 20);
//   KVSTOW_ASSIGN_OR_RETURN(Permit permit, admission->AdmitCall(8 << 20));
//   KVSTOW_ASSIGN_OR_RETURN(Permit pinned, admission->HoldBytes(record_bytes));
//
// A permit gives back what it holds when it goes. Thread safety: all methods may be called at once.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/core/mutex.h"

namespace kvstow {

// Long enough for a few frames to be done with, short beside any prefill.
inline constexpr absl::Duration kRetryAfter = absl::Milliseconds(100);

// `status` with kRetryAfter attached where it is kResourceExhausted without a hint.
absl::Status WithRetryHint(absl::Status status);

class Admission;

// Part of the limits, held by a call or by bytes on their way out. Empty when moved from.
class Permit {
 public:
  Permit() = default;
  Permit(Permit&& other) noexcept;
  Permit& operator=(Permit&& other) noexcept;
  ~Permit();

 private:
  friend class Admission;
  Permit(std::shared_ptr<Admission> admission, int32_t num_calls, int64_t num_bytes);

  std::shared_ptr<Admission> admission_;
  int32_t num_calls_ = 0;
  int64_t num_bytes_ = 0;
};

class Admission : public std::enable_shared_from_this<Admission> {
 public:
  Admission(int32_t calls_max, int64_t bytes_max) : calls_max_(calls_max), bytes_max_(bytes_max) {}

  // One call that holds `bytes` for its whole life.
  absl::StatusOr<Permit> AdmitCall(int64_t bytes);
  // Bytes of a call that was admitted before.
  absl::StatusOr<Permit> HoldBytes(int64_t bytes);

  // From now on new calls are refused with kUnavailable; those admitted before go on.
  void StartDrain();
  // For calls too short to be counted. kUnavailable after StartDrain.
  absl::Status CheckOpen() const;
  // Waits until no call and no byte is held. False when `timeout` passes first.
  bool WaitUntilIdle(absl::Duration timeout) const;

  int64_t calls_in_flight() const;
  int64_t bytes_in_flight() const;
  int64_t num_refused_by_calls() const;
  int64_t num_refused_by_bytes() const;

 private:
  friend class Permit;
  absl::Status CheckOpenLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Permit> Take(int32_t num_calls, int64_t num_bytes);
  void GiveBack(int32_t num_calls, int64_t num_bytes);

  const int32_t calls_max_;
  const int64_t bytes_max_;
  mutable Mutex mutex_;
  mutable CondVar idle_;
  bool is_draining_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_refused_by_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_refused_by_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvstow
