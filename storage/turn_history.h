// TurnHistory: the turns whose blocks are stored, and how the blocks follow each other, so that the
// next process knows whose they are and recognizes the next turn of a conversation.
//
//   TurnHistory history = retention->History();
//   ... next process, before anything is placed ...
//   KVSTOW_ASSIGN_OR_RETURN(auto held, retention->Recall(history));
//
// Plain values; policy_state.h brings them to disk.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/core/block_key.h"
#include "storage/policy/policy.h"

namespace kvstow {

struct TurnHistory {
  static constexpr int64_t kBlocksMax = int64_t{1} << 17;  // those of the newest turns
  static constexpr int64_t kSessionsMax = int64_t{1} << 16;

  struct Block {
    BlockKey key;
    uint32_t parent = policy::kNone;  // index of the block before it; it is listed before
    uint32_t turn = policy::kNone;    // index of the last turn that used it; kNone: forgotten
  };
  struct Session {
    uint64_t session = 0;
    uint64_t number = 0;  // of its last turn
    uint32_t turn = 0;    // as hinted
    uint32_t zero = 0;
  };

  // In the order of arrival. Request::time_s is minus the age: the clock stands still in between.
  std::vector<policy::Request> turns;
  std::vector<Block> blocks;
  std::vector<Session> sessions;

  // Ages fall, numbers and keys are there once, indices point where they may, nothing is too much.
  bool IsSound() const;
};

}  // namespace kvstow
