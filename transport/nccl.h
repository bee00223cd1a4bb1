// NCCL: windows in GPU memory that are moved GPU to GPU, over NVLink or the network.
//
//   worker:   KVSTOW_ASSIGN_OR_RETURN(auto window, OpenNcclWindow({.bytes = 64 << 20,
//                                                                  .host = "10.0.0.7"}));
//   service:  KVSTOW_ASSIGN_OR_RETURN(auto nccl, MakeNcclTransport({}));
//
// Window::memory() and Transfer::local are device memory of the end's GPU. The stream of a channel
// waits for no other: what writes or reads that memory has been synchronized before a transfer is
// asked for. NCCL and the CUDA runtime are found at run time (dlopen); both ends must load the very
// same version of NCCL. Two ends on one GPU are refused by NCCL.
//
// NCCL sends only what the other end receives: a request goes to the worker's thread over a TCP
// connection of its own, and both enqueue their half. A transfer that is late, or a peer that is
// gone, ends the channel: both ends abort the communicator. Where NCCL's abort itself hangs, the
// communicator and its memory are left alone and the path is closed for the process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/transport.h"

namespace kvstow {

struct NcclDevice {
  // "": libnccl.so.2, and libcudart.so of version 13 or 12.
  std::string nccl_path;
  std::string cudart_path;
  int32_t device_idx = 0;
};

struct NcclWindowOptions {
  int64_t bytes = 0;               // 1 to kMaxWindowBytes
  std::string host = "127.0.0.1";  // IPv4 address at which the service reaches this end
  NcclDevice device;
};

// kInvalidArgument the size or the host; kUnavailable no NCCL, CUDA or device, or no port;
// kResourceExhausted no device memory.
absl::StatusOr<std::unique_ptr<Window>> OpenNcclWindow(const NcclWindowOptions& options);

struct NcclTransportOptions {
  int32_t channels_max = 8;  // a communicator holds 50 to 100 MB of GPU memory
  NcclDevice device;
};

// Errors as those of OpenNcclWindow. Channels may outlive the transport.
absl::StatusOr<std::unique_ptr<Transport>> MakeNcclTransport(const NcclTransportOptions& options);

}  // namespace kvstow
