#include "transport/ucx_ticket.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"
#include "transport/window_ticket.h"

namespace kvstow {
namespace {

// window id | bytes | length, listener | XXH3 of all before
constexpr size_t kFixedBytes = 16 + 8;
constexpr size_t kMaxListenerBytes = 64;
constexpr size_t kChecksumBytes = 8;

void Append(std::string& out, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
}

// Takes a little-endian number from the front; `body` is long enough.
uint64_t Take(std::string_view& body, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(body[i])) << (8 * i);
  }
  body.remove_prefix(bytes);
  return value;
}

// A length of two bytes and as many bytes.
bool TakeString(std::string_view& body, std::string& out) {
  if (body.size() < 2) return false;
  const size_t length = Take(body, 2);
  if (length == 0 || body.size() < length) return false;
  out = body.substr(0, length);
  body.remove_prefix(length);
  return true;
}

uint64_t ChecksumOf(std::string_view body) {
  return Xxh3({reinterpret_cast<const std::byte*>(body.data()), body.size()});
}

}  // namespace

absl::StatusOr<std::string> EncodeUcxTicket(const UcxTicket& ticket) {
  if (ticket.listener.size() > kMaxListenerBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a UCX listener of ", ticket.listener.size(),
                                                   " bytes, want at most ", kMaxListenerBytes));
  }
  std::string body(ticket.window_id.data(), ticket.window_id.size());
  Append(body, ticket.bytes, 8);
  Append(body, ticket.listener.size(), 2);
  body += ticket.listener;
  Append(body, ChecksumOf(body), 8);
  return MakeTicket(PathKind::kUcx, kUcxTicketVersion, body);
}

absl::StatusOr<UcxTicket> DecodeUcxTicket(std::string_view bytes) {
  KVSTOW_ASSIGN_OR_RETURN(std::string_view body,
                          TicketBody(PathKind::kUcx, kUcxTicketVersion, bytes));
  const absl::Status damaged = absl::InvalidArgumentError("the UCX window ticket is damaged");
  if (body.size() < kFixedBytes + kChecksumBytes) return damaged;
  std::string_view checksum = body.substr(body.size() - kChecksumBytes);
  body.remove_suffix(kChecksumBytes);
  if (Take(checksum, kChecksumBytes) != ChecksumOf(body)) return damaged;
  UcxTicket ticket;
  std::memcpy(ticket.window_id.data(), body.data(), ticket.window_id.size());
  body.remove_prefix(ticket.window_id.size());
  ticket.bytes = Take(body, 8);
  if (!TakeString(body, ticket.listener) || !body.empty() ||
      ticket.listener.size() > kMaxListenerBytes) {
    return damaged;
  }
  if (ticket.bytes < 1 || ticket.bytes > uint64_t{kMaxWindowBytes}) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a UCX window of ", ticket.bytes, " bytes; 1 to ", kMaxWindowBytes, " are allowed"));
  }
  return ticket;
}

}  // namespace kvstow
