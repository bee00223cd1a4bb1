// FrameSource: the answer to one Get as a sequence of frames, made one at a time.
//
//   FrameSource source(parts, deadline, {.keys = keys, .form = v1::FORM_ENCODED});
//   while (!source.done()) { KVSTOW_ASSIGN_OR_RETURN(grpc::ByteBuffer frame, source.Next()); ... }
//
// Units go out as they stand in the record, without a copy: the frame's slice points into it and
// pins it until gRPC has let go of the slice. In FORM_ROWS encoded units are checked, decoded and
// hashed.
//
// Thread safety: one thread at a time; for worker threads.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstow/v1/control.pb.h"
#include "proto/convert.h"
#include "proto/frames.h"
#include "service/admission.h"
#include "service/call_deadline.h"
#include "service/channel_table.h"
#include "service/model_registry.h"
#include "service/service_parts.h"
#include "storage/record.h"

namespace kvstow {

class FrameSource {
 public:
  // Where payloads go instead of into the messages: a range of a channel's window.
  struct WindowRange {
    std::shared_ptr<BulkChannel> channel;  // null: into the messages
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  // What is asked for.
  struct Question {
    std::vector<BlockKey> keys;  // at least one
    v1::Form form = v1::FORM_ENCODED;
    TurnHints hints;
    std::optional<BlockKey> after;  // the block before the first key
    WindowRange window;
    std::vector<UnitRange> ranges;  // of each block; none: all of it
    // Of those units, where raw ones of the first block go in the channel's window; or none. As
    // GetRequest.unit_place.
    std::vector<uint64_t> places;
  };

  FrameSource(const ServiceParts& parts, const CallDeadline& deadline, Question question)
      : parts_(parts),
        deadline_(deadline),
        keys_(std::move(question.keys)),
        form_(question.form),
        hints_(question.hints),
        after_(question.after),
        ranges_(std::move(question.ranges)),
        places_(std::move(question.places)),
        window_(std::move(question.window)) {}

  bool done() const { return block_idx_ >= keys_.size(); }

  // The next frame. May read the disk.
  //   kResourceExhausted  the bytes in flight are at their limit: the call ends
  //   kInvalidArgument    the window's range is full;  kUnavailable: its worker is gone
  absl::StatusOr<grpc::ByteBuffer> Next();

 private:
  // A record and its share of the bytes in flight, kept by every slice that points into it.
  struct PinnedBlock {
    BlockRef block;
    Permit permit;
  };

  // Opens keys_[block_idx_]. A status other than kResourceExhausted is the block's own.
  absl::Status OpenBlock();
  // In FORM_ROWS: is every unit what the model says? kFailedPrecondition.
  absl::Status CheckShape() const;
  // Frames of units from next_unit_ on.
  absl::StatusOr<grpc::ByteBuffer> StoredFrame();
  absl::StatusOr<grpc::ByteBuffer> PlacedFrame();
  absl::StatusOr<grpc::ByteBuffer> DecodedFrame();
  // Ends a frame over `payload`, which `owner` keeps.
  absl::StatusOr<grpc::ByteBuffer> Finish(GetFrameHeader header, std::shared_ptr<const void> owner,
                                          absl::Span<const std::byte> payload);
  absl::Status StoreInWindow(GetFrameHeader& header, std::shared_ptr<const void> owner,
                             absl::Span<const std::byte> payload);
  grpc::ByteBuffer EndBlock(absl::StatusCode code);
  GetFrameHeader StartHeader() const;
  // Of the range that is under way.
  uint32_t range_end() const {
    return ranges_.empty() ? record_->num_units() : ranges_[range_idx_].end;
  }
  bool IsPlaced(uint32_t unit) const {
    return !places_.empty() && record_->entry(unit).codec == CodecId::kRaw;
  }
  // Past `num_units` that were sent.
  void Advance(uint32_t num_units);

  const ServiceParts& parts_;
  const CallDeadline deadline_;
  const std::vector<BlockKey> keys_;
  const v1::Form form_;
  const TurnHints hints_;
  const std::optional<BlockKey> after_;
  const std::vector<UnitRange> ranges_;
  const std::vector<uint64_t> places_;
  WindowRange window_;                  // what is left of it
  absl::Status window_fault_;           // of the call, not of a block
  std::shared_ptr<const TurnUse> use_;  // of all keys, from the first frame on
  size_t block_idx_ = 0;
  // Of the open block.
  std::shared_ptr<const PinnedBlock> pin_;
  std::optional<RecordView> record_;
  ModelRef model_;
  CalibrationRef calibration_;  // that the record names
  bool is_started_ = false;     // a frame of it was made
  size_t range_idx_ = 0;
  uint32_t next_unit_ = 0;
  size_t num_done_ = 0;  // units, of those that are asked for
};

}  // namespace kvstow
