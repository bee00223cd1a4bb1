// What survives: kill -9, damaged files, a full disk, a capped folder.
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>

#include "storage/nvme_tier.h"
#include "tests/e2e/damage.h"
#include "tests/e2e/store_fixture.h"

namespace kvstow::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Durability : public RunningDaemon {
 protected:
  // Puts 16 blocks, waits until they are on disk, ends the daemon, flips one byte in the middle.
  void PutAndFlip(const KvData& kv) {
    StartDaemon({.dram = "16MiB", .nvme = "256MiB"});
    MustPut(kv, "raw", /*durable=*/true);
    ASSERT_EQ(daemon_->Terminate(), 0);
    const std::vector<fs::path> files = BlobFiles(daemon_->nvme_path());
    ASSERT_FALSE(files.empty()) << "no blob file in " << daemon_->nvme_path();
    // Records lie end to end in the file, so half of it is about where one begins; a third of a
    // record further on there are units.
    const uint64_t record_bytes = fs::file_size(files[0]) / kv.num_blocks();
    ASSERT_TRUE(FlipByte(files[0], fs::file_size(files[0]) / 2 + record_bytes / 3));
  }

  static uint64_t FolderBytes(const std::string& path) {
    uint64_t bytes = 0;
    std::error_code error;  // files come and go while we look
    for (const auto& entry : fs::recursive_directory_iterator(path, error)) {
      const uint64_t size = entry.is_regular_file(error) ? entry.file_size(error) : 0;
      if (!error) bytes += size;
    }
    return bytes;
  }
};

TEST_F(Durability, U15DurableBlocksSurviveKillMinusNine) {
  StartDaemon({.dram = "64MiB", .nvme = "256MiB"});
  const KvData raw(model_.spec, 1, 8);
  const KvData quantized(model_.spec, 2, 8);
  MustPut(raw, "raw", /*durable=*/true);
  MustPut(quantized, "k=tqm4,v=tq4", /*durable=*/true);
  daemon_->Kill();
  Restart();
  EXPECT_EQ(TierOf(daemon_->Stat(), "dram").num_blocks(), 0u) << "memory does not survive";
  EXPECT_EQ(CountHits(raw), 8);
  EXPECT_EQ(CountHits(quantized.AfterCodec(ParseCodecChoice("k=tqm4,v=tq4")->pair)), 8);
  EXPECT_EQ(Counter("nvme_hits"), 16u);
}

TEST_F(Durability, SigtermWritesWhatWasNotYetDurable) {
  StartDaemon({.dram = "64MiB", .nvme = "256MiB"});
  const KvData kv(model_.spec, 3, 8);
  MustPut(kv, "raw");
  ASSERT_EQ(daemon_->Terminate(), 0) << daemon_->log();
  Restart();
  EXPECT_EQ(CountHits(kv), 8);
}

TEST_F(Durability, DurablePutWithoutADiskIsRefusedAndNothingIsHalfDone) {
  StartDaemon({});
  const KvData kv(model_.spec, 4, 2);
  const absl::StatusOr<PutSummary> put = Put(kv, "raw", /*durable=*/true);
  const bool refused = !put.ok() || put->num_stored == 0;
  EXPECT_TRUE(refused) << "no disk, so durable cannot be promised";
  EXPECT_EQ(daemon_->Stat().open_tickets(), 0u);
}

