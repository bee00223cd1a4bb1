// Window tickets: the bytes by which a service attaches to a worker's window, behind a common head
// so that a ticket of another path, or of a later version, is told apart from a damaged one.
//
//   "kvt" | path: 's' 'u' 'n' 'g' | version, one byte | body, of the path
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/transport.h"

namespace kvstow {

inline constexpr size_t kTicketHeadBytes = 5;
inline constexpr size_t kMaxTicketBytes = 4096;

std::string MakeTicket(PathKind path, uint8_t version, std::string_view body);

// The body, a part of `ticket`. Versions 1 to `newest_version` are known.
//   kInvalidArgument  no ticket, one of another path, of an unknown version, or too long
absl::StatusOr<std::string_view> TicketBody(PathKind path, uint8_t newest_version,
                                            std::string_view ticket);

}  // namespace kvstow
