// Retention: which block leaves a tier next. It knows the turns that used the blocks and asks the
// policy (policy/policy.h, the classes that the simulator runs); it holds no bytes.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto retention, Retention::Create(options, &clock));
//   auto use = retention->Use({.keys = keys});                 // a turn arrives
//   ... OnPlaced and OnRemoved, from the index ...
//   std::optional<BlockKey> victim = retention->Choose(TierKind::kDram);
//   ... take it out of the tier, or say that it is in use: retention->SetAside(...) ...
//
// Each tier has a policy of its own, since a block may be in several; turns are told to all.
//
// Turns are found from the prompts: keys of a call follow each other, a block has one predecessor,
// and a turn continues the last one that used its deepest known block (policy/sessions.h). Keys
// that do not follow each other are taken apart into several turns.
//
// Bounded: about 64 bytes per block that is stored, being written or on the way to one, 32 more per
// tier, 56 per extent, about 250 per turn that owns blocks or is younger than 5,000 s, and a table
// of fixed size for blocks that are gone.
//
// Thread safety: all methods may be called at once; none blocks or calls out. Lock order: last.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"
#include "storage/chain_map.h"
#include "storage/index_shard.h"
#include "storage/policy/block_tree.h"
#include "storage/policy/ledger.h"
#include "storage/policy/policy.h"
#include "storage/tier.h"
#include "storage/turn.h"
#include "storage/turn_history.h"

namespace kvstow {

class Retention;

// While it lives, the blocks of a call to Use keep their place in the chain, stored or not. Must
// not outlive the Retention.
class TurnUse {
 public:
  explicit TurnUse(Retention* retention) : retention_(retention) {}
  TurnUse(const TurnUse&) = delete;
  TurnUse& operator=(const TurnUse&) = delete;
  ~TurnUse();

 private:
  friend class Retention;
  Retention* const retention_;
  std::vector<BlockNumber> numbers_;
};

class Retention final : public ResidencyListener {
 public:
  struct Options {
    std::string policy = "rtv";
    double alpha = 0.1;
    absl::Duration turn_gap = absl::Seconds(5);
    std::array<int64_t, kNumStoreTiers> tier_bytes{0, 1, 0};  // by TierIdx; 0: no such tier
    int64_t blocks_max = 0;                                   // blocks of the index
  };
  // kInvalidArgument: an unknown policy (the nearest is named), or an oracle.
  static absl::StatusOr<std::unique_ptr<Retention>> Create(const Options& options,
                                                           const Clock* clock);

  // A turn arrives and uses `request.keys`: those that are stored now, and those that are placed
  // while the result lives.
  std::shared_ptr<const TurnUse> Use(const TurnRequest& request);
  // Applies the hints to the turn that used the deepest known of the keys, or to the session's last
  // one. No use. False where no such turn is known.
  bool Tell(const TurnRequest& request);

  void OnPlaced(const BlockKey& key, TierKind tier, int64_t record_bytes) override;
  void OnRemoved(const BlockKey& key, TierKind tier, int64_t record_bytes) override;

  // The block that `tier` should give up; nothing where all that is there is set aside.
  std::optional<BlockKey> Choose(TierKind tier);
  // A block of `tier` that no turn has used for `ttl`, deepest first; nothing where none is found
  // among the next few thousand turns' blocks. Call again later: the search goes on from there.
  std::optional<BlockKey> ChooseIdle(TierKind tier, absl::Duration ttl);
  // The block is in use: it is not offered again until TakeBack.
  void SetAside(TierKind tier, const BlockKey& key);
  void TakeBack(TierKind tier);

  size_t num_tiers() const { return num_tiers_; }
  // What the policies have learned, fastest tier first; and to go on from there in a later process.
  // False: no such numbers, or other tiers.
  std::vector<std::vector<double>> Learned() const;
  bool Restore(const std::vector<std::vector<double>>& tiers);

  // The turns whose blocks are in the last tier; and the way back in a later process, before
  // anything is placed: whose blocks they are stays known while they are held or placed.
  // kInvalidArgument: it is not sound.
  TurnHistory History() const;
  absl::StatusOr<std::shared_ptr<const TurnUse>> Recall(const TurnHistory& history);

