// What an engine may tell the service of its conversations. None of it is needed, none of it is a
// promise; without it the service finds turns from the prompts' prefixes.
//
//   client->Put(model, {..., .conversation = {.session = "chat-17", .turn = 3}});
//   client->Lookup(keys, {.conversation = {.session = "chat-17", .session_over = true}});
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace kvstow {

struct Conversation {
  std::string session;        // its name, at most 64 bytes; empty: not told
  std::string tenant;         // whose it is, as in KeyContext; a put takes its context's
  uint32_t turn = 0;          // its number within the session, from 1; 0: not told
  bool session_over = false;  // no further turn comes: its blocks leave first
  absl::Duration returns_within = absl::ZeroDuration();  // the next turn comes by then; 0: not told
  absl::Duration pin_for = absl::ZeroDuration();         // keep the blocks, if others leave room
  uint32_t output_tokens = 0;                            // of the answer; 0: not known yet
};

struct LookupOptions {
  Conversation conversation;
  // Tokens per second that the engine would compute instead; 0: no estimate is wanted.
  double prefill_tokens_per_s = 0;
  // Of this call, where it is less than the client's control_timeout.
  absl::Duration timeout = absl::InfiniteDuration();
};

// Of the leading blocks, from rates measured by the service.
struct LoadAdvice {
  double load_ms = 0;
  double recompute_ms = 0;
  int32_t num_worth_loading = 0;  // leading blocks: loading these and computing the rest is fastest
  bool is_measured = false;       // false: nothing has been read yet, the rates are guesses
};

namespace v1 {
class TurnHints;
}
v1::TurnHints HintsToProto(const Conversation& conversation);

}  // namespace kvstow
