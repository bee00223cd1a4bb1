#include "client/cpp/fetch_job.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "client/cpp/parallel.h"
#include "client/cpp/plane_selection.h"
#include "kernels/core/mutex.h"
#include "kernels/core/status_macros.h"
#include "proto/convert.h"

namespace kvstow {
namespace {

// The service is asked to look at a block that came damaged, but nobody waits long for it.
constexpr absl::Duration kVerifyTimeout = absl::Seconds(1);
// Groups that are under way behind the one that is waited for. The first one has all to itself.
constexpr size_t kGroupsAhead = 3;
// Signalled sooner; every stream ends by the job's deadline.
constexpr absl::Duration kWait = absl::Seconds(1);

// Best effort: the service checks the record and drops it where it is bad there too.
void AskToVerify(Connection& connection, absl::Span<const BlockKey> keys, absl::Duration timeout) {
  v1::VerifyRequest request;
  request.set_keys(KeysToBytes(keys));
  const absl::Status ignored = connection.Call(timeout, [&](grpc::ClientContext* context) {
    const auto reader = connection.control().Verify(context, request);
    v1::VerifyProgress progress;
    while (reader->Read(&progress)) {
    }
    return reader->Finish();
  });
}

class Fetch {
 public:
  Fetch(ClientState& client, const FetchJob& job);
  absl::StatusOr<Fetched> Run();

 private:
  // A group's planes of blocks [begin, end): what one stream brings.
  struct Piece {
    size_t group_idx = 0;
    size_t begin = 0;
    size_t end = 0;
  };

  size_t NumPieces(const std::vector<int32_t>& planes) const;
  // Pieces, in order, until there are none: a stream's thread.
  void Work();
  std::optional<Piece> Next();
  // Which group may be fetched now, with those before it.
  size_t LastGroup() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return pieces_left_[0] > 0 ? 0 : num_delivered_ + kGroupsAhead;
  }
  void FetchPiece(const Piece& piece);
  void Deliver();
  // Waits for a group. False: nothing came of it, by a fault of the calls.
  bool AwaitGroup(size_t group_idx, std::vector<absl::Status>& blocks);

  ClientState& client_;
  const FetchJob& job_;
  std::vector<Piece> pieces_;
  Mutex mutex_;
  CondVar changed_;
  size_t next_piece_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<size_t> pieces_left_ ABSL_GUARDED_BY(mutex_);  // of each group
  size_t num_delivered_ ABSL_GUARDED_BY(mutex_) = 0;         // groups
  FetchResult result_ ABSL_GUARDED_BY(mutex_);
};

Fetch::Fetch(ClientState& client, const FetchJob& job)
    : client_(client), job_(job), pieces_left_(job.groups.size()) {
  result_.blocks.resize(job.keys.size());
  for (size_t group_idx = 0; group_idx < job.groups.size(); ++group_idx) {
    const size_t count = NumPieces(job.groups[group_idx]);
    pieces_left_[group_idx] = count;
    for (size_t i = 0; i < count; ++i) {
      const auto begin_of = [&](size_t piece) { return job.keys.size() * piece / count; };
      pieces_.push_back({group_idx, begin_of(i), begin_of(i + 1)});
    }
  }
}

size_t Fetch::NumPieces(const std::vector<int32_t>& planes) const {
  const auto num_keys = static_cast<int64_t>(job_.keys.size());
  const int64_t bytes = num_keys * RowBytes(*job_.model.layout, planes);
  if (!job_.on_group) {
    return static_cast<size_t>(
        NumStreams(num_keys, bytes, client_.connection->options().num_channels));
  }
  return static_cast<size_t>(
      std::clamp<int64_t>((bytes + kBulkCallBytes - 1) / kBulkCallBytes, 1, num_keys));
}

absl::StatusOr<Fetched> Fetch::Run() {
  Connection& connection = *client_.connection;
  KVSTOW_RETURN_IF_ERROR(connection.Allow());
  if (job_.on_group) {
    // Group by group each call is short: while one begins or ends, another moves bytes.
    const int num_streams =
        std::min(static_cast<int>(pieces_.size()), connection.options().num_channels);
    RunParallel(1 + num_streams, [this](int i) { i == 0 ? Deliver() : Work(); });
  } else {
    RunParallel(static_cast<int>(pieces_.size()), [this](int) { Work(); });
  }
  MutexLock lock(&mutex_);  // nobody else is there any more
  connection.Record(result_.status, result_.longest_wait);
  client_.corrupt_blocks += static_cast<int64_t>(result_.corrupt.size());
  const absl::Duration left = job_.deadline - connection.clock().Now();
  if (!result_.corrupt.empty() && left > absl::ZeroDuration()) {
    AskToVerify(connection, result_.corrupt, std::min(left, kVerifyTimeout));
  }
  if (result_.num_answered == 0 && !result_.status.ok()) return result_.status;
  return Fetched{std::move(result_.blocks), result_.received_bytes};
}

void Fetch::Work() {
  while (const std::optional<Piece> piece = Next()) FetchPiece(*piece);
}

std::optional<Fetch::Piece> Fetch::Next() {
  MutexLock lock(&mutex_);
  while (next_piece_ < pieces_.size() && pieces_[next_piece_].group_idx > LastGroup()) {
    changed_.WaitFor(&mutex_, kWait);
  }
  if (next_piece_ == pieces_.size()) return std::nullopt;
  return pieces_[next_piece_++];
}

void Fetch::FetchPiece(const Piece& piece) {
  std::vector<BlockKey> keys;  // of blocks that have not failed yet
  std::vector<int32_t> places;
  {
    MutexLock lock(&mutex_);
    for (size_t i = piece.begin; i < piece.end; ++i) {
      if (!result_.blocks[i].ok()) continue;
      keys.push_back(job_.keys[i]);
      places.push_back(static_cast<int32_t>(i));
    }
  }
  FetchResult came;
  if (!keys.empty()) {
    const FetchPlan plan{job_.model, job_.groups[piece.group_idx], job_.deadline, job_.place};
    came = BlockFetcher(client_, plan)
               .Fetch({keys, places, job_.keys.data()}, job_.make_fn(piece.group_idx));
  }
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < places.size(); ++i) result_.blocks[places[i]].Update(came.blocks[i]);
  result_.status.Update(came.status);
  result_.num_answered += came.num_answered;
  result_.received_bytes += came.received_bytes;
  result_.longest_wait = std::max(result_.longest_wait, came.longest_wait);
  result_.corrupt.insert(result_.corrupt.end(), came.corrupt.begin(), came.corrupt.end());
  --pieces_left_[piece.group_idx];
  changed_.SignalAll();
}

bool Fetch::AwaitGroup(size_t group_idx, std::vector<absl::Status>& blocks) {
  MutexLock lock(&mutex_);
  while (pieces_left_[group_idx] > 0) changed_.WaitFor(&mutex_, kWait);
  blocks = result_.blocks;
  if (result_.num_answered > 0 || result_.status.ok()) return true;
  next_piece_ = pieces_.size();
  changed_.SignalAll();
  return false;
}

void Fetch::Deliver() {
  std::vector<absl::Status> blocks;
  for (size_t group_idx = 0; group_idx < job_.groups.size(); ++group_idx) {
    if (!AwaitGroup(group_idx, blocks)) return;
    job_.on_group(group_idx, blocks);
    MutexLock lock(&mutex_);
    ++num_delivered_;
    changed_.SignalAll();
  }
}

}  // namespace

absl::StatusOr<Fetched> FetchBlocks(ClientState& client, const FetchJob& job) {
  return Fetch(client, job).Run();
}

}  // namespace kvstow
