// Policy: which block leaves a tier next. One interface for every rule, for the simulator and for a
// live store alike.
//
//   BlockTree tree;
//   ASSIGN policy = MakePolicy("rtv", {.tier_blocks = {5000}}, tree);
//   TierLedger ledger(1, &tree, policy.get());          // ledger.h: sends the events below in
//   order
//
// Blocks are small numbers given by the store, one block per number; a prompt is a chain of them,
// and a block has one predecessor for ever. Time is passed in: seconds from any start, never back.
//
// Thread safety: none. The owner of the ledger holds a lock or runs on one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvstow::policy {

class BlockTree;
class Future;

using BlockNumber = uint32_t;
using OwnerSlot = uint32_t;   // a request in a BlockTree
using ExtentSlot = uint32_t;  // the blocks of one request in one tier
inline constexpr uint32_t kNone = 0xffffffff;
inline constexpr int kTiersMax = 4;

// What is known of a request (one turn of a session) when it arrives.
struct Request {
  uint64_t number = 0;  // increases from request to request
  double time_s = 0;
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;  // 0 where not known yet
  int32_t num_blocks = 0;     // of the prompt, the partial last one included
  int32_t full_blocks = 0;    // whole ones: what a follow-up turn needs back
  int32_t seen_blocks = 0;    // leading blocks that any earlier request had
  int32_t turn = 1;           // within its session
  bool continues = false;     // a follow-up turn of `parent`
  uint64_t parent = 0;        // meaningful if `continues`
  int64_t parent_tokens = 0;  // input and output of the parent
};

class Policy {
 public:
  virtual ~Policy() = default;

  virtual std::string_view name() const = 0;

  // Time has come to `now_s`. Called before everything that happens then.
  virtual void OnTime(double now_s) {}

  // `request` arrives and is `owner` in the tree. OnHit or OnInsert follow for each of its blocks,
  // in the order of the chain.
  virtual void OnRequest(const Request& request, OwnerSlot owner) {}

  // `request` arrived in an earlier process and is `owner` now; its blocks follow by OnInsert.
  // Called after Restore and before the first request, in the order of arrival.
  virtual void OnRecall(const Request& request, OwnerSlot owner) {
    Request alone = request;
    alone.continues = false;
    OnRequest(alone, owner);
  }

  // The session of `owner` is over: its client will not send another turn.
  virtual void OnSessionOver(OwnerSlot owner) {}

  // The client of `owner` says that it sends the next turn by `at_s`.
  virtual void OnReturnExpected(OwnerSlot owner, double at_s) {}

  // Whether the policy still means something by a block that is in no tier: its number must not
  // become another block's.
  virtual bool Remembers(BlockNumber block) const { return false; }

  // A tier now holds about so many blocks: their sizes have become known, or have changed.
  virtual void SetTierBlocks(int tier, int64_t blocks) {}

  // The arriving request uses `block`, which was in `from_tier` and is in tier 0 from now on.
  virtual void OnHit(BlockNumber block, int from_tier) {}

  // `block` enters `tier`: tier 0 as a new block of the arriving request, another one by demotion.
  virtual void OnInsert(BlockNumber block, int tier) {}

  // `block` has left `tier`: evicted (OnInsert follows if to another tier) or deleted.
  virtual void OnErase(BlockNumber block, int tier) {}

  // The extent changed: its count, its deepest block, or whether it may be evicted. A count of zero
  // means it is gone, and its slot will mean another extent. Sent once before the next
  // ChooseVictim.
  virtual void OnExtent(ExtentSlot extent) {}

  // What was learned, in numbers for Restore in a later process; empty: nothing is.
  virtual std::vector<double> Learned() const { return {}; }
  // Goes on from there. False: not numbers that this policy can have learned; nothing has changed.
  virtual bool Restore(absl::Span<const double> learned) { return learned.empty(); }

  // The block of `tier` to give up first: never one with a resident child in that tier, never a
  // pinned one. kNone when there is none. Called again without an event, it names the same block.
  virtual BlockNumber ChooseVictim(int tier) = 0;
};

struct PolicyOptions {
  // Capacity of each tier in blocks; `arc` and `s3fifo` size their queues and ghosts by it.
  std::vector<int64_t> tier_blocks;
  // rtv: weight of whole sessions against single blocks, in [0, 1]. More gives more sessions found
  // whole, fewer block hits and, past .3, slower first tokens.
  double alpha = 0.1;
  // hazard: width in seconds of the window in which a return counts.
  double hazard_window_s = 60;
  // The oracles' knowledge; they cannot be made without it. Must outlive the policy.
  const Future* future = nullptr;

  // kInvalidArgument names the field and the limit.
  absl::Status Validate() const;
};

struct PolicyKind {
  std::string_view name;
  std::string_view about;  // one line for people
  bool is_oracle = false;
  bool has_ghosts = false;  // remembers as many blocks that are gone as there are in a tier
};

// Every policy, baselines first, oracles last.
const std::vector<PolicyKind>& AllPolicies();

// `tree` must outlive the policy.
//   kInvalidArgument     options; an unknown name (the nearest is named)
//   kFailedPrecondition  an oracle without `future`
absl::StatusOr<std::unique_ptr<Policy>> MakePolicy(std::string_view name,
                                                   const PolicyOptions& options,
                                                   const BlockTree& tree);

}  // namespace kvstow::policy
