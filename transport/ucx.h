// UCX: windows that a service on another machine reads and writes, over RDMA or TCP.
//
//   worker:   KVSTOW_ASSIGN_OR_RETURN(auto window, OpenUcxWindow({.bytes = 64 << 20}));
//   service:  KVSTOW_ASSIGN_OR_RETURN(auto ucx, MakeUcxTransport({}));
//             KVSTOW_ASSIGN_OR_RETURN(auto channel, ucx->Attach(ticket, absl::Seconds(5)));
//
// Each window, and each transport, has one thread that drives UCX; it sleeps while nothing moves.
// Link-time halves: ucx_*.cc where UCX was found, ucx_none.cc otherwise.
//
// UCX has no authentication: for networks that are trusted, see README.md.
//
// A worker that hangs raises no error in UCX. The deadline of a transfer therefore ends the channel
// with it: the endpoint is closed by force, which releases the local memory, and a new window is
// needed. Whoever set UCX_* variables keeps them; README.md lists those that we set otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/transport.h"

namespace kvstow {

struct UcxNetwork {
  std::string tls;          // as UCX_TLS, "tcp" for example; "": what UCX_TLS says, or all but shm
  std::string net_devices;  // as UCX_NET_DEVICES, "lo" for example; "": what that says, or all
};

bool IsUcxBuilt();

struct UcxWindowOptions {
  int64_t bytes = 0;  // 1 to kMaxWindowBytes
  UcxNetwork network;
  // Of this machine, where the service connects to. The port is a free one.
  std::string ip = "127.0.0.1";
};

// Allocates the memory, about a second per GiB, and listens. Needs no service. Window::is_alive
// turns false when the channel was closed or its service died.
//   kInvalidArgument    the size, or `ip`
//   kResourceExhausted  no memory
//   kUnavailable        UCX does not start, for example for want of such devices
//   kUnimplemented      built without UCX
absl::StatusOr<std::unique_ptr<Window>> OpenUcxWindow(const UcxWindowOptions& options);

struct UcxTransportOptions {
  int32_t channels_max = 64;
  UcxNetwork network;
};

// Errors as those of OpenUcxWindow. Channels may outlive the transport.
absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const UcxTransportOptions& options);

}  // namespace kvstow
