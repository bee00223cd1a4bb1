// The way to the disk: write-behind, Persist, restarts, crashes, a disk that fails.
#include <signal.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "gtest/gtest.h"
#include "storage/nvme_tier.h"
#include "tests/storage/store_fixture.h"

extern char** environ;

namespace kvstow {
namespace {

using testing::FilesOf;
using testing::FlipByte;
using testing::FolderBytes;
using testing::IsEqual;
using testing::KeyOf;
using testing::MetaOf;
using testing::RecordOf;

class StoreDiskTest : public testing::StoreTest {
 protected:
  std::vector<BlockKey> Keys(uint64_t begin, uint64_t end) {
    std::vector<BlockKey> keys;
    for (uint64_t number = begin; number < end; ++number) keys.push_back(KeyOf(number));
    return keys;
  }
};

TEST_F(StoreDiskTest, PersistNeedsADisk) {
  Open();
  EXPECT_EQ(store_->Persist({}, absl::Seconds(1)),
            absl::FailedPreconditionError("there is no disk tier: blocks live in memory only"));
}

TEST_F(StoreDiskTest, SealedBlocksWaitAndAreWritten) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  EXPECT_EQ(store_->Stats().write_behind_bytes, kMiB);
  EXPECT_EQ(Where(0), (Location{.in_dram = true}));
  store_->RunMaintenance();
  EXPECT_EQ(store_->Stats().write_behind_bytes, 0);
  EXPECT_EQ(Where(0), (Location{.in_dram = true, .in_nvme = true}));
  EXPECT_EQ(store_->Stats().nvme_bytes_written, kMiB);
  EXPECT_EQ(Nvme().sealed_bytes, kMiB);
  EXPECT_EQ(Nvme().num_blocks, 1);
  EXPECT_EQ(store_->Stats().num_blocks, 1);
}

TEST_F(StoreDiskTest, PersistedBlocksSurviveACleanEndAndQueuedOnesToo) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  ASSERT_TRUE(store_->Persist(Keys(0, 1), absl::Seconds(10)).ok());
  ASSERT_TRUE(Put(1).ok());  // never persisted, never maintained
  Open();
  EXPECT_TRUE(HasExactly(0));
  EXPECT_TRUE(HasExactly(1));
}

TEST_F(StoreDiskTest, PersistSaysWhichBlockIsMissing) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  EXPECT_EQ(store_->Persist(Keys(0, 2), absl::Seconds(1)),
            absl::NotFoundError(absl::StrCat("no block ", KeyOf(1).ToHex(), " to persist")));
  EXPECT_EQ(store_->Persist(Keys(0, 1), absl::ZeroDuration()), absl::OkStatus());
}

TEST_F(StoreDiskTest, PersistHasADeadline) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  EXPECT_EQ(store_->Persist(Keys(0, 1), absl::Seconds(-1)),
            absl::DeadlineExceededError(absl::StrCat(
                "1 of 1 blocks are not on disk after -1s, first block ", KeyOf(0).ToHex())));
}

// What the disk cannot keep up with is lost on eviction, and counted; puts go on.
TEST_F(StoreDiskTest, AFullQueueDropsDemotionsAndPersistTriesAgain) {
  options_.write_behind_bytes_max = 2 * kMiB;
  OpenWithDisk();
  for (uint64_t number = 0; number < 3; ++number) ASSERT_TRUE(Put(number).ok());
  EXPECT_EQ(store_->Stats().write_behind_bytes, 2 * kMiB);
  store_->RunMaintenance();
  EXPECT_FALSE(Where(2).in_nvme);
  ASSERT_TRUE(store_->Persist(Keys(0, 3), absl::Seconds(10)).ok());
  EXPECT_TRUE(Where(2).in_nvme);
  for (uint64_t number = 10; number < 17; ++number) ASSERT_TRUE(Put(number).ok());
  EXPECT_EQ(store_->Stats().dram_evictions, 6);
  // 0, 1, 2 are on disk and left first; then those that found no place in the queue.
  EXPECT_EQ(store_->Stats().demotions_dropped, 3);
  store_->RunMaintenance();
  EXPECT_EQ(store_->Stats().write_behind_bytes, 0);
}

TEST_F(StoreDiskTest, OneBlockLargerThanTheQueueStillGetsToTheDisk) {
  options_.write_behind_bytes_max = 1000;
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  store_->RunMaintenance();
  EXPECT_TRUE(Where(0).in_nvme);
}

