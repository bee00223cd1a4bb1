// Each policy on small cases made by hand; the block tree; rtv against a plain rewriting of its
// rule.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "storage/policy/block_tree.h"
#include "storage/policy/keyed_heaps.h"
#include "storage/policy/ledger.h"
#include "storage/policy/return_model.h"
#include "storage/policy/seen_table.h"
#include "storage/policy/sessions.h"
#include "storage/policy/simulator.h"
#include "tests/testing/rng.h"

namespace kvstow::policy {
namespace {

// One or more tiers under a policy, driven by hand.
class Tiers {
 public:
  Tiers(std::string_view policy, std::vector<int64_t> blocks, PolicyOptions options = {})
      : blocks_(std::move(blocks)) {
    options.tier_blocks = blocks_;
    policy_ = *MakePolicy(policy, options, tree_);
    ledger_ = std::make_unique<TierLedger>(static_cast<int>(blocks_.size()), &tree_, policy_.get());
  }

  // A prompt of blocks of 10 tokens, whole but for the last. Returns the number of leading hits.
  int Send(double time_s, const std::vector<BlockNumber>& chain, Request request = {}) {
    request.number = ++number_;
    request.time_s = time_s;
    request.num_blocks = static_cast<int32_t>(chain.size());
    if (request.full_blocks == 0) request.full_blocks = request.num_blocks;
    request.input_tokens = 10 * request.full_blocks + (request.full_blocks < request.num_blocks);
    ledger_->BeginRequest(request);
    int hits = 0;
    bool is_leading = true;
    for (const BlockNumber block : chain) {
      is_leading = ledger_->Touch(block) >= 0 && is_leading;
      hits += is_leading ? 1 : 0;
    }
    return hits;
  }

  // Evicts down to the capacities; the victims of tier 0 in order.
  std::vector<BlockNumber> Shrink() {
    std::vector<BlockNumber> victims;
    for (size_t t = 0; t < blocks_.size(); ++t) {
      while (ledger_->num_blocks(static_cast<int>(t)) > blocks_[t]) {
        const BlockNumber block = ledger_->Evict(static_cast<int>(t));
        if (block == kNone) return victims;
        if (t == 0) victims.push_back(block);
      }
    }
    return victims;
  }

  uint64_t number() const { return number_; }
  TierLedger& ledger() { return *ledger_; }
  const BlockTree& tree() const { return tree_; }

