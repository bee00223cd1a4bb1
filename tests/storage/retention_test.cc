// Retention: turns found from keys, hints, and who leaves; without a store.
#include "storage/retention.h"

#include <malloc.h>

#include <set>
#include <thread>

#include "gtest/gtest.h"
#include "storage/store_options.h"
#include "tests/storage/records.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::KeyOf;
using testing::Rng;

constexpr TierKind kDram = TierKind::kDram;
constexpr TierKind kNvme = TierKind::kNvme;
constexpr int64_t kBlockBytes = 100;

class RetentionTest : public ::testing::Test {
 protected:
  RetentionTest() { Make("lru"); }

  void Make(const std::string& policy) {
    options_.policy = policy;
    absl::StatusOr<std::unique_ptr<Retention>> made = Retention::Create(options_, &clock_);
    ASSERT_TRUE(made.ok()) << made.status();
    retention_ = *std::move(made);
    numbers_.clear();
  }

  static std::vector<BlockKey> Keys(const std::vector<uint64_t>& numbers) {
    std::vector<BlockKey> keys;
    for (const uint64_t number : numbers) keys.push_back(KeyOf(number));
    return keys;
  }

  // A turn that uses the prompt; what is not there is stored then.
  void Send(const std::vector<uint64_t>& prompt, TurnHints hints = {}) {
    const std::vector<BlockKey> keys = Keys(prompt);
    const auto use = retention_->Use({.keys = keys, .hints = hints});
    for (const uint64_t number : prompt) Place(number);
  }
  void Place(uint64_t number, TierKind tier = kDram) {
    if (!numbers_.insert({tier, number}).second) return;
    retention_->OnPlaced(KeyOf(number), tier, kBlockBytes);
  }
  void Remove(uint64_t number, TierKind tier = kDram) {
    ASSERT_EQ(numbers_.erase({tier, number}), 1u);
    retention_->OnRemoved(KeyOf(number), tier, kBlockBytes);
  }
  // -1: nobody.
  int64_t Choose(TierKind tier = kDram) {
    const std::optional<BlockKey> key = retention_->Choose(tier);
    if (!key.has_value()) return -1;
    for (const auto& [in, number] : numbers_) {
      if (in == tier && KeyOf(number) == *key) return static_cast<int64_t>(number);
    }
    return -2;
  }
  // All that leave, in order.
  std::vector<int64_t> Drain(TierKind tier = kDram) {
    std::vector<int64_t> order;
    for (int64_t number; (number = Choose(tier)) >= 0;) {
      order.push_back(number);
      Remove(static_cast<uint64_t>(number), tier);
    }
    EXPECT_EQ(Choose(tier), -1);
    return order;
  }

  testing::FakeClock clock_;
  Retention::Options options_{.tier_bytes = {0, 100 * kBlockBytes, 1000 * kBlockBytes},
                              .blocks_max = 1000};
  std::unique_ptr<Retention> retention_;
  std::set<std::pair<TierKind, uint64_t>> numbers_;
};

using Order = std::vector<int64_t>;

TEST_F(RetentionTest, UnknownPoliciesAndOraclesAreRefused) {
  options_.policy = "rvt";
  EXPECT_EQ(Retention::Create(options_, &clock_).status().message(),
            "unknown policy `rvt`; did you mean rtv? Known: lru, s3fifo, arc, gdsf, hazard, rtv, "
            "told-who, told-both, told-both-size, belady");
  options_.policy = "belady";
  EXPECT_TRUE(absl::IsFailedPrecondition(Retention::Create(options_, &clock_).status()));
}

