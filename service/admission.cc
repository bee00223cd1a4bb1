#include "service/admission.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "proto/status.h"

namespace kvstow {

absl::Status WithRetryHint(absl::Status status) {
  if (status.code() == absl::StatusCode::kResourceExhausted &&
      RetryAfter(status) == absl::ZeroDuration()) {
    SetRetryAfter(status, kRetryAfter);
  }
  return status;
}

Permit::Permit(std::shared_ptr<Admission> admission, int32_t num_calls, int64_t num_bytes)
    : admission_(std::move(admission)), num_calls_(num_calls), num_bytes_(num_bytes) {}

Permit::Permit(Permit&& other) noexcept
    : admission_(std::move(other.admission_)),
      num_calls_(std::exchange(other.num_calls_, 0)),
      num_bytes_(std::exchange(other.num_bytes_, 0)) {}

Permit& Permit::operator=(Permit&& other) noexcept {
  std::swap(admission_, other.admission_);
  std::swap(num_calls_, other.num_calls_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

Permit::~Permit() {
  if (admission_ != nullptr) admission_->GiveBack(num_calls_, num_bytes_);
}

absl::StatusOr<Permit> Admission::AdmitCall(int64_t bytes) { return Take(1, bytes); }

absl::StatusOr<Permit> Admission::HoldBytes(int64_t bytes) { return Take(0, bytes); }

absl::StatusOr<Permit> Admission::Take(int32_t num_calls, int64_t num_bytes) {
  KVSTOW_CHECK(num_bytes >= 0);
  {
    MutexLock lock(&mutex_);
    if (num_calls > 0) KVSTOW_RETURN_IF_ERROR(CheckOpenLocked());
    if (num_calls > 0 && calls_ + num_calls > calls_max_) {
      ++num_refused_by_calls_;
      return WithRetryHint(absl::ResourceExhaustedError(
          absl::StrCat("calls in flight: ", calls_, " of ", calls_max_)));
    }
    if (num_bytes > bytes_max_ - bytes_) {
      ++num_refused_by_bytes_;
      return WithRetryHint(absl::ResourceExhaustedError(absl::StrCat(
          "bytes in flight: ", bytes_, " of ", bytes_max_, " are held, ", num_bytes, " wanted")));
    }
    calls_ += num_calls;
    bytes_ += num_bytes;
  }
  return Permit(shared_from_this(), num_calls, num_bytes);
}

void Admission::GiveBack(int32_t num_calls, int64_t num_bytes) {
  bool is_idle = false;
  {
    MutexLock lock(&mutex_);
    calls_ -= num_calls;
    bytes_ -= num_bytes;
    KVSTOW_CHECK(calls_ >= 0 && bytes_ >= 0);
    is_idle = calls_ == 0 && bytes_ == 0;
  }
  if (is_idle) idle_.SignalAll();
}

absl::Status Admission::CheckOpenLocked() const {
  if (!is_draining_) return absl::OkStatus();
  return absl::UnavailableError("the service is going down: try another or come back later");
}

absl::Status Admission::CheckOpen() const {
  MutexLock lock(&mutex_);
  return CheckOpenLocked();
}

void Admission::StartDrain() {
  MutexLock lock(&mutex_);
  is_draining_ = true;
}

bool Admission::WaitUntilIdle(absl::Duration timeout) const {
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
  MutexLock lock(&mutex_);
  while (calls_ > 0 || bytes_ > 0) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds::zero()) return false;
    idle_.WaitFor(&mutex_, absl::FromChrono(left));
  }
  return true;
}

int64_t Admission::calls_in_flight() const {
  MutexLock lock(&mutex_);
  return calls_;
}

int64_t Admission::bytes_in_flight() const {
  MutexLock lock(&mutex_);
  return bytes_;
}

int64_t Admission::num_refused_by_calls() const {
  MutexLock lock(&mutex_);
  return num_refused_by_calls_;
}

int64_t Admission::num_refused_by_bytes() const {
  MutexLock lock(&mutex_);
  return num_refused_by_bytes_;
}

}  // namespace kvstow
