// Rotations for planes of calibrated codecs, in tests.
#pragma once

#include <map>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels/codec/rotation.h"
#include "kernels/core/block_layout.h"

namespace kvstow::testing {

// Made once; nullptr for dims that have none.
inline const Rotation* RotationFor(int dim, Role role) {
  static auto* made = new std::map<std::pair<int, Role>, absl::StatusOr<Rotation>>;
  const auto [place, is_new] = made->try_emplace({dim, role}, absl::UnknownError(""));
  if (is_new) place->second = Rotation::Reflection(dim, dim * 2 + (role == Role::kValue ? 1 : 0));
  return place->second.ok() ? &*place->second : nullptr;
}

}  // namespace kvstow::testing
