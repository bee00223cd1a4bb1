// BlockFetcher: blocks by key, complete, over one stream of calls at a time. Private to the client
// library.
//
//   BlockFetcher fetcher(client, {model, planes, deadline});
//   const FetchResult result = fetcher.Fetch(keys, [&](const ReceivedBlock& block) { ... });
//
// Thread safety: none; one for each stream.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/block_receiver.h"
#include "client/cpp/client_state.h"
#include "client/cpp/rows_writer.h"

namespace kvstow {

// What is the same for all streams of a fetch.
struct FetchPlan {
  const Model& model;
  absl::Span<const int32_t> planes;  // ascending, at least one
  absl::Time deadline;
  const RowsPlace* place = nullptr;  // where the rows go; null: elsewhere
};

// Keys of one stream, and the place of each among all that are asked for, ascending.
struct KeyRange {
  absl::Span<const BlockKey> keys;
  absl::Span<const int32_t> places;
  const BlockKey* all = nullptr;  // those that are asked for
  // The block before the first key in its prompt, or null.
  const BlockKey* after() const { return places[0] == 0 ? nullptr : all + places[0] - 1; }
  KeyRange From(size_t first) const { return {keys.subspan(first), places.subspan(first), all}; }
};

// Takes a complete block; what it makes of units that are not checked is its own. Not OK: one of
// them is not what it should be.
using BlockFn = std::function<absl::Status(const ReceivedBlock&)>;

// What came of one stream.
struct FetchResult {
  absl::Status status;               // of the last call
  std::vector<absl::Status> blocks;  // per key
  std::vector<BlockKey> corrupt;     // came, and did not stand the checks
  int64_t num_answered = 0;          // blocks of which the service said something
  int64_t received_bytes = 0;        // payload on the wire
  absl::Duration longest_wait = absl::ZeroDuration();

  void Add(const BlockReceiver& receiver);
};

// Fetches the blocks of one stream: in one call, or with a window in as many as it takes to pass
// all of them through an area of it. Where the window fails, the rest goes by gRPC. Rows that go to
// a WindowBuffer are written there by the service, in one call.
class BlockFetcher {
 public:
  BlockFetcher(ClientState& client, const FetchPlan& plan) : client_(client), plan_(plan) {}

  FetchResult Fetch(KeyRange range, const BlockFn& on_block);

 private:
  // How the bytes of a call come; all null: in the messages.
  struct Way {
    const BulkArea* area = nullptr;
    const BulkArea* buffer = nullptr;
    const PlacedUnits* placed = nullptr;  // in the buffer
  };

  // Where the service can write the blocks in place; no offsets: it cannot.
  PlacedUnits PlacesIn(const BulkArea& buffer, const KeyRange& range) const;
  // As many of the keys as came in place, all where there is no other way for the rest.
  size_t FetchInPlace(const KeyRange& range, const BlockFn& on_block, FetchResult& result);
  absl::Status Call(const KeyRange& range, const Way& way, const BlockFn& on_block,
                    BlockReceiver& receiver);

  ClientState& client_;
  const FetchPlan& plan_;
  absl::Duration longest_wait_ = absl::ZeroDuration();
};

}  // namespace kvstow
