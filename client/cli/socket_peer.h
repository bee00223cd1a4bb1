// SocketPeer: a second process at the end of a plain blocking socket: what the machine can do
// without gRPC. The ceiling of the transfer benchmarks.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto peer, SocketPeer::Start(SocketKind::kUnix, pool_bytes));  // forks
//   KVSTOW_RETURN_IF_ERROR(peer->Send(pool));         // from our pool into the peer's, 1 MiB a
//   call KVSTOW_RETURN_IF_ERROR(peer->Receive(pool));      // back
//
// Start it before the process has threads: the child goes on in the same program.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvstow {

enum class SocketKind { kUnix, kTcp };

class SocketPeer {
 public:
  static absl::StatusOr<std::unique_ptr<SocketPeer>> Start(SocketKind kind, int64_t pool_bytes);
  ~SocketPeer();  // closes the socket and waits for the child's end
  SocketPeer(const SocketPeer&) = delete;
  SocketPeer& operator=(const SocketPeer&) = delete;

  // Returns when the peer has everything in its pool.
  absl::Status Send(absl::Span<const std::byte> bytes);
  // The first `bytes.size()` bytes of the peer's pool.
  absl::Status Receive(absl::Span<std::byte> bytes);

  pid_t pid() const { return pid_; }

 private:
  SocketPeer(int fd, pid_t pid) : fd_(fd), pid_(pid) {}
  const int fd_;
  const pid_t pid_;
};

}  // namespace kvstow
