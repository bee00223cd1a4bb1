#include "storage/retention.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "storage/policy/sessions.h"

namespace kvstow {
namespace {

using policy::kNone;

// A first guess, until blocks have come.
constexpr int64_t kGuessedBlockBytes = int64_t{1} << 20;
// Blocks that are gone are remembered up to 4 Mi of them (32 MiB).
constexpr int64_t kSeenMax = int64_t{1} << 22;

uint8_t BitOf(size_t tier_idx) { return static_cast<uint8_t>(1u << tier_idx); }

}  // namespace

TurnUse::~TurnUse() { retention_->Release(numbers_); }

absl::StatusOr<std::unique_ptr<Retention>> Retention::Create(const Options& options,
                                                             const Clock* clock) {
  std::unique_ptr<Retention> retention(new Retention(options, clock));
  for (size_t i = 0; i < retention->num_tiers_; ++i) {
    TierState& tier = retention->tiers_[i];
    tier.capacity_bytes = options.tier_bytes[retention->first_tier_ + i];
    tier.told_blocks = std::max<int64_t>(1, tier.capacity_bytes / kGuessedBlockBytes);
    KVSTOW_ASSIGN_OR_RETURN(
        tier.policy,
        policy::MakePolicy(options.policy,
                           {.tier_blocks = {tier.told_blocks}, .alpha = options.alpha}, tier.tree));
    tier.ledger = std::make_unique<policy::TierLedger>(1, &tier.tree, tier.policy.get());
  }
  return retention;
}

Retention::Retention(const Options& options, const Clock* clock)
    : options_(options),
      clock_(clock),
      start_(clock->Now()),
      first_tier_(options.tier_bytes[TierIdx(TierKind::kHbm)] > 0 ? TierIdx(TierKind::kHbm)
                                                                  : TierIdx(TierKind::kDram)),
      num_tiers_(TierIdx(options.tier_bytes[TierIdx(TierKind::kNvme)] > 0 ? TierKind::kNvme
                                                                          : TierKind::kDram) +
                 1 - first_tier_),
      map_(static_cast<uint64_t>(std::clamp<int64_t>(options.blocks_max, 1024, kSeenMax)),
           [this](BlockNumber number) {
             return std::any_of(tiers_.begin(), tiers_.begin() + num_tiers_,
                                [&](TierState& tier) { return tier.policy->Remembers(number); });
           }) {}

double Retention::NowS() {
  last_s_ = std::max(last_s_, absl::ToDoubleSeconds(clock_->Now() - start_));
  return last_s_;
}

void Retention::Release(const std::vector<BlockNumber>& numbers) {
  MutexLock lock(&mutex_);
  for (const BlockNumber number : numbers) map_.Release(number);
}

// --- turns ---

std::shared_ptr<const TurnUse> Retention::Use(const TurnRequest& request) {
  auto use = std::make_shared<TurnUse>(this);
  MutexLock lock(&mutex_);
  if (request.hints.block_tokens > 0) block_tokens_ = request.hints.block_tokens;
  TurnHints hints = request.hints;
  for (size_t i = 0; i < request.keys.size();) {
    const size_t first = use->numbers_.size();
    i = LinkKeys(request, i, use->numbers_);
    // The turn uses the whole prompt, not only the part that was named.
    std::vector<BlockNumber> chain;
    const BlockNumber top = map_.node(use->numbers_[first]).parent;
    for (BlockNumber up = top; up != kNone; up = map_.node(up).parent) chain.push_back(up);
    std::reverse(chain.begin(), chain.end());
    chain.insert(chain.end(), use->numbers_.begin() + static_cast<std::ptrdiff_t>(first),
                 use->numbers_.end());
    BeginTurn(chain, hints);
    hints.session = 0;  // what follows is another prompt
    hints.full_blocks = -1;
    hints.input_tokens = 0;
  }
  return use;
}

size_t Retention::LinkKeys(const TurnRequest& request, size_t begin,
                           std::vector<BlockNumber>& numbers) {
  BlockNumber previous = kNone;
  if (begin == 0 && request.after != nullptr) previous = map_.Find(*request.after);
  if (previous != kNone && map_.node(previous).refs == 0) previous = kNone;  // forgotten
  size_t i = begin;
  for (; i < request.keys.size(); ++i) {
    // Beyond the bound a block stands alone: nothing is kept alive for its sake.
    const bool is_full = map_.size() > 2 * options_.blocks_max + kSeenMax;
    if (is_full && i > begin) break;
    const BlockNumber number = NumberFor(request.keys[i], is_full ? kNone : previous);
    if (number == previous) previous = kNone;
    if (previous != kNone && map_.node(number).parent != previous) {
      if (MayRelink(number)) {
        Relink(number, previous);
      } else if (i > begin) {
        break;
      }
    }
    map_.Hold(number);
    numbers.push_back(number);
    previous = number;
  }
  return i;
}

// A number that is new, or comes back to life, stands behind `parent`.
BlockNumber Retention::NumberFor(const BlockKey& key, BlockNumber parent) {
  BlockNumber number = map_.Find(key);
  if (number != kNone && map_.node(number).refs > 0) return number;
  if (number == kNone) {
    number = map_.Add(key, parent);
  } else if (parent != kNone) {
    map_.SetParent(number, parent);
  }
  for (size_t i = 0; i < num_tiers_; ++i) {
    tiers_[i].ledger->Link(number, parent, map_.node(number).chain_idx);
  }
  return number;
}

// A block whose predecessor was not known, and that nobody stands behind: stored and no more.
bool Retention::MayRelink(BlockNumber number) const {
  const ChainMap::Node& node = map_.node(number);
  uint32_t stored = 0;
  for (size_t i = 0; i < num_tiers_; ++i) {
    if (IsUnclaimed(number, i) || tiers_[i].ledger->IsResident(number)) ++stored;
  }
  return node.parent == kNone && node.refs == stored;
}

void Retention::Relink(BlockNumber number, BlockNumber parent) {
  map_.SetParent(number, parent);
  for (size_t i = 0; i < num_tiers_; ++i) {
    policy::TierLedger& ledger = *tiers_[i].ledger;
    const bool is_resident = ledger.IsResident(number);
    if (is_resident) {
      ledger.SetPinned(number, false);
      ledger.Erase(number);
    }
    ledger.Link(number, parent, map_.node(number).chain_idx);
    if (is_resident) Insert(tiers_[i], number);
  }
}

const policy::Request* Retention::FindTurn(uint64_t number) const {
  if (number == 0) return nullptr;
  const policy::Request* found = nullptr;
  for (size_t i = 0; i < num_tiers_ && found == nullptr; ++i) {
    found = tiers_[i].ledger->FindRequest(number);
  }
  return found;
}

bool Retention::IsSameTurn(const policy::Request& request, const policy::Request& before,
                           const TurnHints& hints) const {
  if (hints.session != 0) {
    const auto session = sessions_.find(hints.session);
    if (hints.turn != 0 && session != sessions_.end() && session->second.turn != 0) {
      return session->second.number == before.number && session->second.turn == hints.turn;
    }
  }
  if (request.time_s - before.time_s >= absl::ToDoubleSeconds(options_.turn_gap)) return false;
  const bool is_part = request.num_blocks <= before.num_blocks;
  return request.seen_blocks >= (is_part ? request.num_blocks : before.num_blocks);
}

void Retention::BeginTurn(const std::vector<BlockNumber>& chain, const TurnHints& hints) {
  policy::Request request;
  request.time_s = NowS();
  request.num_blocks = static_cast<int32_t>(chain.size());
  request.full_blocks =
      hints.full_blocks >= 0 ? std::min(hints.full_blocks, request.num_blocks) : request.num_blocks;
  request.input_tokens =
      hints.input_tokens > 0 ? hints.input_tokens : int64_t{request.full_blocks} * block_tokens_;
  request.output_tokens = hints.output_tokens;
  uint64_t last = 0;  // turn, of the deepest known block
  bool has_place = true;
  for (const BlockNumber number : chain) {
    if (map_.node(number).last_turn == 0) break;
    last = map_.node(number).last_turn;
    has_place = has_place && map_.node(number).is_used;
    ++request.seen_blocks;
  }
  const auto session = sessions_.find(hints.session);
  const bool is_told = hints.session != 0 && session != sessions_.end();
  const policy::Request* before = FindTurn(is_told ? session->second.number : last);
  uint64_t replaced = 0;
  if (before != nullptr && IsSameTurn(request, *before, hints)) {
    // Part of the turn's own prompt: nothing new. (What a turn owns must lie on one chain.)
    if (has_place && last == before->number && request.seen_blocks == request.num_blocks) {
      Apply(hints, before->number, chain);
      return;
    }
    // The whole of it, and more: the turn goes on under a new number. Else a branch of it.
    const bool is_whole = last == before->number && request.seen_blocks >= before->num_blocks;
    replaced = is_whole ? before->number : 0;
    request.seen_blocks = before->seen_blocks;
    request.continues = before->continues;
    request.parent = before->parent;
    request.parent_tokens = before->parent_tokens;
    request.turn = before->turn;
  } else if (before != nullptr) {
    const int32_t seen = request.seen_blocks;
    if (is_told) request.seen_blocks = std::max(request.num_blocks, before->full_blocks + 2);
    policy::ContinueIf(*before, request);
    request.seen_blocks = seen;
  }
  request.number = ++last_number_;
  Arrive(chain, request, replaced);
  Apply(hints, request.number, chain);
}

void Retention::Arrive(const std::vector<BlockNumber>& chain, const policy::Request& request,
                       uint64_t replaced) {
  ++stats_.turns;
  if (request.continues) ++stats_.follow_ups;
  if (replaced != 0) {
    --stats_.turns;
    if (request.continues) --stats_.follow_ups;
  }
  for (const BlockNumber number : chain) {
    ChainMap::Node& node = map_.node(number);
    if (node.last_turn != 0 && node.last_turn != replaced) node.is_again = true;
    node.last_turn = request.number;
    node.is_used = true;
  }
  for (size_t i = 0; i < num_tiers_; ++i) {
    policy::TierLedger& ledger = *tiers_[i].ledger;
    ledger.BeginRequest(request);
    for (const BlockNumber number : chain) {
      if (IsUnclaimed(number, i)) {
        map_.node(number).unclaimed &= static_cast<uint8_t>(~BitOf(i));
        Insert(tiers_[i], number);
      } else if (ledger.IsResident(number)) {
        ledger.Use(number);
      }
    }
    // It owns nothing now, and teaches nothing.
    if (replaced != 0) ledger.SessionOver(replaced);
  }
}

// --- hints ---

bool Retention::Tell(const TurnRequest& request) {
  MutexLock lock(&mutex_);
  std::vector<BlockNumber> chain;
  uint64_t number = 0;
  for (const BlockKey& key : request.keys) {
    const BlockNumber block = map_.Find(key);
    if (block == kNone || map_.node(block).refs == 0 || map_.node(block).last_turn == 0) break;
    chain.push_back(block);
    number = map_.node(block).last_turn;
  }
  const auto session = sessions_.find(request.hints.session);
  if (request.hints.session != 0 && session != sessions_.end()) number = session->second.number;
  if (FindTurn(number) == nullptr) return false;
  Apply(request.hints, number, chain);
  return true;
}

void Retention::Apply(const TurnHints& hints, uint64_t number,
                      const std::vector<BlockNumber>& chain) {
  const double now_s = NowS();
  for (size_t i = 0; i < num_tiers_; ++i) {
    TierState& tier = tiers_[i];
    if (hints.session_over) tier.ledger->SessionOver(number);
    if (hints.returns_within > absl::ZeroDuration()) {
      tier.ledger->ReturnExpected(number, now_s + absl::ToDoubleSeconds(hints.returns_within));
    }
  }
  if (hints.session_over) ++stats_.sessions_over;
  if (hints.pin_for > absl::ZeroDuration()) {
    Pin(chain, now_s + absl::ToDoubleSeconds(hints.pin_for));
  }
  if (hints.session == 0) return;
  if (hints.session_over) {
    sessions_.erase(hints.session);
    return;
  }
  sessions_[hints.session] = {number, hints.turn};
  ForgetSessions();
}

void Retention::ForgetSessions() {
  if (sessions_.size() <= sessions_max_) return;
  absl::erase_if(sessions_,
                 [&](const auto& entry) { return FindTurn(entry.second.number) == nullptr; });
  sessions_max_ = std::max<size_t>(1024, 2 * sessions_.size());
}

void Retention::Pin(const std::vector<BlockNumber>& chain, double until_s) {
  for (const BlockNumber number : chain) {
    const auto [it, is_new] = pin_until_.try_emplace(number, until_s);
    if (is_new) {
      map_.Hold(number);
    } else {
      pins_.erase({it->second, number});
      it->second = std::max(it->second, until_s);
    }
    pins_.emplace(it->second, number);
    map_.node(number).is_pinned = true;
    for (size_t i = 0; i < num_tiers_; ++i) SetPinned(i, number);
  }
}

void Retention::Unpin(BlockNumber number) {
  const auto it = pin_until_.find(number);
  pins_.erase({it->second, number});
  pin_until_.erase(it);
  map_.node(number).is_pinned = false;
  for (size_t i = 0; i < num_tiers_; ++i) SetPinned(i, number);
  map_.Release(number);
}

void Retention::UnpinUntil(double now_s) {
  while (!pins_.empty() && pins_.begin()->first <= now_s) Unpin(pins_.begin()->second);
}

void Retention::SetPinned(size_t tier_idx, BlockNumber number) {
  const ChainMap::Node& node = map_.node(number);
  policy::TierLedger& ledger = *tiers_[tier_idx].ledger;
  if (!ledger.IsResident(number)) return;
  ledger.SetPinned(number, node.is_pinned || (node.aside & BitOf(tier_idx)) != 0);
}

// --- tiers ---

bool Retention::IsUnclaimed(BlockNumber number, size_t tier_idx) const {
  return (map_.node(number).unclaimed & BitOf(tier_idx)) != 0;
}

void Retention::Insert(TierState& tier, BlockNumber number) {
  const ChainMap::Node& node = map_.node(number);
  policy::Request request;
  request.number = node.last_turn;
  request.num_blocks = request.full_blocks = node.chain_idx + 1;
  request.input_tokens = int64_t{request.num_blocks} * block_tokens_;
  tier.ledger->Insert(number, request);
  SetPinned(static_cast<size_t>(&tier - tiers_.data()), number);
}

void Retention::OnPlaced(const BlockKey& key, TierKind tier_kind, int64_t record_bytes) {
  const size_t tier_idx = IdxOf(tier_kind);
  MutexLock lock(&mutex_);
  TierState& tier = tiers_[tier_idx];
  const BlockNumber number = NumberFor(key, kNone);
  map_.Hold(number);
  ++tier.blocks;
  tier.bytes += record_bytes;
  if (!map_.node(number).is_used) {  // found on disk
    map_.node(number).unclaimed |= BitOf(tier_idx);
    tier.unclaimed.push_back(number);
  } else {
    Insert(tier, number);
  }
  TellTierBlocks(tier);
}

void Retention::OnRemoved(const BlockKey& key, TierKind tier_kind, int64_t record_bytes) {
  const size_t tier_idx = IdxOf(tier_kind);
  MutexLock lock(&mutex_);
  TierState& tier = tiers_[tier_idx];
  const BlockNumber number = map_.Find(key);
  KVSTOW_CHECK(number != kNone);
  --tier.blocks;
  tier.bytes -= record_bytes;
  ChainMap::Node& node = map_.node(number);
  node.aside &= static_cast<uint8_t>(~BitOf(tier_idx));
  if (IsUnclaimed(number, tier_idx)) {
    node.unclaimed &= static_cast<uint8_t>(~BitOf(tier_idx));
  } else {
    tier.ledger->SetPinned(number, false);
    tier.ledger->Erase(number);
  }
  map_.Release(number);
}

void Retention::TellTierBlocks(TierState& tier) {
  const int64_t blocks = std::max<int64_t>(
      1, static_cast<int64_t>(static_cast<double>(tier.capacity_bytes) /
                              static_cast<double>(std::max<int64_t>(1, tier.bytes)) *
                              static_cast<double>(tier.blocks)));
  if (std::abs(blocks - tier.told_blocks) <= tier.told_blocks / 10) return;
  tier.told_blocks = blocks;
  tier.policy->SetTierBlocks(0, blocks);
}

// --- leaving ---

BlockNumber Retention::FirstUnclaimed(size_t tier_idx) {
  std::deque<BlockNumber>& unclaimed = tiers_[tier_idx].unclaimed;
  while (!unclaimed.empty() && !IsUnclaimed(unclaimed.front(), tier_idx)) unclaimed.pop_front();
  return unclaimed.empty() ? kNone : unclaimed.front();
}

std::optional<BlockKey> Retention::ChooseIdle(TierKind tier_kind, absl::Duration ttl) {
  constexpr policy::ExtentSlot kLooksMax = 4096;
  const size_t tier_idx = IdxOf(tier_kind);
  MutexLock lock(&mutex_);
  if (tier_idx >= num_tiers_) return std::nullopt;
  const double before_s = NowS() - absl::ToDoubleSeconds(ttl);
  TierState& tier = tiers_[tier_idx];
  // The last use of what was found at the start is not known: the start counts.
  if (const BlockNumber first = FirstUnclaimed(tier_idx); first != kNone && before_s >= 0) {
    return map_.node(first).key;
  }
  const policy::ExtentSlot num_slots = tier.tree.num_extent_slots();
  for (policy::ExtentSlot look = 0; look < std::min(kLooksMax, num_slots); ++look) {
    if (tier.idle_cursor >= num_slots) tier.idle_cursor = 0;
    const policy::Extent& extent = tier.tree.extent(tier.idle_cursor);
    // An extent stays under the cursor until nothing of it may leave.
    if (tier.tree.MayShrink(tier.idle_cursor) &&
        tier.tree.owner(extent.owner).request.time_s <= before_s) {
      return map_.node(extent.deepest).key;
    }
    ++tier.idle_cursor;
  }
  return std::nullopt;
}

std::optional<BlockKey> Retention::Choose(TierKind tier_kind) {
  const size_t tier_idx = IdxOf(tier_kind);
  MutexLock lock(&mutex_);
  if (tier_idx >= num_tiers_) return std::nullopt;
  if (!pins_.empty()) UnpinUntil(NowS());
  TierState& tier = tiers_[tier_idx];
  BlockNumber victim = FirstUnclaimed(tier_idx);
  if (victim == kNone) victim = tier.ledger->ChooseVictim(0);
  // Pins by hints give way before a write is refused; the earliest end first.
  while (victim == kNone && !pins_.empty()) {
    Unpin(pins_.begin()->second);
    victim = tier.ledger->ChooseVictim(0);
  }
  if (victim == kNone) return std::nullopt;
  return map_.node(victim).key;
}

void Retention::SetAside(TierKind tier_kind, const BlockKey& key) {
  const size_t tier_idx = IdxOf(tier_kind);
  MutexLock lock(&mutex_);
  const BlockNumber number = map_.Find(key);
  if (number == kNone) return;
  TierState& tier = tiers_[tier_idx];
  ChainMap::Node& node = map_.node(number);
  if (IsUnclaimed(number, tier_idx)) {
    // In use is used: a turn of its own.
    node.unclaimed &= static_cast<uint8_t>(~BitOf(tier_idx));
    node.last_turn = ++last_number_;
    node.is_used = true;
    Insert(tier, number);
  }
  if (!tier.ledger->IsResident(number) || (node.aside & BitOf(tier_idx)) != 0) return;
  node.aside |= BitOf(tier_idx);
  tier.aside.push_back(number);
  SetPinned(tier_idx, number);
}

void Retention::TakeBack(TierKind tier_kind) {
  const size_t tier_idx = IdxOf(tier_kind);
  MutexLock lock(&mutex_);
  if (tier_idx >= num_tiers_) return;
  TierState& tier = tiers_[tier_idx];
  for (const BlockNumber number : tier.aside) {
    ChainMap::Node& node = map_.node(number);
    if ((node.aside & BitOf(tier_idx)) == 0) continue;
    node.aside &= static_cast<uint8_t>(~BitOf(tier_idx));
    SetPinned(tier_idx, number);
  }
  tier.aside.clear();
}

bool Retention::IsUsedAgain(const BlockKey& key) const {
  MutexLock lock(&mutex_);
  const BlockNumber number = map_.Find(key);
  return number != kNone && map_.node(number).is_again;
}

Retention::Stats Retention::stats() const {
  MutexLock lock(&mutex_);
  Stats stats = stats_;
  stats.pinned_blocks = static_cast<int64_t>(pins_.size());
  stats.memory_bytes = map_.memory_bytes();
  for (const TierState& tier : tiers_) stats.memory_bytes += tier.tree.memory_bytes();
  return stats;
}

}  // namespace kvstow
