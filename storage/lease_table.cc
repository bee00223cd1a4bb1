#include "storage/lease_table.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "storage/random_id.h"

namespace kvstow {

absl::Status LeaseTable::CheckRoomLocked(int64_t num_keys) const {
  if (static_cast<int64_t>(leases_.size()) >= leases_max_) {
    return absl::ResourceExhaustedError(
        absl::StrCat(leases_.size(), " leases are open, the limit is ", leases_max_));
  }
  if (num_pins_ + num_keys > kPinsMax) {
    return absl::ResourceExhaustedError(absl::StrCat("leases pin ", num_pins_, " blocks, ",
                                                     num_keys, " more are wanted, the limit is ",
                                                     kPinsMax));
  }
  return absl::OkStatus();
}

absl::Status LeaseTable::CheckRoom(int64_t num_keys) const {
  MutexLock lock(&mutex_);
  return CheckRoomLocked(num_keys);
}

absl::StatusOr<LeaseId> LeaseTable::Add(std::vector<LeasePin>& pins, absl::Time deadline) {
  const LeaseId id = RandomId();
  MutexLock lock(&mutex_);
  KVSTOW_RETURN_IF_ERROR(CheckRoomLocked(static_cast<int64_t>(pins.size())));
  num_pins_ += static_cast<int64_t>(pins.size());
  leases_.emplace(id, Lease{std::move(pins), deadline});
  deadlines_.emplace(deadline, id);
  return id;
}

std::optional<std::vector<LeasePin>> LeaseTable::Remove(LeaseId id) {
  MutexLock lock(&mutex_);
  const auto found = leases_.find(id);
  if (found == leases_.end()) return std::nullopt;
  std::vector<LeasePin> pins = std::move(found->second.pins);
  num_pins_ -= static_cast<int64_t>(pins.size());
  deadlines_.erase({found->second.deadline, id});
  leases_.erase(found);
  return pins;
}

std::optional<std::vector<LeasePin>> LeaseTable::RemoveExpired(absl::Time now) {
  LeaseId id = 0;
  {
    MutexLock lock(&mutex_);
    if (deadlines_.empty() || deadlines_.begin()->first > now) return std::nullopt;
    id = deadlines_.begin()->second;
  }
  // Released in between: nothing to give back, and the next call finds the next one.
  std::optional<std::vector<LeasePin>> pins = Remove(id);
  return pins.has_value() ? std::move(pins) : std::vector<LeasePin>{};
}

int64_t LeaseTable::num_leases() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(leases_.size());
}

}  // namespace kvstow