TEST_F(RetentionTest, EveryPolicyGivesUpWhatItWasGivenLeavesFirst) {
  for (const policy::PolicyKind& kind : policy::AllPolicies()) {
    if (kind.is_oracle) continue;
    Make(std::string(kind.name));
    Send({1, 2, 3});
    clock_.Advance(absl::Minutes(1));
    Send({1, 2, 4, 5});
    const Order order = Drain();
    ASSERT_EQ(order.size(), 5u) << kind.name;
    const auto at = [&](int64_t number) {
      return std::find(order.begin(), order.end(), number) - order.begin();
    };
    EXPECT_LT(at(3), at(2)) << kind.name;
    EXPECT_LT(at(5), at(4)) << kind.name;
    EXPECT_LT(at(4), at(2)) << kind.name;
    EXPECT_LT(at(2), at(1)) << kind.name;
  }
}

TEST_F(RetentionTest, TheWholePromptIsUsedWhenItsEndIs) {
  Send({1, 2, 3});
  clock_.Advance(absl::Minutes(1));
  Send({10, 11});
  clock_.Advance(absl::Minutes(1));
  Send({3});  // stands behind 1 and 2, as the first call said
  EXPECT_EQ(Drain(), (Order{11, 10, 3, 2, 1}));
}

TEST_F(RetentionTest, ABlockMayNameTheOneBeforeIt) {
  Send({1, 2});
  clock_.Advance(absl::Minutes(1));
  Send({10});
  clock_.Advance(absl::Minutes(1));
  const BlockKey after = KeyOf(2);
  const std::vector<BlockKey> keys = Keys({3});
  const auto use = retention_->Use({.keys = keys, .after = &after});
  Place(3);
  EXPECT_EQ(retention_->stats().follow_ups, 1);
  EXPECT_EQ(Drain(), (Order{10, 3, 2, 1}));
}

TEST_F(RetentionTest, BlocksStoredBeforeTheirPredecessorAreStillBehindIt) {
  const std::vector<BlockKey> keys = Keys({1, 2, 3});
  {
    const auto use = retention_->Use({.keys = keys});
    for (const uint64_t number : {3, 1, 2}) Place(number);
  }
  EXPECT_EQ(Drain(), (Order{3, 2, 1}));
}

TEST_F(RetentionTest, BlocksStoredOneByOneAreLinkedByThePromptThatNamesThem) {
  for (const uint64_t number : {3, 2, 1}) Send({number});
  EXPECT_EQ(Choose(), 3);
  clock_.Advance(absl::Minutes(1));
  Send({1, 2, 3});
  clock_.Advance(absl::Minutes(1));
  Send({1});
  EXPECT_EQ(Drain(), (Order{3, 2, 1}));
}

TEST_F(RetentionTest, KeysThatDoNotFollowEachOtherAreTakenApart) {
  Send({1, 2});
  Send({10, 11});
  clock_.Advance(absl::Minutes(1));
  const int64_t turns = retention_->stats().turns;
  Send({1, 2, 10, 11, 1, 1});
  EXPECT_GE(retention_->stats().turns, turns + 2);
  EXPECT_EQ(Drain().size(), 4u);
}

