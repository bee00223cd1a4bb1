// PolicyState: what the policy knows, kept beside the disk tier so that a restart does not begin
// anew: what it has learned, and whose the stored blocks are. Written whole (a new file, synced,
// renamed), read whole, checked.
//
//   KVSTOW_RETURN_IF_ERROR(WritePolicyState(dir, {"rtv", retention->Learned(), history}));
//   absl::StatusOr<PolicyState> state = ReadPolicyState(dir);   // <dir>/policy.state
//
// FORMAT.md has the bytes. Thread safety: one writer at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/turn_history.h"

namespace kvstow {

struct PolicyState {
  std::string policy;                        // "rtv"
  std::vector<std::vector<double>> learned;  // policy::Policy::Learned of each tier, fastest first
  TurnHistory history;                       // sound
};

// Larger files are refused. What a policy has learned takes 4 KiB a tier, a block of the history 40
// bytes, a turn 72.
inline constexpr int64_t kPolicyStateBytesMax = int64_t{64} << 20;

std::string EncodePolicyState(const PolicyState& state);
// kDataLoss: damaged, unsound, or not such a file. kFailedPrecondition: of another version.
absl::StatusOr<PolicyState> DecodePolicyState(std::string_view bytes);

// kUnavailable, kPermissionDenied: the disk is full or fails; the file before is as it was, or,
// where only its directory could not be synced, the new one is there.
absl::Status WritePolicyState(const std::string& dir, const PolicyState& state);
// kNotFound; and as DecodePolicyState.
absl::StatusOr<PolicyState> ReadPolicyState(const std::string& dir);
// Renames the file to policy.state.broken; the one before goes.
void SetPolicyStateAside(const std::string& dir);

}  // namespace kvstow
