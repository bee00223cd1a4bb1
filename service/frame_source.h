// FrameSource: the answer to one Get as a sequence of frames, made one at a time.
//
//   FrameSource source(parts, keys, v1::FORM_ENCODED, hints, after);
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
#include "proto/frames.h"
#include "service/admission.h"
#include "service/model_registry.h"
#include "service/service_parts.h"
#include "storage/record.h"

namespace kvstow {

class FrameSource {
 public:
  // keys: at least one. form: FORM_ROWS or FORM_ENCODED.
  FrameSource(const ServiceParts& parts, std::vector<BlockKey> keys, v1::Form form,
              const TurnHints& hints, std::optional<BlockKey> after)
      : parts_(parts), keys_(std::move(keys)), form_(form), hints_(hints), after_(after) {}

  bool done() const { return block_idx_ >= keys_.size(); }

  // The next frame. May read the disk.
  //   kResourceExhausted  the bytes in flight are at their limit: the call ends
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
  absl::StatusOr<grpc::ByteBuffer> DecodedFrame();
  grpc::ByteBuffer Finish(GetFrameHeader header, grpc::Slice payload);
  grpc::ByteBuffer EndBlock(absl::StatusCode code);
  GetFrameHeader StartHeader() const;

  const ServiceParts& parts_;
  const std::vector<BlockKey> keys_;
  const v1::Form form_;
  const TurnHints hints_;
  const std::optional<BlockKey> after_;  // the block before the first key
  std::shared_ptr<const TurnUse> use_;   // of all keys, from the first frame on
  size_t block_idx_ = 0;
  // Of the open block.
  std::shared_ptr<const PinnedBlock> pin_;
  std::optional<RecordView> record_;
  ModelRef model_;
  uint32_t next_unit_ = 0;
};

}  // namespace kvstow
