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
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/put_frames.h"

namespace kvstow {

// What became of a block. kAlreadyExists: nothing was sent.
struct PutOutcome {
  int32_t block_idx = 0;
  absl::Status status;
  bool is_shared = false;  // all that this writer has of it is there, and others seal it
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

  // The planes of these layers of all blocks with tickets.
  absl::Status Send(const RowsOfLayers& rows, absl::Time deadline);

  // Seals what has a ticket.
  absl::Status Seal(absl::Time deadline);

  // One per block whose end is known: OK is sealed.
  const std::vector<PutOutcome>& outcomes() const { return outcomes_; }
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  // What came of one stream.
  struct StreamResult {
    absl::Status status;
    std::map<uint64_t, absl::Status> tickets;  // those that the service answered for
    absl::Duration longest_wait = absl::ZeroDuration();
    int64_t sent_bytes = 0;
    bool used_window = false;

    void Add(const StreamResult& other);
  };

  absl::Status ReserveSome(absl::Span<const int32_t> block_idxs, absl::Time deadline);
  absl::Status SendFrames(absl::Span<const PutFramePlan> frames, const RowsOfLayers& rows,
                          absl::Time deadline);
  StreamResult SendStream(absl::Span<const PutFramePlan> frames, const RowsOfLayers& rows,
                          absl::Time deadline) const;
  StreamResult TrySendStream(absl::Span<const PutFramePlan> frames, const RowsOfLayers& rows,
                             absl::Time deadline) const;
  StreamResult SendCall(absl::Span<const PutFramePlan> frames, const RowsOfLayers& rows,
                        const PutPlace& place, absl::Duration timeout) const;
  int NumStreamsOf(absl::Span<const PutFramePlan> frames) const;
  void DropFailedTickets();
  absl::Status SealSome(absl::Span<const PutTicket> tickets, absl::Time deadline);
  void Abort(absl::Span<const uint64_t> ids);
  absl::Duration Left(absl::Time deadline) const;

  const PutPlan& plan_;
  std::vector<PutTicket> tickets_;
  std::map<uint64_t, absl::Status> statuses_;  // of tickets, by the last call that carried them
  std::vector<PutOutcome> outcomes_;
  bool is_unreachable_ = false;  // the last call got no answer: an Abort would get none either
  int64_t sent_bytes_ = 0;
};

}  // namespace kvstow