TEST_F(Durability, U05KeysAreTheSameInTheCommandLineAndTheLibraryAndAfterARestart) {
  const std::string fixture = std::string(KVSTOW_TEST_DATA) + "/smollm2_kv.safetensors";
  StartDaemon({.dram = "64MiB", .nvme = "256MiB"});
  const auto cli = [&](std::vector<std::string> words) {
    words.insert(words.begin(), CliBinary());
    words.insert(words.end(), {"--target", daemon_->target()});
    return RunCommand(words);
  };
  const CommandResult put = cli({"put", fixture, "--codec", "raw", "--durable"});
  ASSERT_EQ(put.status, 0) << put.output;
  std::vector<BlockKey> listed;
  for (const v1::BlockInfo& block : daemon_->List()) {
    listed.push_back(BlockKey::FromBytes(block.key(), "key").value());
    const CommandResult printed = RunCommand({CliBinary(), "key", fixture, "--json"});
    EXPECT_THAT(printed.output, HasSubstr(listed.back().ToHex()))
        << "the key computed without the service is the one it stores";
  }
  ASSERT_EQ(listed.size(), 4u);

  daemon_->Kill();
  ASSERT_TRUE(daemon_->Start()) << daemon_->log();
  absl::StatusOr<LookupSummary> lookup;
  // The first call may find the connection of the daemon that was killed.
  EXPECT_TRUE(
      Eventually([&] { return (lookup = client_->Lookup(listed)).ok(); }, absl::Seconds(20)));
  EXPECT_EQ(lookup->num_leading, 4);
  const CommandResult get = cli({"get", "--tokens-from", fixture, "-o",
                                 folder_.path() + "/out.safetensors", "--compare", fixture});
  EXPECT_EQ(get.status, 0) << get.output;
}

TEST_F(Durability, U10FlippedByteOnDiskIsOneMissAndTheRestIsEqual) {
  const KvData kv(SmallModel(), 5, 16);
  PutAndFlip(kv);
  Restart();
  EXPECT_EQ(CountHits(kv), 15);
  EXPECT_EQ(Counter("corrupt_blocks"), 1u);
  EXPECT_EQ(daemon_->Stat().num_blocks(), 15u) << "the bad block is forgotten";
  EXPECT_EQ(CountHits(kv), 15) << "and stays a miss";
}

TEST_F(Durability, U10VerifyNamesTheFlippedRecord) {
  const KvData kv(SmallModel(), 6, 16);
  PutAndFlip(kv);
  Restart();
  const CommandResult verify = RunCommand({CliBinary(), "verify", "--target", daemon_->target()});
  EXPECT_EQ(verify.status, 1) << verify.output;
  int named = 0;
  for (const BlockKey& key : KeysOf(kv)) {
    named += verify.output.find(key.ToHex().substr(0, 12)) != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(named, 1) << verify.output;
  EXPECT_EQ(CountHits(kv), 15);
  const CommandResult again = RunCommand({CliBinary(), "verify", "--target", daemon_->target()});
  EXPECT_EQ(again.status, 0) << again.output;
}

TEST_F(Durability, RecordsCutShortOnDiskAreMissesCountedAndRemoved) {
  StartDaemon({.dram = "16MiB", .nvme = "256MiB"});
  const KvData kv(model_.spec, 7, 16);
  MustPut(kv, "raw", /*durable=*/true);
  ASSERT_EQ(daemon_->Terminate(), 0);
  const std::vector<fs::path> files = BlobFiles(daemon_->nvme_path());
  ASSERT_FALSE(files.empty());
  fs::resize_file(files[0], fs::file_size(files[0]) / 2);
  Restart();
  const int hits = CountHits(kv);
  EXPECT_LT(hits, 16);
  const v1::StatResponse stat = daemon_->Stat();
  EXPECT_EQ(stat.num_blocks(), static_cast<uint64_t>(hits)) << "what missed is removed";
  const bool set_aside = stat.counters().at("dirs_set_aside") > 0;
  if (!set_aside) {
    EXPECT_EQ(stat.counters().at("corrupt_blocks"), static_cast<uint64_t>(16 - hits));
  }
  const KvData next(model_.spec, 8, 4);
  MustPut(next, "raw", /*durable=*/true);
  EXPECT_EQ(CountHits(next), 4);
}

TEST_F(Durability, BrokenFolderIsSetAsideAndTheServiceStartsEmpty) {
  StartDaemon({.dram = "16MiB", .nvme = "256MiB"});
  const KvData kv(model_.spec, 9, 4);
  MustPut(kv, "raw", /*durable=*/true);
  ASSERT_EQ(daemon_->Terminate(), 0);
  int num_flipped = 0;
  for (const auto& entry : fs::recursive_directory_iterator(daemon_->nvme_path())) {
    if (entry.path().filename().string().rfind("MANIFEST", 0) != 0) continue;
    ASSERT_TRUE(FlipByte(entry.path(), fs::file_size(entry.path()) / 2));
    ++num_flipped;
  }
  ASSERT_EQ(num_flipped, 1);
  Restart();
  EXPECT_EQ(CountHits(kv), 0);
  EXPECT_EQ(Counter("dirs_set_aside"), 1u);
  bool found = false;
  for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
    found = found || entry.path().filename().string().find(".broken-") != std::string::npos;
  }
  EXPECT_TRUE(found) << "the broken folder is kept beside the new one";
  MustPut(kv, "raw", /*durable=*/true);
  EXPECT_EQ(CountHits(kv), 4);
}

