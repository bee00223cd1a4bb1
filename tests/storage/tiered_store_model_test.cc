// TieredStore against a std::map: random operations, one thread and then several.
#include <atomic>
#include <map>
#include <set>
#include <thread>

#include "gtest/gtest.h"
#include "storage/nvme_tier.h"
#include "tests/storage/store_fixture.h"

namespace kvstow {
namespace {

using testing::IsEqual;
using testing::KeyOf;
using testing::MetaOf;
using testing::RecordOf;
using testing::RequestOf;
using testing::Rng;
using testing::WriteUnits;

// Sizes follow from the key, so that any block can be checked by anyone.
std::vector<uint32_t> LengthsOf(uint64_t number) {
  Rng rng(number);
  std::vector<uint32_t> lengths(1 + rng.Below(5));
  for (uint32_t& length : lengths) length = static_cast<uint32_t>(rng.Below(60000));
  return lengths;
}

std::vector<std::byte> WantOf(uint64_t number) {
  return RecordOf(MetaOf(KeyOf(number)), LengthsOf(number));
}

class StoreModelTest : public testing::StoreTest {
 protected:
  struct Writing {
    TicketId ticket;
    absl::Time deadline;
  };

  // One random step; keeps `sealed_` (keys that may be there) and `open_` in step.
  void Step(Rng& rng) {
    const uint64_t number = rng.Below(kNumbers);
    const BlockKey key = KeyOf(number);
    switch (rng.Below(12)) {
      case 0:
      case 1:
      case 2:
        StartWriting(number, rng);
        break;
      case 3:
        FinishWriting(rng);
        break;
      case 4: {
        const absl::Status status = store_->Delete(key);
        ASSERT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
        if (status.ok()) {
          ASSERT_TRUE(sealed_.contains(number));
        }
        sealed_.erase(number);
        break;
      }
      case 5:
        clock_.Advance(absl::Seconds(static_cast<int64_t>(rng.Below(8))));
        break;
      case 6:
        store_->RunMaintenance();
        break;
      case 7:
        Lease(rng);
        break;
      case 8: {
        const absl::Status status = store_->Persist({key}, absl::Seconds(5));
        ASSERT_TRUE(status.ok() || absl::IsNotFound(status) ||
                    (options_.nvme_path.empty() && absl::IsFailedPrecondition(status)))
            << status;
        break;
      }
      case 9: {
        const absl::Status status = store_->Verify(key);
        ASSERT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
        break;
      }
      default: {
        const absl::StatusOr<BlockRef> got = store_->Get(key);
        if (!got.ok()) {
          ASSERT_TRUE(absl::IsNotFound(got.status())) << got.status();
          break;
        }
        ASSERT_TRUE(sealed_.contains(number)) << "a block that was never sealed";
        ASSERT_TRUE(IsEqual(got->bytes(), WantOf(number)));
        if (held_.size() < 4) held_[number] = *got;
      }
    }
    if (rng.Below(3) == 0) held_.clear();
    for (const auto& [held, block] : held_) {
      ASSERT_TRUE(IsEqual(block.bytes(), WantOf(held))) << "bytes changed under a pin";
    }
  }

  void StartWriting(uint64_t number, Rng& rng) {
    std::vector<uint32_t> planned = LengthsOf(number);
    for (uint32_t& length : planned) {
      if (rng.Below(10) == 0) length = 0;  // not planned
    }
    const absl::StatusOr<TicketId> ticket = store_->Reserve(RequestOf(KeyOf(number), planned));
    const auto writing = open_.find(number);
    const bool is_live = writing != open_.end() && clock_.Now() < writing->second.deadline;
    if (is_live) {
      ASSERT_TRUE(absl::IsAlreadyExists(ticket.status())) << ticket.status();
      return;
    }
    if (!ticket.ok()) {
      ASSERT_TRUE(absl::IsResourceExhausted(ticket.status()) ||
                  (absl::IsAlreadyExists(ticket.status()) && sealed_.contains(number)))
          << ticket.status();
      return;
    }
    open_[number] = {*ticket, clock_.Now() + absl::Seconds(30)};
  }