// What follows what is the client's word: no order of words may hang or crash.
TEST_F(RetentionTest, AnyOrderOfAnyKeysIsFine) {
  const char* policies[] = {"lru", "s3fifo", "arc", "gdsf", "hazard", "rtv"};
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const char* policy = policies[seed % 6];
    Make(policy);
    Rng rng(seed);
    std::vector<std::shared_ptr<const TurnUse>> held;
    for (int step = 0; step < 2000; ++step) {
      SCOPED_TRACE(absl::StrCat(policy, " seed ", seed, " step ", step));
      std::vector<uint64_t> prompt;
      for (uint64_t i = 0; i <= rng.Below(6); ++i) prompt.push_back(rng.Below(40));
      const std::vector<BlockKey> keys = Keys(prompt);
      const BlockKey after = KeyOf(rng.Below(40));
      TurnHints hints{.session = rng.Below(4), .turn = static_cast<uint32_t>(rng.Below(3))};
      hints.session_over = rng.Below(10) == 0;
      if (rng.Below(10) == 0) hints.pin_for = absl::Seconds(static_cast<int64_t>(rng.Below(100)));
      if (rng.Below(10) == 0) hints.returns_within = absl::Seconds(30);
      TurnRequest request{.keys = keys, .hints = hints};
      if (rng.Below(3) == 0) request.after = &after;
      if (rng.Below(8) == 0) {
        retention_->Tell(request);
      } else {
        held.push_back(retention_->Use(request));
      }
      if (rng.Below(3) == 0) held.clear();
      for (const uint64_t number : prompt) {
        const TierKind tier = rng.Below(3) == 0 ? kNvme : kDram;
        if (rng.Below(2) == 0) {
          Place(number, tier);
        } else if (numbers_.contains({tier, number})) {
          Remove(number, tier);
        }
      }
      for (const TierKind tier : {kDram, kNvme}) {
        const int64_t victim = Choose(tier);
        ASSERT_NE(victim, -2);
        if (victim < 0) continue;
        if (rng.Below(4) == 0) {
          retention_->SetAside(tier, KeyOf(static_cast<uint64_t>(victim)));
        } else if (rng.Below(2) == 0) {
          Remove(static_cast<uint64_t>(victim), tier);
        }
      }
      if (rng.Below(20) == 0) retention_->TakeBack(kDram);
      if (rng.Below(50) == 0) clock_.Advance(absl::Seconds(static_cast<int64_t>(rng.Below(9000))));
    }
    held.clear();
    clock_.Advance(absl::Hours(100));
    for (const TierKind tier : {kDram, kNvme}) {
      retention_->TakeBack(tier);
      Drain(tier);
    }
    EXPECT_TRUE(numbers_.empty()) << policy;
  }
}

// --- turns ---

TEST_F(RetentionTest, ReadingAndWritingOnePromptIsOneTurn) {
  Send({1, 2});
  clock_.Advance(absl::Minutes(1));
  Send({1, 2});           // the read
  Send({1, 2, 3, 4});     // the write
  Send({1, 2, 3, 4, 5});  // and some more
  EXPECT_EQ(retention_->stats().turns, 2);
  EXPECT_EQ(retention_->stats().follow_ups, 1);
  clock_.Advance(absl::Minutes(1));
  Send({1, 2, 3, 4, 5, 6});
  EXPECT_EQ(retention_->stats().turns, 3);
  EXPECT_EQ(retention_->stats().follow_ups, 2);
  Send({1, 2, 9});  // another conversation that shares its beginning
  EXPECT_EQ(retention_->stats().turns, 4);
  EXPECT_EQ(retention_->stats().follow_ups, 2);
}

TEST_F(RetentionTest, AConversationIsKnownAfterItsBlocksAreGone) {
  Send({1, 2, 3});
  Drain();
  clock_.Advance(absl::Minutes(10));
  Send({1, 2, 3, 4});
  EXPECT_EQ(retention_->stats().follow_ups, 1);
}

TEST_F(RetentionTest, ABlockThatIsWrittenAgainInTheSameTurnBelongsToIt) {
  Send({10, 11});
  Send({1, 2, 3});
  Remove(3);
  Send({1, 2, 3});
  EXPECT_EQ(retention_->stats().turns, 2);
  EXPECT_EQ(Drain(), (Order{11, 10, 3, 2, 1}));
}

TEST_F(RetentionTest, ATurnIsNamedBySessionAndNumberHoweverLongItTakes) {
  Send({1, 2}, {.session = 7, .turn = 1});
  clock_.Advance(absl::Minutes(2));
  Send({1, 2, 3}, {.session = 7, .turn = 1});
  EXPECT_EQ(retention_->stats().turns, 1);
  Send({1, 2, 3, 4}, {.session = 7, .turn = 2});
  EXPECT_EQ(retention_->stats().turns, 2);
  EXPECT_EQ(retention_->stats().follow_ups, 1);
  clock_.Advance(absl::Minutes(2));
  Send({50}, {.session = 7, .turn = 3});  // the client compressed its history
  EXPECT_EQ(retention_->stats().follow_ups, 2);
}

