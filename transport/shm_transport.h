// ShmTransport: the service's end of shared windows: a side socket, and a thread that takes what
// workers offer there.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto shm, ShmTransport::Listen({.socket_path = ShmSocketPath(grpc)}));
//   KVSTOW_ASSIGN_OR_RETURN(auto channel, shm->Attach(ticket, absl::Seconds(1)));
//
// Workers of the same user and of root are let in; the socket's file is its owner's only. No right
// of root, no shared pid namespace and no shared /dev/shm is needed, only a folder for the socket.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/owned_fd.h"
#include "transport/shm_peers.h"
#include "transport/transport.h"

namespace kvstow {

struct ShmTransportOptions {
  std::string socket_path;
  ShmLimits limits;
};

class ShmTransport final : public Transport {
 public:
  // A socket file that nobody answers on any more is replaced.
  //   kInvalidArgument     the path's length, or a limit that is not positive
  //   kUnavailable         somebody answers there
  //   kFailedPrecondition  what is there is no socket
  //   kPermissionDenied, kNotFound  of the folder
  static absl::StatusOr<std::unique_ptr<ShmTransport>> Listen(const ShmTransportOptions& options);
  // Channels may live on; their windows stay mapped, but they count as dead.
  ~ShmTransport() override;

  PathKind path() const override { return PathKind::kShm; }
  // Does not wait for the peer. What of `timeout` remains goes into the page table.
  absl::StatusOr<std::unique_ptr<Channel>> Attach(std::string_view ticket,
                                                  absl::Duration timeout) override;
  ShmTotals totals() { return peers_->totals(); }

 private:
  ShmTransport(std::string path, OwnedFd listener, OwnedFd stop, std::shared_ptr<ShmPeers> peers);
  void Run();
  // False: the process has no descriptors or memory left, ask again later.
  bool AcceptSome();

  const std::string path_;
  uint64_t device_ = 0;  // of the socket's file, so that only ours is removed
  uint64_t inode_ = 0;
  const OwnedFd listener_;
  const OwnedFd stop_;  // eventfd
  const std::shared_ptr<ShmPeers> peers_;
  std::thread acceptor_;
};

}  // namespace kvstow
