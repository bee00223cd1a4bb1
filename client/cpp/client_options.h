// Options of KvClient, and a setting of the process that it gains from.
//
//   TuneMallocForBulkTransfers();  // first thing in main
//   auto client = KvClient::Create({.target = "10.0.0.7:7411", .data_timeout = absl::Seconds(5)});
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/breaker.h"
#include "transport/transport.h"
#include "transport/ucx.h"

namespace kvstow {

// glibc gives large buffers back to the kernel and touches their pages anew for every message,
// which halves the rate of Put and Get. A program that moves much KV calls this at the start of
// main; the library does not, because it is the process's setting (the M_MMAP_THRESHOLD and
// M_TRIM_THRESHOLD of mallopt).
void TuneMallocForBulkTransfers();

struct KvClientOptions {
  std::string target = "unix:/tmp/kvstow.sock";  // "unix:PATH" or "HOST:PORT"
  int num_channels = 2;                          // two carry more than one, four no more than two
  absl::Duration control_timeout = absl::Seconds(5);  // of one control call
  absl::Duration data_timeout = absl::Seconds(60);    // of one whole Put or Get
  // A connection that says nothing for so long while calls wait is asked whether it is there, and
  // left for another one when it keeps silent as long again: a damaged one may swallow all that
  // comes. At least 200 ms.
  absl::Duration silence = absl::Seconds(5);
  // Paths for bytes past gRPC, best first, used where the service has them and the window can be
  // opened; otherwise, and when one breaks, bytes go by gRPC. Empty: gRPC only.
  std::vector<PathKind> paths = {PathKind::kShm, PathKind::kUcx};
  // Of memory shared with the service, at most; 16 MiB to 4 GiB. 16 MiB are taken for blocks up to
  // 4 MiB, four times a block for larger ones.
  int64_t window_bytes = int64_t{256} << 20;
  UcxNetwork ucx;
  std::string ucx_ip;  // of this machine, for the service to connect to; empty: by the route to it
  BreakerOptions breaker;
  // Asks for what the service has itself; not for what its peers have. For services as clients.
  bool local_only = false;

  absl::Status Validate() const;
};

}  // namespace kvstow
