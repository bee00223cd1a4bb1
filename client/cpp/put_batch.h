// PutBatch: some blocks of a prompt on their way into the service: reserve, send planes, seal. What
// is not sealed is aborted on destruction. Private to the client library.
//
//   PutBatch batch(plan);
//   KVSTOW_RETURN_IF_ERROR(batch.Reserve(block_idxs, deadline));
//   KVSTOW_RETURN_IF_ERROR(batch.Send({.first_layer = 0, .rows = rows}, deadline));
//   KVSTOW_RETURN_IF_ERROR(batch.Seal(deadline));
//   ... batch.outcomes() ...
//
// An error of a method is one of the call as a whole: the service was not reached, or refused it. A
// block that was refused is an outcome.
//
// Deadlines are by the connection's clock. Thread safety: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client_state.h"
#include "kernels/codec/codec.h"
#include "kernels/core/block_key.h"
#include "proto/frames.h"

namespace kvstow {

// What a whole Put has in common.
struct PutPlan {
  std::shared_ptr<ClientState> client;
  Model model;
  std::vector<BlockKey> keys;  // of all full blocks
  CodecChoice codec;
  CompressAt compress_at = CompressAt::kService;
  bool durable = false;

  // The first block of a prompt holds the attention sink.
  CodecPair CodecsOf(int32_t block_idx) const {
    return block_idx == 0 && codec.raw_first_block ? CodecPair{} : codec.pair;
  }
};

// What became of a block. kAlreadyExists: nothing was sent.
struct PutOutcome {
  int32_t block_idx = 0;
  absl::Status status;
};

// Layers [first_layer, first_layer + rows.size()).
struct RowsOfLayers {
  int32_t first_layer = 0;
  absl::Span<const LayerRows> rows;
};

class PutBatch {
 public:
  // `plan` must outlive the batch.
  explicit PutBatch(const PutPlan& plan) : plan_(plan) {}
  ~PutBatch();
  PutBatch(const PutBatch&) = delete;
  PutBatch& operator=(const PutBatch&) = delete;

  // Tickets for blocks of the plan. May be called again for more blocks.
  absl::Status Reserve(absl::Span<const int32_t> block_idxs, absl::Time deadline);
  bool has_tickets() const { return !tickets_.empty(); }

  // The planes of these layers of all blocks with tickets.
  absl::Status Send(const RowsOfLayers& rows, absl::Time deadline);

  // Seals what has a ticket.
  absl::Status Seal(absl::Time deadline);

  // One per block whose end is known: OK is sealed.
  const std::vector<PutOutcome>& outcomes() const { return outcomes_; }
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  struct Ticket {
    int32_t block_idx = 0;
    uint64_t id = 0;
    absl::Status status;  // of the last call that carried its planes
  };
  struct Unit {
    CodecId codec = CodecId::kRaw;
    int64_t bytes = 0;
  };
  // One frame: consecutive planes of one block.
  struct FrameRange {
    size_t ticket_idx = 0;
    int32_t first_plane = 0;
    int32_t num_planes = 0;
  };
  absl::Status ReserveSome(absl::Span<const int32_t> block_idxs, absl::Time deadline);
  std::vector<FrameRange> PlanFrames(size_t ticket_idx, const RowsOfLayers& rows) const;
  absl::Status SendFrames(const std::vector<FrameRange>& frames, const RowsOfLayers& rows,
                          absl::Time deadline);
  absl::Status TrySendFrames(const std::vector<FrameRange>& frames, const RowsOfLayers& rows,
                             absl::Duration timeout);
  absl::Status TakeResults(const grpc::ByteBuffer& response);
  Unit WriteUnit(int32_t block_idx, int32_t plane_idx, const RowsView& rows, std::byte* out);
  grpc::ByteBuffer MakeFrame(const FrameRange& frame, const RowsOfLayers& rows);
  void DropFailedTickets();
  absl::Status SealSome(size_t first_ticket, size_t num_tickets, absl::Time deadline);
  void Abort(absl::Span<const uint64_t> ids);
  absl::Duration Left(absl::Time deadline) const;
  int64_t PlannedBytes(int32_t block_idx, const PlaneInfo& plane) const;
  int64_t UnitBytesMax(int32_t block_idx, const PlaneInfo& plane) const;

  const PutPlan& plan_;
  std::vector<Ticket> tickets_;
  std::vector<PutOutcome> outcomes_;
  std::vector<std::byte> scratch_;  // one plane
  bool is_unreachable_ = false;     // the last call got no answer: an Abort would get none either
  int64_t sent_bytes_ = 0;
};

}  // namespace kvstow
