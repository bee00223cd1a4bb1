// Server: a whole kvstowd in one object. server.cc is the one place where the shape of the service
// can be read: what is built, from what, in which order.
//
//   KVSTOW_ASSIGN_OR_RETURN(std::unique_ptr<Server> server, Server::Start(options, &clock));
//   ... until told to stop ...
//   server->Drain();
//
// Several can live in one process.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/clock.h"
#include "service/server_config.h"
#include "storage/tiered_store.h"

namespace kvstow {

class Server {
 public:
  // Opens the store, listens and serves. `clock` must outlive the server.
  //   kInvalidArgument     hbm.capacity where there is no GPU
  //   kUnavailable         an address is in use or cannot be taken: it is named
  //   kPermissionDenied    a directory cannot be written: it is named
  //   kFailedPrecondition  another process holds the directory, or a file is in the socket's way
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       const Clock* clock);
  ~Server();  // drains

  // Stops accepting calls, waits options.drain_timeout for those in flight, cancels the rest,
  // flushes to disk, removes the socket. Once; further calls do nothing.
  void Drain();

  // Where it listens: the real ports. 0 and "" where it does not.
  const std::string& unix_socket() const;
  int tcp_port() const;
  int metrics_port() const;

  // For tests, which play the disk and the clock behind the service's back.
  TieredStore& store();

 private:
  struct State;
  explicit Server(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvstow
