#include "storage/turn_history.h"

#include "absl/container/flat_hash_set.h"

namespace kvstow {
namespace {

bool IsSoundTurn(const policy::Request& turn, double time_before_s) {
  constexpr int64_t kTokensMax = int64_t{1} << 40;
  const auto is_count = [](int64_t count, int64_t most) { return count >= 0 && count <= most; };
  // Written so that NaN fails.
  return turn.number > 0 && turn.time_s >= time_before_s && turn.time_s <= 0 &&
         is_count(turn.input_tokens, kTokensMax) && is_count(turn.output_tokens, kTokensMax) &&
         is_count(turn.parent_tokens, 2 * kTokensMax) && is_count(turn.num_blocks, INT32_MAX / 2) &&
         is_count(turn.full_blocks, turn.num_blocks) && is_count(turn.seen_blocks, INT32_MAX / 2) &&
         turn.turn >= 1 && turn.parent < turn.number;
}

}  // namespace

bool TurnHistory::IsSound() const {
  if (static_cast<int64_t>(blocks.size()) > 2 * kBlocksMax || turns.size() > blocks.size()) {
    return false;
  }
  constexpr double kOldestS = -1e10;
  absl::flat_hash_set<uint64_t> numbers;
  double time_s = kOldestS;
  for (const policy::Request& turn : turns) {
    if (!IsSoundTurn(turn, time_s) || !numbers.insert(turn.number).second) return false;
    time_s = turn.time_s;
  }
  absl::flat_hash_set<BlockKey, BlockKeyHash> keys;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    if (block.parent != policy::kNone && block.parent >= i) return false;
    if (block.turn != policy::kNone && block.turn >= turns.size()) return false;
    if (!keys.insert(block.key).second) return false;
  }
  for (const Session& session : sessions) {
    if (session.session == 0 || !numbers.contains(session.number)) return false;
  }
  return static_cast<int64_t>(sessions.size()) <= kSessionsMax;
}

}  // namespace kvstow