 private:
  std::vector<int64_t> blocks_;
  BlockTree tree_;
  std::unique_ptr<Policy> policy_;
  std::unique_ptr<TierLedger> ledger_;
  uint64_t number_ = 0;
};

using Blocks = std::vector<BlockNumber>;

TEST(Lru, OldestRequestLeavesDeepestBlockFirst) {
  Tiers tiers("lru", {4});
  tiers.Send(0, {0, 1, 2});
  tiers.Send(1, {10, 11, 12});
  EXPECT_EQ(tiers.Shrink(), (Blocks{2, 1}));
  EXPECT_EQ(tiers.Send(2, {0, 1}), 1);
  EXPECT_EQ(tiers.Shrink(), (Blocks{12}));
}

TEST(Lru, SharedPrefixBelongsToTheNewestUser) {
  Tiers tiers("lru", {4});
  tiers.Send(0, {0, 1, 2});
  tiers.Send(1, {10, 11});
  tiers.Send(2, {0, 5});
  // 1 and 2 are left to the oldest request; 0 went to the newest.
  EXPECT_EQ(tiers.Shrink(), (Blocks{2, 1}));
  EXPECT_EQ(tiers.tree().TierOf(0), 0);
}

TEST(Ledger, EvictedBlocksGoDownTierByTierAndHitsBringThemUp) {
  Tiers tiers("lru", {2, 2, 1});
  tiers.Send(0, {0, 1});
  tiers.Send(1, {2, 3, 4});
  tiers.Shrink();
  EXPECT_EQ(tiers.tree().TierOf(2), 0);
  EXPECT_EQ(tiers.tree().TierOf(3), 0);
  EXPECT_EQ(tiers.tree().TierOf(4), 1);
  EXPECT_EQ(tiers.tree().TierOf(0), 1);
  EXPECT_EQ(tiers.tree().TierOf(1), 2);
  EXPECT_EQ(tiers.Send(2, {0, 1}), 2);
  tiers.Shrink();
  EXPECT_EQ(tiers.tree().TierOf(1), 0);
  EXPECT_EQ(tiers.tree().TierOf(4), 2);
}

TEST(Ledger, PinnedBlocksAndWhatLiesAboveThemStay) {
  Tiers tiers("rtv", {2});
  tiers.Send(0, {0, 1, 2});
  tiers.ledger().SetPinned(2, true);
  tiers.Send(1, {5});
  EXPECT_EQ(tiers.Shrink(), (Blocks{5}));  // then everything left hangs on the pin
  EXPECT_EQ(tiers.ledger().ChooseVictim(0), kNone);
  tiers.ledger().SetPinned(2, false);
  EXPECT_EQ(tiers.Shrink(), (Blocks{2}));
}

TEST(Ledger, ABlockInTheMiddleMayBeErased) {
  Tiers tiers("lru", {10});
  tiers.Send(0, {0, 1, 2, 3});
  tiers.ledger().Erase(3);
  tiers.ledger().Erase(1);
  EXPECT_EQ(tiers.ledger().Evict(0), 2u);
  EXPECT_EQ(tiers.ledger().Evict(0), 0u);
  EXPECT_EQ(tiers.ledger().Evict(0), kNone);
  EXPECT_EQ(tiers.ledger().num_blocks(0), 0);
}

TEST(SeenTable, RemembersTheLastUserAndForgetsTheOldestOfARow) {
  SeenTable seen(64);
  ::kvstow::testing::Rng rng(5);
  std::vector<uint64_t> hashes;
  for (uint64_t number = 1; number <= 1000; ++number) {
    hashes.push_back(rng.Next());
    seen.Put(hashes.back(), number);
    EXPECT_EQ(seen.Find(hashes.back()), number);
  }
  seen.Put(hashes.back(), 2000);
  EXPECT_EQ(seen.Find(hashes.back()), 2000u);
  int64_t found = 0;
  for (uint64_t i = 0; i < hashes.size(); ++i) {
    const uint64_t number = seen.Find(hashes[i]);
    EXPECT_TRUE(number == 0 || number == i + 1 || number == 2000);
    found += number == 0 ? 0 : 1;
    if (i < 500) {
      EXPECT_EQ(number, 0u) << "an old one has pushed a new one out";
    }
  }
  EXPECT_GT(found, 48);
  EXPECT_LE(found, 64);
  EXPECT_EQ(seen.Find(rng.Next()), 0u);
  EXPECT_EQ(seen.memory_bytes(), 64 * 8);
}

TEST(BlockTree, ForgetsOldRequestsThatOwnNothing) {
  BlockTree tree(100);
  Request request;
  request.number = 1;
  const OwnerSlot first = tree.AddOwner(request);
  tree.Link(0, kNone, 0);
  tree.Take(first, 0);
  request.number = 2;
  tree.AddOwner(request);
  tree.Forget(101);
  EXPECT_EQ(tree.FindOwner(1), first);  // owns block 0
  EXPECT_EQ(tree.FindOwner(2), kNone);
  tree.Drop(0);
  EXPECT_EQ(tree.FindOwner(1), kNone);
}

TEST(Gdsf, KeepsTheSmallSessionOfManyTurns) {
  Tiers tiers("gdsf", {6});
  tiers.Send(0, {0, 1}, {.turn = 3});  // 3 / 2
  tiers.Send(1, {2, 3, 4, 5, 6, 7});   // 1 / 6
  EXPECT_EQ(tiers.Shrink(), (Blocks{7, 6}));
  tiers.Send(2, {8});  // clock 1 / 6 + 1
  EXPECT_EQ(tiers.Shrink(), (Blocks{5}));
}

TEST(Arc, BlocksUsedTwiceOutliveAScan) {
  Tiers tiers("arc", {4});
  tiers.Send(0, {0, 1});
  tiers.Send(1, {0, 1});
  for (BlockNumber i = 10; i < 30; ++i) {
    tiers.Send(i, {i});
    tiers.Shrink();
  }
  EXPECT_EQ(tiers.Send(40, {0, 1}), 2);
}

TEST(Arc, AGhostComesBackAsUsedTwice) {
  Tiers tiers("arc", {2});
  tiers.Send(0, {0});
  tiers.Send(1, {0});  // used again: queue two
  tiers.Send(2, {1});
  tiers.Send(3, {2});
  EXPECT_EQ(tiers.Shrink(), (Blocks{1}));
  tiers.Send(4, {1});                      // a ghost of "once": the border moves towards once
  EXPECT_EQ(tiers.Shrink(), (Blocks{0}));  // so that now the other queue pays
  EXPECT_EQ(tiers.Send(5, {2}), 1);
}

TEST(S3Fifo, OneShotBlocksLeaveBeforeUsedOnesAndGhostsGoToMain) {
  Tiers tiers("s3fifo", {10});
  tiers.Send(0, {0});
  tiers.Send(1, {0});
  tiers.Send(2, {0});  // used twice after it came: to the main queue
  for (BlockNumber i = 10; i < 20; ++i) {
    tiers.Send(i, {i});
    tiers.Shrink();
  }
  EXPECT_EQ(tiers.tree().TierOf(0), 0);
  EXPECT_EQ(tiers.tree().TierOf(10), -1);
  tiers.Send(30, {10});  // remembered
  for (BlockNumber i = 40; i < 47; ++i) {
    tiers.Send(i, {i});
    tiers.Shrink();
  }
  EXPECT_EQ(tiers.tree().TierOf(10), 0);
}

TEST(Hazard, TheClassThatNeverReturnsLeavesFirst) {
  Tiers tiers("hazard", {3});
  double now = 0;
  BlockNumber next = 100;
  for (int i = 0; i < 40; ++i) {  // turn 1 returns after 10 s, turn 2 never does
    tiers.Send(now, {next, next + 1});
    tiers.Send(now + 10, {next, next + 1, next + 2},
               {.seen_blocks = 2, .turn = 2, .continues = true, .parent = tiers.number()});
    tiers.Shrink();
    now += 20;
    next += 3;
  }
  now += 1000;
  tiers.Send(now, {1}, {.turn = 2});
  tiers.Send(now + 1, {2}, {.turn = 1});
  tiers.Send(now + 2, {3}, {.turn = 2});
  tiers.Shrink();
  tiers.Send(now + 3, {4}, {.turn = 1});
  EXPECT_EQ(tiers.Shrink(), (Blocks{1}));
}

// Four requests of two blocks; 0 returns at 50, 1 at 20, 2 and 3 never.
class ToldTest : public ::testing::Test {
 protected:
  ToldTest() {
    trace_ = *ParseTrace(
        R"({"timestamp": 0, "input_length": 20, "output_length": 1, "hash_ids": [0, 1]}
{"timestamp": 1000, "input_length": 20, "output_length": 1, "hash_ids": [2, 3]}
{"timestamp": 2000, "input_length": 20, "output_length": 1, "hash_ids": [4, 5]}
{"timestamp": 3000, "input_length": 20, "output_length": 1, "hash_ids": [6, 7]}
{"timestamp": 20000, "input_length": 30, "output_length": 1, "hash_ids": [2, 3, 8]}
{"timestamp": 50000, "input_length": 30, "output_length": 1, "hash_ids": [0, 1, 9]}
)",
        TraceFormat::kMooncake, {.block_tokens = 10});
    requests_ = FindSessions(trace_);
    future_ = std::make_unique<Future>(trace_, requests_);
  }

