// GetCall: one Get stream. While gRPC writes a frame, a worker makes the next ones, at most
// kFramesAhead of them.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/mutex.h"
#include "kvstow/v1/data.pb.h"
#include "service/call_deadline.h"
#include "service/frame_source.h"
#include "service/service_parts.h"

namespace kvstow {

class GetCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  static constexpr size_t kFramesAhead = 4;
  // A worker is called for when so few are left: several frames for one hand-over.
  static constexpr size_t kRefillBelow = 3;

  static GetCall* Start(const ServiceParts& parts, const CallDeadline& deadline,
                        const grpc::ByteBuffer& request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { delete this; }

 private:
  // What to do next, decided under the lock and done without it.
  struct Steps {
    bool write = false;
    bool refill = false;
    bool finish = false;
  };

  explicit GetCall(const ServiceParts& parts)
      : parts_(parts), timer_(parts.metrics, Method::kGet) {}

  absl::Status Open(const CallDeadline& deadline, const grpc::ByteBuffer& request);
  // Which of the keys peers are to be asked for.
  absl::Status FindMissing(const v1::GetRequest& request, absl::Span<const BlockKey> keys);
  // True: a fetch is under way, after which the call goes on by itself.
  bool FillFromPeers();
  void Fill();
  Steps Decide() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Writes, refills, finishes, or neither. The last thing a thread does with this call, unless it
  // is the refilling one and says that it goes on.
  void Continue(bool refill_is_over);
  void Refill();
  bool HasEnded();
  void End(const absl::Status& status);

  const ServiceParts& parts_;
  const CallTimer timer_;
  // Of one write at a time; gRPC orders them.
  std::chrono::steady_clock::time_point write_start_;
  absl::Duration writing_;
  int64_t written_bytes_ = 0;
  Permit permit_;
  std::vector<BlockKey> missing_;        // here; to be fetched before the first frame
  Digest fingerprint_;                   // of their model
  std::unique_ptr<FrameSource> source_;  // used by the worker that refills
  grpc::ByteBuffer current_;             // of the write that is out

  Mutex mutex_;
  std::deque<grpc::ByteBuffer> ready_ ABSL_GUARDED_BY(mutex_);
  bool write_is_out_ ABSL_GUARDED_BY(mutex_) = false;
  bool refill_is_out_ ABSL_GUARDED_BY(mutex_) = false;
  bool source_is_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);  // not OK: nothing more is written
};

}  // namespace kvstow
