#include "storage/nvme_tier.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/status_macros.h"
#include "tests/storage/records.h"
#include "tests/testing/fake_clock.h"

namespace kvstow {
namespace {

using testing::FakeClock;
using testing::FilesOf;
using testing::FlipByte;
using testing::FolderBytes;
using testing::IsEqual;
using testing::KeyOf;
using testing::RecordOf;
using testing::Rng;
using testing::TempDir;

namespace fs = std::filesystem;

constexpr int64_t kCapacity = 64 << 20;

class NvmeTierTest : public ::testing::Test {
 protected:
  absl::Status TryOpen(const std::string& path, int64_t capacity_bytes = kCapacity) {
    found_.clear();
    absl::StatusOr<std::unique_ptr<NvmeTier>> tier =
        NvmeTier::Open({.path = path, .capacity_bytes = capacity_bytes, .clock = &clock_},
                       [this](const BlockInfo& block) { found_[block.key] = block; });
    if (tier.ok()) tier_ = *std::move(tier);
    return tier.status();
  }
  void Open() {
    const absl::Status status = TryOpen(dir_.path());
    ASSERT_TRUE(status.ok()) << status;
  }
  void Reopen() {
    tier_.reset();
    Open();
  }
  absl::Status Put(uint64_t number, int64_t bytes) {
    return tier_->Put(KeyOf(number), RecordOf(number, bytes));
  }
  // Evicts the oldest of `resident` until the put succeeds, as the store does.
  absl::Status PutEvicting(uint64_t number, int64_t bytes, std::vector<uint64_t>& resident,
                           Rng* random = nullptr) {
    while (true) {
      const absl::Status status = Put(number, bytes);
      if (status.ok()) resident.push_back(number);
      if (!absl::IsResourceExhausted(status) || resident.empty()) return status;
      const size_t victim = random == nullptr ? 0 : random->Below(resident.size());
      tier_->Drop(KeyOf(resident[victim]));
      resident.erase(resident.begin() + static_cast<int64_t>(victim));
    }
  }
  bool HasExactly(uint64_t number, int64_t bytes) {
    const absl::StatusOr<BlockRef> got = tier_->Get(KeyOf(number));
    return got.ok() && IsEqual(got->bytes(), RecordOf(number, bytes));
  }

