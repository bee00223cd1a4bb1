// Turns: what the calls of the wire say of conversations, brought to the store. No gRPC.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstow/v1/control.pb.h"
#include "storage/tiered_store.h"

namespace kvstow {

// The session is its tenant's: nobody ends or continues it who does not know both names.
// kInvalidArgument as HintsFromProto. `block_tokens`: 0 where the call does not tell.
absl::StatusOr<TurnHints> ReadHints(const v1::TurnHints& message, int32_t block_tokens);

// One per block of the request: the turn it is part of. Null for a block whose keys are malformed.
// Blocks that follow each other, as `after` says, are one prompt.
std::vector<std::shared_ptr<const TurnUse>> StartTurns(TieredStore& store,
                                                       const v1::ReserveRequest& request,
                                                       const TurnHints& hints);

}  // namespace kvstow
