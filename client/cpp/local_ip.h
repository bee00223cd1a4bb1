// LocalIpTowards: which of this machine's addresses a service can connect back to.
//
//   LocalIpTowards("10.0.0.7:7411")      // "10.0.0.3", by the routing table; nothing is sent
//   LocalIpTowards("unix:/run/k.sock")   // "127.0.0.1"
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvstow {

// kUnavailable: the host of `target` is not known, or there is no route to it.
absl::StatusOr<std::string> LocalIpTowards(const std::string& target);

}  // namespace kvstow
