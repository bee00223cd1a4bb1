// The tier in device memory: what it does when copies are late, never end, or fail. What it shares
// with other tiers is in tier_contract_test.cc.
#include "storage/hbm_tier.h"

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/device.h"
#include "tests/storage/records.h"
#include "tests/testing/late_device.h"

namespace kvstow {
namespace {

using ::testing::HasSubstr;
using testing::IsEqual;
using testing::KeyOf;
using testing::LateDevice;
using testing::RecordOf;

constexpr int64_t kDeviceBytes = 8 << 20;

class HbmTierTest : public ::testing::Test {
 protected:
  void Open(HbmTier::Options options = {.capacity_bytes = 4 << 20, .staging_bytes = 10000}) {
    absl::StatusOr<std::unique_ptr<HbmTier>> tier = HbmTier::Create(device_, options);
    ASSERT_TRUE(tier.ok()) << tier.status();
    tier_ = *std::move(tier);
  }
  absl::Status Put(uint64_t number, int64_t bytes = 100000) {
    return tier_->Put(KeyOf(number), RecordOf(number, bytes));
  }
  bool HasExactly(uint64_t number, int64_t bytes = 100000) {
    const absl::StatusOr<BlockRef> got = tier_->Get(KeyOf(number));
    return got.ok() && IsEqual(got->bytes(), RecordOf(number, bytes));
  }

