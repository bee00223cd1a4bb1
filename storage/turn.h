// Turn: one request of a conversation, as a caller of the store tells of it.
//
//   const auto use = store.Use({.keys = keys, .hints = {.session = 7, .session_over = true}});
//
// A turn uses the blocks of one prompt, in the order of the prompt. Reading some of them and
// writing others is one turn, not two: calls that name the same prompt, or a longer one, within
// StoreOptions::turn_gap belong to the turn that is there.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/block_key.h"

namespace kvstow {

// What a client may say of its conversation. None of it is needed; none of it is a promise.
struct TurnHints {
  uint64_t session = 0;       // names the conversation; 0: found from the prompt's prefix
  uint32_t turn = 0;          // number of the turn within the session, from 1; 0: not told
  bool session_over = false;  // no further turn comes: its blocks leave first
  absl::Duration returns_within = absl::ZeroDuration();  // the next turn comes by then; 0: not told
  // Its blocks stay so long, as far as others leave room: where nothing else may leave, they do.
  absl::Duration pin_for = absl::ZeroDuration();
  int64_t input_tokens = 0;   // of the prompt; 0: its blocks'
  int64_t output_tokens = 0;  // of the answer; 0: not known
  int32_t full_blocks = -1;   // whole blocks of the prompt; negative: all
  int32_t block_tokens = 0;   // tokens of a block; 0: as the last time it was told
};

struct TurnRequest {
  absl::Span<const BlockKey> keys;  // in the order of the prompt
  const BlockKey* after = nullptr;  // the block before the first; null: not told, or none
  TurnHints hints;
};

}  // namespace kvstow
