// CallDeadline: what is left of the time that a call's client has given it.
//
//   const CallDeadline deadline(*context);
//   ... channel->Load(offset, bytes, deadline.Left()) ...
#pragma once

#include <grpcpp/server_context.h>

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace kvstow {

class CallDeadline {
 public:
  explicit CallDeadline(const grpc::ServerContextBase& context) : at_(context.deadline()) {}

  // From 0 to a minute: nobody waits for a disk or a peer longer.
  absl::Duration Left() const {
    constexpr std::chrono::system_clock::duration kMax = std::chrono::minutes(1);
    const auto left = at_ - std::chrono::system_clock::now();
    return absl::FromChrono(std::clamp(left, std::chrono::system_clock::duration::zero(), kMax));
  }

 private:
  std::chrono::system_clock::time_point at_;
};

}  // namespace kvstow