TEST_F(StoreDiskTest, ABlockEvictedBeforeItsTurnIsSkipped) {
  OpenWithDisk();
  for (uint64_t number = 0; number < 6; ++number) ASSERT_TRUE(Put(number).ok());  // 4 fit
  EXPECT_EQ(store_->Stats().demotions_dropped, 2);
  EXPECT_FALSE(Where(0).present());
  store_->RunMaintenance();
  EXPECT_EQ(store_->Stats().write_behind_bytes, 0);
  EXPECT_EQ(Nvme().num_blocks, 4);
}

// U14 through the store: the oldest leave, puts never fail, the folder stays small.
TEST_F(StoreDiskTest, TheDiskIsACacheOfItsCapacity) {
  OpenWithDisk();
  for (uint64_t number = 0; number < 160; ++number) {
    ASSERT_TRUE(Put(number).ok()) << number;
    store_->RunMaintenance();
    ASSERT_LE(Nvme().used_bytes, Nvme().capacity_bytes);
  }
  EXPECT_LE(FolderBytes(options_.nvme_path),
            options_.nvme_bytes + NvmeTier::SlackBytes(options_.nvme_bytes));
  EXPECT_GT(Nvme().num_blocks, 40);
  EXPECT_EQ(store_->Stats().nvme_evictions, 160 - Nvme().num_blocks);
  EXPECT_EQ(store_->Stats().demotions_dropped, 0);
  EXPECT_TRUE(Where(159).in_nvme);
  EXPECT_TRUE(Where(159 - 40).in_nvme);
  EXPECT_FALSE(Where(0).present());
  Open();
  for (const BlockInfo& block : store_->List(BlockKey{}, 1000)) {
    EXPECT_TRUE(store_->Verify(block.key).ok());
  }
}

TEST_F(StoreDiskTest, ASmallerCapacityEvictsAtTheStart) {
  OpenWithDisk();
  for (uint64_t number = 0; number < 45; ++number) {
    ASSERT_TRUE(Put(number).ok());
    store_->RunMaintenance();
  }
  options_.nvme_bytes = 32 * kMiB;
  Open();
  EXPECT_LE(Nvme().used_bytes, Nvme().capacity_bytes);
  EXPECT_GT(store_->Stats().nvme_evictions, 0);
  EXPECT_EQ(Nvme().num_blocks, store_->Stats().num_blocks);
  EXPECT_TRUE(Where(44).in_nvme);
}

TEST_F(StoreDiskTest, ASmallerIndexKeepsWhatItCanHold) {
  OpenWithDisk();
  for (uint64_t number = 0; number < 20; ++number) {
    ASSERT_TRUE(Put(number, 8192).ok());
    store_->RunMaintenance();
  }
  options_.blocks_max = 5;
  Open();
  EXPECT_EQ(store_->Stats().num_blocks, 5);
  EXPECT_EQ(Nvme().num_blocks, 5);
  ASSERT_TRUE(Put(100, 8192).ok());
  EXPECT_EQ(store_->Stats().num_blocks, 5);
}

TEST_F(StoreDiskTest, WhatNobodyPersistedIsFlushedWhenTheDiskIsQuiet) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  store_->RunMaintenance();
  EXPECT_TRUE(FilesOf(options_.nvme_path, ".blob").empty());
  clock_.Advance(absl::Seconds(5));
  store_->RunMaintenance();
  EXPECT_EQ(FilesOf(options_.nvme_path, ".blob").size(), 1u);
}

TEST_F(StoreDiskTest, ABrokenDatabaseIsSetAsideAndCounted) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  store_.reset();
  for (const auto& entry : std::filesystem::directory_iterator(options_.nvme_path + "/rocksdb")) {
    if (entry.path().filename().string().starts_with("MANIFEST")) FlipByte(entry.path(), 12);
  }
  Open();
  EXPECT_EQ(store_->Stats().dirs_set_aside, 1);
  EXPECT_EQ(store_->Stats().num_blocks, 0);
  ASSERT_TRUE(Put(0).ok());
  EXPECT_TRUE(store_->Persist(Keys(0, 1), absl::Seconds(10)).ok());
}

TEST_F(StoreDiskTest, ErrorsOfTheDirectoryComeThrough) {
  OpenWithDisk();
  EXPECT_TRUE(absl::IsFailedPrecondition(TieredStore::Open(options_, &clock_).status()));
  options_.nvme_path = "/proc/kvstow";
  EXPECT_TRUE(absl::IsPermissionDenied(TieredStore::Open(options_, &clock_).status()));
}

// --- what is written unasked ---

