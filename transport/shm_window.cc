#include "transport/shm_window.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/clock.h"
#include "kernels/core/status_macros.h"
#include "transport/owned_fd.h"
#include "transport/shm_mapping.h"
#include "transport/shm_wire.h"
#include "transport/window_ticket.h"

namespace kvstow {
namespace {

class ShmWindow final : public Window {
 public:
  ShmWindow(OwnedFd socket, std::shared_ptr<ShmMapping> mapping, std::string ticket)
      : socket_(std::move(socket)), mapping_(std::move(mapping)), ticket_(std::move(ticket)) {}

  PathKind path() const override { return PathKind::kShm; }
  absl::Span<std::byte> memory() override { return mapping_->memory(); }
  const std::string& ticket() const override { return ticket_; }
  // The service sends nothing after its reply: whatever happens on the socket is its end.
  bool is_alive() override {
    pollfd entry = {.fd = socket_.get(), .events = POLLIN | POLLRDHUP};
    int num_events = 0;
    do {
      num_events = poll(&entry, 1, 0);
    } while (num_events < 0 && errno == EINTR);
    // Not knowing is no end: who believes in one may use memory that the service still writes to.
    return num_events <= 0;
  }

 private:
  const OwnedFd socket_;
  const std::shared_ptr<ShmMapping> mapping_;
  const std::string ticket_;
};

absl::StatusOr<OwnedFd> Connect(const ShmWindowOptions& options) {
  KVSTOW_ASSIGN_OR_RETURN(const sockaddr_un address, ShmSocketAddress(options.socket_path));
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.is_open()) {
    return absl::ResourceExhaustedError(absl::StrCat("socket: ", std::strerror(errno)));
  }
  // A full backlog is no event that poll could tell of: so the call itself waits, with a bound.
  const timeval limit =
      absl::ToTimeval(std::clamp(options.timeout, absl::Milliseconds(1), absl::Hours(1)));
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return fd;
  }
  const std::string message =
      absl::StrCat("shared memory socket ", options.socket_path, ": ", std::strerror(errno));
  if (errno == EAGAIN || errno == EINTR) return absl::DeadlineExceededError(message);
  if (errno == EACCES || errno == EPERM) return absl::PermissionDeniedError(message);
  return absl::UnavailableError(message);
}

absl::StatusOr<ShmToken> AwaitReply(int socket, absl::Duration timeout) {
  const RealClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  bool was_reset = false;
  while (true) {
    absl::StatusOr<ShmPacket> packet = ReceiveShmPacket(socket, kShmReplyBytes);
    if (!packet.ok()) {
      // A service that refused before it read our hello resets, and its reason comes after.
      if (std::exchange(was_reset, true)) return packet.status();
      continue;
    }
    if (!packet->would_block) {
      if (packet->bytes.empty()) {
        return absl::UnavailableError("the service closed the shared memory socket");
      }
      return DecodeShmReply(packet->bytes);
    }
    const absl::Duration left = std::min(deadline - clock.Now(), absl::Hours(1));
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError("the service did not answer the shared memory hello");
    }
    pollfd entry = {.fd = socket, .events = POLLIN};
    poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Window>> OpenShmWindow(const ShmWindowOptions& options) {
  if (options.bytes < 1 || options.bytes > kMaxWindowBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a window of ", options.bytes, " bytes; 1 to ",
                                                   kMaxWindowBytes, " are allowed"));
  }
  // Is anybody there? Asked first, so that no memory is filled for nothing, and on a connection of
  // its own: the service does not wait for a hello while pages are being allocated.
  KVSTOW_RETURN_IF_ERROR(Connect(options).status());
  KVSTOW_ASSIGN_OR_RETURN(const OwnedFd memory_fd, CreateWindowFd(options.bytes));
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<ShmMapping> mapping,
                          ShmMapping::MapOwn(memory_fd.get(), options.bytes));
  KVSTOW_ASSIGN_OR_RETURN(OwnedFd socket, Connect(options));
  const auto hello = EncodeShmHello({.window_bytes = static_cast<uint64_t>(options.bytes)});
  // Where sending does not succeed, a refusal may still be there to read.
  const absl::Status sent = SendShmPacket(socket.get(), hello, memory_fd.get());
  absl::StatusOr<ShmToken> token = AwaitReply(socket.get(), options.timeout);
  if (!token.ok()) return token.status();
  KVSTOW_RETURN_IF_ERROR(sent);
  return std::make_unique<ShmWindow>(std::move(socket), std::move(mapping),
                                     MakeTicket(PathKind::kShm, kShmTicketVersion,
                                                std::string_view(token->data(), token->size())));
}

}  // namespace kvstow
