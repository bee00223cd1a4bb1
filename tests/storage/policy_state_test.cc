// What the policy knows, over a restart: the file's bytes and damage, and a store that goes on.
#include "storage/policy_state.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/checksum.h"
#include "storage/policy/policy.h"
#include "storage/policy/return_model.h"
#include "tests/storage/store_fixture.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::KeyOf;
using testing::Rng;

PolicyState Sample() {
  PolicyState state{.policy = "rtv", .learned = {{1.5, -2, 0}, {3}, {}}};
  state.history.turns = {{.number = 7, .time_s = -90, .input_tokens = 100, .num_blocks = 2},
                         {.number = 9, .time_s = -3, .turn = 2, .continues = true, .parent = 7}};
  state.history.blocks = {
      {KeyOf(1), policy::kNone, policy::kNone}, {KeyOf(2), 0, 0}, {KeyOf(3), 1, 1}};
  state.history.sessions = {{.session = 5, .number = 9, .turn = 2}};
  return state;
}

// With the checksum of what it now says.
std::string Resealed(std::string bytes) {
  bytes.resize(bytes.size() - 8);
  const uint64_t checksum = Xxh3({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
  return bytes.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
}

TEST(PolicyStateFile, WhatIsWrittenIsRead) {
  const absl::StatusOr<PolicyState> read = DecodePolicyState(EncodePolicyState(Sample()));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->policy, "rtv");
  EXPECT_EQ(read->learned, Sample().learned);
  EXPECT_EQ(EncodePolicyState(*read), EncodePolicyState(Sample()));
  EXPECT_EQ(read->history.turns[1].parent, 7u);
  EXPECT_TRUE(read->history.turns[1].continues);
  EXPECT_EQ(read->history.blocks[2].parent, 1u);
}

TEST(TurnHistory, WhatCannotHaveBeenIsUnsound) {
  const TurnHistory good = Sample().history;
  EXPECT_TRUE(good.IsSound());
  EXPECT_TRUE(TurnHistory().IsSound());
  const std::vector<std::function<void(TurnHistory&)>> spoil = {
      [](TurnHistory& h) { h.turns[1].number = 7; },
      [](TurnHistory& h) { h.turns[0].number = 0; },
      [](TurnHistory& h) { h.turns[0].time_s = -2; },
      [](TurnHistory& h) { h.turns[1].time_s = 1; },
      [](TurnHistory& h) { h.turns[1].time_s = std::numeric_limits<double>::quiet_NaN(); },
      [](TurnHistory& h) { h.turns[0].input_tokens = -1; },
      [](TurnHistory& h) { h.turns[0].full_blocks = 3; },
      [](TurnHistory& h) { h.turns[0].num_blocks = -1; },
      [](TurnHistory& h) { h.turns[0].turn = 0; },
      [](TurnHistory& h) { h.turns[1].parent = 9; },
      [](TurnHistory& h) { h.blocks[1].parent = 1; },
      [](TurnHistory& h) { h.blocks[2].turn = 2; },
      [](TurnHistory& h) { h.blocks[2].key = h.blocks[0].key; },
      [](TurnHistory& h) { h.sessions[0].session = 0; },
      [](TurnHistory& h) { h.sessions[0].number = 8; },
      [](TurnHistory& h) { h.blocks.clear(); },
  };
  for (size_t i = 0; i < spoil.size(); ++i) {
    TurnHistory bad = good;
    spoil[i](bad);
    EXPECT_FALSE(bad.IsSound()) << i;
  }
}

TEST(PolicyStateFile, EveryFlippedBitAndEveryShorterFileIsDamage) {
  const std::string good = EncodePolicyState(Sample());
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_TRUE(absl::IsDataLoss(DecodePolicyState(bad).status())) << "bit " << bit;
  }
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(DecodePolicyState(good.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodePolicyState(good + "x").ok());
}

// Right checksum, wrong content: as another program would write it.
TEST(PolicyStateFile, SealedNonsenseIsRefused) {
  const std::string good = EncodePolicyState(Sample());
  std::string other = good;
  other[8] = 2;
  EXPECT_TRUE(absl::IsFailedPrecondition(DecodePolicyState(Resealed(other)).status()));
  Rng rng(20261201);
  for (int i = 0; i < 20000; ++i) {
    std::string bad = good;
    for (int flips = 0; flips < 3; ++flips) {
      bad[rng.Below(bad.size())] = static_cast<char>(rng.Below(256));
    }
    const absl::StatusOr<PolicyState> read = DecodePolicyState(Resealed(bad));
    if (!read.ok()) continue;
    EXPECT_LE(EncodePolicyState(*read).size(), good.size());
  }
}

class PolicyRestartTest : public testing::StoreTest {
 protected:
  PolicyRestartTest() {
    options_.policy = "rtv";
    options_.nvme_bytes = 64 * kMiB;
  }

  std::string FilePath() const { return options_.nvme_path + "/policy.state"; }
  std::string Bytes() const {
    std::ifstream file(FilePath(), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  void Write(const std::string& bytes) const {
    std::ofstream(FilePath(), std::ios::binary | std::ios::trunc) << bytes;
  }
  // A turn that stores its prompt, in blocks of a fourth MiB.
  void Send(const std::vector<uint64_t>& prompt, TurnHints hints = {}) {
    std::vector<BlockKey> keys;
    for (const uint64_t number : prompt) keys.push_back(KeyOf(number));
    const auto use = store_->Use({.keys = keys, .hints = hints});
    for (const BlockKey& key : keys) {
      ReserveRequest request = testing::RequestOf(key, Lengths(kMiB / 4));
      request.use = use;
      const absl::StatusOr<TicketId> ticket = store_->Reserve(request);
      if (absl::IsAlreadyExists(ticket.status())) continue;
      ASSERT_TRUE(ticket.ok()) << ticket.status();
      ASSERT_TRUE(testing::WriteUnits(*store_, *ticket, key, Lengths(kMiB / 4)).ok());
      ASSERT_TRUE(store_->Seal(*ticket).ok());
    }
    store_->RunMaintenance();
  }

  // An hour of turns, none of which returns.
  void Learn() {
    for (uint64_t i = 0; i < 200; ++i) {
      const std::vector<BlockKey> keys = {KeyOf(10 * i), KeyOf(10 * i + 1)};
      (void)store_->Use({.keys = keys});
      clock_.Advance(absl::Seconds(18));
    }
  }
};

TEST_F(PolicyRestartTest, WhatWasLearnedIsThereAfterARestart) {
  OpenWithDisk();
  Learn();
  store_.reset();
  const std::string saved = Bytes();
  const absl::StatusOr<PolicyState> learned = DecodePolicyState(saved);
  ASSERT_TRUE(learned.ok()) << learned.status();
  ASSERT_EQ(learned->learned.size(), 2u);
  // Bin 0 has been left by all turns but the last.
  EXPECT_EQ(learned->learned[0][policy::ReturnModel::kBins], 199);
  OpenWithDisk();
  store_.reset();
  EXPECT_EQ(Bytes(), saved);  // nothing new was learned
  OpenWithDisk();
  Learn();
  store_.reset();
  EXPECT_EQ(DecodePolicyState(Bytes())->learned[1][policy::ReturnModel::kBins], 2 * 199);
}

TEST_F(PolicyRestartTest, ItIsSavedEveryMinuteNotOnlyAtTheEnd) {
  OpenWithDisk();
  Learn();
  store_->RunMaintenance();
  ASSERT_TRUE(DecodePolicyState(Bytes()).ok());
  std::filesystem::remove(FilePath());
  clock_.Advance(absl::Seconds(59));
  store_->RunMaintenance();
  EXPECT_FALSE(std::filesystem::exists(FilePath()));
  clock_.Advance(absl::Seconds(1));
  store_->RunMaintenance();
  EXPECT_TRUE(std::filesystem::exists(FilePath()));
}

TEST_F(PolicyRestartTest, ADamagedFileIsSetAsideAndCountedAndTheStoreOpens) {
  OpenWithDisk();
  Learn();
  ASSERT_TRUE(Put(1).ok());
  ASSERT_TRUE(store_->Persist({KeyOf(1)}, absl::Seconds(10)).ok());
  store_.reset();
  const std::string good = Bytes();
  PolicyState impossible = *DecodePolicyState(good);
  impossible.learned[0][0] = std::numeric_limits<double>::quiet_NaN();
  PolicyState of_one_tier = *DecodePolicyState(good);
  of_one_tier.learned.pop_back();
  for (const std::string& bad :
       {std::string("x"), std::string(), good.substr(0, 1000), EncodePolicyState(impossible),
        EncodePolicyState(of_one_tier), std::string(1 << 20, 'x')}) {
    Write(bad);
    OpenWithDisk();
    EXPECT_EQ(store_->Stats().policy_files_set_aside, 1);
    EXPECT_TRUE(HasExactly(1));
    EXPECT_FALSE(std::filesystem::exists(FilePath()));
    EXPECT_TRUE(std::filesystem::exists(FilePath() + ".broken"));
    store_.reset();
  }
  ASSERT_TRUE(DecodePolicyState(Bytes()).ok());
  OpenWithDisk();
  EXPECT_EQ(store_->Stats().policy_files_set_aside, 0);
}

TEST_F(PolicyRestartTest, AFileOfAnotherPolicyIsReplaced) {
  OpenWithDisk();
  Learn();
  options_.policy = "lru";
  Open();
  EXPECT_EQ(store_->Stats().policy_files_set_aside, 0);
  store_.reset();
  EXPECT_EQ(DecodePolicyState(Bytes())->policy, "lru");
  EXPECT_FALSE(std::filesystem::exists(FilePath() + ".broken"));
}

// --- turns ---

TEST_F(PolicyRestartTest, TheNextTurnAfterARestartFollowsTheOneBefore) {
  OpenWithDisk();
  Send({1, 2, 3});
  clock_.Advance(absl::Minutes(1));
  Send({1, 2, 3, 4});
  EXPECT_EQ(store_->Stats().follow_up_turns, 1);
  Open();
  EXPECT_EQ(store_->Stats().follow_up_turns, 0);
  clock_.Advance(absl::Minutes(1));
  Send({1, 2, 3, 4, 5});
  EXPECT_EQ(store_->Stats().turns, 1);
  EXPECT_EQ(store_->Stats().follow_up_turns, 1);
  clock_.Advance(absl::Minutes(1));
  Send({1, 20, 21});
  EXPECT_EQ(store_->Stats().follow_up_turns, 1);
}

TEST_F(PolicyRestartTest, ANamedSessionGoesOnAndAnotherPromptOfItFollows) {
  OpenWithDisk();
  Send({1, 2, 3}, {.session = 77, .turn = 1});
  Open();
  clock_.Advance(absl::Minutes(1));
  Send({40, 41}, {.session = 77, .turn = 2});
  EXPECT_EQ(store_->Stats().follow_up_turns, 1);
}

// With `lru`: the order of uses before the restart decides, not the order on disk.
TEST_F(PolicyRestartTest, WhatWasUsedLongestAgoBeforeTheRestartLeavesFirst) {
  options_.policy = "lru";
  OpenWithDisk();
  for (uint64_t number = 0; number < 12; ++number) {
    Send({number});
    clock_.Advance(absl::Seconds(10));
  }
  for (const uint64_t number : {0, 1, 2}) Send({number});  // used again
  options_.nvme_bytes = 32 * kMiB;
  Open();
  // Of 32 MiB three fourths live at most; blocks of a fourth MiB push the old ones out.
  uint64_t next = 100;
  const auto num_left = [&] {
    int64_t num = 0;
    for (uint64_t number = 0; number < 12; ++number) num += Where(number).in_nvme ? 1 : 0;
    return num;
  };
  while (num_left() > 3 && next < 400) {
    Send({next++});
    clock_.Advance(absl::Seconds(10));
  }
  EXPECT_EQ(num_left(), 3);
  for (const uint64_t number : {0, 1, 2}) EXPECT_TRUE(Where(number).in_nvme) << number;
}

TEST_F(PolicyRestartTest, BlocksThatAreGoneFromTheDiskAreForgotten) {
  OpenWithDisk();
  Send({1, 2, 3});
  store_.reset();
  std::filesystem::remove_all(options_.nvme_path + "/rocksdb");
  OpenWithDisk();
  EXPECT_EQ(store_->Stats().num_blocks, 0);
  EXPECT_EQ(store_->Stats().policy_files_set_aside, 0);
  Send({1, 2, 3});
  EXPECT_EQ(store_->Stats().turns, 1);
  EXPECT_TRUE(Where(3).in_nvme);
}

}  // namespace
}  // namespace kvstow
