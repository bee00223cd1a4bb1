// What every tier promises (storage/tier.h), over all of them.
#include <map>
#include <set>
#include <thread>

#include "gtest/gtest.h"
#include "storage/dram_tier.h"
#include "storage/hbm_tier.h"
#include "storage/nvme_tier.h"
#include "tests/storage/records.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/late_device.h"

namespace kvstow {
namespace {

using testing::FakeClock;
using testing::IsEqual;
using testing::KeyOf;
using testing::RecordOf;
using testing::TempDir;

constexpr int64_t kCapacity = 32 << 20;

struct Dram {
  static constexpr bool kFreesAtOnce = true;
  std::unique_ptr<Tier> tier = *DramTier::Create(kCapacity);
};

struct Hbm {
  std::unique_ptr<Tier> tier =
      *HbmTier::Create(std::make_shared<testing::LateDevice>(20261203, kCapacity),
                       {.capacity_bytes = kCapacity, .staging_bytes = 100000, .num_lanes = 3});
};

struct Nvme {
  static constexpr bool kFreesAtOnce = false;  // with the next Flush or Put
  TempDir dir;
  FakeClock clock;
  std::unique_ptr<Tier> tier = Open();

  std::unique_ptr<Tier> Open() {
    absl::StatusOr<std::unique_ptr<NvmeTier>> opened =
        NvmeTier::Open({.path = dir.path(), .capacity_bytes = kCapacity, .clock = &clock},
                       [](const BlockInfo&) {});
    KVSTOW_CHECK(opened.ok());
    return *std::move(opened);
  }
};

template <typename T>
class TierContract : public ::testing::Test {
 protected:
  Tier& tier() { return *made_.tier; }
  void PutNumber(uint64_t number, int64_t bytes) {
    const absl::Status status = tier().Put(KeyOf(number), RecordOf(number, bytes));
    ASSERT_TRUE(status.ok()) << status;
  }
  T made_;
};

using Tiers = ::testing::Types<Hbm, Dram, Nvme>;
TYPED_TEST_SUITE(TierContract, Tiers);

TYPED_TEST(TierContract, GetReturnsExactlyWhatWasPut) {
  for (const int64_t bytes : {600, 4095, 4097, 70000, 3 << 20}) {
    this->PutNumber(static_cast<uint64_t>(bytes), bytes);
  }
  for (int round = 0; round < 2; ++round) {  // from memory, then from disk
    for (const int64_t bytes : {600, 4095, 4097, 70000, 3 << 20}) {
      const absl::StatusOr<BlockRef> got = this->tier().Get(KeyOf(static_cast<uint64_t>(bytes)));
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_TRUE(IsEqual(got->bytes(), RecordOf(static_cast<uint64_t>(bytes), bytes))) << bytes;
    }
    ASSERT_TRUE(this->tier().Flush().ok());
  }
}

TYPED_TEST(TierContract, PutOfAKnownKeyIsAlreadyExistsAndChangesNothing) {
  this->PutNumber(1, 5000);
  std::vector<std::byte> other = RecordOf(testing::MetaOf(KeyOf(1)), {1, 2, 3});
  EXPECT_TRUE(absl::IsAlreadyExists(this->tier().Put(KeyOf(1), other)));
  EXPECT_TRUE(IsEqual(this->tier().Get(KeyOf(1))->bytes(), RecordOf(1, 5000)));
}

TYPED_TEST(TierContract, AnUnknownKeyIsNotFoundAndMayBeDropped) {
  EXPECT_TRUE(absl::IsNotFound(this->tier().Get(KeyOf(1)).status()));
  this->tier().Drop(KeyOf(1));
  EXPECT_EQ(this->tier().used_bytes(), 0);
}

TYPED_TEST(TierContract, ADroppedBlockIsGoneAndItsKeyIsFree) {
  this->PutNumber(1, 100000);
  this->PutNumber(2, 100000);
  this->tier().Drop(KeyOf(1));
  EXPECT_TRUE(absl::IsNotFound(this->tier().Get(KeyOf(1)).status()));
  EXPECT_TRUE(this->tier().Get(KeyOf(2)).ok());
  this->PutNumber(1, 200000);
  EXPECT_TRUE(IsEqual(this->tier().Get(KeyOf(1))->bytes(), RecordOf(1, 200000)));
}

TYPED_TEST(TierContract, AReferenceKeepsItsBytesThroughDropAndReuse) {
  this->PutNumber(1, 1 << 20);
  absl::StatusOr<BlockRef> held = this->tier().Get(KeyOf(1));
  ASSERT_TRUE(held.ok());
  const BlockRef copy = *held;
  held = absl::NotFoundError("released");
  this->tier().Drop(KeyOf(1));
  for (uint64_t number = 2;; ++number) {
    if (!this->tier().Put(KeyOf(number), RecordOf(number, 1 << 20)).ok()) break;
  }
  EXPECT_TRUE(IsEqual(copy.bytes(), RecordOf(1, 1 << 20)));
}

TYPED_TEST(TierContract, PutRefusesWhenFullAndNamesTheLimit) {
  uint64_t number = 0;
  absl::Status status;
  while ((status = this->tier().Put(KeyOf(number), RecordOf(number, 1 << 20))).ok()) {
    ASSERT_LT(++number, 33u);
    ASSERT_LE(this->tier().used_bytes(), this->tier().capacity_bytes());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find("bytes wanted"), absl::string_view::npos) << status;
  EXPECT_GE(number, 20u);  // most of the capacity is of use
  EXPECT_TRUE(absl::IsNotFound(this->tier().Get(KeyOf(number)).status()));
  // Dropping makes room again, at once.
  this->tier().Drop(KeyOf(0));
  this->tier().Drop(KeyOf(1));
  EXPECT_TRUE(this->tier().Put(KeyOf(number), RecordOf(number, 1 << 20)).ok());
}

TYPED_TEST(TierContract, ARecordLargerThanTheTierIsRefusedForGood) {
  const absl::Status status = this->tier().Put(KeyOf(1), RecordOf(1, kCapacity + 4096));
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

TYPED_TEST(TierContract, ForEachVisitsEachBlockOnceWithItsSize) {
  std::map<BlockKey, int64_t> want;
  for (uint64_t number = 0; number < 50; ++number) {
    this->PutNumber(number, 1000 + static_cast<int64_t>(number) * 128);
    want[KeyOf(number)] =
        static_cast<int64_t>(RecordOf(number, 1000 + static_cast<int64_t>(number) * 128).size());
  }
  this->tier().Drop(KeyOf(7));
  want.erase(KeyOf(7));
  std::map<BlockKey, int64_t> seen;
  this->tier().ForEach([&](const BlockKey& key, int64_t record_bytes) {
    EXPECT_TRUE(seen.emplace(key, record_bytes).second);
  });
  EXPECT_EQ(seen, want);
}

TYPED_TEST(TierContract, UsedBytesReturnToZero) {
  for (uint64_t number = 0; number < 20; ++number) this->PutNumber(number, 300000);
  EXPECT_GE(this->tier().used_bytes(), 20 * 299000);
  for (uint64_t number = 0; number < 20; ++number) this->tier().Drop(KeyOf(number));
  ASSERT_TRUE(this->tier().Flush().ok());
  EXPECT_EQ(this->tier().used_bytes(), 0);
}

TYPED_TEST(TierContract, AReferenceMayOutliveTheTier) {
  this->PutNumber(1, 100000);
  this->PutNumber(2, 1000);
  ASSERT_TRUE(this->tier().Flush().ok());
  const BlockRef large = *this->tier().Get(KeyOf(1));
  const BlockRef small = *this->tier().Get(KeyOf(2));
  this->made_.tier.reset();
  EXPECT_TRUE(IsEqual(large.bytes(), RecordOf(1, 100000)));
  EXPECT_TRUE(IsEqual(small.bytes(), RecordOf(2, 1000)));
}

TYPED_TEST(TierContract, ManyThreadsSeeOnlyWholeRecords) {
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      testing::Rng rng(t);
      for (int i = 0; i < 300; ++i) {
        const uint64_t number = rng.Below(30);
        const int64_t bytes = 20000 + static_cast<int64_t>(number) * 1000;
        switch (rng.Below(4)) {
          case 0: {
            const absl::Status status = this->tier().Put(KeyOf(number), RecordOf(number, bytes));
            EXPECT_TRUE(status.ok() || absl::IsAlreadyExists(status)) << status;
            break;
          }
          case 1:
            this->tier().Drop(KeyOf(number));
            break;
          default: {
            const absl::StatusOr<BlockRef> got = this->tier().Get(KeyOf(number));
            if (!got.ok()) {
              EXPECT_TRUE(absl::IsNotFound(got.status())) << got.status();
            } else {
              EXPECT_TRUE(IsEqual(got->bytes(), RecordOf(number, bytes)));
            }
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kvstow