TEST_F(Durability, U14FolderStaysWithinItsCapAndPutsGoOn) {
  constexpr uint64_t kCap = uint64_t{64} << 20;
  const uint64_t slack = NvmeTier::SlackBytes(kCap);  // FORMAT.md: logs, manifests, options
  StartDaemon({.dram = "32MiB", .nvme = "64MiB"}, LargerModel());
  uint64_t most = 0;
  for (uint64_t i = 0; i < 64; ++i) {  // 64 puts of 4 MiB
    const KvData kv(model_.spec, 100 + i, 8);
    const absl::StatusOr<PutSummary> put = Put(kv, "raw");
    ASSERT_TRUE(put.ok()) << put.status();
    EXPECT_EQ(put->num_refused, 0) << put->first_refusal;
    most = std::max(most, FolderBytes(daemon_->nvme_path()));
    EXPECT_LE(TierOf(daemon_->Stat(), "nvme").used_bytes(), kCap);
  }
  EXPECT_LE(most, kCap + slack);
  EXPECT_GT(Counter("nvme_evictions"), 0u) << "256 MiB went towards 64 MiB";
  // The last put is still here, whole.
  EXPECT_EQ(CountHits(KvData(model_.spec, 163, 8)), 8);
}

// A mounted tmpfs of a given size; gone with the object.
class SmallDisk {
 public:
  SmallDisk(const std::string& path, const char* options) : path_(path) {
    fs::create_directories(path);
    is_mounted_ = mount("tmpfs", path.c_str(), "tmpfs", 0, options) == 0;
  }
  ~SmallDisk() {
    if (is_mounted_) umount2(path_.c_str(), MNT_DETACH);
  }
  bool is_mounted() const { return is_mounted_; }

 private:
  std::string path_;
  bool is_mounted_ = false;
};

TEST_F(Durability, FullDiskStopsNoPutAndGivesNoWrongByte) {
  const SmallDisk disk(folder_.path() + "/nvme", "size=24m");
  if (!disk.is_mounted()) GTEST_SKIP() << "mounting a small tmpfs needs root";
  StartDaemon({.dram = "32MiB", .nvme = "256MiB"});
  int num_durable = 0;
  for (uint64_t i = 0; i < 12; ++i) {  // 12 puts of 4 MiB: twice the disk
    const KvData kv(model_.spec, 200 + i, 32);
    const absl::StatusOr<PutSummary> put = Put(kv, "raw", /*durable=*/true);
    if (put.ok() && put->num_refused == 0) {
      ++num_durable;
    } else if (!put.ok()) {
      EXPECT_NE(put.status().code(), absl::StatusCode::kInternal) << put.status();
      EXPECT_NE(put.status().code(), absl::StatusCode::kUnknown) << put.status();
    }
  }
  EXPECT_LT(num_durable, 12) << "48 MiB cannot be durable on 24 MiB";
  const v1::StatResponse stat = daemon_->Stat();
  EXPECT_GT(stat.counters().at("nvme_write_errors"), 0u);
  for (uint64_t i = 0; i < 12; ++i) CountHits(KvData(model_.spec, 200 + i, 32));
  // Memory goes on serving.
  const KvData last(model_.spec, 299, 8);
  MustPut(last, "raw");
  EXPECT_EQ(CountHits(last), 8);
  daemon_->Kill();
}

}  // namespace
}  // namespace kvstow::testing
