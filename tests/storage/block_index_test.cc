#include "storage/block_index.h"

#include <malloc.h>

#include <map>
#include <set>
#include <thread>

#include "gtest/gtest.h"
#include "tests/storage/records.h"

namespace kvstow {
namespace {

using testing::KeyOf;
using testing::Rng;

BlockInfo InfoOf(uint64_t number, Location location = {.in_dram = true}) {
  return {.key = KeyOf(number),
          .fingerprint = Sha256(absl::StrCat("model ", number % 3)),
          .codecs = {static_cast<CodecId>(number % 2), CodecId::kRaw},
          .location = location,
          .num_tokens = static_cast<int32_t>(number % 1024),
          .record_bytes = 1000 + static_cast<int64_t>(number),
          .logical_bytes = 4000};
}

absl::Status Insert(BlockIndex& index, uint64_t number, Location location = {.in_dram = true}) {
  return index.Insert(InfoOf(number, location), [](IndexedBlock&) {});
}

void Erase(BlockIndex& index, uint64_t number) {
  index.Visit(KeyOf(number), [](IndexedBlock& block) {
    block.Remove(TierKind::kDram);
    block.Remove(TierKind::kNvme);
  });
}

TEST(BlockIndex, FindsWhatWasInsertedAndForgetsWhatIsInNoTier) {
  BlockIndex index(100);
  EXPECT_FALSE(index.Lookup(KeyOf(1)).present());
  ASSERT_TRUE(Insert(index, 1).ok());
  EXPECT_EQ(index.Lookup(KeyOf(1)), (Location{.in_dram = true}));
  index.Visit(KeyOf(1), [](IndexedBlock& block) { block.Place(TierKind::kNvme); });
  EXPECT_EQ(index.Lookup(KeyOf(1)), (Location{.in_dram = true, .in_nvme = true}));
  index.Visit(KeyOf(1), [](IndexedBlock& block) { block.Remove(TierKind::kDram); });
  EXPECT_EQ(index.Lookup(KeyOf(1)), (Location{.in_nvme = true}));
  Erase(index, 1);
  EXPECT_FALSE(index.Visit(KeyOf(1), [](IndexedBlock&) { FAIL(); }));
  EXPECT_EQ(index.num_blocks(), 0);
}

TEST(BlockIndex, ASecondInsertIsAlreadyExistsAndChangesNothing) {
  BlockIndex index(100);
  ASSERT_TRUE(Insert(index, 1).ok());
  const absl::Status status =
      index.Insert(InfoOf(1, {.in_nvme = true}), [](IndexedBlock&) { FAIL(); });
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_EQ(index.Lookup(KeyOf(1)), (Location{.in_dram = true}));
  EXPECT_EQ(index.num_blocks(), 1);
}

TEST(BlockIndex, IsBoundedAndNamesTheLimit) {
  BlockIndex index(3);
  for (uint64_t i = 0; i < 3; ++i) ASSERT_TRUE(Insert(index, i).ok());
  EXPECT_EQ(Insert(index, 3), absl::ResourceExhaustedError("index holds 3 blocks, its limit"));
  Erase(index, 0);
  EXPECT_TRUE(Insert(index, 3).ok());
}

// Adds up what it is told.
class Listener final : public ResidencyListener {
 public:
  void OnPlaced(const BlockKey& key, TierKind tier, int64_t record_bytes) override {
    EXPECT_TRUE(blocks_.insert({key, tier}).second);
    bytes_ += record_bytes;
  }
  void OnRemoved(const BlockKey& key, TierKind tier, int64_t record_bytes) override {
    EXPECT_EQ(blocks_.erase({key, tier}), 1u);
    bytes_ -= record_bytes;
  }
  size_t num_blocks() const { return blocks_.size(); }
  int64_t bytes() const { return bytes_; }

