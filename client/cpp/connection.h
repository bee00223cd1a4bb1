// Connection: the channels to one service, and the rule for every call over them: ask the breaker,
// set a deadline, tell the breaker. Private to the client library.
//
//   KVSTOW_RETURN_IF_ERROR(connection->Call(timeout, [&](grpc::ClientContext* context) {
//     return connection->control().Stat(context, request, &response);
//   }));
//
// Thread safety: all methods may be called at once.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/status.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/breaker.h"
#include "client/cpp/buffer_pool.h"
#include "client/cpp/kv_client.h"
#include "kernels/core/clock.h"
#include "kvstow/v1/calibrations.grpc.pb.h"
#include "kvstow/v1/channels.grpc.pb.h"
#include "kvstow/v1/control.grpc.pb.h"
#include "kvstow/v1/model.grpc.pb.h"

namespace kvstow {

class Connection {
 public:
  // Connects lazily. kInvalidArgument for bad options.
  static absl::StatusOr<std::unique_ptr<Connection>> Create(const KvClientOptions& options);

  using CallFn = std::function<grpc::Status(grpc::ClientContext*)>;
  // One unary call. kUnavailable at once while the breaker is open.
  absl::Status Call(absl::Duration timeout, const CallFn& call);

  v1::Control::Stub& control() { return *control_; }
  v1::Models::Stub& models() { return *models_; }
  v1::Channels::Stub& channels() { return *channels_; }
  v1::Calibrations::Stub& calibrations() { return *calibrations_; }
  // Of the next channel in turn.
  grpc::GenericStub& NextDataStub();

  // For calls made otherwise: kUnavailable while the breaker is open. Each OK wants one Record.
  absl::Status Allow();
  // `longest_wait`: the slowest single answer within the call, so that a long transfer is not slow.
  void Record(const absl::Status& status, absl::Duration longest_wait);
  // `status` of a call with the service's address, where it says that no answer came.
  absl::Status WithTarget(const absl::Status& status, absl::Duration timeout) const;

  const KvClientOptions& options() const { return options_; }
  const Clock& clock() const { return clock_; }
  BreakerState breaker_state() const { return breaker_.state(); }
  BufferPool& buffers() { return buffers_; }

 private:
  explicit Connection(const KvClientOptions& options);

  const KvClientOptions options_;
  const RealClock clock_;
  Breaker breaker_;
  BufferPool buffers_;
  std::unique_ptr<v1::Control::Stub> control_;
  std::unique_ptr<v1::Models::Stub> models_;
  std::unique_ptr<v1::Channels::Stub> channels_;
  std::unique_ptr<v1::Calibrations::Stub> calibrations_;
  std::vector<std::unique_ptr<grpc::GenericStub>> data_stubs_;
  std::atomic<uint32_t> next_data_stub_{0};
};

// `timeout` from now, as gRPC takes it. Bounded to a day.
std::chrono::system_clock::time_point GrpcDeadline(absl::Duration timeout);

}  // namespace kvstow
