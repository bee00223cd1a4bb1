// UcxTicket: what a service needs to reach a worker's window by UCX. README.md has the bytes.
//
// The checksum tells a damaged ticket; it does not tell a forged one, which UCX 1.13 does not
// survive for certain: tickets are taken only from workers that may open a channel at all.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace kvstow {

inline constexpr uint8_t kUcxTicketVersion = 1;
// In front of the window, in the same registration: see UcxControl.
inline constexpr int64_t kUcxControlBytes = 4096;

using UcxWindowId = std::array<char, 16>;

struct UcxTicket {
  UcxWindowId window_id{};
  uint64_t address = 0;  // of the window's first byte, in the worker
  uint64_t bytes = 0;
  std::string worker_address;
  std::string rkey;
};

// kInvalidArgument: UCX gave more than a ticket may hold (kMaxTicketBytes).
absl::StatusOr<std::string> EncodeUcxTicket(const UcxTicket& ticket);
// kInvalidArgument says what is wrong.
absl::StatusOr<UcxTicket> DecodeUcxTicket(std::string_view bytes);

// The first bytes of the registration, written by the worker at the start and by the service, so
// that a ticket is known to mean this window and is used once, and its end is seen.
enum class UcxWindowState : uint64_t { kOffered = 1, kAttached = 2, kClosed = 3 };
struct UcxControl {
  std::array<char, 8> magic{'K', 'V', 'S', 'T', 'O', 'W', 'U', 'W'};
  UcxWindowId window_id{};
  UcxWindowState state = UcxWindowState::kOffered;
};

}  // namespace kvstow
