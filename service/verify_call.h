// VerifyCall: one Verify stream. Checks kBlocksPerStep blocks on the control executor, writes the
// progress, and so on: other control work gets its turn in between.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kvstow/v1/control.pb.h"
#include "service/service_parts.h"

namespace kvstow {

class VerifyCall final : public grpc::ServerWriteReactor<v1::VerifyProgress> {
 public:
  static constexpr int64_t kBlocksPerStep = 64;

  static VerifyCall* Start(const ServiceParts& parts, const v1::VerifyRequest& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override { is_cancelled_ = true; }
  void OnDone() override { delete this; }

 private:
  explicit VerifyCall(const ServiceParts& parts)
      : parts_(parts), timer_(parts.metrics, Method::kVerify) {}

  absl::Status Open(const v1::VerifyRequest& request);
  void SubmitStep();
  void Step();
  // The next keys to check; empty at the end.
  std::vector<BlockKey> NextKeys();
  void End(const absl::Status& status);

  const ServiceParts& parts_;
  const CallTimer timer_;
  std::atomic<bool> is_cancelled_{false};
  // One thing at a time is out, a step or a write, so the rest needs no lock.
  Permit permit_;
  bool is_all_ = false;
  std::vector<BlockKey> keys_;  // asked for; empty for all
  BlockKey after_;              // where the walk over all stands
  int64_t num_checked_ = 0;
  int64_t num_total_ = 0;
  v1::VerifyProgress progress_;
};

}  // namespace kvstow
