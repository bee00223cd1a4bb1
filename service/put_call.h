// PutCall: one Put stream. Reads frames, has the workers bring them into the store, answers with
// one result per ticket.
//
// At most kFramesInWork frames, and about a frame's worth of bytes, are in work at once: the next
// one is read only below that, so a fast sender waits in its own flow control. Frames are worked on
// in any order.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/core/mutex.h"
#include "proto/frames.h"
#include "service/call_deadline.h"
#include "service/channel_table.h"
#include "service/frame_writer.h"
#include "service/service_parts.h"

namespace kvstow {

class PutCall final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  static constexpr int kFramesInWork = 4;
  static constexpr int64_t kMaxTickets = 65536;  // in one call

  // `response` is gRPC's, valid until the call is done.
  static PutCall* Start(const ServiceParts& parts, const CallDeadline& deadline,
                        grpc::ByteBuffer* response);

  void OnReadDone(bool ok) override;
  void OnDone() override { delete this; }

 private:
  struct Frame {
    PutFrameHeader header;
    FramePayload payload;
    std::shared_ptr<BulkChannel> channel;  // where the payload is, unless it came in the message
    int64_t payload_bytes = 0;
    size_t ticket_idx = 0;
  };
  // What the call knows of a ticket.
  struct TicketState {
    TicketId ticket = 0;
    std::shared_ptr<const TicketPlan> plan;  // once a worker has looked it up
    absl::Status fault;                      // the first
    uint32_t num_units = 0;
  };

  PutCall(const ServiceParts& parts, const CallDeadline& deadline, grpc::ByteBuffer* response)
      : parts_(parts),
        deadline_(deadline),
        timer_(parts.metrics, Method::kPut),
        response_(response) {}

  // Gives the buffer that was read to the workers. Not OK: the call cannot go on.
  absl::Status Accept();
  absl::StatusOr<size_t> FindOrAddTicket(TicketId ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A frame whose payload is in a channel's window: finds the channel. kNotFound, kInvalidArgument.
  absl::Status FindPayload(Frame& frame) const;
  void Work(const Frame& frame);
  // The units of a frame into their place.
  absl::Status Write(const Frame& frame, const TicketPlan& plan);
  std::shared_ptr<const TicketPlan> PlanOf(size_t ticket_idx);
  void RecordFault(size_t ticket_idx, const absl::Status& fault);
  // Reads on, or finishes, or neither while work is under way. `finished`: the frame whose work
  // ends here, or nullptr. The last thing a thread does with this call.
  void Continue(const Frame* finished);
  void FinishCall();

  const ServiceParts& parts_;
  const CallDeadline deadline_;
  const CallTimer timer_;
  grpc::ByteBuffer* const response_;
  Permit permit_;
  grpc::ByteBuffer buffer_;  // of the read that is out

  Mutex mutex_;
  bool read_is_out_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_are_done_ ABSL_GUARDED_BY(mutex_) = false;
  int frames_in_work_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t bytes_in_work_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);                  // of the call
  std::vector<TicketState> tickets_ ABSL_GUARDED_BY(mutex_);  // in the order first seen
  std::unordered_map<TicketId, size_t> ticket_idx_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
