// FetchBlocks: blocks by key, whole or in groups of planes one after the other, over as many
// streams as pays. Private to the client library.
//
//   KVSTOW_ASSIGN_OR_RETURN(Fetched fetched, FetchBlocks(client, {.model = model, .keys = keys,
//                               .groups = {planes}, .deadline = t, .make_fn = make_fn}));
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/block_fetcher.h"
#include "client/cpp/client_state.h"

namespace kvstow {

struct FetchJob {
  const Model& model;
  absl::Span<const BlockKey> keys;           // at least one
  std::vector<std::vector<int32_t>> groups;  // planes of each, ascending; at least one group
  absl::Time deadline;
  const RowsPlace* place = nullptr;  // where the rows go; null: elsewhere
  // What takes the blocks of one stream, each with the planes of the group.
  std::function<BlockFn(size_t group_idx)> make_fn;
  // Called on the calling thread for each group in order, as soon as it and those before it are
  // there, while later ones come; `blocks`: per key, so far. Empty: there is one group.
  std::function<void(size_t group_idx, absl::Span<const absl::Status> blocks)> on_group;
};

struct Fetched {
  std::vector<absl::Status> blocks;  // per key: OK for all groups, or the first that went wrong
  int64_t received_bytes = 0;
};

// An error: nothing at all came; of several groups, of the first.
absl::StatusOr<Fetched> FetchBlocks(ClientState& client, const FetchJob& job);

}  // namespace kvstow
