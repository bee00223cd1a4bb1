// UcxTicket: what a service needs to reach a worker's window by UCX. README.md has the bytes.
//
// The checksum tells a damaged ticket; it does not tell a forged one, which makes the service
// connect to an address that the worker chose: tickets are taken only from workers that may open a
// channel at all.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvstow {

inline constexpr uint8_t kUcxTicketVersion = 1;

// Random: whoever knows it may attach.
using UcxWindowId = std::array<char, 16>;

struct UcxTicket {
  UcxWindowId window_id{};
  uint64_t bytes = 0;
  std::string listener;  // "IP:PORT", where the worker takes connections of UCX
};

// kInvalidArgument: a listener longer than any address.
absl::StatusOr<std::string> EncodeUcxTicket(const UcxTicket& ticket);
// kInvalidArgument says what is wrong.
absl::StatusOr<UcxTicket> DecodeUcxTicket(std::string_view bytes);

}  // namespace kvstow