  void FinishWriting(Rng& rng) {
    if (open_.empty()) return;
    auto any = open_.begin();
    std::advance(any, static_cast<int64_t>(rng.Below(open_.size())));
    const auto [number, writing] = *any;
    open_.erase(any);
    const bool is_dead = clock_.Now() >= writing.deadline;
    absl::Status status;
    if (rng.Below(4) == 0) {
      status = store_->Abort(writing.ticket);
    } else {
      status = WriteUnits(*store_, writing.ticket, KeyOf(number), LengthsOf(number));
      if (status.ok()) status = store_->Seal(writing.ticket);
      if (status.ok()) sealed_.insert(number);
      if (absl::IsResourceExhausted(status)) {
        ASSERT_TRUE(store_->Abort(writing.ticket).ok());
        return;
      }
    }
    if (is_dead) {
      ASSERT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    } else {
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  void Lease(Rng& rng) {
    if (!leases_.empty() && rng.Below(2) == 0) {
      const absl::Status status = store_->Release(leases_.back());
      ASSERT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
      leases_.pop_back();
      return;
    }
    std::vector<BlockKey> keys;
    for (int i = 0; i < 3; ++i) keys.push_back(KeyOf(rng.Below(kNumbers)));
    const absl::StatusOr<AcquireResult> lease =
        store_->Acquire(keys, absl::Seconds(1 + static_cast<int64_t>(rng.Below(20))));
    ASSERT_TRUE(lease.ok()) << lease.status();
    if (lease->lease != 0) leases_.push_back(lease->lease);
  }

  void CheckSums() {
    const StoreStats stats = store_->Stats();
    std::map<TierKind, int64_t> bytes;
    int64_t codec_bytes = 0;
    for (const BlockInfo& block : store_->List(BlockKey{}, 1 << 20)) {
      if (block.location.in_hbm) bytes[TierKind::kHbm] += block.record_bytes;
      if (block.location.in_dram) bytes[TierKind::kDram] += block.record_bytes;
      if (block.location.in_nvme) bytes[TierKind::kNvme] += block.record_bytes;
      codec_bytes += block.record_bytes;
    }
    for (const TierStats& tier : stats.tiers) {
      SCOPED_TRACE(TierName(tier.kind));
      ASSERT_EQ(tier.sealed_bytes, bytes[tier.kind]);
      ASSERT_LE(tier.used_bytes, tier.capacity_bytes);
      ASSERT_GE(tier.reserved_bytes, 0);
      if (tier.kind == TierKind::kNvme) continue;
      ASSERT_GE(tier.used_bytes, bytes[tier.kind] + tier.reserved_bytes);
    }
    ASSERT_EQ(stats.codecs.empty() ? 0 : stats.codecs[0].record_bytes, codec_bytes);
    ASSERT_EQ(stats.corrupt_blocks, 0);
    ASSERT_EQ(stats.hbm_errors, 0);
    for (const int64_t gauge :
         {stats.pinned_bytes, stats.open_leases, stats.open_tickets, stats.write_behind_bytes}) {
      ASSERT_GE(gauge, 0);
    }
  }

  // What one of several threads does next.
  void ThreadStep(Rng& rng, std::atomic<int64_t>& num_hits, std::atomic<int64_t>& num_seals) {
    const uint64_t number = rng.Below(kNumbers);
    const BlockKey key = KeyOf(number);
    switch (rng.Below(8)) {
      case 0:
      case 1:
      case 2: {
        const absl::Status status = testing::PutBlock(*store_, key, LengthsOf(number));
        EXPECT_TRUE(status.ok() || absl::IsAlreadyExists(status) ||
                    absl::IsResourceExhausted(status))
            << status;
        if (status.ok()) ++num_seals;
        break;
      }
      case 3: {
        const absl::StatusOr<AcquireResult> lease =
            store_->Acquire({key, KeyOf(rng.Below(kNumbers))}, absl::Seconds(10));
        EXPECT_TRUE(lease.ok()) << lease.status();
        if (lease.ok() && lease->lease != 0) {
          EXPECT_TRUE(store_->Release(lease->lease).ok());
        }
        break;
      }
      case 4: {
        const absl::Status status = rng.Below(2) == 0 ? store_->Delete(key) : store_->Verify(key);
        EXPECT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
        break;
      }
      case 5: {
        const absl::Status status = store_->Persist({key}, absl::Seconds(60));
        EXPECT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
        (void)store_->Stats();
        (void)store_->List(key, 10);
        break;
      }
      default: {
        const absl::StatusOr<BlockRef> got = store_->Get(key);
        if (got.ok()) {
          EXPECT_TRUE(IsEqual(got->bytes(), WantOf(number)));
          ++num_hits;
        } else {
          EXPECT_TRUE(absl::IsNotFound(got.status())) << got.status();
        }
      }
    }
  }

  // Everything ends; all gauges are back to zero.
  void Drain() {
    held_.clear();
    for (const LeaseId lease : leases_) store_->Release(lease).IgnoreError();
    for (const auto& [number, writing] : open_) store_->Abort(writing.ticket).IgnoreError();
    clock_.Advance(absl::Hours(1));
    store_->RunMaintenance();
    store_->RunMaintenance();
    const StoreStats stats = store_->Stats();
    EXPECT_EQ(stats.pinned_bytes, 0);
    EXPECT_EQ(stats.open_leases, 0);
    EXPECT_EQ(stats.open_tickets, 0);
    EXPECT_EQ(stats.write_behind_bytes, 0);
    EXPECT_EQ(Dram().reserved_bytes, 0);
  }

  // Of a store with a disk, to its end.
  void UseAndRestart(uint64_t seed) {
    Rng rng(seed);
    for (int step = 0; step < 4000; ++step) {
      SCOPED_TRACE(absl::StrCat("seed ", seed, " step ", step));
      Step(rng);
      if (HasFatalFailure()) return;
      if (step % 50 == 0) CheckSums();
      if (step % 1000 == 999) {
        Drain();
        open_.clear();
        leases_.clear();
        Open();  // restart: what is found is whole
        CheckSums();
      }
    }
    Drain();
    CheckWholeAndEmpty();
  }

  // All there is at the end is whole, and goes.
  void CheckWholeAndEmpty() {
    std::map<BlockKey, uint64_t> numbers;
    for (uint64_t number = 0; number < kNumbers; ++number) numbers[KeyOf(number)] = number;
    for (const BlockInfo& block : store_->List(BlockKey{}, 1 << 20)) {
      ASSERT_TRUE(sealed_.contains(numbers.at(block.key)));
      ASSERT_TRUE(IsEqual(store_->Get(block.key)->bytes(), WantOf(numbers.at(block.key))));
    }
    for (uint64_t number = 0; number < kNumbers; ++number) {
      store_->Delete(KeyOf(number)).IgnoreError();
    }
    store_->RunMaintenance();
    EXPECT_EQ(Hbm().used_bytes, 0);
    EXPECT_EQ(Dram().used_bytes, 0);
    EXPECT_EQ(store_->Stats().num_blocks, 0);
  }

  static constexpr uint64_t kNumbers = 150;
  std::set<uint64_t> sealed_;  // may have been evicted since
  std::map<uint64_t, Writing> open_;
  std::map<uint64_t, BlockRef> held_;
  std::vector<LeaseId> leases_;
};

TEST_F(StoreModelTest, RandomUseOfMemoryAgreesWithAModel) {
  constexpr uint64_t kSeed = 20261202;
  Rng rng(kSeed);
  Open();
  for (int step = 0; step < 8000; ++step) {
    SCOPED_TRACE(absl::StrCat("seed ", kSeed, " step ", step));
    Step(rng);
    if (HasFatalFailure()) return;
    if (step % 50 == 0) CheckSums();
  }
  Drain();
}

TEST_F(StoreModelTest, RandomUseOfMemoryAndDiskAgreesWithAModel) {
  constexpr uint64_t kSeed = 20261203;
  options_.dram_bytes = 2 * kMiB;
  options_.nvme_bytes = 32 * kMiB;
  OpenWithDisk();
  UseAndRestart(kSeed);
}

TEST_F(StoreModelTest, RandomUseOfHbmAndMemoryLosesNothingWhileThereIsRoom) {
  constexpr uint64_t kSeed = 20261204;
  Rng rng(kSeed);
  options_.dram_bytes = 48 * kMiB;  // more than all blocks take
  OpenWithHbm(kMiB);
  for (int step = 0; step < 6000; ++step) {
    SCOPED_TRACE(absl::StrCat("seed ", kSeed, " step ", step));
    Step(rng);
    if (HasFatalFailure()) return;
    if (step % 50 == 0) CheckSums();
    for (const uint64_t number : sealed_) ASSERT_TRUE(Where(number).present()) << number;
  }
  EXPECT_GT(store_->Stats().hbm_hits, 30);
  EXPECT_GT(store_->Stats().hbm_evictions, 10);
  Drain();
  CheckWholeAndEmpty();
}

TEST_F(StoreModelTest, RandomUseOfHbmMemoryAndDiskAgreesWithAModel) {
  constexpr uint64_t kSeed = 20261206;
  options_.dram_bytes = 2 * kMiB;
  options_.nvme_path = dir_.path() + "/store";
  options_.nvme_bytes = 32 * kMiB;
  OpenWithHbm(2 * kMiB);
  UseAndRestart(kSeed);
}

// Several threads and the background thread; any wrong byte is seen, since bytes follow from the
// key. With and without a GPU.
class StoreThreadsTest : public StoreModelTest, public ::testing::WithParamInterface<int64_t> {};
INSTANTIATE_TEST_SUITE_P(HbmBytes, StoreThreadsTest, ::testing::Values(0, 2 << 20));

TEST_P(StoreThreadsTest, ManyThreadsNeverSeeAWrongByte) {
  options_.dram_bytes = 2 * kMiB;
  options_.nvme_path = dir_.path() + "/store";
  options_.nvme_bytes = 32 * kMiB;
  options_.background = true;
  if (GetParam() > 0) {
    OpenWithHbm(GetParam());
  } else {
    Open();
  }
  std::atomic<int64_t> num_hits = 0;
  std::atomic<int64_t> num_seals = 0;
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t, &num_hits, &num_seals] {
      Rng rng(1000 + t);
      for (int i = 0; i < 1200; ++i) {
        ThreadStep(rng, num_hits, num_seals);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(num_hits, 0);
  EXPECT_GT(num_seals, 0);
  EXPECT_EQ(store_->Stats().corrupt_blocks, 0);
  EXPECT_EQ(store_->Stats().seals, num_seals);
  // Only at rest: until then the background thread goes on between Stats and List.
  Drain();
  CheckSums();
}

// U17: two writers of one key, many rounds: one seals, the other moves nothing.
TEST_F(StoreModelTest, OfTwoWritersOfAKeyOneWins) {
  Open();
  for (uint64_t round = 0; round < 200; ++round) {
    std::atomic<int> num_ok = 0;
    std::atomic<int> num_exists = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([this, round, &num_ok, &num_exists] {
        const absl::Status status = testing::PutBlock(*store_, KeyOf(round), LengthsOf(round));
        if (status.ok()) ++num_ok;
        if (absl::IsAlreadyExists(status)) ++num_exists;
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(num_ok, 1) << round;
    ASSERT_EQ(num_exists, 1) << round;
    ASSERT_TRUE(IsEqual(store_->Get(KeyOf(round))->bytes(), WantOf(round)));
  }
  EXPECT_EQ(Dram().reserved_bytes, 0);
}

}  // namespace
}  // namespace kvstow