  // Used by more than one turn, as far as is remembered.
  bool IsUsedAgain(const BlockKey& key) const;

  struct Stats {
    int64_t turns = 0, follow_ups = 0, sessions_over = 0;  // counters
    int64_t pinned_blocks = 0;                             // by hints
    int64_t memory_bytes = 0;                              // about
  };
  Stats stats() const;

 private:
  friend class TurnUse;
  struct TierState {
    policy::BlockTree tree;
    std::unique_ptr<policy::Policy> policy;
    std::unique_ptr<policy::TierLedger> ledger;
    std::deque<BlockNumber> unclaimed;  // found at the start, oldest first; stale ones are skipped
    std::vector<BlockNumber> aside;     // likewise
    int64_t capacity_bytes = 0;
    int64_t bytes = 0;
    int64_t blocks = 0;
    int64_t told_blocks = 1;             // last SetTierBlocks
    policy::ExtentSlot idle_cursor = 0;  // of ChooseIdle
  };
  struct Session {
    uint64_t number = 0;  // of its last turn
    uint32_t turn = 0;    // as hinted
  };

  Retention(const Options& options, const Clock* clock);

  void Release(const std::vector<BlockNumber>& numbers);
  // The place in tiers_; num_tiers_ or more where there is no such tier.
  size_t IdxOf(TierKind tier) const { return TierIdx(tier) - first_tier_; }

  // All below: with the lock held.
  double NowS();  // seconds since the start; a step back counts as none
  // Numbers for the keys from `begin` on, as long as each follows the one before; appends them,
  // held. Returns the end.
  size_t LinkKeys(const TurnRequest& request, size_t begin, std::vector<BlockNumber>& numbers);
  BlockNumber NumberFor(const BlockKey& key, BlockNumber parent);
  bool MayRelink(BlockNumber number) const;
  void Relink(BlockNumber number, BlockNumber parent);
  void BeginTurn(const std::vector<BlockNumber>& chain, const TurnHints& hints);
  // Blocks of the last tier, those of the newest turns first, no more than a history holds.
  std::vector<BlockNumber> NewestStored() const;
  const policy::Request* FindTurn(uint64_t number) const;
  bool IsSameTurn(const policy::Request& request, const policy::Request& before,
                  const TurnHints& hints) const;
  void Arrive(const std::vector<BlockNumber>& chain, const policy::Request& request,
              uint64_t replaced);
  void Apply(const TurnHints& hints, uint64_t number, const std::vector<BlockNumber>& chain);
  void Pin(const std::vector<BlockNumber>& chain, double until_s);
  void Unpin(BlockNumber number);
  void UnpinUntil(double now_s);
  void Insert(TierState& tier, BlockNumber number);
  bool IsUnclaimed(BlockNumber number, size_t tier_idx) const;
  // The first block of `tier_idx` that was found at the start and not used since, or kNone.
  BlockNumber FirstUnclaimed(size_t tier_idx);
  void SetPinned(size_t tier_idx, BlockNumber number);
  void TellTierBlocks(TierState& tier);
  void ForgetSessions();

  const Options options_;
  const Clock* const clock_;
  const absl::Time start_;
  const size_t first_tier_;  // dram is always there, and all between the first and the last
  const size_t num_tiers_;

  mutable Mutex mutex_;
  ChainMap map_;
  std::array<TierState, kNumStoreTiers> tiers_;  // fastest first, from first_tier_ on
  absl::flat_hash_map<uint64_t, Session> sessions_;
  size_t sessions_max_ = 1024;                          // then those that are forgotten go
  std::set<std::pair<double, BlockNumber>> pins_;       // by end
  absl::flat_hash_map<BlockNumber, double> pin_until_;  // the same
  uint64_t last_number_ = 0;                            // of a turn
  double last_s_ = 0;
  int32_t block_tokens_ = 64;  // as last told
  Stats stats_;
};

}  // namespace kvstow