TEST_F(RetentionTest, AClockThatJumpsBackIsNoTurnAndNoCrash) {
  Make("rtv");
  Send({1, 2});
  clock_.Advance(absl::Hours(-1000));
  Send({3, 4});
  clock_.Advance(absl::Seconds(1));
  Send({1, 2, 5});
  EXPECT_EQ(Drain().size(), 5u);
}

TEST_F(RetentionTest, OnlyTheSecondTurnMakesABlockUsedAgain) {
  Send({1, 2});
  Send({1, 2, 3});  // the same turn
  EXPECT_FALSE(retention_->IsUsedAgain(KeyOf(1)));
  clock_.Advance(absl::Minutes(1));
  Send({1, 2, 3});
  EXPECT_TRUE(retention_->IsUsedAgain(KeyOf(1)));
  EXPECT_TRUE(retention_->IsUsedAgain(KeyOf(3)));
  EXPECT_FALSE(retention_->IsUsedAgain(KeyOf(9)));
  Drain();
  clock_.Advance(absl::Minutes(1));
  const std::vector<BlockKey> keys = Keys({1});
  const auto use = retention_->Use({.keys = keys});  // seen before, though gone
  EXPECT_TRUE(retention_->IsUsedAgain(KeyOf(1)));
}

// --- idle blocks ---

TEST_F(RetentionTest, IdleIsWhatNoTurnHasUsedForSoLongDeepestFirst) {
  constexpr absl::Duration kTtl = absl::Minutes(10);
  const auto idle = [&]() -> int64_t {
    const std::optional<BlockKey> key = retention_->ChooseIdle(kDram, kTtl);
    for (uint64_t number = 0; key.has_value() && number < 100; ++number) {
      if (KeyOf(number) == *key) return static_cast<int64_t>(number);
    }
    return -1;
  };
  Send({1, 2, 3});
  clock_.Advance(absl::Minutes(9));
  Send({1, 20, 21});  // keeps block 1
  EXPECT_EQ(idle(), -1);
  clock_.Advance(absl::Seconds(59));
  EXPECT_EQ(idle(), -1);
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(idle(), 3);
  retention_->SetAside(kDram, KeyOf(3));  // in use, and so is what it stands on
  EXPECT_EQ(idle(), -1);
  retention_->TakeBack(kDram);
  EXPECT_EQ(idle(), 3);
  Remove(3);
  EXPECT_EQ(idle(), 2);
  Remove(2);
  EXPECT_EQ(idle(), -1);
  EXPECT_EQ(retention_->ChooseIdle(kNvme, kTtl), std::nullopt);
  clock_.Advance(absl::Minutes(9));
  for (const int64_t number : {21, 20, 1}) {
    EXPECT_EQ(idle(), number);
    Remove(static_cast<uint64_t>(number));
  }
  EXPECT_EQ(idle(), -1);
}

TEST_F(RetentionTest, WhatWasFoundAtTheStartIsIdleFromThenOn) {
  options_.tier_bytes = {0, 1000, 1000};
  Make("rtv");
  Place(1, kNvme);
  EXPECT_EQ(retention_->ChooseIdle(kNvme, absl::Minutes(1)), std::nullopt);
  clock_.Advance(absl::Minutes(1));
  EXPECT_EQ(retention_->ChooseIdle(kNvme, absl::Minutes(1)), KeyOf(1));
}

// --- hints ---

TEST_F(RetentionTest, ASessionThatIsOverLeavesFirst) {
  Make("rtv");
  Send({1, 2});
  Send({10, 11}, {.session = 3});
  Send({20, 21});
  const std::vector<BlockKey> keys = Keys({20, 21});
  EXPECT_TRUE(retention_->Tell({.keys = keys, .hints = {.session_over = true}}));
  EXPECT_TRUE(retention_->Tell({.hints = {.session = 3, .session_over = true}}));
  EXPECT_FALSE(retention_->Tell({.hints = {.session = 99, .session_over = true}}));
  EXPECT_EQ(retention_->stats().sessions_over, 2);
  const Order order = Drain();
  EXPECT_EQ(std::set<int64_t>(order.begin(), order.begin() + 4),
            (std::set<int64_t>{10, 11, 20, 21}));
}