  std::shared_ptr<LateDevice> device_ = std::make_shared<LateDevice>(20261201, kDeviceBytes);
  std::unique_ptr<HbmTier> tier_;
};

// The device of these tests finds what it is there to find.
TEST(LateDevice, WithoutAWaitACopyIsGarbageAtBothEnds) {
  int num_early_reads = 0;
  int num_early_writes = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    auto device = std::make_shared<LateDevice>(seed, kDeviceBytes);
    const DeviceSlab slab = *device->Allocate(4096);
    const DeviceStream stream = *device->CreateStream();
    const HostBuffer host = *device->AllocateHost(8192);
    std::byte* const source = host.get();
    std::byte* const back = host.get() + 4096;
    std::memset(source, 7, 4096);
    ASSERT_TRUE(device->CopyToDevice(stream, slab.address, source, 4096).ok());
    std::memset(source, 8, 4096);  // too early
    ASSERT_TRUE(device->CopyToHost(stream, back, slab.address, 4096).ok());
    if (std::memcmp(back, source, 4096) != 0) ++num_early_reads;
    ASSERT_TRUE(device->Wait(*device->Record(stream), absl::Seconds(1)).ok());
    if (back[0] != std::byte{7}) ++num_early_writes;
  }
  EXPECT_GT(num_early_reads, 10);
  EXPECT_GT(num_early_writes, 10);
}

TEST_F(HbmTierTest, RecordsLargerThanTheStagingComeBackWhole) {
  Open();
  for (const int64_t bytes : {640, 9984, 10048, 20032, 100096, 1 << 20}) {
    ASSERT_TRUE(Put(static_cast<uint64_t>(bytes), bytes).ok());
  }
  for (const int64_t bytes : {640, 9984, 10048, 20032, 100096, 1 << 20}) {
    EXPECT_TRUE(HasExactly(static_cast<uint64_t>(bytes), bytes)) << bytes;
  }
}

TEST_F(HbmTierTest, ManyThreadsOverFewLanesSeeOnlyWholeRecords) {
  Open({.capacity_bytes = 1 << 20, .staging_bytes = 4096, .num_lanes = 2});
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      testing::Rng rng(t);
      for (int i = 0; i < 300; ++i) {
        const uint64_t number = rng.Below(40);
        const int64_t bytes = 5000 + static_cast<int64_t>(number) * 1000;
        if (rng.Below(3) == 0) {
          const absl::Status status = Put(number, bytes);
          EXPECT_TRUE(status.ok() || absl::IsAlreadyExists(status) ||
                      absl::IsResourceExhausted(status))
              << status;
        } else if (rng.Below(2) == 0) {
          tier_->Drop(KeyOf(number));
        } else {
          const absl::StatusOr<BlockRef> got = tier_->Get(KeyOf(number));
          EXPECT_TRUE(got.ok() || absl::IsNotFound(got.status())) << got.status();
          if (got.ok()) {
            EXPECT_TRUE(IsEqual(got->bytes(), RecordOf(number, bytes)));
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(HbmTierTest, ACopyThatDoesNotEndKeepsItsMemoryUntilItHas) {
  Open({.capacity_bytes = 1 << 20, .num_lanes = 2, .wait_max = absl::Milliseconds(1)});
  ASSERT_TRUE(Put(1, 300000).ok());
  device_->Hang(true);
  const absl::Status put = Put(2, 300000);
  EXPECT_TRUE(absl::IsUnavailable(put)) << put;
  EXPECT_TRUE(absl::IsUnavailable(tier_->Get(KeyOf(1)).status()));
  // Both lanes are out. What the device may still write, or read, is nobody else's.
  EXPECT_TRUE(absl::IsUnavailable(tier_->Get(KeyOf(1)).status()));
  tier_->Drop(KeyOf(1));
  EXPECT_GE(tier_->used_bytes(), 2 * 299000);
  device_->Hang(false);
  EXPECT_TRUE(absl::IsNotFound(tier_->Get(KeyOf(1)).status()));
  EXPECT_TRUE(absl::IsNotFound(tier_->Get(KeyOf(2)).status()));
  ASSERT_TRUE(Put(3, 300000).ok());
  EXPECT_TRUE(HasExactly(3, 300000));
  tier_->Drop(KeyOf(3));
  EXPECT_EQ(tier_->used_bytes(), 0);
}

TEST_F(HbmTierTest, ADeviceThatFailsStoresNothingAndSaysSo) {
  Open();
  ASSERT_TRUE(Put(1).ok());
  device_->Break(true);
  const absl::Status put = Put(2);
  EXPECT_TRUE(absl::IsUnavailable(put)) << put;
  EXPECT_THAT(std::string(put.message()), HasSubstr("fell off the bus"));
  EXPECT_TRUE(absl::IsUnavailable(tier_->Get(KeyOf(1)).status()));
  device_->Break(false);
  EXPECT_TRUE(absl::IsNotFound(tier_->Get(KeyOf(2)).status()));
  EXPECT_TRUE(HasExactly(1));
}

TEST_F(HbmTierTest, TheSlabIsTakenAtStartAndAShortageShowsThen) {
  const absl::StatusOr<std::unique_ptr<HbmTier>> tier =
      HbmTier::Create(device_, {.capacity_bytes = kDeviceBytes + 256});
  EXPECT_TRUE(absl::IsResourceExhausted(tier.status())) << tier.status();
  Open({.capacity_bytes = 1000});
  EXPECT_EQ(tier_->capacity_bytes(), 768);
  EXPECT_TRUE(absl::IsInvalidArgument(HbmTier::Create(device_, {.capacity_bytes = 255}).status()));
}

// On the machine at hand: with a GPU its bytes come back, without one the reason is said.
TEST(DeviceMemory, OfThisMachineKeepsBytesOrIsUnavailable) {
  absl::StatusOr<std::shared_ptr<DeviceMemory>> device = OpenDeviceMemory(0);
  if (ListDevices().devices.empty()) {
    EXPECT_TRUE(absl::IsUnavailable(device.status())) << device.status();
    EXPECT_THAT(std::string(device.status().message()), HasSubstr(ListDevices().why_none));
    return;
  }
  ASSERT_TRUE(device.ok()) << device.status();
  const absl::StatusOr<std::unique_ptr<HbmTier>> tier =
      HbmTier::Create(*device, {.capacity_bytes = 64 << 20});
  ASSERT_TRUE(tier.ok()) << tier.status();
  for (uint64_t number = 0; number < 8; ++number) {
    ASSERT_TRUE((*tier)->Put(KeyOf(number), RecordOf(number, 6 << 20)).ok());
  }
  for (uint64_t number = 0; number < 8; ++number) {
    EXPECT_TRUE(IsEqual((*tier)->Get(KeyOf(number))->bytes(), RecordOf(number, 6 << 20)));
  }
}

}  // namespace
}  // namespace kvstow
