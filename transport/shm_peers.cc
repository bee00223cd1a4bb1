#include "transport/shm_peers.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "transport/shm_channel.h"

namespace kvstow {
namespace {

// What epoll gives back: the peer's number and which of its two descriptors it is.
constexpr uint64_t SocketTag(uint64_t id) { return id << 1; }
constexpr uint64_t ProcessTag(uint64_t id) { return (id << 1) | 1; }

// Not told by the headers of older systems.
constexpr int kPeerPidfdOption = 77;  // SO_PEERPIDFD, Linux 6.5

// The process at the other end, as it was when it connected. Closed: not to be had, for example
// where it lives in a pid namespace that is not below ours.
OwnedFd ProcessOf(int socket, pid_t pid) {
  int fd = -1;
  socklen_t size = sizeof(fd);
  if (getsockopt(socket, SOL_SOCKET, kPeerPidfdOption, &fd, &size) == 0) return OwnedFd(fd);
  if (pid <= 0) return OwnedFd();
  return OwnedFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

ShmToken RandomToken() {
  ShmToken token;
  // Sixteen bytes are never split, and once the kernel's pool is up the call does not fail.
  KVSTOW_CHECK(getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size()));
  return token;
}

}  // namespace

void ShmPeers::Watch(int fd, uint64_t tag) {
  epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data = {.u64 = tag}};
  KVSTOW_CHECK(epoll_ctl(epoll_fd_.get(), EPOLL_CTL_ADD, fd, &event) == 0);
}

// Said aloud: closing alone does not do it while another process shares the descriptor.
void ShmPeers::Unwatch(Peer& peer) {
  for (OwnedFd* fd : {&peer.socket, &peer.process}) {
    if (!fd->is_open()) continue;
    epoll_ctl(epoll_fd_.get(), EPOLL_CTL_DEL, fd->get(), nullptr);
    fd->Reset();
  }
}

void ShmPeers::Refuse(int socket, const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    ++totals_.refused;
  }
  SendShmPacket(socket, EncodeShmReply(status, {})).IgnoreError();
}

void ShmPeers::Accept(OwnedFd socket) {
  ucred peer_user = {};
  socklen_t size = sizeof(peer_user);
  const bool is_known = getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer_user, &size) == 0;
  if (!is_known || (peer_user.uid != geteuid() && peer_user.uid != 0)) {
    return Refuse(socket.get(), absl::PermissionDeniedError(absl::StrCat(
                                    "user ", peer_user.uid, " may not share memory with user ",
                                    geteuid(), ": the same user or root may")));
  }
  if (totals().connections >= kMaxConnections) {
    return Refuse(socket.get(),
                  absl::ResourceExhaustedError(absl::StrCat(
                      kMaxConnections, " connections without a window, no more are allowed")));
  }
  Peer peer;
  peer.process = ProcessOf(socket.get(), peer_user.pid);
  peer.socket = std::move(socket);
  peer.deadline = clock_.Now() + limits_.handshake_timeout;
  peer.is_alive = std::make_shared<std::atomic<bool>>(true);
  MutexLock lock(&mutex_);
  const uint64_t id = ++last_id_;
  Watch(peer.socket.get(), SocketTag(id));
  if (peer.process.is_open()) Watch(peer.process.get(), ProcessTag(id));
  peers_.emplace(id, std::move(peer));
  ++totals_.connections;
}

void ShmPeers::OnEvent(uint64_t tag) {
  const uint64_t id = tag >> 1;
  int socket = -1;
  {
    MutexLock lock(&mutex_);
    const auto it = peers_.find(id);
    if (it == peers_.end()) return;
    // Only this thread closes the socket of a peer that has not said hello.
    if (tag == SocketTag(id) && it->second.mapping == nullptr) socket = it->second.socket.get();
  }
  if (socket >= 0) {
    TakeHello(id, socket);
  } else {
    End(id);
  }
}

void ShmPeers::TakeHello(uint64_t id, int socket) {
  absl::StatusOr<ShmPacket> packet = ReceiveShmPacket(socket, kShmHelloBytes);
  if (packet.ok() && packet->would_block) return;
  if (!packet.ok() || packet->bytes.empty()) return End(id);
  const auto take = [&]() -> absl::Status {
    KVSTOW_ASSIGN_OR_RETURN(const ShmHello hello, DecodeShmHello(packet->bytes));
    if (packet->fds.size() != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "hello with ", packet->fds.size(), " descriptors, wanted is 1: the window's memfd"));
    }
    if (hello.window_bytes < 1 || hello.window_bytes > uint64_t{kMaxWindowBytes}) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a window of ", hello.window_bytes, " bytes; 1 to ", kMaxWindowBytes, " are allowed"));
    }
    const auto window_bytes = static_cast<int64_t>(hello.window_bytes);
    KVSTOW_RETURN_IF_ERROR(CheckRoom(window_bytes));
    KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<ShmMapping> mapping,
                            ShmMapping::MapOffered(packet->fds[0].get(), window_bytes));
    return Offer(id, window_bytes, std::move(mapping));
  };
  if (const absl::Status status = take(); !status.ok()) {
    Refuse(socket, status);
    End(id);
  }
}