TEST_F(RetentionTest, WhoReturnsSoonStaysUntilThen) {
  Make("rtv");
  Send({1, 2}, {.returns_within = absl::Seconds(20)});
  Send({10, 11}, {.returns_within = absl::Hours(1)});
  Send({20, 21});
  const Order order = Drain();
  EXPECT_EQ(order[4] + order[5], 3) << "the one that comes back first leaves last";
}

TEST_F(RetentionTest, PinsKeepUntilTheirEndOrUntilNothingElseMayLeave) {
  Send({1, 2}, {.pin_for = absl::Minutes(10)});
  Send({10, 11});
  EXPECT_EQ(retention_->stats().pinned_blocks, 2);
  EXPECT_EQ(Choose(), 11);
  clock_.Advance(absl::Minutes(10));
  EXPECT_EQ(Choose(), 2);
  EXPECT_EQ(retention_->stats().pinned_blocks, 0);
  const std::vector<BlockKey> keys = Keys({1, 2, 10, 11});
  for (const BlockKey& key : keys) {
    retention_->Tell({.keys = {&key, 1}, .hints = {.pin_for = absl::Hours(1)}});
  }
  EXPECT_EQ(retention_->stats().pinned_blocks, 4);
  EXPECT_EQ(Drain().size(), 4u);  // a hint is no lease
}

// --- blocks in use, and blocks of before ---

TEST_F(RetentionTest, WhatIsSetAsideIsOfferedAgainAfterTakeBack) {
  for (const uint64_t number : {1, 2, 3}) Send({number});
  retention_->SetAside(kDram, KeyOf(1));
  EXPECT_EQ(Choose(), 2);
  retention_->SetAside(kDram, KeyOf(2));
  retention_->SetAside(kDram, KeyOf(3));
  EXPECT_EQ(Choose(), -1);
  retention_->TakeBack(kDram);
  EXPECT_EQ(Choose(), 1);
  retention_->SetAside(kDram, KeyOf(1));
  Remove(1);  // deleted while it was aside
  Send({4});  // may get its number
  EXPECT_EQ(Drain(), (Order{2, 3, 4}));
}

TEST_F(RetentionTest, BlocksFoundAtTheStartLeaveFirstUnlessTheyAreUsed) {
  for (const uint64_t number : {1, 2, 3, 4}) Place(number, kNvme);
  Send({10});
  Place(10, kNvme);
  clock_.Advance(absl::Minutes(1));
  Send({2, 3});  // promotes
  EXPECT_EQ(Choose(kNvme), 1);
  retention_->SetAside(kNvme, KeyOf(1));
  EXPECT_EQ(Choose(kNvme), 4);
  Remove(4, kNvme);
  retention_->TakeBack(kNvme);
  EXPECT_EQ(Drain(kNvme), (Order{10, 3, 2, 1}));
}

TEST_F(RetentionTest, TiersDecideForThemselves) {
  Send({1, 2});
  Place(1, kNvme);
  Place(2, kNvme);
  clock_.Advance(absl::Minutes(1));
  Send({3});
  EXPECT_EQ(Drain(kDram), (Order{2, 1, 3}));
  EXPECT_EQ(Drain(kNvme), (Order{2, 1}));
}