  // The victims after the first four requests, until two blocks are left.
  Blocks Victims(std::string_view name) {
    BlockTree tree;
    PolicyOptions options;
    options.tier_blocks = {2};
    options.future = future_.get();
    const std::unique_ptr<Policy> policy = *MakePolicy(name, options, tree);
    TierLedger ledger(1, &tree, policy.get());
    for (size_t i = 0; i < 4; ++i) {
      ledger.BeginRequest(requests_[i]);
      for (const BlockNumber block : trace_.Chain(i)) ledger.Touch(block);
    }
    Blocks victims;
    while (ledger.num_blocks(0) > 2) victims.push_back(ledger.Evict(0));
    return victims;
  }

  Trace trace_;
  std::vector<Request> requests_;
  std::unique_ptr<Future> future_;
};

TEST_F(ToldTest, WhoGivesUpThoseThatNeverReturnOldestFirst) {
  EXPECT_EQ(Victims("told-who"), (Blocks{5, 4, 7, 6, 1, 0}));
}

TEST_F(ToldTest, BothGivesUpTheLatestReturnNext) {
  EXPECT_EQ(Victims("told-both"), (Blocks{5, 4, 7, 6, 1, 0}));
  requests_[4].time_s = 60;  // now 1 returns after 0
  future_ = std::make_unique<Future>(trace_, requests_);
  EXPECT_EQ(Victims("told-both"), (Blocks{5, 4, 7, 6, 3, 2}));
  EXPECT_EQ(Victims("told-who"), (Blocks{5, 4, 7, 6, 1, 0}));
}

TEST_F(ToldTest, BeladyGivesUpTheLastUseAndNeverUsedFirst) {
  const Blocks victims = Victims("belady");
  ASSERT_EQ(victims.size(), 6u);
  EXPECT_EQ((Blocks{victims[4], victims[5]}), (Blocks{1, 0}));
}

TEST_F(ToldTest, OraclesRefuseToBeMadeWithoutAFuture) {
  BlockTree tree;
  EXPECT_EQ(MakePolicy("belady", {.tier_blocks = {5}}, tree).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(MakePolicy, NamesTheNearestAndChecksOptions) {
  BlockTree tree;
  const absl::Status unknown = MakePolicy("rvt", {.tier_blocks = {5}}, tree).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(unknown.message()).find("did you mean rtv"), std::string::npos) << unknown;
  EXPECT_FALSE(MakePolicy("lru", {}, tree).ok());
  EXPECT_FALSE(MakePolicy("lru", {.tier_blocks = {0}}, tree).ok());
  EXPECT_FALSE(MakePolicy("rtv", {.tier_blocks = {5}, .alpha = 1.5}, tree).ok());
}

TEST(KeyedHeaps, AgreeWithASortedListUnderRandomChanges) {
  testing::Rng rng(11);
  KeyedHeaps heaps(2);
  std::vector<std::pair<int, double>> model(50, {-1, 0});
  for (int step = 0; step < 20000; ++step) {
    const auto element = static_cast<uint32_t>(rng.Below(50));
    if (rng.Below(4) == 0) {
      heaps.Remove(element);
      model[element].first = -1;
    } else {
      model[element] = {static_cast<int>(rng.Below(2)), static_cast<double>(rng.Below(30))};
      heaps.Set(element, model[element].first, {model[element].second, element});
    }
    for (int heap = 0; heap < 2; ++heap) {
      uint32_t lowest = kNone;
      for (uint32_t i = 0; i < 50; ++i) {
        if (model[i].first != heap) continue;
        if (lowest == kNone || model[i].second < model[lowest].second) lowest = i;
      }
      ASSERT_EQ(heaps.empty(heap), lowest == kNone) << "step " << step;
      if (lowest == kNone) continue;
      ASSERT_EQ(heaps.top(heap).element, lowest) << "step " << step;
    }
  }
}

TEST(ReturnModel, LearnsWhoReturnsAndTheIndexFollows) {
  ReturnModel model;
  const ReturnFeatures one = ReturnModel::FeaturesOf({.input_tokens = 100, .output_tokens = 5});
  const ReturnFeatures two = ReturnModel::FeaturesOf(
      {.input_tokens = 9000, .output_tokens = 900, .seen_blocks = 4, .turn = 4, .continues = true});
  for (int i = 0; i < 500; ++i) {
    for (int bin = 0; bin < 3; ++bin) model.Learn(one, bin, false);
    model.Learn(two, 0, false);
    model.Learn(two, 1, true);
  }
  EXPECT_GT(model.Hazard(two, 1), 0.8);
  EXPECT_LT(model.Hazard(one, 1), 0.1);
  EXPECT_GT(model.Index(two, 0), 3 * model.Index(one, 0));
  // About to return in bin 1: worth more once bin 0 has passed.
  EXPECT_GT(model.Index(two, 1), model.Index(two, 2));
  EXPECT_DOUBLE_EQ(model.Index(two, 23) / 1.5, model.Index(two, 24));
}

TEST(Rtv, AHintThatTheSessionIsOverMakesItLeaveFirst) {
  Tiers tiers("rtv", {4});
  tiers.Send(0, {0, 1});
  tiers.Send(1, {2, 3});
  tiers.Send(2, {4, 5});
  tiers.ledger().SessionOver(2);
  EXPECT_EQ(tiers.Shrink(), (Blocks{3, 2}));
}

TEST(Rtv, TheTailOfAContinuedRequestLeavesFirst) {
  Tiers tiers("rtv", {5});
  tiers.Send(0, {0, 1, 2}, {.full_blocks = 2});
  tiers.Send(1, {10, 11, 12}, {.full_blocks = 2});
  tiers.Send(30, {10, 11, 13},
             {.full_blocks = 2, .seen_blocks = 2, .turn = 2, .continues = true, .parent = 2});
  EXPECT_EQ(tiers.Shrink()[0], 12u);
}

// The rule of rtv again, written plainly: every candidate scored at every decision.
class PlainRtv {
 public:
  PlainRtv(const BlockTree& tree, double alpha) : tree_(tree), alpha_(alpha) {}

  void OnRequest(const Request& request, OwnerSlot owner) {
    now_s_ = request.time_s;
    for (int bin = 0; bin < ReturnModel::kBins; ++bin) {
      for (Turn& turn : turns_) {
        if (turn.bin != bin || turn.time_s > now_s_ - model_.EdgeOf(bin + 1)) continue;
        turn.bin = bin + 1;
        turn.is_entering = true;
        if (!turn.is_returned) model_.Learn(turn.features, bin, false);
      }
    }
    for (Turn& turn : turns_) {
      if (turn.is_entering) turn.index = model_.Index(turn.features, turn.bin);
      turn.is_entering = false;
    }
    if (request.continues) OnReturn(request);
    mean_blocks_ += 0.005 * (request.num_blocks - mean_blocks_);
    Turn turn{request.number, request.time_s, ReturnModel::FeaturesOf(request)};
    turn.num_blocks = request.num_blocks;
    turn.need = request.full_blocks;
    turn.index = model_.Index(turn.features, 0);
    turns_.push_back(turn);
  }

  BlockNumber ChooseVictim(int tier) const {
    double lowest = std::numeric_limits<double>::infinity();
    uint64_t oldest = 0;
    BlockNumber victim = kNone;
    for (ExtentSlot slot = 0; slot < tree_.num_extent_slots(); ++slot) {
      const Extent& extent = tree_.extent(slot);
      if (extent.count == 0 || extent.tier != tier || !tree_.MayShrink(slot)) continue;
      const uint64_t number = tree_.owner(extent.owner).request.number;
      const double score = Score(extent, turns_[number]);
      if (score < lowest || (score == lowest && number < oldest)) {
        lowest = score;
        oldest = number;
        victim = extent.deepest;
      }
    }
    return victim;
  }

 private:
  struct Turn {
    uint64_t number;
    double time_s;
    ReturnFeatures features;
    int num_blocks = 0;
    int need = 0;
    double index = 0;
    int bin = 0;
    bool is_returned = false;
    bool is_entering = false;
  };

  void OnReturn(const Request& request) {
    Turn& parent = turns_[request.parent];
    if (parent.num_blocks > parent.need) {
      returns_ += 1;
      if (request.seen_blocks >= parent.num_blocks) tail_hits_ += 1;
    }
    if (parent.is_returned) return;
    if (parent.bin < ReturnModel::kBins) model_.Learn(parent.features, parent.bin, true);
    parent.is_returned = true;
  }

  double Score(const Extent& extent, const Turn& turn) const {
    const double index = turn.is_returned ? 1e-6 / (1 + now_s_ - turn.time_s) : turn.index;
    const int bi = extent.deepest_idx;
    if (bi >= turn.need && turn.need >= 1) {
      return index * ((1 + tail_hits_) / (10 + returns_)) / mean_blocks_;
    }
    const double owned = std::max(1, std::min(turn.need, bi + 1) - (bi + 1 - extent.count));
    return index * (alpha_ * (bi + 1 >= turn.need ? 1 : 0) / owned + (1 - alpha_) / mean_blocks_);
  }

  const BlockTree& tree_;
  const double alpha_;
  ReturnModel model_;
  std::vector<Turn> turns_;  // by number
  double now_s_ = 0;
  double mean_blocks_ = 20;
  double returns_ = 0;
  double tail_hits_ = 0;
};

TEST(Rtv, ChoosesTheVictimsOfThePlainRule) {
  const absl::StatusOr<Trace> trace =
      ReadTrace(std::string(KVSTOW_TEST_DATA) + "/mooncake_synthetic_trace.jsonl", {});
  ASSERT_TRUE(trace.ok()) << trace.status();
  const std::vector<Request> requests = FindSessions(*trace);
  const std::vector<int64_t> capacity{300, 1500};
  BlockTree tree;
  const std::unique_ptr<Policy> policy = *MakePolicy("rtv", {.tier_blocks = capacity}, tree);
  TierLedger ledger(2, &tree, policy.get());
  PlainRtv plain(tree, 0.1);
  int64_t decisions = 0;
  int64_t different = 0;
  for (size_t i = 0; i < 1200; ++i) {
    ledger.BeginRequest(requests[i]);
    plain.OnRequest(requests[i], tree.FindOwner(i));
    for (const BlockNumber block : trace->Chain(i)) ledger.Touch(block);
    for (int tier = 0; tier < 2; ++tier) {
      while (ledger.num_blocks(tier) > capacity[static_cast<size_t>(tier)]) {
        const BlockNumber expected = plain.ChooseVictim(tier);
        const BlockNumber chosen = ledger.Evict(tier);
        ++decisions;
        // Equal but for the rounding of two orders of multiplication.
        different += chosen == expected ? 0 : 1;
      }
    }
  }
  EXPECT_GT(decisions, 10000);
  EXPECT_LE(different, decisions / 10000);
}

}  // namespace
}  // namespace kvstow::policy
