#include "service/turns.h"

#include <optional>

#include "kernels/core/status_macros.h"
#include "proto/convert.h"

namespace kvstow {

absl::StatusOr<TurnHints> ReadHints(const v1::TurnHints& message, int32_t block_tokens) {
  KVSTOW_ASSIGN_OR_RETURN(const WireHints wire, HintsFromProto(message));
  return TurnHints{.session = wire.session,
                   .turn = wire.turn,
                   .session_over = wire.session_over,
                   .returns_within = wire.returns_within,
                   .pin_for = wire.pin_for,
                   .input_tokens = wire.input_tokens,
                   .output_tokens = wire.output_tokens,
                   .block_tokens = block_tokens};
}

std::vector<std::shared_ptr<const TurnUse>> StartTurns(TieredStore& store,
                                                       const v1::ReserveRequest& request,
                                                       const TurnHints& hints) {
  std::vector<std::shared_ptr<const TurnUse>> uses(static_cast<size_t>(request.blocks_size()));
  std::vector<BlockKey> prompt;  // the blocks from `first` on
  std::optional<BlockKey> after;
  size_t first = 0;
  const auto start = [&] {
    if (prompt.empty()) return;
    const auto use =
        store.Use({.keys = prompt, .after = after.has_value() ? &*after : nullptr, .hints = hints});
    for (size_t i = 0; i < prompt.size(); ++i) uses[first + i] = use;
    prompt.clear();
    after.reset();
  };
  for (size_t i = 0; i < uses.size(); ++i) {
    const v1::ReserveBlock& block = request.blocks(static_cast<int>(i));
    const absl::StatusOr<BlockKey> key = Digest::FromBytes(block.key(), "key");
    absl::StatusOr<BlockKey> before = BlockKey();
    if (!block.after().empty()) before = Digest::FromBytes(block.after(), "after");
    const bool is_bad = !key.ok() || !before.ok();
    const bool follows =
        !is_bad && (block.after().empty() || (!prompt.empty() && *before == prompt.back()));
    if (!follows) start();
    if (is_bad) continue;
    if (prompt.empty()) {
      first = i;
      if (!block.after().empty()) after = *before;
    }
    prompt.push_back(*key);
  }
  start();
  return uses;
}

}  // namespace kvstow
