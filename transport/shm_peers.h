// ShmPeers: the workers connected to the side socket, from the connection to the end of their
// window, and the limits on them.
//
// A peer says hello, is given a token, and is attached by whoever brings the token. It ends when
// its socket closes, its process dies, it sends anything more, or it is late with the next step.
//
// Thread safety: Accept, OnEvent, EndLate and EndAll on the acceptor's thread, the rest on any.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"
#include "transport/owned_fd.h"
#include "transport/shm_channel.h"
#include "transport/shm_mapping.h"
#include "transport/shm_wire.h"

namespace kvstow {

struct ShmLimits {
  int32_t channels_max = 64;
  int64_t window_bytes_max = int64_t{16} << 30;         // all windows together
  absl::Duration handshake_timeout = absl::Seconds(5);  // from the connection to the hello
  absl::Duration attach_timeout = absl::Seconds(10);    // from the hello to Attach
};

struct ShmTotals {
  int32_t connections = 0;  // without a window so far
  int32_t windows = 0;      // offered and attached
  int64_t window_bytes = 0;
  int64_t refused = 0;  // since the start: connections, hellos
};

class ShmPeers : public std::enable_shared_from_this<ShmPeers> {
 public:
  // At most this many connections may be without a window.
  static constexpr int32_t kMaxConnections = 64;

  // Descriptors are watched by `epoll_fd`, with the tags that OnEvent wants.
  ShmPeers(OwnedFd epoll_fd, const ShmLimits& limits)
      : limits_(limits), epoll_fd_(std::move(epoll_fd)) {}

  void Accept(OwnedFd socket);
  // A descriptor of a peer is readable or closed. Tags of peers that are gone do nothing.
  void OnEvent(uint64_t tag);
  // Ends the peers that are late. Returns the time until the next may be, at most a second.
  absl::Duration EndLate();
  // The acceptor stops: channels that are attached count as dead from now on.
  void EndAll();

  absl::StatusOr<std::unique_ptr<ShmChannel>> Attach(const ShmToken& token);
  ShmTotals totals();
  int epoll_fd() const { return epoll_fd_.get(); }

 private:
  struct Peer {
    OwnedFd socket;
    OwnedFd process;  // a pidfd; closed where the kernel or the pid namespace does not tell
    absl::Time deadline = absl::InfiniteFuture();
    std::shared_ptr<ShmMapping> mapping;  // null until the hello
    int64_t window_bytes = 0;
    ShmToken token{};
    bool is_attached = false;
    std::shared_ptr<std::atomic<bool>> is_alive;
  };

  void TakeHello(uint64_t id, int socket);
  absl::Status CheckRoom(int64_t window_bytes);
  absl::Status Offer(uint64_t id, int64_t window_bytes, std::shared_ptr<ShmMapping> mapping);
  // Peers that are attached stay, marked dead, until their channel closes.
  void End(uint64_t id);
  void EndLocked(uint64_t id, std::vector<Peer>& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Watch(int fd, uint64_t tag);
  void Unwatch(Peer& peer);
  void OnChannelClosed(uint64_t id);
  void Refuse(int socket, const absl::Status& status);

  const ShmLimits limits_;
  const OwnedFd epoll_fd_;
  const RealClock clock_;
  Mutex mutex_;
  std::map<uint64_t, Peer> peers_ ABSL_GUARDED_BY(mutex_);
  std::map<ShmToken, uint64_t> offered_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  ShmTotals totals_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
