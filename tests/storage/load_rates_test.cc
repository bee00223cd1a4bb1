#include "storage/load_rates.h"

#include "gtest/gtest.h"

namespace kvstow {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

BlockInfo Block(bool in_dram) {
  return {
      .location = {.in_dram = in_dram, .in_nvme = true}, .num_tokens = 64, .record_bytes = kMiB};
}

TEST(LoadRates, GuessesUntilTheFirstReadThenMeasures) {
  LoadRates rates;
  EXPECT_FALSE(rates.of(TierKind::kDram).is_measured);
  rates.RecordSend(100 * kMiB, absl::Seconds(1));
  EXPECT_TRUE(rates.of(TierKind::kDram).is_measured);
  EXPECT_FALSE(rates.of(TierKind::kNvme).is_measured);
  EXPECT_NEAR(rates.of(TierKind::kDram).bytes_per_s, 100.0 * kMiB, 1);
  rates.RecordRead(TierKind::kNvme, 10 * kMiB, absl::Seconds(1));
  EXPECT_NEAR(rates.of(TierKind::kNvme).bytes_per_s, 10.0 * kMiB, 1);
  EXPECT_NEAR(rates.of(TierKind::kDram).bytes_per_s, 100.0 * kMiB, 1);
}

TEST(LoadRates, ADiskThatTurnsSlowIsNoticed) {
  LoadRates rates;
  rates.RecordSend(1000 * kMiB, absl::Seconds(1));
  for (int i = 0; i < 100; ++i) rates.RecordRead(TierKind::kNvme, 500 * kMiB, absl::Seconds(1));
  EXPECT_NEAR(rates.of(TierKind::kNvme).bytes_per_s, 500.0 * kMiB, 1000);
  for (int i = 0; i < 10; ++i) rates.RecordRead(TierKind::kNvme, kMiB, absl::Seconds(1));
  EXPECT_LT(rates.of(TierKind::kNvme).bytes_per_s, 2.0 * kMiB);
}

TEST(LoadRates, SmallReadsAndClocksThatStandStillSayNothing) {
  LoadRates rates;
  rates.RecordSend(100, absl::Seconds(1));
  rates.RecordSend(kMiB, absl::ZeroDuration());
  rates.RecordSend(kMiB, absl::Seconds(-1));
  EXPECT_FALSE(rates.of(TierKind::kDram).is_measured);
}

TEST(EstimateLoad, ASlowDiskYieldsRecompute) {
  LoadRates rates;
  rates.RecordSend(1000 * kMiB, absl::Seconds(1));
  rates.RecordRead(TierKind::kNvme, kMiB, absl::Seconds(1));
  const std::vector<BlockInfo> on_disk(10, Block(false));
  const LoadEstimate slow = EstimateLoad(rates, on_disk, 20000);
  EXPECT_EQ(slow.num_worth_loading, 0);
  EXPECT_NEAR(slow.load_ms, 10000, 1);
  EXPECT_NEAR(slow.recompute_ms, 32, 0.01);
  EXPECT_EQ(slow.load_bytes, 10 * kMiB);
  EXPECT_TRUE(slow.is_measured);
  // A slow engine makes the same load worth while.
  EXPECT_EQ(EstimateLoad(rates, on_disk, 10).num_worth_loading, 10);
}

TEST(EstimateLoad, LoadsTheLeadingBlocksThatPay) {
  LoadRates rates;
  rates.RecordSend(1000 * kMiB, absl::Seconds(1));  // 1 ms a block; computing takes 3.2 ms
  rates.RecordRead(TierKind::kNvme, 100 * kMiB, absl::Seconds(1));  // 10 ms a block
  std::vector<BlockInfo> blocks(5, Block(true));
  blocks.resize(9, Block(false));
  EXPECT_EQ(EstimateLoad(rates, blocks, 20000).num_worth_loading, 5);
  // A block on disk in between is worth its 10 ms when enough in memory stands behind it.
  blocks.assign(1, Block(false));
  blocks.resize(3, Block(true));
  EXPECT_EQ(EstimateLoad(rates, blocks, 20000).num_worth_loading, 0);
  blocks.resize(8, Block(true));
  EXPECT_EQ(EstimateLoad(rates, blocks, 20000).num_worth_loading, 8);
  EXPECT_EQ(EstimateLoad(rates, {}, 20000).num_worth_loading, 0);
}

}  // namespace
}  // namespace kvstow