TEST_F(StoreDiskTest, SecondSightWritesWhatASecondTurnHasUsed) {
  options_.disk_admission = DiskAdmission::kSecondSight;
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  ASSERT_TRUE(Put(1).ok());
  store_->RunMaintenance();
  EXPECT_FALSE(Where(0).in_nvme);
  EXPECT_EQ(store_->Stats().nvme_writes_filtered, 2);
  EXPECT_TRUE(HasExactly(0));  // the second turn
  store_->RunMaintenance();
  EXPECT_TRUE(Where(0).in_nvme);
  EXPECT_FALSE(Where(1).in_nvme);
  // Who asks for it gets it.
  EXPECT_TRUE(store_->Persist(Keys(1, 2), absl::Seconds(10)).ok());
  EXPECT_TRUE(Where(1).in_nvme);
  // A block seen before and lost is written when it comes back.
  for (uint64_t number = 2; number < 7; ++number) ASSERT_TRUE(Put(number).ok());
  EXPECT_FALSE(Where(2).present());
  ASSERT_TRUE(Put(2).ok());
  store_->RunMaintenance();
  EXPECT_TRUE(Where(2).in_nvme);
  EXPECT_EQ(store_->Stats().nvme_bytes_written, 3 * kMiB);
}

TEST_F(StoreDiskTest, ABudgetStopsWritesThatNobodyAskedFor) {
  options_.disk_write_bytes_per_day = 24 * 2 * kMiB;  // two blocks an hour
  OpenWithDisk();
  for (uint64_t number = 0; number < 4; ++number) ASSERT_TRUE(Put(number).ok());
  store_->RunMaintenance();
  EXPECT_EQ(Nvme().num_blocks, 2);
  EXPECT_EQ(store_->Stats().nvme_writes_over_budget, 2);
  EXPECT_TRUE(store_->Persist(Keys(3, 4), absl::Seconds(10)).ok());
  EXPECT_EQ(Nvme().num_blocks, 3);
  clock_.Advance(absl::Minutes(30));  // pays for what was asked for
  ASSERT_TRUE(Put(4).ok());
  store_->RunMaintenance();
  EXPECT_FALSE(Where(4).in_nvme);
  clock_.Advance(absl::Minutes(10));
  ASSERT_TRUE(Put(5).ok());
  store_->RunMaintenance();
  EXPECT_TRUE(Where(5).in_nvme);
}

// --- a disk that is full ---

TEST_F(StoreDiskTest, WithAFullDiskMemoryGoesOnAndTheDiskComesBack) {
  const std::string path = dir_.path() + "/small";
  std::filesystem::create_directory(path);
  if (mount("tmpfs", path.c_str(), "tmpfs", 0, "size=12m") != 0) {
    GTEST_SKIP() << "no right to mount a small tmpfs here: " << strerror(errno);
  }
  options_.nvme_path = path;
  Open();
  for (uint64_t number = 0; number < 30; ++number) {
    ASSERT_TRUE(Put(number).ok()) << number;  // the service goes on
    store_->RunMaintenance();
  }
  EXPECT_GT(store_->Stats().nvme_write_errors, 0);
  EXPECT_TRUE(HasExactly(29));
  const absl::Status status = store_->Persist(Keys(29, 30), absl::Seconds(10));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find("No space left on device"), absl::string_view::npos) << status;
  EXPECT_GT(store_->Stats().demotions_dropped, 0);
  EXPECT_EQ(store_->Stats().write_behind_bytes, 0);
  ASSERT_EQ(mount(nullptr, path.c_str(), nullptr, MS_REMOUNT, "size=128m"), 0);
  clock_.Advance(absl::Seconds(2));
  EXPECT_EQ(store_->Persist(Keys(29, 30), absl::Seconds(10)), absl::OkStatus());
  ASSERT_TRUE(Put(30).ok());
  EXPECT_EQ(store_->Persist(Keys(30, 31), absl::Seconds(10)), absl::OkStatus());
  Open();
  EXPECT_TRUE(HasExactly(29));
  EXPECT_TRUE(HasExactly(30));
  for (const BlockInfo& block : store_->List(BlockKey{}, 1000)) {
    EXPECT_TRUE(store_->Verify(block.key).ok());
  }
  store_.reset();
  EXPECT_EQ(umount(path.c_str()), 0);
}

// --- kill -9 ---

