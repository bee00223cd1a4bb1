// StoreTest: a TieredStore with a clock that the test moves and no background thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "storage/tiered_store.h"
#include "tests/storage/records.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/late_device.h"

namespace kvstow::testing {

class StoreTest : public ::testing::Test {
 protected:
  static constexpr int64_t kMiB = int64_t{1} << 20;

  StoreTest() {
    options_.dram_bytes = 4 * kMiB;
    options_.nvme_bytes = 64 * kMiB;
    options_.write_deadline = absl::Seconds(30);
    options_.reuse_delay = absl::Seconds(20);
    options_.lease_max = absl::Seconds(60);
    options_.background = false;
    // Every use counts, and the block used longest ago leaves first.
    options_.policy = "lru";
    options_.turn_gap = absl::ZeroDuration();
  }

  void Open() {
    store_.reset();
    absl::StatusOr<std::unique_ptr<TieredStore>> store =
        TieredStore::Open(options_, &clock_, device_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  // A GPU whose copies come late.
  void OpenWithHbm(int64_t hbm_bytes) {
    device_ = std::make_shared<LateDevice>(20261205, 2 * hbm_bytes);
    options_.hbm_bytes = hbm_bytes;
    Open();
  }
  void OpenWithDisk() {
    options_.nvme_path = dir_.path() + "/store";
    Open();
  }

  // Units of a record of exactly `bytes` bytes, a multiple of 64.
  static std::vector<uint32_t> Lengths(int64_t bytes) {
    const int64_t units = bytes - RecordPrefixBytes(4);
    const int64_t unit = units / 4 / 64 * 64;
    std::vector<uint32_t> lengths(4, static_cast<uint32_t>(unit));
    lengths[3] = static_cast<uint32_t>(units - 3 * unit);
    return lengths;
  }
  absl::Status Put(uint64_t number, int64_t bytes = kMiB) {
    return PutBlock(*store_, KeyOf(number), Lengths(bytes));
  }
  bool HasExactly(uint64_t number, int64_t bytes = kMiB) {
    const absl::StatusOr<BlockRef> got = store_->Get(KeyOf(number));
    return got.ok() && IsEqual(got->bytes(), RecordOf(MetaOf(KeyOf(number)), Lengths(bytes)));
  }
  Location Where(uint64_t number) { return store_->Lookup({KeyOf(number)})[0]; }
  TierStats StatsOf(TierKind tier) const {
    for (const TierStats& stats : store_->Stats().tiers) {
      if (stats.kind == tier) return stats;
    }
    return {};
  }
  TierStats Hbm() const { return StatsOf(TierKind::kHbm); }
  TierStats Dram() const { return StatsOf(TierKind::kDram); }
  TierStats Nvme() const { return StatsOf(TierKind::kNvme); }
  // An open ticket with its first `num_units` units written.
  TicketId Reserve(uint64_t number, int64_t bytes = kMiB, uint32_t num_units = 4) {
    const absl::StatusOr<TicketId> ticket =
        store_->Reserve(RequestOf(KeyOf(number), Lengths(bytes)));
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    if (!ticket.ok()) return 0;
    std::vector<uint32_t> lengths = Lengths(bytes);
    lengths.resize(num_units);
    EXPECT_TRUE(WriteUnits(*store_, *ticket, KeyOf(number), lengths).ok());
    return *ticket;
  }

  TempDir dir_;
  FakeClock clock_;
  std::shared_ptr<LateDevice> device_;  // null: none
  StoreOptions options_;
  std::unique_ptr<TieredStore> store_;
};

}  // namespace kvstow::testing
