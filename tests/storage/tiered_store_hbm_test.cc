// TieredStore with the memory of a GPU above host memory.
#include <optional>

#include "gtest/gtest.h"
#include "tests/storage/store_fixture.h"

namespace kvstow {
namespace {

using testing::KeyOf;

class StoreHbmTest : public testing::StoreTest {
 protected:
  static constexpr int64_t kBlock = 500032;  // four in 2 MiB

  void PutAndHit(uint64_t number) {
    ASSERT_TRUE(Put(number, kBlock).ok());
    store_->RunMaintenance();
    ASSERT_TRUE(HasExactly(number, kBlock));
    store_->RunMaintenance();
  }
};

TEST_F(StoreHbmTest, ABlockThatIsHitMovesUpAndIsReadFromThere) {
  OpenWithHbm(2 * kMiB);
  ASSERT_TRUE(Put(1, kBlock).ok());
  ASSERT_TRUE(Put(2, kBlock).ok());
  store_->RunMaintenance();
  EXPECT_EQ(Where(1), (Location{.in_dram = true}));  // nobody has asked for it
  EXPECT_TRUE(HasExactly(1, kBlock));
  EXPECT_EQ(Where(1), (Location{.in_dram = true}));
  store_->RunMaintenance();
  EXPECT_EQ(Where(1), (Location{.in_hbm = true}));
  EXPECT_EQ(Where(2), (Location{.in_dram = true}));
  EXPECT_EQ(Hbm().sealed_bytes, kBlock);
  EXPECT_EQ(Dram().sealed_bytes, kBlock);
  EXPECT_TRUE(HasExactly(1, kBlock));
  EXPECT_EQ(store_->Stats().hbm_hits, 1);
  EXPECT_EQ(store_->Stats().hbm_bytes_written, kBlock);
  EXPECT_TRUE(store_->Verify(KeyOf(1)).ok());
  EXPECT_TRUE(store_->Delete(KeyOf(1)).ok());
  EXPECT_EQ(Hbm().used_bytes, 0);
  EXPECT_TRUE(absl::IsNotFound(store_->Get(KeyOf(1)).status()));
}

TEST_F(StoreHbmTest, WhatMakesRoomMovesDownAndNothingIsLost) {
  OpenWithHbm(2 * kMiB);  // and 4 MiB of memory
  for (uint64_t number = 0; number < 10; ++number) PutAndHit(number);
  // The last four hit, but for the room that is kept for the next one.
  int in_hbm = 0;
  for (uint64_t number = 0; number < 10; ++number) {
    EXPECT_TRUE(Where(number).present()) << number;
    in_hbm += Where(number).in_hbm ? 1 : 0;
  }
  EXPECT_GE(in_hbm, 3);
  EXPECT_TRUE(Where(9).in_hbm);
  EXPECT_FALSE(Where(0).in_hbm);
  EXPECT_GE(store_->Stats().hbm_evictions, 5);
  EXPECT_EQ(store_->Stats().dram_evictions, 0);
  for (uint64_t number = 0; number < 10; ++number) EXPECT_TRUE(HasExactly(number, kBlock));
}

TEST_F(StoreHbmTest, TheLastCopyStaysWhereThereIsNoPlaceBelow) {
  options_.dram_bytes = 2 * kMiB;
  OpenWithHbm(2 * kMiB);
  for (uint64_t number = 0; number < 4; ++number) PutAndHit(number);
  for (uint64_t number = 4; number < 8; ++number) ASSERT_TRUE(Put(number, kBlock).ok());
  std::vector<BlockRef> held;  // all of host memory
  for (uint64_t number = 0; number < 8; ++number) {
    if (Where(number).in_dram) held.push_back(*store_->Get(KeyOf(number)));
  }
  ASSERT_EQ(held.size(), 4u);
  store_->RunMaintenance();
  for (uint64_t number = 0; number < 8; ++number) EXPECT_TRUE(Where(number).present()) << number;
  EXPECT_EQ(store_->Stats().hbm_evictions, 0);
}

TEST_F(StoreHbmTest, AReadersBlockStaysInMemoryAndALeasedOneInHbm) {
  OpenWithHbm(2 * kMiB);
  ASSERT_TRUE(Put(1, kBlock).ok());
  std::optional<BlockRef> held = *store_->Get(KeyOf(1));
  store_->RunMaintenance();
  EXPECT_EQ(Where(1), (Location{.in_hbm = true, .in_dram = true}));
  held.reset();
  PutAndHit(2);
  ASSERT_EQ(Where(2), (Location{.in_hbm = true}));
  const absl::StatusOr<AcquireResult> lease = store_->Acquire({KeyOf(2)}, absl::Seconds(60));
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(store_->Stats().pinned_bytes, kBlock);
  for (uint64_t number = 3; number < 10; ++number) PutAndHit(number);
  EXPECT_EQ(Where(2), (Location{.in_hbm = true}));
  ASSERT_TRUE(store_->Release(lease->lease).ok());
  for (uint64_t number = 10; number < 14; ++number) PutAndHit(number);
  EXPECT_FALSE(Where(2).in_hbm);
}

TEST_F(StoreHbmTest, WithoutADeviceItsCapacityIsRefusedByName) {
  options_.hbm_bytes = kMiB;
  absl::Status status = TieredStore::Open(options_, &clock_).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(), "hbm_bytes is 1048576, want 0 where there is no device");
  options_.hbm_bytes = 1000;
  status = TieredStore::Open(options_, &clock_).status();
  EXPECT_EQ(status.message(), "hbm_bytes is 1000, want at least 1048576");
}

TEST_F(StoreHbmTest, BytesThatADeviceChangedAreAMissOrComeFromDisk) {
  options_.nvme_path = dir_.path() + "/store";
  OpenWithHbm(2 * kMiB);
  PutAndHit(1);  // on disk too
  PutAndHit(2);
  for (const uint64_t number : {1, 2}) {
    ASSERT_EQ(Where(number), (Location{.in_hbm = true, .in_nvme = true}));
  }
  device_->FlipBytes();
  EXPECT_TRUE(HasExactly(1, kBlock));
  EXPECT_FALSE(Where(1).in_hbm);
  EXPECT_TRUE(absl::IsDataLoss(store_->Verify(KeyOf(2))));
  EXPECT_EQ(Where(2), (Location{.in_nvme = true}));
  EXPECT_EQ(store_->Stats().corrupt_blocks, 2);
  options_.nvme_path.clear();
  Open();
  PutAndHit(3);
  device_->FlipBytes();
  EXPECT_TRUE(absl::IsNotFound(store_->Get(KeyOf(3)).status()));
  EXPECT_FALSE(Where(3).present());
}

TEST_F(StoreHbmTest, ADeviceThatFailsCostsMissesAndIsLeftAloneForAWhile) {
  OpenWithHbm(2 * kMiB);
  PutAndHit(1);
  device_->Break(true);
  EXPECT_TRUE(absl::IsNotFound(store_->Get(KeyOf(1)).status()));
  EXPECT_EQ(store_->Stats().hbm_errors, 1);
  device_->Break(false);
  EXPECT_TRUE(absl::IsNotFound(store_->Get(KeyOf(1)).status()));  // nobody asks it
  PutAndHit(2);
  EXPECT_EQ(Where(2), (Location{.in_dram = true}));
  EXPECT_EQ(store_->Stats().hbm_errors, 1);
  clock_.Advance(absl::Seconds(31));
  EXPECT_TRUE(HasExactly(1, kBlock));
  EXPECT_TRUE(HasExactly(2, kBlock));
  store_->RunMaintenance();
  EXPECT_EQ(Where(2), (Location{.in_hbm = true}));
}

TEST_F(StoreHbmTest, WhatLivesInHbmOnlyIsWrittenToDiskWhenAskedFor) {
  options_.nvme_path = dir_.path() + "/store";
  options_.disk_write_bytes_per_day = 1;  // one block, and then nothing unasked
  OpenWithHbm(2 * kMiB);
  PutAndHit(1);
  PutAndHit(2);
  ASSERT_EQ(Where(2), (Location{.in_hbm = true}));
  ASSERT_TRUE(store_->Persist({KeyOf(2)}, absl::Seconds(5)).ok());
  EXPECT_EQ(Where(2), (Location{.in_hbm = true, .in_nvme = true}));
  options_.hbm_bytes = 0;
  Open();
  EXPECT_TRUE(HasExactly(2, kBlock));
  EXPECT_EQ(store_->Stats().policy_files_set_aside, 0);
}

// Hits may come faster than blocks move up: then some wait at all times.
TEST_F(StoreHbmTest, HitsThatKeepArrivingKeepNoSealedBlockFromTheDisk) {
  options_.nvme_path = dir_.path() + "/store";
  options_.dram_bytes = 8 * kMiB;
  OpenWithHbm(2 * kMiB);
  for (uint64_t number = 0; number < 10; ++number) ASSERT_TRUE(Put(number, kBlock).ok());
  store_->RunMaintenance();
  for (uint64_t number = 20; number < 23; ++number) ASSERT_TRUE(Put(number, kBlock).ok());
  ASSERT_TRUE(HasExactly(0, kBlock));
  constexpr int kRaisesMax = 100;  // so that a round without an end fails, and does not hang
  int raises = 0;
  device_->OnCopyToDevice([&] {
    if (++raises == 1) {
      EXPECT_TRUE(Where(20).in_nvme) << "the disk goes first";
    }
    if (raises >= kRaisesMax) return;
    for (uint64_t number = 0; number < 10; ++number) EXPECT_TRUE(HasExactly(number, kBlock));
  });
  store_->RunMaintenance();
  device_->OnCopyToDevice(nullptr);
  EXPECT_GE(raises, 1);
  EXPECT_LT(raises, kRaisesMax);
  for (uint64_t number = 20; number < 23; ++number) EXPECT_TRUE(Where(number).in_nvme) << number;
}

// What maintenance does besides moving blocks comes once a round.
TEST_F(StoreHbmTest, HitsAndSealsThatKeepArrivingLeaveARoundItsEnd) {
  options_.nvme_path = dir_.path() + "/store";
  options_.dram_bytes = 8 * kMiB;
  OpenWithHbm(2 * kMiB);
  constexpr int kRaisesMax = 100;
  int raises = 0;
  const auto seal_and_hit = [&] {
    const auto number = static_cast<uint64_t>(raises);
    EXPECT_TRUE(Put(number, kBlock).ok());
    EXPECT_TRUE(HasExactly(number, kBlock));
  };
  seal_and_hit();
  device_->OnCopyToDevice([&] {
    if (++raises < kRaisesMax) seal_and_hit();
  });
  store_->RunMaintenance();
  EXPECT_EQ(raises, 1);
  store_->RunMaintenance();  // goes on with what came meanwhile
  device_->OnCopyToDevice(nullptr);
  EXPECT_EQ(raises, 2);
  EXPECT_TRUE(Where(1).in_nvme);
  EXPECT_TRUE(Where(1).in_hbm);
}

TEST_F(StoreHbmTest, AFullIndexDropsBlocksOfHbmToo) {
  options_.blocks_max = 3;
  OpenWithHbm(2 * kMiB);
  for (uint64_t number = 0; number < 6; ++number) PutAndHit(number);
  EXPECT_LE(store_->Stats().num_blocks, 3);
  EXPECT_TRUE(Where(5).in_hbm);
  EXPECT_FALSE(Where(0).present());
}

}  // namespace
}  // namespace kvstow
