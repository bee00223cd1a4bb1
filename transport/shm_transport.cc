#include "transport/shm_transport.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/clock.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "transport/shm_wire.h"
#include "transport/window_ticket.h"

namespace kvstow {
namespace {

// Tags of the acceptor's own descriptors; those of peers count up from 2.
constexpr uint64_t kListenerTag = 0;
constexpr uint64_t kStopTag = 1;
constexpr int kBacklog = 128;
constexpr int kAcceptsPerRound = 64;  // then the peers that are there have their turn
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);

absl::Status SocketError(const std::string& path, std::string_view doing, int error) {
  const std::string message =
      absl::StrCat("shared memory socket ", path, ": ",
                   absl::string_view(doing.data(), doing.size()), ": ", std::strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

// Removes a socket file that nobody answers on.
absl::Status RemoveStale(const std::string& path, const sockaddr_un& address) {
  struct stat info = {};
  if (lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::OkStatus() : SocketError(path, "looking", errno);
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("shared memory socket ", path, ": a file that is no socket is in the way"));
  }
  const OwnedFd probe(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.is_open()) return SocketError(path, "socket", errno);
  const int result =
      connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  // Any other answer, a full backlog or another kind of socket, is somebody's.
  if (result == 0 || errno != ECONNREFUSED) return SocketError(path, "in use", EADDRINUSE);
  if (unlink(path.c_str()) != 0) return SocketError(path, "removing a stale one", errno);
  return absl::OkStatus();
}

absl::Status CheckLimits(const ShmLimits& limits) {
  if (limits.channels_max < 1 || limits.window_bytes_max < 1 ||
      limits.handshake_timeout <= absl::ZeroDuration() ||
      limits.attach_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("limits of shared memory must be positive");
  }
  return absl::OkStatus();
}

absl::StatusOr<OwnedFd> Bind(const std::string& path) {
  KVSTOW_ASSIGN_OR_RETURN(const sockaddr_un address, ShmSocketAddress(path));
  KVSTOW_RETURN_IF_ERROR(RemoveStale(path, address));
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // bind() gives the file the mode of the socket: there is no moment at which others may connect.
  if (!fd.is_open() || fchmod(fd.get(), S_IRUSR | S_IWUSR) != 0 ||
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(fd.get(), kBacklog) != 0) {
    return SocketError(path, "listening", errno);
  }
  return fd;
}

bool Watch(int epoll_fd, int fd, uint64_t tag) {
  epoll_event event = {.events = EPOLLIN, .data = {.u64 = tag}};
  return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

void Listening(int epoll_fd, int listener, bool is_on) {
  epoll_event event = {.events = is_on ? uint32_t{EPOLLIN} : 0, .data = {.u64 = kListenerTag}};
  KVSTOW_CHECK(epoll_ctl(epoll_fd, EPOLL_CTL_MOD, listener, &event) == 0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShmTransport>> ShmTransport::Listen(
    const ShmTransportOptions& options) {
  KVSTOW_RETURN_IF_ERROR(CheckLimits(options.limits));
  KVSTOW_ASSIGN_OR_RETURN(OwnedFd listener, Bind(options.socket_path));
  OwnedFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  OwnedFd epoll_fd(epoll_create1(EPOLL_CLOEXEC));
  if (!stop.is_open() || !epoll_fd.is_open() ||
      !Watch(epoll_fd.get(), listener.get(), kListenerTag) ||
      !Watch(epoll_fd.get(), stop.get(), kStopTag)) {
    return SocketError(options.socket_path, "watching", errno);
  }
  auto peers = std::make_shared<ShmPeers>(std::move(epoll_fd), options.limits);
  return std::unique_ptr<ShmTransport>(new ShmTransport(options.socket_path, std::move(listener),
                                                        std::move(stop), std::move(peers)));
}

ShmTransport::ShmTransport(std::string path, OwnedFd listener, OwnedFd stop,
                           std::shared_ptr<ShmPeers> peers)
    : path_(std::move(path)),
      listener_(std::move(listener)),
      stop_(std::move(stop)),
      peers_(std::move(peers)) {
  struct stat info = {};
  if (stat(path_.c_str(), &info) == 0) {
    device_ = info.st_dev;
    inode_ = info.st_ino;
  }
  acceptor_ = std::thread([this] { Run(); });
}

ShmTransport::~ShmTransport() {
  const uint64_t one = 1;
  KVSTOW_CHECK(write(stop_.get(), &one, sizeof(one)) == sizeof(one));
  acceptor_.join();
  peers_->EndAll();
  struct stat info = {};
  if (stat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_) {
    unlink(path_.c_str());
  }
}

bool ShmTransport::AcceptSome() {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    OwnedFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) {
      return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
    }
    peers_->Accept(std::move(socket));
  }
  return true;
}

void ShmTransport::Run() {
  const RealClock clock;
  absl::Time resume_at = absl::InfiniteFuture();  // finite while no connection is accepted
  std::array<epoll_event, 64> events;
  while (true) {
    absl::Duration wait = std::min(peers_->EndLate(), resume_at - clock.Now());
    wait = std::max(wait, absl::ZeroDuration());
    const int num_events =
        epoll_wait(peers_->epoll_fd(), events.data(), static_cast<int>(events.size()),
                   static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1);
    for (int i = 0; i < num_events; ++i) {
      const uint64_t tag = events[static_cast<size_t>(i)].data.u64;
      if (tag == kStopTag) return;
      if (tag != kListenerTag) {
        peers_->OnEvent(tag);
      } else if (!AcceptSome()) {
        // The connection stays in the backlog, and would wake us at once and for ever.
        Log(Severity::kWarning, "no descriptors left, shared memory connections wait",
            {{"socket", path_}});
        Listening(peers_->epoll_fd(), listener_.get(), false);
        resume_at = clock.Now() + kAcceptPause;
      }
    }
    if (resume_at <= clock.Now()) {
      Listening(peers_->epoll_fd(), listener_.get(), true);
      resume_at = absl::InfiniteFuture();
    }
  }
}

absl::StatusOr<std::unique_ptr<Channel>> ShmTransport::Attach(std::string_view ticket,
                                                              absl::Duration timeout) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string_view body,
                          TicketBody(PathKind::kShm, kShmTicketVersion, ticket));
  ShmToken token;
  if (body.size() != token.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a ticket of shared memory has ",
                                                   kTicketHeadBytes + token.size(), " bytes, not ",
                                                   ticket.size()));
  }
  std::memcpy(token.data(), body.data(), token.size());
  KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<ShmChannel> channel, peers_->Attach(token));
  channel->Prefault(timeout);
  return channel;
}

}  // namespace kvstow