// Only this thread adds windows, so room that there is stays.
absl::Status ShmPeers::CheckRoom(int64_t window_bytes) {
  MutexLock lock(&mutex_);
  if (totals_.windows >= limits_.channels_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(totals_.windows, " shared windows are open, at most ", limits_.channels_max));
  }
  if (window_bytes > limits_.window_bytes_max - totals_.window_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a shared window of ", window_bytes, " bytes beside ", totals_.window_bytes,
                     " bytes of others, at most ", limits_.window_bytes_max, " together"));
  }
  return absl::OkStatus();
}

absl::Status ShmPeers::Offer(uint64_t id, int64_t window_bytes,
                             std::shared_ptr<ShmMapping> mapping) {
  const ShmToken token = RandomToken();
  MutexLock lock(&mutex_);
  Peer& peer = peers_.at(id);
  // Before the token can be used: nobody attaches to a window whose worker was not told of it.
  KVSTOW_RETURN_IF_ERROR(SendShmPacket(peer.socket.get(), EncodeShmReply(absl::OkStatus(), token)));
  peer.token = token;
  peer.window_bytes = window_bytes;
  peer.mapping = std::move(mapping);
  peer.deadline = clock_.Now() + limits_.attach_timeout;
  offered_.emplace(token, id);
  --totals_.connections;
  ++totals_.windows;
  totals_.window_bytes += window_bytes;
  return absl::OkStatus();
}

void ShmPeers::End(uint64_t id) {
  std::vector<Peer> ended;  // unmapped after the lock
  MutexLock lock(&mutex_);
  EndLocked(id, ended);
}

void ShmPeers::EndLocked(uint64_t id, std::vector<Peer>& ended) {
  const auto it = peers_.find(id);
  if (it == peers_.end()) return;
  Peer& peer = it->second;
  peer.is_alive->store(false, std::memory_order_release);
  peer.deadline = absl::InfiniteFuture();
  Unwatch(peer);
  if (peer.is_attached) return;
  if (peer.mapping == nullptr) {
    --totals_.connections;
  } else {
    offered_.erase(peer.token);
    --totals_.windows;
    totals_.window_bytes -= peer.window_bytes;
  }
  ended.push_back(std::move(peer));
  peers_.erase(it);
}

absl::Duration ShmPeers::EndLate() {
  std::vector<Peer> ended;
  MutexLock lock(&mutex_);
  const absl::Time now = clock_.Now();
  absl::Duration next = absl::Seconds(1);
  std::vector<uint64_t> late;
  for (const auto& [id, peer] : peers_) {
    if (peer.deadline <= now) {
      late.push_back(id);
    } else {
      next = std::min(next, peer.deadline - now);
    }
  }
  for (const uint64_t id : late) EndLocked(id, ended);
  return next;
}

void ShmPeers::EndAll() {
  std::vector<Peer> ended;
  MutexLock lock(&mutex_);
  std::vector<uint64_t> ids;
  for (const auto& [id, peer] : peers_) ids.push_back(id);
  for (const uint64_t id : ids) EndLocked(id, ended);
}

absl::StatusOr<std::unique_ptr<ShmChannel>> ShmPeers::Attach(const ShmToken& token) {
  MutexLock lock(&mutex_);
  const auto it = offered_.find(token);
  if (it == offered_.end()) {
    return absl::NotFoundError(
        "no such shared window: it was attached before, has ended, or its time to be attached "
        "passed");
  }
  const uint64_t id = it->second;
  offered_.erase(it);
  Peer& peer = peers_.at(id);
  peer.is_attached = true;
  peer.deadline = absl::InfiniteFuture();
  return std::make_unique<ShmChannel>(
      peer.mapping, peer.is_alive, [self = shared_from_this(), id] { self->OnChannelClosed(id); });
}

void ShmPeers::OnChannelClosed(uint64_t id) {
  std::vector<Peer> ended;
  MutexLock lock(&mutex_);
  peers_.at(id).is_attached = false;
  EndLocked(id, ended);
}

ShmTotals ShmPeers::totals() {
  MutexLock lock(&mutex_);
  return totals_;
}

}  // namespace kvstow
