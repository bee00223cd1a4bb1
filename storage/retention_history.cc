// Retention: what of it outlives the process.
#include <algorithm>

#include "storage/retention.h"

namespace kvstow {

using policy::kNone;

std::vector<std::vector<double>> Retention::Learned() const {
  MutexLock lock(&mutex_);
  std::vector<std::vector<double>> tiers;
  for (size_t i = 0; i < num_tiers_; ++i) tiers.push_back(tiers_[i].policy->Learned());
  return tiers;
}

bool Retention::Restore(const std::vector<std::vector<double>>& tiers) {
  MutexLock lock(&mutex_);
  bool is_restored = tiers.size() == num_tiers_;
  for (size_t i = 0; is_restored && i < num_tiers_; ++i) {
    is_restored = tiers_[i].policy->Restore(tiers[i]);
  }
  return is_restored;
}

std::vector<BlockNumber> Retention::NewestStored() const {
  const policy::TierLedger& ledger = *tiers_[num_tiers_ - 1].ledger;
  std::vector<BlockNumber> numbers;
  for (BlockNumber number = 0; number < map_.end(); ++number) {
    if (map_.node(number).refs > 0 && ledger.IsResident(number)) numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end(), [this](BlockNumber a, BlockNumber b) {
    return map_.node(a).last_turn > map_.node(b).last_turn;
  });
  if (static_cast<int64_t>(numbers.size()) > TurnHistory::kBlocksMax) {
    numbers.resize(TurnHistory::kBlocksMax);
  }
  return numbers;
}

TurnHistory Retention::History() const {
  MutexLock lock(&mutex_);
  TurnHistory history;
  absl::flat_hash_map<BlockNumber, uint32_t> place;
  std::vector<uint64_t> turn_numbers;
  for (const BlockNumber stored : NewestStored()) {
    // The way up to the first block, or to one that is listed; parents before children.
    std::vector<BlockNumber> way;
    for (BlockNumber up = stored; up != kNone && !place.contains(up); up = map_.node(up).parent) {
      way.push_back(up);
    }
    if (static_cast<int64_t>(place.size() + way.size()) > TurnHistory::kBlocksMax) break;
    for (auto number = way.rbegin(); number != way.rend(); ++number) {
      const ChainMap::Node& node = map_.node(*number);
      const uint32_t parent = node.parent == kNone ? kNone : place.at(node.parent);
      place[*number] = static_cast<uint32_t>(history.blocks.size());
      history.blocks.push_back({node.key, parent, kNone});
      turn_numbers.push_back(node.is_used ? node.last_turn : 0);
    }
  }
  std::vector<uint64_t> ordered = turn_numbers;
  std::sort(ordered.begin(), ordered.end());
  ordered.erase(std::unique(ordered.begin(), ordered.end()), ordered.end());
  absl::flat_hash_map<uint64_t, uint32_t> turn_place;
  for (const uint64_t number : ordered) {
    const policy::Request* turn = FindTurn(number);
    if (turn == nullptr) continue;
    history.turns.push_back(*turn);
    history.turns.back().time_s -= last_s_;
  }
  // A turn that was forgotten and came back is older than its number tells.
  std::stable_sort(
      history.turns.begin(), history.turns.end(),
      [](const policy::Request& a, const policy::Request& b) { return a.time_s < b.time_s; });
  for (const policy::Request& turn : history.turns) {
    turn_place[turn.number] = static_cast<uint32_t>(turn_place.size());
  }
  for (size_t i = 0; i < turn_numbers.size(); ++i) {
    const auto found = turn_place.find(turn_numbers[i]);
    if (found != turn_place.end()) history.blocks[i].turn = found->second;
  }
  for (const auto& [session, last] : sessions_) {
    if (static_cast<int64_t>(history.sessions.size()) == TurnHistory::kSessionsMax) break;
    if (!turn_place.contains(last.number)) continue;
    history.sessions.push_back({.session = session, .number = last.number, .turn = last.turn});
  }
  return history;
}

absl::StatusOr<std::shared_ptr<const TurnUse>> Retention::Recall(const TurnHistory& history) {
  if (!history.IsSound()) return absl::InvalidArgumentError("turns that cannot have been");
  auto use = std::make_shared<TurnUse>(this);
  MutexLock lock(&mutex_);
  for (const policy::Request& turn : history.turns) {
    for (size_t i = 0; i < num_tiers_; ++i) tiers_[i].ledger->Recall(turn);
    last_number_ = std::max(last_number_, turn.number);
  }
  for (const TurnHistory::Block& block : history.blocks) {
    const BlockNumber parent = block.parent == kNone ? kNone : use->numbers_[block.parent];
    const BlockNumber number = NumberFor(block.key, parent);
    map_.Hold(number);
    use->numbers_.push_back(number);
    if (block.turn == kNone) continue;
    map_.node(number).last_turn = history.turns[block.turn].number;
    map_.node(number).is_used = true;
  }
  for (const TurnHistory::Session& session : history.sessions) {
    sessions_[session.session] = {session.number, session.turn};
  }
  return use;
}

}  // namespace kvstow