 private:
  std::set<std::pair<BlockKey, TierKind>> blocks_;
  int64_t bytes_ = 0;
};

TEST(BlockIndex, ItsListenerIsToldOnceOfEveryBlockThatComesOrLeaves) {
  Listener listener;
  BlockIndex index(100, &listener);
  ASSERT_TRUE(Insert(index, 1).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(Insert(index, 1)));
  ASSERT_TRUE(Insert(index, 2, {.in_dram = true, .in_nvme = true}).ok());
  index.Visit(KeyOf(1), [](IndexedBlock& block) {
    block.Place(TierKind::kDram);  // there already
    block.Place(TierKind::kNvme);
    block.Remove(TierKind::kNvme);
    block.Remove(TierKind::kNvme);  // gone already
  });
  EXPECT_EQ(listener.num_blocks(), 3u);
  EXPECT_EQ(listener.bytes(), 1001 + 2 * 1002);
  Erase(index, 1);
  Erase(index, 2);
  EXPECT_EQ(listener.num_blocks(), 0u);
  EXPECT_EQ(listener.bytes(), 0);
}

TEST(BlockIndex, AnIncarnationIsNeverUsedTwice) {
  BlockIndex index(10);
  ASSERT_TRUE(Insert(index, 1).ok());
  BlockId first = 0;
  index.Visit(KeyOf(1), [&](IndexedBlock& block) { first = block.id(); });
  Erase(index, 1);
  ASSERT_TRUE(Insert(index, 1).ok());
  index.Visit(KeyOf(1), [&](IndexedBlock& block) { EXPECT_NE(block.id(), first); });
}

TEST(BlockIndex, ListsInKeyOrderByPages) {
  BlockIndex index(1000);
  std::map<BlockKey, uint64_t> want;
  for (uint64_t i = 0; i < 500; ++i) {
    ASSERT_TRUE(Insert(index, i).ok());
    want[KeyOf(i)] = i;
  }
  std::vector<BlockInfo> all;
  BlockKey after;
  while (true) {
    const std::vector<BlockInfo> page = index.List(after, 7);
    if (page.empty()) break;
    ASSERT_LE(page.size(), 7u);
    all.insert(all.end(), page.begin(), page.end());
    after = page.back().key;
  }
  ASSERT_EQ(all.size(), want.size());
  size_t i = 0;
  for (const auto& [key, number] : want) {
    EXPECT_EQ(all[i].key, key);
    const BlockInfo info = InfoOf(number);
    EXPECT_EQ(all[i].fingerprint, info.fingerprint);
    EXPECT_EQ(all[i].codecs, info.codecs);
    EXPECT_EQ(all[i].num_tokens, info.num_tokens);
    EXPECT_EQ(all[i].record_bytes, info.record_bytes);
    EXPECT_EQ(all[i].logical_bytes, info.logical_bytes);
    ++i;
  }
  EXPECT_TRUE(index.List(BlockKey{}, 0).empty());
}

TEST(BlockIndex, TotalsAreExact) {
  BlockIndex index(1000);
  int64_t bytes = 0;
  for (uint64_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(Insert(index, i, {.in_dram = i % 2 == 0, .in_nvme = i % 2 == 1}).ok());
    bytes += InfoOf(i).record_bytes;
  }
  index.Visit(KeyOf(1), [](IndexedBlock& block) { block.Pin(); });
  IndexShard::Totals totals = index.totals();
  EXPECT_EQ(totals.num_blocks, 100);
  EXPECT_EQ(totals.blocks_in[TierIdx(TierKind::kDram)], 50);
  EXPECT_EQ(totals.blocks_in[TierIdx(TierKind::kNvme)], 50);
  EXPECT_EQ(totals.bytes_in[TierIdx(TierKind::kDram)] + totals.bytes_in[TierIdx(TierKind::kNvme)],
            bytes);
  EXPECT_EQ(totals.pinned_bytes, InfoOf(1).record_bytes);
  ASSERT_EQ(totals.codecs.size(), 2u);
  EXPECT_EQ(totals.codecs[0].num_blocks, 50);
  EXPECT_EQ(totals.codecs[0].record_bytes + totals.codecs[1].record_bytes, bytes);
  for (uint64_t i = 0; i < 100; ++i) Erase(index, i);
  totals = index.totals();
  EXPECT_EQ(totals.num_blocks, 0);
  EXPECT_EQ(totals.bytes_in[TierIdx(TierKind::kDram)] + totals.bytes_in[TierIdx(TierKind::kNvme)],
            0);
  EXPECT_EQ(totals.pinned_bytes, 0);
  EXPECT_TRUE(totals.codecs.empty());
}

// The hash table against std::map, with many deletions.
TEST(BlockIndex, RandomUseAgreesWithAModel) {
  constexpr uint64_t kSeed = 31;
  Rng rng(kSeed);
  BlockIndex index(3000);
  std::map<uint64_t, Location> model;
  for (int step = 0; step < 100000; ++step) {
    const uint64_t number = rng.Below(4000);
    switch (rng.Below(4)) {
      case 0: {
        const absl::Status status = Insert(index, number);
        if (model.contains(number)) {
          ASSERT_FALSE(status.ok()) << "seed " << kSeed << " step " << step;
        } else if (model.size() == 3000) {
          ASSERT_TRUE(absl::IsResourceExhausted(status)) << "step " << step;
        } else {
          ASSERT_TRUE(status.ok()) << "step " << step << status;
          model[number] = {.in_dram = true};
        }
        break;
      }
      case 1:
        index.Visit(KeyOf(number), [](IndexedBlock& block) { block.Place(TierKind::kNvme); });
        if (model.contains(number)) model[number].in_nvme = true;
        break;
      case 2:
        Erase(index, number);
        model.erase(number);
        break;
      default: {
        const auto found = model.find(number);
        ASSERT_EQ(index.Lookup(KeyOf(number)), found == model.end() ? Location{} : found->second)
            << "seed " << kSeed << " step " << step;
      }
    }
    ASSERT_EQ(index.num_blocks(), static_cast<int64_t>(model.size()));
  }
  EXPECT_EQ(index.List(BlockKey{}, 10000).size(), model.size());
}

// README.md states it; a change of the entry must change both.
TEST(BlockIndex, ABlockCostsLessThanOneHundredBytes) {
  constexpr int64_t kBlocks = 200000;
  const auto before = mallinfo2();
  BlockIndex index(kBlocks);
  for (int64_t i = 0; i < kBlocks; ++i) {
    BlockKey key;
    Rng rng(static_cast<uint64_t>(i));
    for (int word = 0; word < 4; ++word) {
      const uint64_t value = rng.Next();
      std::memcpy(key.bytes.data() + 8 * word, &value, 8);
    }
    BlockInfo info = InfoOf(1);
    info.key = key;
    ASSERT_TRUE(index.Insert(info, [](IndexedBlock&) {}).ok());
  }
  const auto after = mallinfo2();
  const double stated = static_cast<double>(index.totals().index_bytes) / kBlocks;
  RecordProperty("bytes_per_block", static_cast<int>(stated));
  EXPECT_LT(stated, 100);
  // Without the sanitizers' own allocators, what malloc gave agrees with what the index says.
  const double measured =
      static_cast<double>((after.uordblks + after.hblkhd) - (before.uordblks + before.hblkhd)) /
      kBlocks;
  if (measured > 1) {
    EXPECT_NEAR(measured, stated, 6);
  }
}

TEST(BlockIndex, ManyThreadsKeepTheCounts) {
  BlockIndex index(100000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&index, t] {
      Rng rng(static_cast<uint64_t>(t));
      for (int i = 0; i < 5000; ++i) {
        const uint64_t number = rng.Below(500);
        switch (rng.Below(5)) {
          case 0:
            Insert(index, number).IgnoreError();
            break;
          case 1:
            Erase(index, number);
            break;
          case 2:
            index.Visit(KeyOf(number), [](IndexedBlock& block) {
              block.Remove(TierKind::kDram);
              block.Place(TierKind::kDram);
            });
            break;
          case 3:
            (void)index.List(KeyOf(number), 3);
            break;
          default:
            (void)index.Lookup(KeyOf(number));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const IndexShard::Totals totals = index.totals();
  EXPECT_EQ(totals.num_blocks, index.num_blocks());
  EXPECT_EQ(static_cast<int64_t>(index.List(BlockKey{}, 100000).size()), index.num_blocks());
  EXPECT_EQ(totals.blocks_in[TierIdx(TierKind::kDram)], index.num_blocks());
}

}  // namespace
}  // namespace kvstow
