// Shared windows, the worker's end: memory that the service maps as well.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto window, OpenShmWindow({.socket_path = ShmSocketPath(grpc),
//                                                       .bytes = 64 << 20}));
//
// Children of fork() do not have the memory: touching it there is a segmentation fault. They do
// share the socket, so the window ends when the process that opened it does, not with its socket.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/transport.h"

namespace kvstow {

struct ShmWindowOptions {
  std::string socket_path;                    // of the service; see ShmSocketPath
  int64_t bytes = 0;                          // 1 to kMaxWindowBytes
  absl::Duration timeout = absl::Seconds(5);  // of each wait for the service
};

// Allocates the window's pages before it says hello, about a second per GiB, once it has seen that
// a service is there. Attach must follow within the service's limit (10 s).
//   kInvalidArgument    the size, the path, or what the service does not accept
//   kUnavailable        no service there, or it went away
//   kDeadlineExceeded   it does not answer
//   kPermissionDenied   it is another user's
//   kResourceExhausted  no memory here, or no room there
absl::StatusOr<std::unique_ptr<Window>> OpenShmWindow(const ShmWindowOptions& options);

}  // namespace kvstow
