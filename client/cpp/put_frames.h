// Put frames: which planes go into which frame, and how a frame is made from the caller's rows.
// Private to the client library.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/client_state.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/codec_plan.h"
#include "kernels/core/block_key.h"
#include "proto/frames.h"

namespace kvstow {

// What a whole Put has in common.
struct PutPlan {
  std::shared_ptr<ClientState> client;
  Model model;
  std::vector<BlockKey> keys;  // of all full blocks
  CodecChoice codec;
  CodecPlan layers;
  CompressAt compress_at = CompressAt::kService;
  bool durable = false;
  Conversation conversation;
  Digest calibration_id;  // zero: none, or the model's only one
  // Encodes here; null where the service does or no codec needs one.
  std::shared_ptr<const Calibration> calibration;
  HeadRange heads;

  bool is_shared() const { return heads.count > 0; }

  PlaneShape ShapeOf(const PlaneInfo& plane) const {
    return CalibratedShape(*model.layout, plane, calibration.get());
  }
  // As Reserve takes it.
  std::string CodecName(int32_t block_idx) const {
    const CodecPair pair = CodecsOf(block_idx);
    const bool has_layers = !layers.empty() && pair != CodecPair{};
    return CodecPairName(pair) + (has_layers ? "," + layers.Text() : "");
  }
  CodecPair CodecsOf(int32_t block_idx) const {
    return codec.OfBlock(block_idx, static_cast<int64_t>(keys.size()),
                         model.layout->tokens_per_block());
  }
};

// Layers [first_layer, first_layer + rows.size()).
struct RowsOfLayers {
  int32_t first_layer = 0;
  absl::Span<const LayerRows> rows;
};

// A block that may be written.
struct PutTicket {
  int32_t block_idx = 0;
  uint64_t id = 0;
  std::shared_ptr<const CodecPlan> model_plan;  // of the service, for this ticket; null: none

  // Of a layer's planes, before what they accept.
  CodecPair CodecsOf(const PutPlan& plan, int32_t layer_idx) const {
    const CodecPair asked = plan.layers.PairFor(layer_idx, plan.CodecsOf(block_idx));
    return model_plan == nullptr ? asked : model_plan->PairFor(layer_idx, asked);
  }
};

// One frame: consecutive planes of one block.
struct PutFramePlan {
  PutTicket ticket;
  int32_t first_plane = 0;
  int32_t num_planes = 0;
};

// Frames of about kTargetPayloadBytes each for these layers of a block, none of them small where
// they could be even. `rows` is not empty.
std::vector<PutFramePlan> PlanPutFrames(const PutPlan& plan, const PutTicket& ticket,
                                        const RowsOfLayers& rows);

// Bytes that a frame's payload has at most.
int64_t MaxPayloadBytes(const PutPlan& plan, const PutFramePlan& frame);

// Where the payloads of frames are; all null: in the messages.
struct PutPlace {
  const BulkArea* area = nullptr;    // written there, one after the other; the caller sees they fit
  const BulkArea* buffer = nullptr;  // the rows are in it, and go as they stand: see BufferOf

  bool has_window() const { return area != nullptr || buffer != nullptr; }
};

// The planes of these frames go over the wire as they stand in a usable buffer; null: they do not.
std::shared_ptr<BulkArea> BufferOf(const PutPlan& plan, absl::Span<const PutFramePlan> frames,
                                   const RowsOfLayers& rows);

// Thread safety: none; one for each stream. `plan`, the rows and `place` must outlive it.
class PutFrameMaker {
 public:
  PutFrameMaker(const PutPlan& plan, const RowsOfLayers& rows, const PutPlace& place)
      : plan_(plan), rows_(rows), place_(place) {}

  // Reads the rows once: gathered or encoded into place, hashed while they are in cache.
  grpc::ByteBuffer Make(const PutFramePlan& frame);
  int64_t payload_bytes() const { return payload_bytes_; }  // of all frames made

 private:
  struct Unit {
    CodecId codec = CodecId::kRaw;
    int64_t bytes = 0;
  };
  Unit WriteUnit(const PutTicket& ticket, int32_t plane_idx, std::byte* out);
  grpc::ByteBuffer MakeInPlace(const PutFramePlan& frame, PutFrameHeader header);
  // All units of the frame to `payload`; returns its bytes.
  int64_t WriteUnits(const PutFramePlan& frame, std::byte* payload, PutFrameHeader& header);

  const PutPlan& plan_;
  const RowsOfLayers rows_;
  const PutPlace place_;
  int64_t area_used_bytes_ = 0;
  std::vector<std::byte> scratch_;  // one plane
  int64_t payload_bytes_ = 0;
};

}  // namespace kvstow
