// Answer: runs a unary call's work on the thread it belongs on, and ends the call with its status.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "absl/status/status.h"
#include "proto/status.h"
#include "service/admission.h"
#include "service/executor.h"
#include "service/service_parts.h"

namespace kvstow {

// What is short runs on the RPC thread; what may wait for the disk or a peer, or takes
// milliseconds, on the control executor.
enum class Where { kRpcThread, kControlExecutor };

// Runs `work` where it belongs and ends the call with its status. Request and response are gRPC's
// and live until then.
template <typename Work>
grpc::ServerUnaryReactor* Answer(const ServiceParts& parts, grpc::CallbackServerContext* context,
                                 Method method, Where where, Work work) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const CallTimer timer(parts.metrics, method);
  const auto finish = [reactor, timer](const absl::Status& status) {
    timer.Done(status.code());
    reactor->Finish(ToGrpcStatus(WithRetryHint(status)));
  };
  if (const absl::Status open = parts.admission->CheckOpen(); !open.ok()) {
    finish(open);
    return reactor;
  }
  if (where == Where::kRpcThread) {
    finish(work());
    return reactor;
  }
  const absl::Status submitted = parts.control->Submit([finish, work] { finish(work()); });
  if (!submitted.ok()) finish(submitted);
  return reactor;
}

}  // namespace kvstow