// Bytes of a policy in use for long, per block, in prompts of 20; each block is in memory or in hbm
// and, where there is a disk, on it.
double PolicyBytesPerBlock(const StoreOptions& store, int64_t num_blocks) {
  constexpr int64_t kBytes = 1 << 20;
  testing::FakeClock clock;
  const auto used = [] {
    const auto info = mallinfo2();  // the sanitizers' own allocators say 0
    return static_cast<int64_t>(info.uordblks + info.hblkhd);
  };
  const int64_t used_before = used();
  const bool has_disk = !store.nvme_path.empty();
  const auto retention =
      *Retention::Create({.policy = store.policy,
                          .tier_bytes = {store.hbm_bytes > 0 ? num_blocks * kBytes : 0,
                                         num_blocks * kBytes, has_disk ? num_blocks * kBytes : 0},
                          .blocks_max = 2 * num_blocks},
                         &clock);
  const int64_t stated_before = retention->stats().memory_bytes;
  const auto memory_of = [&](const BlockKey& key) {
    return store.hbm_bytes > 0 && (key.bytes[0] & std::byte{1}) == std::byte{1} ? TierKind::kHbm
                                                                                : kDram;
  };
  uint64_t next = 0;
  for (int64_t resident = 0; next < 5 * static_cast<uint64_t>(num_blocks);) {
    clock.Advance(absl::Seconds(3000) * 20 / num_blocks);  // the age of what is there
    std::vector<BlockKey> keys;
    for (int i = 0; i < 20; ++i) keys.push_back(KeyOf(next++));
    const auto use = retention->Use({.keys = keys});
    for (const BlockKey& key : keys) {
      retention->OnPlaced(key, memory_of(key), kBytes);
      if (has_disk) retention->OnPlaced(key, kNvme, kBytes);
      ++resident;
    }
    for (; resident > num_blocks; --resident) {
      const BlockKey key = *retention->Choose(has_disk ? kNvme : kDram);
      retention->OnRemoved(key, memory_of(key), kBytes);
      if (has_disk) retention->OnRemoved(key, kNvme, kBytes);
    }
  }
  const int64_t bytes =
      std::max(used() - used_before, retention->stats().memory_bytes - stated_before);
  return static_cast<double>(bytes) / static_cast<double>(num_blocks);
}

// limits.blocks rests on it.
TEST_F(RetentionTest, ABlockTakesTheMemoryThatTheStoreCountsForItAndNotMuchLess) {
  constexpr double kIndex = 100;  // block_index_test.cc
  constexpr double kInMemory = 200;
  constexpr double kOnDisk = 60;
  for (const policy::PolicyKind& kind : policy::AllPolicies()) {
    if (kind.is_oracle) continue;
    for (const int num_tiers : {1, 2, 3}) {
      StoreOptions store;
      store.policy = std::string(kind.name);
      if (num_tiers >= 2) store.nvme_path = "/disk";
      if (num_tiers >= 3) store.hbm_bytes = 1;
      // Tables grow by doubling: sizes at which they are nearly full, as a large one's pages are.
      // Ghosts keep numbers in use, each tier its own.
      const int64_t num_blocks = !kind.has_ghosts ? 15600 : num_tiers < 3 ? 22000 : 27500;
      const double bytes = kIndex + kInMemory + (num_tiers >= 2 ? kOnDisk : 0) +
                           PolicyBytesPerBlock(store, num_blocks);
      const auto counted = static_cast<double>(store.BytesPerBlock());
      EXPECT_LE(bytes, counted) << kind.name << ", tiers: " << num_tiers;
      EXPECT_GT(bytes, counted / 2) << kind.name << ", tiers: " << num_tiers;
    }
  }
}

TEST_F(RetentionTest, ManyThreadsMayUseIt) {
  Make("rtv");
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      Rng rng(t);
      for (uint64_t i = 0; i < 2000; ++i) {
        const std::vector<BlockKey> keys = Keys({10000 * t + i % 50, 10000 * t + 100 + i});
        const auto use = retention_->Use({.keys = keys});
        retention_->OnPlaced(keys[1], kDram, kBlockBytes);
        (void)retention_->Choose(kDram);
        retention_->SetAside(kDram, keys[1]);
        if (i % 7 == 0) retention_->TakeBack(kDram);
        (void)retention_->Tell({.keys = keys, .hints = {.session_over = rng.Below(2) == 0}});
        retention_->OnRemoved(keys[1], kDram, kBlockBytes);
        (void)retention_->stats();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(retention_->Choose(kDram), std::nullopt);
}

}  // namespace
}  // namespace kvstow
