// Lookup, Get, leases, eviction, Delete, List, Verify, over memory and disk.
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "gtest/gtest.h"
#include "tests/storage/store_fixture.h"

namespace kvstow {
namespace {

using testing::FilesOf;
using testing::FlipByte;
using testing::IsEqual;
using testing::KeyOf;
using testing::MetaOf;
using testing::RecordOf;
using testing::RequestOf;

class StoreReadTest : public testing::StoreTest {
 protected:
  std::vector<BlockKey> Keys(uint64_t end) {
    std::vector<BlockKey> keys;
    for (uint64_t number = 0; number < end; ++number) keys.push_back(KeyOf(number));
    return keys;
  }
};

TEST_F(StoreReadTest, LookupAnswersManyKeysAndIsNoUse) {
  Open();
  for (uint64_t number = 0; number < 3; ++number) ASSERT_TRUE(Put(number).ok());
  const std::vector<Location> found = store_->Lookup(Keys(5));
  ASSERT_EQ(found.size(), 5u);
  EXPECT_TRUE(found[2].in_dram);
  EXPECT_FALSE(found[3].present());
  EXPECT_EQ(store_->Stats().lookups, 5);
  EXPECT_EQ(store_->Stats().lookup_hits, 3);
  // U09: polling alone keeps nothing alive.
  for (uint64_t number = 3; number < 6; ++number) {
    for (int i = 0; i < 10; ++i) (void)store_->Lookup(Keys(1));
    ASSERT_TRUE(Put(number).ok());
  }
  EXPECT_FALSE(Where(0).present());
}

TEST_F(StoreReadTest, GetIsUseAndTheOldestLeavesFirst) {
  Open();
  for (uint64_t number = 0; number < 4; ++number) ASSERT_TRUE(Put(number).ok());
  EXPECT_TRUE(HasExactly(0));
  ASSERT_TRUE(Put(4).ok());
  EXPECT_TRUE(Where(0).present());
  EXPECT_FALSE(Where(1).present());
  EXPECT_EQ(store_->Stats().dram_evictions, 1);
  EXPECT_EQ(store_->Stats().demotions_dropped, 0);  // there is no disk
  EXPECT_EQ(store_->Get(KeyOf(1)).status(),
            absl::NotFoundError(absl::StrCat("no block ", KeyOf(1).ToHex())));
  EXPECT_EQ(store_->Stats().misses, 1);
  EXPECT_EQ(store_->Stats().dram_hits, 1);
}

TEST_F(StoreReadTest, WhatIsBeingReadIsNeverEvicted) {
  Open();
  std::vector<BlockRef> held;
  for (uint64_t number = 0; number < 4; ++number) {
    ASSERT_TRUE(Put(number).ok());
    held.push_back(*store_->Get(KeyOf(number)));
  }
  EXPECT_EQ(store_->Stats().pinned_bytes, Dram().sealed_bytes);
  EXPECT_TRUE(store_->List(BlockKey{}, 1)[0].is_pinned);
  const absl::Status status = Put(4);
  EXPECT_EQ(status, absl::ResourceExhaustedError(absl::StrCat(
                        "memory: 1048576 bytes wanted, 0 of 4194304 free, 4194304 pinned by "
                        "readers, 0 reserved by writers: retry when they have ended")));
  EXPECT_EQ(store_->Stats().dram_evictions, 0);
  held.erase(held.begin() + 2);
  EXPECT_TRUE(Put(4).ok());
  EXPECT_FALSE(Where(2).present());
  for (uint64_t number : {0, 1, 3}) EXPECT_TRUE(HasExactly(number)) << number;
  held.clear();
  EXPECT_EQ(store_->Stats().pinned_bytes, 0);
}

// --- leases ---

// U12.
TEST_F(StoreReadTest, LeasesOnAllOfMemoryRefuseAPutAtOnceUntilTheirDeadline) {
  Open();
  for (uint64_t number = 0; number < 4; ++number) ASSERT_TRUE(Put(number).ok());
  const absl::StatusOr<AcquireResult> lease = store_->Acquire(Keys(5), absl::Seconds(10));
  ASSERT_TRUE(lease.ok());
  EXPECT_NE(lease->lease, 0u);
  EXPECT_EQ(lease->held, (std::vector<bool>{true, true, true, true, false}));
  EXPECT_EQ(lease->deadline, clock_.Now() + absl::Seconds(10));
  EXPECT_TRUE(absl::IsResourceExhausted(Put(4)));
  EXPECT_EQ(store_->Stats().open_leases, 1);
  clock_.Advance(absl::Seconds(9));
  (void)store_->Lookup(Keys(4));  // extends nothing
  EXPECT_TRUE(absl::IsResourceExhausted(Put(4)));
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(Put(4).ok());  // without a maintenance run
  EXPECT_EQ(store_->Stats().open_leases, 0);
  EXPECT_EQ(store_->Stats().leases_expired, 1);
  EXPECT_EQ(store_->Stats().pinned_bytes, 0);
  EXPECT_EQ(store_->Release(lease->lease),
            absl::NotFoundError(
                absl::StrCat("no lease ", lease->lease, ": unknown, expired or released already")));
}

TEST_F(StoreReadTest, ReleaseFreesOnceAndOnlyOnce) {
  Open();
  ASSERT_TRUE(Put(0).ok());
  const AcquireResult lease = *store_->Acquire(Keys(1), absl::Seconds(10));
  const AcquireResult second = *store_->Acquire(Keys(1), absl::Seconds(10));
  EXPECT_NE(lease.lease, second.lease);
  ASSERT_TRUE(store_->Release(lease.lease).ok());
  EXPECT_TRUE(absl::IsNotFound(store_->Release(lease.lease)));
  EXPECT_GT(store_->Stats().pinned_bytes, 0);  // the second one still pins
  ASSERT_TRUE(store_->Release(second.lease).ok());
  EXPECT_EQ(store_->Stats().pinned_bytes, 0);
  EXPECT_TRUE(absl::IsNotFound(store_->Release(12345)));
  EXPECT_EQ(store_->Stats().leases_expired, 0);
}

TEST_F(StoreReadTest, LeasesAreBoundedInTimeAndNumber) {
  options_.leases_max = 2;
  Open();
  ASSERT_TRUE(Put(0).ok());
  EXPECT_EQ(store_->Acquire(Keys(1), absl::Hours(10))->deadline, clock_.Now() + absl::Seconds(60));
  EXPECT_EQ(store_->Acquire(Keys(1), absl::ZeroDuration()).status(),
            absl::InvalidArgumentError("lease of 0, want more than 0"));
  ASSERT_TRUE(store_->Acquire(Keys(1), absl::Seconds(1)).ok());
  EXPECT_EQ(store_->Acquire(Keys(1), absl::Seconds(1)).status(),
            absl::ResourceExhaustedError("2 leases are open, the limit is 2"));
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(store_->Acquire(Keys(1), absl::Seconds(1)).ok());
  EXPECT_EQ(store_->Acquire(std::vector<BlockKey>(1'000'001), absl::Seconds(1)).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(StoreReadTest, ALeaseOnNothingIsNone) {
  Open();
  const AcquireResult lease = *store_->Acquire(Keys(3), absl::Seconds(10));
  EXPECT_EQ(lease.lease, 0u);
  EXPECT_EQ(lease.held, std::vector<bool>(3, false));
  EXPECT_EQ(store_->Stats().open_leases, 0);
}

TEST_F(StoreReadTest, ALeaseOnADiskBlockKeepsItThere) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  ASSERT_TRUE(store_->Persist(Keys(1), absl::Seconds(10)).ok());
  Open();  // only on disk now
  ASSERT_EQ(Where(0), (Location{.in_nvme = true}));
  const AcquireResult lease = *store_->Acquire(Keys(1), absl::Seconds(60));
  EXPECT_TRUE(store_->List(BlockKey{}, 1)[0].is_pinned);
  EXPECT_EQ(store_->Stats().pinned_bytes, Nvme().sealed_bytes);
  for (uint64_t number = 1; number < 150; ++number) {
    ASSERT_TRUE(Put(number).ok());
    store_->RunMaintenance();
  }
  EXPECT_GT(store_->Stats().nvme_evictions, 0);
  EXPECT_TRUE(Where(0).in_nvme);
  ASSERT_TRUE(store_->Release(lease.lease).ok());
  EXPECT_EQ(store_->Stats().pinned_bytes, 0);
  for (uint64_t number = 150; number < 250; ++number) {
    ASSERT_TRUE(Put(number).ok());
    store_->RunMaintenance();
  }
  EXPECT_FALSE(Where(0).present());
}

// The lease was on an earlier incarnation of the key: its end must not unpin the new one.
TEST_F(StoreReadTest, AnOldLeaseDoesNotUnpinANewBlock) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  ASSERT_TRUE(store_->Persist(Keys(1), absl::Seconds(10)).ok());
  Open();
  const AcquireResult old = *store_->Acquire(Keys(1), absl::Seconds(60));
  ASSERT_TRUE(store_->Delete(KeyOf(0)).ok());
  EXPECT_EQ(store_->Stats().pinned_bytes, 0);
  ASSERT_TRUE(Put(0).ok());
  ASSERT_TRUE(store_->Persist(Keys(1), absl::Seconds(10)).ok());
  Open();
  const AcquireResult lease = *store_->Acquire(Keys(1), absl::Seconds(60));
  EXPECT_TRUE(absl::IsNotFound(store_->Release(old.lease)));  // gone with the first store
  EXPECT_GT(store_->Stats().pinned_bytes, 0);
  ASSERT_TRUE(store_->Release(lease.lease).ok());
  EXPECT_EQ(store_->Stats().pinned_bytes, 0);
}

// --- delete, list ---

TEST_F(StoreReadTest, DeleteHidesAPinnedBlockNowAndFreesItAtTheLastUnpin) {
  Open();
  ASSERT_TRUE(Put(0).ok());
  BlockRef held = *store_->Get(KeyOf(0));
  ASSERT_TRUE(store_->Delete(KeyOf(0)).ok());
  EXPECT_FALSE(Where(0).present());
  EXPECT_EQ(store_->Delete(KeyOf(0)),
            absl::NotFoundError(absl::StrCat("no block ", KeyOf(0).ToHex())));
  EXPECT_EQ(Dram().sealed_bytes, 0);
  EXPECT_GT(Dram().used_bytes, 0);
  EXPECT_GT(store_->Stats().pinned_bytes, 0);
  // The key is free at once; the old bytes stay with who reads them.
  ASSERT_TRUE(Put(0, 2 * kMiB).ok());
  EXPECT_TRUE(IsEqual(held.bytes(), RecordOf(MetaOf(KeyOf(0)), Lengths(kMiB))));
  held = BlockRef();
  EXPECT_EQ(Dram().used_bytes, Dram().sealed_bytes);
  EXPECT_EQ(store_->Stats().pinned_bytes, 0);
}

TEST_F(StoreReadTest, ADeletedBlockUnderALeaseIsFreedWithTheLease) {
  Open();
  ASSERT_TRUE(Put(0).ok());
  const AcquireResult lease = *store_->Acquire(Keys(1), absl::Seconds(10));
  ASSERT_TRUE(store_->Delete(KeyOf(0)).ok());
  EXPECT_GT(Dram().used_bytes, 0);
  ASSERT_TRUE(store_->Release(lease.lease).ok());
  EXPECT_EQ(Dram().used_bytes, 0);
}

TEST_F(StoreReadTest, DeleteTakesABlockOffTheDiskForGood) {
  OpenWithDisk();
  for (uint64_t number = 0; number < 3; ++number) ASSERT_TRUE(Put(number).ok());
  ASSERT_TRUE(store_->Persist(Keys(3), absl::Seconds(10)).ok());
  ASSERT_TRUE(store_->Delete(KeyOf(1)).ok());
  EXPECT_EQ(Nvme().num_blocks, 2);
  Open();
  EXPECT_FALSE(Where(1).present());
  EXPECT_TRUE(HasExactly(0));
}

TEST_F(StoreReadTest, ABlockDeletedWhileItWaitsForTheDiskDoesNotGetThere) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  ASSERT_TRUE(store_->Delete(KeyOf(0)).ok());
  ASSERT_TRUE(Put(0, 2 * kMiB).ok());  // waits behind the old one
  store_->RunMaintenance();
  EXPECT_EQ(store_->Stats().write_behind_bytes, 0);
  EXPECT_EQ(Nvme().num_blocks, 1);
  Open();
  EXPECT_TRUE(HasExactly(0, 2 * kMiB));
}

TEST_F(StoreReadTest, ListTellsWhatIsKnownInKeyOrder) {
  OpenWithDisk();
  ReserveRequest request = RequestOf(KeyOf(1), {64, 64});
  request.meta.codecs = {CodecId::kTqm4, CodecId::kTq4};
  request.meta.num_tokens = 17;
  request.meta.logical_bytes = 99;
  const TicketId ticket = *store_->Reserve(request);
  ASSERT_TRUE(testing::WriteUnits(*store_, ticket, KeyOf(1), {64, 64}).ok());
  ASSERT_TRUE(store_->Seal(ticket).ok());
  ASSERT_TRUE(Put(0).ok());
  store_->RunMaintenance();
  for (int round = 0; round < 2; ++round) {
    std::vector<BlockInfo> blocks = store_->List(BlockKey{}, 10);
    ASSERT_EQ(blocks.size(), 2u);
    EXPECT_LT(blocks[0].key, blocks[1].key);
    const BlockInfo& block = blocks[blocks[0].key == KeyOf(1) ? 0 : 1];
    EXPECT_EQ(block.key, KeyOf(1));
    EXPECT_EQ(block.fingerprint, Sha256("model"));
    EXPECT_EQ(block.codecs, (CodecPair{CodecId::kTqm4, CodecId::kTq4}));
    EXPECT_EQ(block.num_tokens, 17);
    EXPECT_EQ(block.logical_bytes, 99);
    EXPECT_EQ(block.record_bytes, 320 + 128);
    EXPECT_EQ(block.location, (Location{.in_dram = round == 0, .in_nvme = true}));
    EXPECT_FALSE(block.is_pinned);
    EXPECT_EQ(store_->List(blocks[0].key, 10).size(), 1u);
    EXPECT_TRUE(store_->List(blocks[1].key, 10).empty());
    Open();  // the same from disk
  }
}

// --- disk ---

TEST_F(StoreReadTest, ABlockEvictedFromMemoryComesBackFromDiskAndIsPromoted) {
  OpenWithDisk();
  for (uint64_t number = 0; number < 10; ++number) {
    ASSERT_TRUE(Put(number).ok());
    store_->RunMaintenance();
  }
  ASSERT_EQ(Where(0), (Location{.in_nvme = true}));
  EXPECT_TRUE(HasExactly(0));
  EXPECT_EQ(Where(0), (Location{.in_dram = true, .in_nvme = true}));
  EXPECT_EQ(store_->Stats().nvme_hits, 1);
  EXPECT_EQ(store_->Stats().demotions_dropped, 0);
  EXPECT_TRUE(HasExactly(0));
  EXPECT_EQ(store_->Stats().dram_hits, 1);
  EXPECT_EQ(store_->Stats().num_blocks, 10);
  EXPECT_EQ(store_->Stats().nvme_bytes_read, kMiB);
}

TEST_F(StoreReadTest, WithMemoryPinnedADiskBlockIsReturnedWithoutPromotion) {
  OpenWithDisk();
  for (uint64_t number = 0; number < 8; ++number) {
    ASSERT_TRUE(Put(number).ok());
    store_->RunMaintenance();
  }
  const AcquireResult lease = *store_->Acquire(Keys(8), absl::Seconds(60));
  EXPECT_TRUE(HasExactly(0));
  EXPECT_FALSE(Where(0).in_dram);
  ASSERT_TRUE(store_->Release(lease.lease).ok());
}

// R1: one flipped byte on disk is a miss, counted once, removed; the others are untouched.
TEST_F(StoreReadTest, AFlippedByteOnDiskIsAMissCountedAndRemoved) {
  OpenWithDisk();
  for (uint64_t number = 0; number < 8; ++number) ASSERT_TRUE(Put(number, 400 << 10).ok());
  store_.reset();
  const std::vector<std::string> blobs = FilesOf(options_.nvme_path, ".blob");
  ASSERT_EQ(blobs.size(), 1u);
  FlipByte(blobs[0], 1 << 20);
  Open();
  EXPECT_EQ(store_->Stats().num_blocks, 8);
  int num_bad = 0;
  BlockKey bad;
  for (uint64_t number = 0; number < 8; ++number) {
    const absl::StatusOr<BlockRef> got = store_->Get(KeyOf(number));
    if (got.ok()) {
      EXPECT_TRUE(IsEqual(got->bytes(), RecordOf(MetaOf(KeyOf(number)), Lengths(400 << 10))));
      continue;
    }
    EXPECT_TRUE(absl::IsNotFound(got.status())) << got.status();
    bad = KeyOf(number);
    ++num_bad;
  }
  EXPECT_EQ(num_bad, 1);
  EXPECT_EQ(store_->Stats().corrupt_blocks, 1);
  EXPECT_EQ(store_->Stats().misses, 1);
  EXPECT_FALSE(store_->Lookup({bad})[0].present());
  EXPECT_TRUE(absl::IsNotFound(store_->Get(bad).status()));
  EXPECT_EQ(store_->Stats().corrupt_blocks, 1);
  EXPECT_EQ(store_->Stats().num_blocks, 7);
  Open();
  EXPECT_FALSE(store_->Lookup({bad})[0].present());
}

TEST_F(StoreReadTest, VerifyChecksEveryCopyAndDropsTheBadOne) {
  OpenWithDisk();
  for (uint64_t number = 0; number < 4; ++number) ASSERT_TRUE(Put(number, 400 << 10).ok());
  store_.reset();
  FlipByte(FilesOf(options_.nvme_path, ".blob")[0], 1 << 20);
  Open();
  int num_bad = 0;
  for (uint64_t number = 0; number < 4; ++number) {
    const absl::Status status = store_->Verify(KeyOf(number));
    if (status.ok()) continue;
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_TRUE(absl::IsNotFound(store_->Verify(KeyOf(number))));
    ++num_bad;
  }
  EXPECT_EQ(num_bad, 1);
  EXPECT_EQ(store_->Stats().corrupt_blocks, 1);
  EXPECT_EQ(store_->Verify(KeyOf(77)),
            absl::NotFoundError(absl::StrCat("no block ", KeyOf(77).ToHex())));
}

// Gives the first record in a blob file the format's next version, as a newer build would write it.
void MakeFirstRecordNewer(const std::string& path) {
  std::string file;
  {
    std::ifstream in(path, std::ios::binary);
    file.assign(std::istreambuf_iterator<char>(in), {});
  }
  const size_t begin = file.find("KVSTOWR\n");
  ASSERT_NE(begin, std::string::npos);
  file[begin + 8] = 2;
  uint32_t prefix_bytes;
  std::memcpy(&prefix_bytes, file.data() + begin + 12, 4);
  std::memset(file.data() + begin + 16, 0, 4);
  const uint32_t crc = Crc32c(
      {reinterpret_cast<const std::byte*>(file.data() + begin), static_cast<size_t>(prefix_bytes)});
  std::memcpy(file.data() + begin + 16, &crc, 4);
  std::ofstream(path, std::ios::binary) << file;
}

// A record that this build cannot read is a miss and makes way for a new one; it is not corrupt.
TEST_F(StoreReadTest, ARecordOfANewerVersionIsDroppedAndNotCalledCorrupt) {
  for (const bool by_verify : {false, true}) {
    OpenWithDisk();
    ASSERT_TRUE(Put(0).ok());
    store_.reset();
    MakeFirstRecordNewer(FilesOf(options_.nvme_path, ".blob").back());
    Open();
    ASSERT_TRUE(Where(0).in_nvme);
    if (by_verify) {
      EXPECT_EQ(store_->Verify(KeyOf(0)),
                absl::FailedPreconditionError("record has version 2, this build reads 1"));
    } else {
      EXPECT_EQ(store_->Get(KeyOf(0)).status(),
                absl::NotFoundError(
                    absl::StrCat("no block ", KeyOf(0).ToHex(),
                                 " that can be read: record has version 2, this build reads 1")));
    }
    EXPECT_EQ(store_->Stats().corrupt_blocks, 0);
    EXPECT_FALSE(Where(0).present());
    EXPECT_TRUE(Put(0).ok());
    ASSERT_TRUE(store_->Delete(KeyOf(0)).ok());
  }
}

TEST_F(StoreReadTest, VerifyFindsAByteThatChangedInMemory) {
  Open();
  ASSERT_TRUE(Put(0).ok());
  ASSERT_TRUE(store_->Verify(KeyOf(0)).ok());
  {
    const BlockRef block = *store_->Get(KeyOf(0));
    // What a stray write of another component would do.
    const_cast<std::byte*>(block.bytes().data())[100000] ^= std::byte{1};
  }
  EXPECT_TRUE(absl::IsDataLoss(store_->Verify(KeyOf(0))));
  EXPECT_FALSE(Where(0).present());
  EXPECT_EQ(store_->Stats().corrupt_blocks, 1);
  EXPECT_EQ(Dram().used_bytes, 0);
}

// A good copy on disk outlives the bad one in memory.
TEST_F(StoreReadTest, ABadCopyInMemoryDoesNotTakeTheDiskCopyWithIt) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  store_->RunMaintenance();
  {
    const BlockRef block = *store_->Get(KeyOf(0));
    const_cast<std::byte*>(block.bytes().data())[100000] ^= std::byte{1};
  }
  EXPECT_TRUE(absl::IsDataLoss(store_->Verify(KeyOf(0))));
  EXPECT_EQ(Where(0), (Location{.in_nvme = true}));
  EXPECT_TRUE(HasExactly(0));
  EXPECT_TRUE(store_->Verify(KeyOf(0)).ok());
}

}  // namespace
}  // namespace kvstow
