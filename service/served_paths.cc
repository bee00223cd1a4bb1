#include "service/served_paths.h"

#include <string>
#include <utility>

#include "kernels/core/log.h"
#include "transport/shm_transport.h"
#include "transport/ucx.h"

namespace kvstow {
namespace {

ServedPath OpenShm(const ChannelOptions& options) {
  ServedPath served{.path = PathKind::kShm, .address = options.shm_socket};
  if (options.shm_socket.empty()) {
    served.unavailable = "channels.shm_socket is empty";
    return served;
  }
  absl::StatusOr<std::unique_ptr<ShmTransport>> transport =
      ShmTransport::Listen({.socket_path = options.shm_socket,
                            .limits = {.channels_max = options.channels_max,
                                       .window_bytes_max = options.window_bytes_max}});
  if (transport.ok()) {
    served.transport = *std::move(transport);
  } else {
    served.unavailable = std::string(transport.status().message());
  }
  return served;
}

ServedPath OpenUcx(const ChannelOptions& options) {
  ServedPath served{.path = PathKind::kUcx};
  if (!options.with_ucx) {
    served.unavailable = "channels.ucx is false";
    return served;
  }
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      MakeUcxTransport({.channels_max = options.channels_max, .network = options.ucx});
  if (transport.ok()) {
    served.transport = *std::move(transport);
  } else {
    served.unavailable = std::string(transport.status().message());
  }
  return served;
}

}  // namespace

std::vector<ServedPath> OpenPaths(const ChannelOptions& options) {
  std::vector<ServedPath> paths;
  paths.push_back(OpenShm(options));
  paths.push_back(OpenUcx(options));
  for (const ServedPath& served : paths) {
    if (served.unavailable.empty()) continue;
    Log(Severity::kInfo, "a path is not there",
        {{"path", std::string(PathName(served.path))}, {"why", served.unavailable}});
  }
  return paths;
}

}  // namespace kvstow
