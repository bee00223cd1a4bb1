#include "transport/nccl_wire.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/checksum.h"
#include "kernels/core/clock.h"
#include "kernels/core/status_macros.h"
#include "transport/window_ticket.h"

namespace kvstow {
namespace {

// secret | IPv4 address, as in a packet | port | bytes | XXH3 of all before: a damaged ticket must
// not make us connect to somebody
constexpr size_t kChecksumOffset = 16 + 4 + 2 + 8;
constexpr size_t kTicketBodyBytes = kChecksumOffset + 8;

uint64_t ChecksumOf(std::string_view body) {
  return Xxh3({reinterpret_cast<const std::byte*>(body.data()), kChecksumOffset});
}

// False: the deadline has passed.
bool WaitFor(int fd, int16_t events, absl::Time deadline) {
  const RealClock clock;
  const absl::Duration left =
      std::clamp(deadline - clock.Now(), absl::ZeroDuration(), absl::Hours(1));
  pollfd entry = {.fd = fd, .events = events};
  return poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) > 0 ||
         clock.Now() < deadline;
}

absl::Status SocketError(absl::string_view doing, int error) {
  return absl::UnavailableError(absl::StrCat("NCCL control connection, ", doing, ": ",
                                             error == 0 ? "closed" : std::strerror(error)));
}

}  // namespace

std::string EncodeNcclTicket(const NcclTicket& ticket) {
  std::string body(kTicketBodyBytes, '\0');
  std::memcpy(body.data(), ticket.secret.data(), 16);
  std::memcpy(body.data() + 16, &ticket.host, 4);
  std::memcpy(body.data() + 20, &ticket.port, 2);
  std::memcpy(body.data() + 22, &ticket.bytes, 8);
  const uint64_t checksum = ChecksumOf(body);
  std::memcpy(body.data() + kChecksumOffset, &checksum, 8);
  return MakeTicket(PathKind::kNccl, kNcclTicketVersion, body);
}

absl::StatusOr<NcclTicket> DecodeNcclTicket(std::string_view bytes) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string_view body,
                          TicketBody(PathKind::kNccl, kNcclTicketVersion, bytes));
  if (body.size() != kTicketBodyBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a ticket of NCCL has ",
                                                   kTicketHeadBytes + kTicketBodyBytes,
                                                   " bytes, not ", bytes.size()));
  }
  const uint64_t checksum = ChecksumOf(body);
  if (std::memcmp(body.data() + kChecksumOffset, &checksum, 8) != 0) {
    return absl::InvalidArgumentError("the NCCL window ticket is damaged");
  }
  NcclTicket ticket;
  std::memcpy(ticket.secret.data(), body.data(), 16);
  std::memcpy(&ticket.host, body.data() + 16, 4);
  std::memcpy(&ticket.port, body.data() + 20, 2);
  std::memcpy(&ticket.bytes, body.data() + 22, 8);
  if (ticket.bytes < 1 || ticket.bytes > kMaxWindowBytes || ticket.port == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an NCCL window of ", ticket.bytes, " bytes; 1 to ", kMaxWindowBytes, " are allowed"));
  }
  return ticket;
}

NcclSocket::NcclSocket(OwnedFd fd) : fd_(std::move(fd)) {
  const int on = 1;
  setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

absl::StatusOr<NcclSocket> NcclSocket::Connect(in_addr host, uint16_t port, absl::Time deadline) {
  OwnedFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.is_open()) return SocketError("opening", errno);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr = host;
  address.sin_port = htons(port);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
      errno != EINPROGRESS) {
    return SocketError("connecting", errno);
  }
  pollfd entry = {.fd = fd.get(), .events = POLLOUT};
  const RealClock clock;
  while (poll(&entry, 1, 0) == 0) {
    if (!WaitFor(fd.get(), POLLOUT, deadline)) {
      return absl::DeadlineExceededError("NCCL control connection: the worker does not answer");
    }
  }
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return SocketError("connecting", error);
  return NcclSocket(std::move(fd));
}

absl::Status NcclSocket::Send(const NcclMessage& message, absl::Time deadline) {
  const auto* const bytes = reinterpret_cast<const char*>(&message);
  for (size_t at = 0; at < sizeof(message);) {
    const ssize_t sent =
        send(fd_.get(), bytes + at, sizeof(message) - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      at += static_cast<size_t>(sent);
    } else if (errno != EAGAIN && errno != EINTR) {
      return SocketError("sending", errno);
    } else if (!WaitFor(fd_.get(), POLLOUT, deadline)) {
      return absl::DeadlineExceededError("NCCL control connection: the peer does not read");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<NcclMessage>> NcclSocket::TryReceive() {
  while (num_buffered_ < buffer_.size()) {
    const ssize_t got = recv(fd_.get(), buffer_.data() + num_buffered_,
                             buffer_.size() - num_buffered_, MSG_DONTWAIT);
    if (got > 0) {
      num_buffered_ += static_cast<size_t>(got);
    } else if (got == 0) {
      return SocketError("receiving", 0);
    } else if (errno == EAGAIN) {
      return std::optional<NcclMessage>();
    } else if (errno != EINTR) {
      return SocketError("receiving", errno);
    }
  }
  num_buffered_ = 0;
  NcclMessage message;
  const auto magic = message.magic;
  std::memcpy(&message, buffer_.data(), sizeof(message));
  if (message.magic != magic) {
    return absl::UnavailableError("NCCL control connection: what comes is no message");
  }
  return std::optional<NcclMessage>(message);
}

absl::StatusOr<NcclMessage> NcclSocket::Receive(NcclMessageKind kind, absl::Time deadline) {
  while (true) {
    KVSTOW_ASSIGN_OR_RETURN(const std::optional<NcclMessage> message, TryReceive());
    if (message.has_value() && message->kind == kind) return *message;
    if (message.has_value()) {
      return absl::UnavailableError("NCCL control connection: a message out of turn");
    }
    if (!WaitFor(fd_.get(), POLLIN, deadline)) {
      return absl::DeadlineExceededError("NCCL control connection: the peer does not answer");
    }
  }
}

}  // namespace kvstow
