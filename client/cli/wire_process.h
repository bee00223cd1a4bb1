// WireProcess: a relay (relay.h) in a process of its own, so that its work is not counted as that
// of the ends.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto wire, WireProcess::Start({.bytes_per_s = 5e8}));  // forks
//   KVSTOW_RETURN_IF_ERROR(wire->ConnectTo("unix:/tmp/kvstow.sock"));
//   ... a client of wire->target() ...
//
// Start it before the process has threads: the child goes on in the same program.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/relay.h"
#include "transport/owned_fd.h"

namespace kvstow {

class WireProcess {
 public:
  static absl::StatusOr<std::unique_ptr<WireProcess>> Start(const WireRule& rule);
  ~WireProcess();  // ends the process (by its id) and removes the socket
  WireProcess(const WireProcess&) = delete;
  WireProcess& operator=(const WireProcess&) = delete;

  // The service at the other end, once. kInvalidArgument: not "unix:PATH".
  absl::Status ConnectTo(const std::string& target);
  std::string target() const { return "unix:" + dir_ + "/wire"; }

 private:
  WireProcess() = default;

  std::string dir_;
  OwnedFd order_;  // the child reads its service's path from the other end
  pid_t pid_ = -1;
};

}  // namespace kvstow
