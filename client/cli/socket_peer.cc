#include "client/cli/socket_peer.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr size_t kMessageBytes = size_t{1} << 20;

enum class Order : uint64_t { kReceive = 1, kSend = 2 };

struct Command {
  Order order;
  uint64_t num_bytes;
};

bool SendAll(int fd, const void* from, size_t num_bytes) {
  const char* next = static_cast<const char*>(from);
  while (num_bytes > 0) {
    const ssize_t sent = send(fd, next, std::min(num_bytes, kMessageBytes), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    next += sent;
    num_bytes -= sent;
  }
  return true;
}

bool ReceiveAll(int fd, void* to, size_t num_bytes) {
  char* next = static_cast<char*>(to);
  while (num_bytes > 0) {
    const ssize_t received = recv(fd, next, std::min(num_bytes, kMessageBytes), 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return false;
    next += received;
    num_bytes -= received;
  }
  return true;
}

// A connected pair: [0] ours, [1] the child's.
absl::StatusOr<std::array<int, 2>> ConnectedPair(SocketKind kind) {
  std::array<int, 2> fds = {-1, -1};
  if (kind == SocketKind::kUnix) {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) != 0) {
      return absl::ErrnoToStatus(errno, "socketpair");
    }
    return fds;
  }
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const bool listens = bind(listener, generic, size) == 0 && listen(listener, 1) == 0 &&
                       getsockname(listener, generic, &size) == 0;
  fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listens && connect(fds[0], generic, size) == 0) {
    fds[1] = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  }
  const int error = errno;
  close(listener);
  if (fds[1] < 0) {
    close(fds[0]);
    return absl::ErrnoToStatus(error, "a TCP connection over loopback");
  }
  const int one = 1;
  for (int fd : fds) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return fds;
}

// The child's life: obeys orders until the socket closes.
void Serve(int fd, size_t pool_bytes) {
  void* const pool = mmap(nullptr, pool_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (pool == MAP_FAILED) return;
  Command command = {};
  while (ReceiveAll(fd, &command, sizeof(command)) && command.num_bytes <= pool_bytes) {
    bool ok = false;
    if (command.order == Order::kReceive) {
      const char acknowledged = 1;
      ok = ReceiveAll(fd, pool, command.num_bytes) && SendAll(fd, &acknowledged, 1);
    } else {
      ok = SendAll(fd, pool, command.num_bytes);
    }
    if (!ok) return;
  }
}

absl::Status PeerGone() {
  return absl::UnavailableError("the process at the other end of the plain socket has ended");
}

}  // namespace

absl::StatusOr<std::unique_ptr<SocketPeer>> SocketPeer::Start(SocketKind kind, int64_t pool_bytes) {
  KVSTOW_ASSIGN_OR_RETURN(const auto fds, ConnectedPair(kind));
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(fds[0]);
    if (getppid() == parent) Serve(fds[1], pool_bytes);
    _exit(0);
  }
  close(fds[1]);
  return std::unique_ptr<SocketPeer>(new SocketPeer(fds[0], pid));
}

SocketPeer::~SocketPeer() {
  close(fd_);
  waitpid(pid_, nullptr, 0);
}

absl::Status SocketPeer::Send(absl::Span<const std::byte> bytes) {
  const Command command{Order::kReceive, bytes.size()};
  char acknowledged = 0;
  const bool ok = SendAll(fd_, &command, sizeof(command)) &&
                  SendAll(fd_, bytes.data(), bytes.size()) && ReceiveAll(fd_, &acknowledged, 1);
  return ok ? absl::OkStatus() : PeerGone();
}

absl::Status SocketPeer::Receive(absl::Span<std::byte> bytes) {
  const Command command{Order::kSend, bytes.size()};
  const bool ok =
      SendAll(fd_, &command, sizeof(command)) && ReceiveAll(fd_, bytes.data(), bytes.size());
  return ok ? absl::OkStatus() : PeerGone();
}

}  // namespace kvstow
