// OpenPaths: the paths past gRPC that this machine and configuration allow.
#pragma once

#include <vector>

#include "service/channel_table.h"
#include "service/server_config.h"

namespace kvstow {

// Best first. A path that cannot be had is in the list with the reason: its absence is no error.
std::vector<ServedPath> OpenPaths(const ChannelOptions& options);

}  // namespace kvstow
