// Listen addresses: whether one can be taken, told before gRPC is asked, which says only that it
// could not.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace kvstow {

// kUnavailable names `field`, the address and the reason ("address in use"). Port 0 is always free.
absl::Status CheckTcpAddressIsFree(std::string_view field, const std::string& address);

// Makes the path of a unix socket free: the file of a server that died is removed.
//   kUnavailable        a server answers there: address in use
//   kFailedPrecondition something that is no socket is there
//   kPermissionDenied, kNotFound  the folder cannot be written or is missing
absl::Status FreeUnixSocket(const std::string& path);

}  // namespace kvstow