  TempDir dir_;
  FakeClock clock_;
  std::unique_ptr<NvmeTier> tier_;
  std::map<BlockKey, BlockInfo> found_;
};

TEST_F(NvmeTierTest, OptionsAreCheckedAndNamed) {
  EXPECT_EQ(
      TryOpen(dir_.path(), 1 << 20),
      absl::InvalidArgumentError("disk tier: capacity_bytes is 1048576, want at least 33554432"));
  EXPECT_EQ(TryOpen(""), absl::InvalidArgumentError("disk tier: path is empty"));
}

TEST_F(NvmeTierTest, ReopenFindsEveryBlockWithWhatTheIndexNeeds) {
  Open();
  for (uint64_t number = 0; number < 300; ++number) ASSERT_TRUE(Put(number, 20000).ok());
  Reopen();
  ASSERT_EQ(found_.size(), 300u);
  const BlockInfo& block = found_.at(KeyOf(17));
  EXPECT_EQ(block.fingerprint, Sha256("model"));
  EXPECT_EQ(block.num_tokens, 64);
  EXPECT_EQ(block.logical_bytes, 4096);
  EXPECT_EQ(block.record_bytes, static_cast<int64_t>(RecordOf(17, 20000).size()));
  EXPECT_EQ(block.location, (Location{.in_nvme = true}));
  for (uint64_t number = 0; number < 300; ++number) {
    ASSERT_TRUE(HasExactly(number, 20000)) << number;
  }
  EXPECT_EQ(tier_->open_report().blocks_lost, 0);
}

TEST_F(NvmeTierTest, DroppedBlocksStayAwayAfterACleanEnd) {
  Open();
  for (uint64_t number = 0; number < 20; ++number) ASSERT_TRUE(Put(number, 20000).ok());
  ASSERT_TRUE(tier_->Flush().ok());
  for (uint64_t number = 0; number < 20; number += 2) tier_->Drop(KeyOf(number));
  Reopen();
  EXPECT_EQ(found_.size(), 10u);
  EXPECT_FALSE(found_.contains(KeyOf(0)));
  EXPECT_TRUE(HasExactly(1, 20000));
}

// U14. Random victims are the worst case: segments die only in parts and have to be cleaned.
TEST_F(NvmeTierTest, TheFolderStaysWithinCapacityAndSlackUnderFourfoldChurn) {
  constexpr int64_t kSmall = NvmeTier::kCapacityMin;
  constexpr int64_t kBytes = 100 << 10;
  for (const bool is_random : {false, true}) {
    SCOPED_TRACE(is_random ? "random victims" : "oldest first");
    tier_.reset();
    std::filesystem::remove_all(dir_.path());
    ASSERT_TRUE(TryOpen(dir_.path(), kSmall).ok());
    Rng rng(5);
    std::vector<uint64_t> resident;
    int64_t most = 0;
    for (uint64_t number = 0; number < 4 * kSmall / kBytes; ++number) {
      const absl::Status status = PutEvicting(number, kBytes, resident, is_random ? &rng : nullptr);
      ASSERT_TRUE(status.ok()) << number << ": " << status;
      ASSERT_LE(tier_->used_bytes(), kSmall);
      if (number % 8 == 0) most = std::max(most, FolderBytes(dir_.path()));
    }
    EXPECT_LE(most, kSmall + NvmeTier::SlackBytes(kSmall));
    EXPECT_GE(static_cast<int64_t>(resident.size()) * kBytes, kSmall * 65 / 100);
    ASSERT_TRUE(tier_->Flush().ok());
    for (int round = 0; round < 2; ++round) {
      for (const uint64_t number : resident) ASSERT_TRUE(HasExactly(number, kBytes)) << number;
      tier_.reset();
      ASSERT_TRUE(TryOpen(dir_.path(), kSmall).ok());
      EXPECT_EQ(found_.size(), resident.size());
    }
  }
}

TEST_F(NvmeTierTest, UsedBytesAgreeWithTheFolder) {
  Open();
  for (uint64_t number = 0; number < 400; ++number) ASSERT_TRUE(Put(number, 100 << 10).ok());
  ASSERT_TRUE(tier_->Flush().ok());
  const int64_t folder = FolderBytes(dir_.path());
  EXPECT_GE(tier_->used_bytes(), 400 * (99 << 10));
  EXPECT_NEAR(static_cast<double>(tier_->used_bytes()), static_cast<double>(folder), 2 << 20);
}

// The cost that the tier assumes per record bounds what it really takes.
TEST_F(NvmeTierTest, SmallRecordsCostNoMoreThanAssumed) {
  Open();
  for (uint64_t number = 0; number < 3000; ++number) ASSERT_TRUE(Put(number, 700).ok());
  const int64_t assumed = tier_->live_bytes();
  ASSERT_TRUE(tier_->Flush().ok());
  EXPECT_LE(tier_->used_bytes(), assumed);
}

// A client that persists every block: tables are merged, reads stay correct, before and after.
TEST_F(NvmeTierTest, ManyFlushesDoNotLeaveManyTables) {
  Open();
  for (uint64_t number = 0; number < 100; ++number) {
    ASSERT_TRUE(Put(number, 20000).ok());
    if (number % 10 == 5) tier_->Drop(KeyOf(number));
    ASSERT_TRUE(tier_->Flush().ok());
  }
  EXPECT_LE(FilesOf(dir_.path(), ".sst").size(), 40u);
  for (int round = 0; round < 2; ++round) {
    for (uint64_t number = 0; number < 100; ++number) {
      ASSERT_EQ(HasExactly(number, 20000), number % 10 != 5) << number;
    }
    Reopen();
    EXPECT_EQ(found_.size(), 90u);
  }
}

// A table with a damaged block is not merged: that would stop the database.
TEST_F(NvmeTierTest, ADamagedTableDoesNotStopLaterFlushes) {
  Open();
  for (uint64_t number = 0; number < 5; ++number) {
    ASSERT_TRUE(Put(number, 20000).ok());
    ASSERT_TRUE(tier_->Flush().ok());
  }
  FlipByte(FilesOf(dir_.path(), ".sst")[2], 30);
  for (uint64_t number = 5; number < 100; ++number) {
    ASSERT_TRUE(Put(number, 20000).ok()) << number;
    const absl::Status status = tier_->Flush();
    ASSERT_TRUE(status.ok()) << number << ": " << status;
  }
  int num_whole = 0;
  for (uint64_t number = 0; number < 100; ++number) num_whole += HasExactly(number, 20000) ? 1 : 0;
  EXPECT_GE(num_whole, 99);
}

TEST_F(NvmeTierTest, BlocksLargerThanASegmentFit) {
  Open();
  std::vector<uint64_t> resident;
  for (uint64_t number = 0; number < 20; ++number) {
    const absl::Status status = PutEvicting(number, 10 << 20, resident);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_LE(FolderBytes(dir_.path()), kCapacity + NvmeTier::SlackBytes(kCapacity));
  }
  EXPECT_GE(resident.size(), 3u);
  for (const uint64_t number : resident) EXPECT_TRUE(HasExactly(number, 10 << 20)) << number;
}

TEST_F(NvmeTierTest, ASmallerCapacityIsKeptAfterReopen) {
  Open();
  for (uint64_t number = 0; number < 200; ++number) ASSERT_TRUE(Put(number, 200 << 10).ok());
  tier_.reset();
  ASSERT_TRUE(TryOpen(dir_.path(), 32 << 20).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(tier_->MakeRoom(0)));
  for (uint64_t number = 0; absl::IsResourceExhausted(tier_->MakeRoom(0)); ++number) {
    ASSERT_LT(number, 200u);
    tier_->Drop(KeyOf(number));
  }
  EXPECT_LE(tier_->used_bytes(), 32 << 20);
  EXPECT_LE(FolderBytes(dir_.path()), (32 << 20) + NvmeTier::SlackBytes(32 << 20));
  EXPECT_TRUE(HasExactly(199, 200 << 10));
}

// --- the directory ---

TEST_F(NvmeTierTest, ASecondUserIsRefusedAndToldWhoHoldsTheLock) {
  Open();
  absl::StatusOr<std::unique_ptr<NvmeTier>> second =
      NvmeTier::Open({.path = dir_.path(), .capacity_bytes = kCapacity, .clock = &clock_},
                     [](const BlockInfo&) {});
  EXPECT_EQ(second.status(), absl::FailedPreconditionError(absl::StrCat(
                                 "disk tier directory ", dir_.path(), " is in use: process ",
                                 getpid(), " holds ", dir_.path(), "/LOCK")));
  ASSERT_TRUE(Put(1, 20000).ok());
}

TEST(NvmeTier, SlackIsSmall) {
  EXPECT_EQ(NvmeTier::SlackBytes(64 << 20), 16 << 20);
  EXPECT_EQ(NvmeTier::SlackBytes(int64_t{1} << 40), 76 << 20);
}

TEST_F(NvmeTierTest, ADirectoryThatCannotBeMadeOrWrittenIsPermissionDeniedByName) {
  std::ofstream(dir_.path() + "/file") << "in the way";
  const std::string paths[] = {dir_.path() + "/file/below", dir_.path() + "/file", "/proc/kvstow",
                               "/sys/kernel"};
  for (const std::string& path : paths) {
    const absl::Status status = TryOpen(path);
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << path << ": " << status;
    EXPECT_NE(status.message().find(path), absl::string_view::npos) << status;
  }
}

TEST_F(NvmeTierTest, AReadOnlyDirectoryIsPermissionDenied) {
  if (mount(dir_.path().c_str(), dir_.path().c_str(), nullptr, MS_BIND, nullptr) != 0) {
    GTEST_SKIP() << "no right to mount here: " << strerror(errno);
  }
  ASSERT_EQ(mount(nullptr, dir_.path().c_str(), nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY, nullptr),
            0);
  const absl::Status status = TryOpen(dir_.path());
  ASSERT_EQ(umount(dir_.path().c_str()), 0);
  EXPECT_EQ(status, absl::PermissionDeniedError(absl::StrCat(
                        "disk tier directory ", dir_.path(),
                        ": LOCK cannot be opened for writing: Read-only file system")));
}

// --- damage ---

class NvmeDamageTest : public NvmeTierTest {
 protected:
  void SetUp() override {
    Open();
    for (uint64_t number = 0; number < kBlocks; ++number) ASSERT_TRUE(Put(number, kBytes).ok());
    tier_.reset();
  }
  std::string Database() const { return dir_.path() + "/rocksdb"; }
  // Numbers of the blocks that come back whole; every other is an error, never other bytes.
  std::set<uint64_t> Whole() {
    std::set<uint64_t> whole;
    for (uint64_t number = 0; number < kBlocks; ++number) {
      const absl::StatusOr<BlockRef> got = tier_->Get(KeyOf(number));
      if (got.ok() && IsEqual(got->bytes(), RecordOf(number, kBytes))) whole.insert(number);
    }
    return whole;
  }
  static constexpr uint64_t kBlocks = 100;
  static constexpr int64_t kBytes = 20000;
};

// The tier does not look at the record: its own checksums must find the byte.
TEST_F(NvmeDamageTest, AFlippedByteInABlobIsFoundByTheRecordAndTouchesNoOther) {
  const std::vector<std::string> blobs = FilesOf(Database(), ".blob");
  ASSERT_EQ(blobs.size(), 1u);
  FlipByte(blobs[0], 50000);
  Open();
  EXPECT_EQ(found_.size(), kBlocks);
  EXPECT_EQ(Whole().size(), kBlocks - 1);
  int num_bad = 0;
  for (uint64_t number = 0; number < kBlocks; ++number) {
    const absl::StatusOr<BlockRef> got = tier_->Get(KeyOf(number));
    if (!got.ok()) continue;
    const absl::StatusOr<RecordView> record = RecordView::Parse(got->bytes());
    if (!record.ok() || !record->VerifyUnits().ok()) ++num_bad;
  }
  EXPECT_EQ(num_bad, 1);
}

TEST_F(NvmeDamageTest, ATruncatedBlobFileLosesBlocksAndNoMore) {
  const std::vector<std::string> blobs = FilesOf(Database(), ".blob");
  fs::resize_file(blobs[0], fs::file_size(blobs[0]) / 2);
  Open();
  for (uint64_t number = 0; number < kBlocks; ++number) {
    const absl::StatusOr<BlockRef> got = tier_->Get(KeyOf(number));
    if (got.ok()) {
      EXPECT_TRUE(IsEqual(got->bytes(), RecordOf(number, kBytes)));
    } else {
      EXPECT_TRUE(absl::IsDataLoss(got.status())) << got.status();
    }
  }
  EXPECT_TRUE(Put(1000, kBytes).ok());
  EXPECT_TRUE(tier_->Flush().ok());
  EXPECT_TRUE(HasExactly(1000, kBytes));
}

TEST_F(NvmeDamageTest, AMissingBlobFileLosesItsBlocksAndNoMore) {
  fs::remove(FilesOf(Database(), ".blob")[0]);
  Open();
  EXPECT_TRUE(Whole().empty());
  EXPECT_TRUE(Put(1000, kBytes).ok());
  EXPECT_TRUE(tier_->Flush().ok());
  EXPECT_TRUE(HasExactly(1000, kBytes));
}

// Anywhere in the table file: opening works or the database is set aside; no byte is ever wrong.
TEST_F(NvmeDamageTest, AFlippedByteAnywhereInATableIsNeverAWrongByte) {
  const std::vector<std::string> tables = FilesOf(Database(), ".sst");
  ASSERT_EQ(tables.size(), 1u);
  const int64_t size = static_cast<int64_t>(fs::file_size(tables[0]));
  const fs::path copy = dir_.path() + "/copy";
  fs::copy(Database(), copy, fs::copy_options::recursive);
  std::map<BlockKey, uint64_t> numbers;
  for (uint64_t number = 0; number < kBlocks; ++number) numbers[KeyOf(number)] = number;
  int num_set_aside = 0;
  int64_t num_lost = 0;
  for (int64_t offset = 7; offset < size; offset += size / 40) {
    SCOPED_TRACE(absl::StrCat("offset ", offset, " of ", size));
    tier_.reset();
    fs::remove_all(Database());
    fs::copy(copy, Database(), fs::copy_options::recursive);
    FlipByte(FilesOf(Database(), ".sst")[0], offset);
    Open();
    num_set_aside += static_cast<int>(tier_->open_report().dirs_set_aside);
    num_lost += tier_->open_report().blocks_lost;
    for (const auto& [key, block] : found_) {
      const absl::StatusOr<BlockRef> got = tier_->Get(key);
      if (!got.ok()) continue;
      const absl::StatusOr<RecordView> record = RecordView::Parse(got->bytes());
      if (!record.ok() || record->meta().key != key || !record->VerifyUnits().ok()) continue;
      ASSERT_TRUE(numbers.contains(key));
      EXPECT_TRUE(IsEqual(got->bytes(), RecordOf(numbers[key], kBytes)));
    }
    EXPECT_TRUE(Put(1000, kBytes).ok());
    EXPECT_TRUE(tier_->Flush().ok());
    EXPECT_TRUE(HasExactly(1000, kBytes));
  }
  EXPECT_LT(num_set_aside, 10);  // most damage costs some blocks, not all
  EXPECT_GT(num_lost, 0);
}

TEST_F(NvmeDamageTest, AMissingTableSetsTheDatabaseAside) {
  fs::remove(FilesOf(Database(), ".sst")[0]);
  Open();
  EXPECT_EQ(tier_->open_report().dirs_set_aside, 1);
  EXPECT_TRUE(found_.empty());
  EXPECT_TRUE(fs::exists(dir_.path() + "/rocksdb.broken-1"));
  EXPECT_TRUE(Put(1, kBytes).ok());
}

TEST_F(NvmeDamageTest, ATruncatedTableSetsTheDatabaseAside) {
  const std::string table = FilesOf(Database(), ".sst")[0];
  fs::resize_file(table, fs::file_size(table) / 2);
  Open();
  EXPECT_EQ(tier_->open_report().dirs_set_aside, 1);
  EXPECT_TRUE(Put(1, kBytes).ok());
}

TEST_F(NvmeDamageTest, ADamagedManifestSetsTheDatabaseAsideAndOnlyOneIsKept) {
  for (int round = 1; round <= 3; ++round) {
    std::string manifest;
    for (const auto& entry : fs::directory_iterator(Database())) {
      if (entry.path().filename().string().starts_with("MANIFEST")) manifest = entry.path();
    }
    FlipByte(manifest, 12);
    Reopen();
    EXPECT_EQ(tier_->open_report().dirs_set_aside, 1);
    EXPECT_TRUE(found_.empty());
    ASSERT_TRUE(Put(1, kBytes).ok());
    tier_.reset();
    EXPECT_TRUE(fs::exists(absl::StrCat(Database(), ".broken-", round)));
    EXPECT_FALSE(fs::exists(absl::StrCat(Database(), ".broken-", round - 1)));
  }
}

TEST_F(NvmeDamageTest, OtherFilesInTheFolderDoNoHarm) {
  std::ofstream(dir_.path() + "/notes.txt") << "mine";
  std::ofstream(Database() + "/notes.txt") << "mine";
  Open();
  EXPECT_EQ(Whole().size(), kBlocks);
  EXPECT_TRUE(fs::exists(dir_.path() + "/notes.txt"));
}

// --- a disk that is full ---

class SmallDisk {
 public:
  explicit SmallDisk(const std::string& path, const char* size) : path_(path) {
    const std::string options = absl::StrCat("size=", size);
    is_mounted_ = mount("tmpfs", path.c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~SmallDisk() {
    if (is_mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  bool is_mounted() const { return is_mounted_; }

 private:
  const std::string path_;
  bool is_mounted_ = false;
};

TEST_F(NvmeTierTest, AFullDiskIsUnavailableKeepsWhatThereIsAndRecovers) {
  SmallDisk disk(dir_.path(), "24m");
  if (!disk.is_mounted()) GTEST_SKIP() << "no right to mount a small tmpfs here";
  Open();
  uint64_t number = 0;
  absl::Status status;
  while ((status = Put(number, 200 << 10)).ok()) ASSERT_LT(++number, 200u);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find("No space left on device"), absl::string_view::npos) << status;
  // Still full: refused at once, and what was put stays readable, flushed or not.
  EXPECT_TRUE(absl::IsUnavailable(Put(number, 200 << 10)));
  clock_.Advance(absl::Seconds(2));
  EXPECT_TRUE(absl::IsUnavailable(Put(number, 200 << 10)));
  EXPECT_TRUE(absl::IsUnavailable(tier_->Flush()));
  for (uint64_t i = 0; i < number; ++i) ASSERT_TRUE(HasExactly(i, 200 << 10)) << i;
  // The administrator makes room.
  ASSERT_EQ(mount(nullptr, dir_.path().c_str(), nullptr, MS_REMOUNT, "size=64m"), 0);
  clock_.Advance(absl::Seconds(2));
  status = Put(number, 200 << 10);
  ASSERT_TRUE(status.ok()) << status;
  status = tier_->Flush();
  ASSERT_TRUE(status.ok()) << status;
  Reopen();
  EXPECT_EQ(found_.size(), number + 1);
  for (uint64_t i = 0; i <= number; ++i) ASSERT_TRUE(HasExactly(i, 200 << 10)) << i;
  tier_.reset();
}

TEST_F(NvmeTierTest, OnAFullDiskDroppingMakesRoom) {
  SmallDisk disk(dir_.path(), "24m");
  if (!disk.is_mounted()) GTEST_SKIP() << "no right to mount a small tmpfs here";
  Open();
  uint64_t number = 0;
  while (Put(number, 200 << 10).ok()) ASSERT_LT(++number, 200u);
  for (uint64_t i = 0; i + 10 < number; ++i) tier_->Drop(KeyOf(i));
  clock_.Advance(absl::Seconds(2));
  absl::Status status = Put(number, 200 << 10);
  // The first try may find the disk still full: what was dropped goes away meanwhile.
  if (!status.ok()) {
    clock_.Advance(absl::Seconds(2));
    status = Put(number, 200 << 10);
  }
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_TRUE(tier_->Flush().ok());
  for (uint64_t i = number - 10; i <= number; ++i) EXPECT_TRUE(HasExactly(i, 200 << 10)) << i;
  tier_.reset();
}

TEST_F(NvmeTierTest, AFullDiskAtTheStartIsUnavailable) {
  SmallDisk disk(dir_.path(), "64k");
  if (!disk.is_mounted()) GTEST_SKIP() << "no right to mount a small tmpfs here";
  std::ofstream filler(dir_.path() + "/filler");
  filler << std::string(80 << 10, 'x');
  filler.close();
  const absl::Status status = TryOpen(dir_.path());
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
}

}  // namespace
}  // namespace kvstow