// Another process that writes until it is killed.
class Writer {
 public:
  Writer(const std::string& dir, int num_persisted) {
    int fds[2];
    KVSTOW_CHECK(pipe(fds) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], STDOUT_FILENO);
    const std::string count = absl::StrCat(num_persisted);
    const char* args[] = {KVSTOW_CRASH_WRITER, dir.c_str(), count.c_str(), nullptr};
    KVSTOW_CHECK(
        posix_spawn(&pid_, args[0], &actions, nullptr, const_cast<char**>(args), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    out_ = fds[0];
  }
  ~Writer() { close(out_); }
  // False where it ended without saying so.
  bool WaitUntilReady() {
    std::string text;
    char byte;
    while (text != "ready\n" && read(out_, &byte, 1) == 1) text += byte;
    return text == "ready\n";
  }
  void Kill() {
    kill(pid_, SIGKILL);
    int status = 0;
    KVSTOW_CHECK(waitpid(pid_, &status, 0) == pid_ && WIFSIGNALED(status));
  }

 private:
  pid_t pid_ = 0;
  int out_ = -1;
};

TEST_F(StoreDiskTest, AfterKillNineEveryBlockIsEqualOrAMissAndPersistedOnesAreThere) {
  options_.nvme_path = dir_.path() + "/store";
  options_.nvme_bytes = 256 * kMiB;
  options_.dram_bytes = 64 * kMiB;
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    const uint64_t num_persisted = 50 + 100 * static_cast<uint64_t>(round);
    Writer writer(options_.nvme_path, static_cast<int>(num_persisted));
    ASSERT_TRUE(writer.WaitUntilReady());
    EXPECT_TRUE(absl::IsFailedPrecondition(TieredStore::Open(options_, &clock_).status()));
    writer.Kill();
    Open();
    const StoreStats stats = store_->Stats();
    EXPECT_EQ(stats.corrupt_blocks, 0);
    EXPECT_EQ(stats.dirs_set_aside, 0);
    // No orphan bytes: what the tier holds is what the index knows.
    EXPECT_EQ(stats.num_blocks, Nvme().num_blocks);
    EXPECT_LE(Nvme().used_bytes, Nvme().sealed_bytes + stats.num_blocks * 512);
    uint64_t num_seen = 0;
    for (uint64_t number = 0; num_seen < static_cast<uint64_t>(stats.num_blocks); ++number) {
      ASSERT_LT(number, 100000u);
      const absl::StatusOr<BlockRef> got = store_->Get(KeyOf(number));
      if (!got.ok()) {
        ASSERT_GE(number, num_persisted) << got.status();
        continue;
      }
      ++num_seen;
      ASSERT_TRUE(IsEqual(got->bytes(), RecordOf(MetaOf(KeyOf(number)), {30000, 30000})));
    }
    EXPECT_GE(num_seen, num_persisted);
    store_.reset();
  }
}

// --- blocks that nobody uses ---

TEST_F(StoreDiskTest, BlocksUnusedForTheirTimeLeaveBothTiersAndUsedOrHeldOnesStay) {
  options_.block_ttl = absl::Minutes(10);
  OpenWithDisk();
  for (uint64_t number = 0; number < 3; ++number) ASSERT_TRUE(Put(number).ok());
  store_->RunMaintenance();
  clock_.Advance(absl::Minutes(9));
  EXPECT_TRUE(HasExactly(1));  // a use
  const absl::StatusOr<BlockRef> held = store_->Get(KeyOf(2));
  ASSERT_TRUE(held.ok());
  clock_.Advance(absl::Minutes(2));
  store_->RunMaintenance();
  EXPECT_FALSE(Where(0).present());
  EXPECT_EQ(Where(1), (Location{.in_dram = true, .in_nvme = true}));
  EXPECT_EQ(store_->Stats().blocks_idle_dropped, 2);  // a copy in each tier
  clock_.Advance(absl::Minutes(30));
  store_->RunMaintenance();
  EXPECT_FALSE(Where(1).present());
  EXPECT_EQ(Where(2), (Location{.in_dram = true}));  // its reader is not done
  EXPECT_TRUE(IsEqual(held->bytes(), RecordOf(MetaOf(KeyOf(2)), Lengths(kMiB))));
  EXPECT_EQ(store_->Stats().dram_evictions, 0);
}

TEST_F(StoreDiskTest, WhatIsFoundAtTheStartLeavesAfterItsTimeToo) {
  OpenWithDisk();
  ASSERT_TRUE(Put(0).ok());
  ASSERT_TRUE(Put(1).ok());
  store_->RunMaintenance();
  options_.block_ttl = absl::Hours(1);
  Open();
  clock_.Advance(absl::Minutes(59));
  store_->RunMaintenance();
  EXPECT_TRUE(HasExactly(1));
  clock_.Advance(absl::Minutes(2));
  store_->RunMaintenance();
  EXPECT_FALSE(Where(0).present());
  EXPECT_TRUE(Where(1).present());
}

}  // namespace
}  // namespace kvstow
