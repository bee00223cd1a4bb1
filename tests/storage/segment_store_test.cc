// The segments of the disk tier over a device in memory that fails when it is told to.
#include "storage/segment_store.h"

#include <map>
#include <set>
#include <string>

#include "gtest/gtest.h"
#include "storage/nvme_meta.h"
#include "tests/storage/records.h"
#include "tests/testing/fake_clock.h"

namespace kvstow {
namespace {

using testing::FakeClock;
using testing::IsEqual;
using testing::KeyOf;
using testing::MetaOf;
using testing::RecordOf;
using testing::Rng;

constexpr int64_t kCapacity = 64 << 20;
constexpr int64_t kMiB = 1 << 20;

// What survives a crash is what was flushed.
struct FakeSegment final : Segment {
  struct Entry {
    std::string meta;
    std::vector<std::byte> record;
  };
  uint32_t segment_idx = 0;
  std::map<BlockKey, Entry> entries;
  std::map<BlockKey, Entry> flushed;
  int64_t written_bytes = 0;
  bool is_deleted = false;
};

class FakeDevice final : public SegmentDevice {
 public:
  absl::StatusOr<std::shared_ptr<Segment>> Create(uint32_t segment_idx) override {
    KVSTOW_RETURN_IF_ERROR(failure);
    auto segment = std::make_shared<FakeSegment>();
    segment->segment_idx = segment_idx;
    segments[segment_idx] = segment;
    return segment;
  }
  absl::Status Write(Segment& segment, const BlockKey& key, std::string_view meta,
                     absl::Span<const std::byte> record) override {
    KVSTOW_RETURN_IF_ERROR(failure);
    Of(segment).entries[key] = {std::string(meta), {record.begin(), record.end()}};
    Of(segment).written_bytes += static_cast<int64_t>(record.size());
    records_written += 1;
    return absl::OkStatus();
  }
  absl::Status Erase(Segment& segment, const BlockKey& key) override {
    KVSTOW_RETURN_IF_ERROR(failure);
    Of(segment).entries.erase(key);
    return absl::OkStatus();
  }
  absl::Status Flush(Segment& segment) override {
    KVSTOW_RETURN_IF_ERROR(failure);
    Of(segment).flushed = Of(segment).entries;
    ++num_flushes;
    return absl::OkStatus();
  }
  absl::Status Delete(Segment& segment) override {
    KVSTOW_RETURN_IF_ERROR(failure);
    Of(segment).is_deleted = true;
    segments.erase(Of(segment).segment_idx);
    return absl::OkStatus();
  }
  absl::Status Resume() override {
    ++num_resumes;
    return failure;
  }
  absl::StatusOr<BlockRef> Read(const Segment& segment, const BlockKey& key) const override {
    if (damaged.contains(key)) return absl::DataLossError("damaged");
    const auto found = Of(segment).entries.find(key);
    if (found == Of(segment).entries.end()) return absl::NotFoundError("no such record");
    auto copy = std::make_shared<std::vector<std::byte>>(found->second.record);
    const absl::Span<const std::byte> bytes = *copy;
    return BlockRef(std::move(copy), bytes);
  }
  absl::Status Scan(
      const Segment& segment,
      const std::function<void(const BlockKey&, std::string_view)>& visit) const override {
    for (const auto& [key, entry] : Of(segment).entries) visit(key, entry.meta);
    return absl::OkStatus();
  }
  int64_t FileBytes(const Segment& segment) const override { return Of(segment).written_bytes; }

  // What a restart after a crash would find.
  std::map<uint32_t, std::shared_ptr<Segment>> Crash() {
    std::map<uint32_t, std::shared_ptr<Segment>> found;
    for (auto& [segment_idx, segment] : segments) {
      segment->entries = segment->flushed;
      found[segment_idx] = segment;
    }
    return found;
  }

  absl::Status failure;  // of everything that writes
  std::set<BlockKey> damaged;
  std::map<uint32_t, std::shared_ptr<FakeSegment>> segments;
  int64_t records_written = 0;
  int num_flushes = 0;
  int num_resumes = 0;

 private:
  static FakeSegment& Of(Segment& segment) { return static_cast<FakeSegment&>(segment); }
  static const FakeSegment& Of(const Segment& segment) {
    return static_cast<const FakeSegment&>(segment);
  }
};

class SegmentStoreTest : public ::testing::Test {
 protected:
  absl::Status Put(uint64_t number, int64_t bytes = kMiB) {
    return store_.Put(KeyOf(number), RecordOf(number, bytes));
  }
  bool HasExactly(const SegmentStore& store, uint64_t number, int64_t bytes = kMiB) {
    const absl::StatusOr<BlockRef> got = store.Get(KeyOf(number));
    return got.ok() && IsEqual(got->bytes(), RecordOf(number, bytes));
  }
  FakeDevice device_;
  FakeClock clock_;
  SegmentStore store_{kCapacity, &device_, &clock_};
};

TEST_F(SegmentStoreTest, BytesThatAreNoRecordOfTheKeyAreRefused) {
  const std::vector<std::byte> record = RecordOf(1, 1000);
  EXPECT_TRUE(absl::IsInvalidArgument(store_.Put(KeyOf(2), record)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      store_.Put(KeyOf(1), absl::MakeConstSpan(record).first(record.size() - 1))));
  EXPECT_EQ(device_.records_written, 0);
}

TEST_F(SegmentStoreTest, SegmentsCloseAtTheirSizeAndAreDeletedWhenNothingLives) {
  for (uint64_t number = 0; number < 9; ++number) ASSERT_TRUE(Put(number).ok());
  ASSERT_EQ(device_.segments.size(), 3u);  // 4 MiB each
  for (uint64_t number = 0; number < 3; ++number) store_.Drop(KeyOf(number));
  ASSERT_TRUE(store_.Flush().ok());
  EXPECT_EQ(device_.segments.size(), 2u);
  EXPECT_FALSE(device_.segments.contains(1));
  for (uint64_t number = 3; number < 9; ++number) EXPECT_TRUE(HasExactly(store_, number));
  EXPECT_EQ(device_.records_written, 9);  // nothing moved
}

TEST_F(SegmentStoreTest, OldestFirstEvictionMovesNothing) {
  uint64_t oldest = 0;
  for (uint64_t number = 0; number < 300; ++number) {
    while (absl::IsResourceExhausted(Put(number))) store_.Drop(KeyOf(oldest++));
  }
  EXPECT_EQ(device_.records_written, 300);
}

// A moved record must be safe before the segment it came from goes.
TEST_F(SegmentStoreTest, CleaningLosesNothingThatWasFlushed) {
  Rng rng(3);
  std::vector<uint64_t> resident;
  for (uint64_t number = 0; number < 400; ++number) {
    while (absl::IsResourceExhausted(Put(number))) {
      const size_t victim = rng.Below(resident.size());
      store_.Drop(KeyOf(resident[victim]));
      resident.erase(resident.begin() + static_cast<int64_t>(victim));
    }
    resident.push_back(number);
    ASSERT_LE(store_.used_bytes(), kCapacity);
    if (number % 50 == 0) {
      ASSERT_TRUE(store_.Flush().ok());
      // Crash here: everything that lives is found again.
      FakeDevice copy = device_;
      for (auto& [segment_idx, segment] : copy.segments) {
        segment = std::make_shared<FakeSegment>(*segment);
      }
      SegmentStore reopened(kCapacity, &copy, &clock_);
      ASSERT_TRUE(reopened.Adopt(copy.Crash(), [](const BlockInfo&) {}).ok());
      for (const uint64_t lives : resident) ASSERT_TRUE(HasExactly(reopened, lives)) << lives;
    }
  }
  EXPECT_GT(device_.records_written, 400);  // some had to move
  EXPECT_LT(device_.records_written, 400 * 5);
}

TEST_F(SegmentStoreTest, OfTwoCopiesTheYoungerSegmentsCounts) {
  for (uint64_t number = 0; number < 4; ++number) ASSERT_TRUE(Put(number).ok());
  ASSERT_TRUE(store_.Flush().ok());
  store_.Drop(KeyOf(0));  // its removal is not flushed
  ASSERT_TRUE(store_.Put(KeyOf(0), RecordOf(0, 2 * kMiB)).ok());
  ASSERT_TRUE(store_.Flush().ok());
  ASSERT_EQ(device_.segments.size(), 2u);
  SegmentStore reopened(kCapacity, &device_, &clock_);
  std::vector<BlockInfo> found;
  const absl::StatusOr<int64_t> num_lost =
      reopened.Adopt(device_.Crash(), [&](const BlockInfo& block) { found.push_back(block); });
  EXPECT_EQ(*num_lost, 0);
  EXPECT_EQ(found.size(), 5u);
  EXPECT_TRUE(HasExactly(reopened, 0, 2 * kMiB));
}

TEST_F(SegmentStoreTest, ADamagedMetaEntryIsRebuiltFromTheRecord) {
  for (uint64_t number = 0; number < 3; ++number) ASSERT_TRUE(Put(number).ok());
  ASSERT_TRUE(store_.Flush().ok());
  std::string& meta = device_.segments[1]->flushed[KeyOf(1)].meta;
  meta[5] ^= 1;
  device_.segments[1]->flushed[KeyOf(2)].meta = "short";
  device_.segments[1]->flushed[KeyOf(2)].record.resize(100);
  SegmentStore reopened(kCapacity, &device_, &clock_);
  std::map<BlockKey, BlockInfo> found;
  const absl::StatusOr<int64_t> num_lost =
      reopened.Adopt(device_.Crash(), [&](const BlockInfo& block) { found[block.key] = block; });
  EXPECT_EQ(*num_lost, 1);  // block 2 has no good record either
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[KeyOf(1)].num_tokens, 64);
  EXPECT_TRUE(HasExactly(reopened, 1));
  EXPECT_TRUE(absl::IsNotFound(reopened.Get(KeyOf(2)).status()));
}

TEST_F(SegmentStoreTest, AfterARestartTheLastSegmentIsFilledUp) {
  ASSERT_TRUE(Put(0).ok());
  ASSERT_TRUE(store_.Flush().ok());
  SegmentStore reopened(kCapacity, &device_, &clock_);
  ASSERT_TRUE(reopened.Adopt(device_.Crash(), [](const BlockInfo&) {}).ok());
  ASSERT_TRUE(reopened.Put(KeyOf(1), RecordOf(1, kMiB)).ok());
  EXPECT_EQ(device_.segments.size(), 1u);
}

TEST_F(SegmentStoreTest, ADamagedRecordIsLostWhenItsSegmentIsCleaned) {
  for (uint64_t number = 0; number < 48; ++number) ASSERT_TRUE(Put(number, 900 << 10).ok());
  device_.damaged.insert(KeyOf(1));
  for (uint64_t number : {0, 2}) store_.Drop(KeyOf(number));
  // Enough to use up the room and force a cleaning.
  uint64_t number = 48;
  for (uint64_t oldest = 8; number < 120; ++number) {
    while (absl::IsResourceExhausted(Put(number, 900 << 10))) store_.Drop(KeyOf(oldest++));
  }
  EXPECT_TRUE(absl::IsNotFound(store_.Get(KeyOf(1)).status()) ||
              absl::IsDataLoss(store_.Get(KeyOf(1)).status()));
  EXPECT_TRUE(HasExactly(store_, 3, 900 << 10));
}

TEST_F(SegmentStoreTest, AFailingDeviceIsAskedOnceASecondAndRecovers) {
  ASSERT_TRUE(Put(0).ok());
  device_.failure = absl::UnavailableError("no space");
  EXPECT_EQ(Put(1), absl::UnavailableError("no space"));
  EXPECT_EQ(Put(1), absl::UnavailableError("no space"));
  EXPECT_EQ(store_.Flush(), absl::UnavailableError("no space"));
  EXPECT_EQ(device_.num_resumes, 0);  // not within the first second
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(Put(1), absl::UnavailableError("no space"));
  EXPECT_EQ(Put(1), absl::UnavailableError("no space"));
  EXPECT_EQ(device_.num_resumes, 1);
  EXPECT_TRUE(HasExactly(store_, 0));
  EXPECT_TRUE(absl::IsNotFound(store_.Get(KeyOf(1)).status()));
  device_.failure = absl::OkStatus();
  EXPECT_EQ(Put(1), absl::UnavailableError("no space"));  // until it is asked again
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(Put(1).ok());
  EXPECT_TRUE(HasExactly(store_, 0));
  EXPECT_TRUE(HasExactly(store_, 1));
}

// Whatever fails whenever: what lives stays readable, and the numbers agree afterwards.
TEST_F(SegmentStoreTest, RandomFailuresLoseNothingThatLives) {
  constexpr uint64_t kSeed = 99;
  Rng rng(kSeed);
  std::map<uint64_t, int64_t> model;
  for (uint64_t step = 0; step < 1500; ++step) {
    SCOPED_TRACE(absl::StrCat("seed ", kSeed, " step ", step));
    device_.failure = rng.Below(10) == 0 ? absl::UnavailableError("no space") : absl::OkStatus();
    clock_.Advance(absl::Milliseconds(static_cast<int64_t>(rng.Below(700))));
    const uint64_t number = step;
    const int64_t bytes = 20000 + static_cast<int64_t>(rng.Below(1 << 20));
    absl::Status status = Put(number, bytes);
    while (absl::IsResourceExhausted(status) && !model.empty()) {
      auto victim = model.begin();
      std::advance(victim, static_cast<int64_t>(rng.Below(model.size())));
      store_.Drop(KeyOf(victim->first));
      model.erase(victim);
      status = Put(number, bytes);
    }
    if (status.ok()) model[number] = bytes;
    ASSERT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    if (rng.Below(20) == 0) store_.Flush().IgnoreError();
    ASSERT_LE(store_.used_bytes(), kCapacity);
    if (!model.empty()) {
      auto any = model.begin();
      std::advance(any, static_cast<int64_t>(rng.Below(model.size())));
      ASSERT_TRUE(HasExactly(store_, any->first, any->second)) << any->first;
    }
  }
  device_.failure = absl::OkStatus();
  clock_.Advance(absl::Seconds(2));
  ASSERT_TRUE(store_.FlushDrops().ok());
  SegmentStore reopened(kCapacity, &device_, &clock_);
  std::set<BlockKey> found;
  ASSERT_TRUE(
      reopened.Adopt(device_.Crash(), [&](const BlockInfo& b) { found.insert(b.key); }).ok());
  EXPECT_EQ(found.size(), model.size());
  for (const auto& [number, bytes] : model) ASSERT_TRUE(HasExactly(reopened, number, bytes));
  EXPECT_EQ(reopened.map().live_bytes(), store_.map().live_bytes());
}

TEST(NvmeMeta, EveryFlippedBitAndAnotherKeyAreNoticed) {
  const BlockInfo block{.key = KeyOf(1),
                        .fingerprint = Sha256("model"),
                        .codecs = {CodecId::kTqm4, CodecId::kTq4},
                        .location = {.in_nvme = true},
                        .num_tokens = 64,
                        .record_bytes = 400000,
                        .logical_bytes = int64_t{1} << 33};
  const std::string good = EncodeNvmeMeta(block);
  ASSERT_EQ(good.size(), kNvmeMetaBytes);
  const std::optional<BlockInfo> decoded = DecodeNvmeMeta(KeyOf(1), good);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(decoded->fingerprint, block.fingerprint);
  EXPECT_EQ(decoded->codecs, block.codecs);
  EXPECT_EQ(decoded->num_tokens, 64);
  EXPECT_EQ(decoded->record_bytes, 400000);
  EXPECT_EQ(decoded->logical_bytes, int64_t{1} << 33);
  EXPECT_FALSE(DecodeNvmeMeta(KeyOf(2), good).has_value());
  EXPECT_FALSE(DecodeNvmeMeta(KeyOf(1), good + "x").has_value());
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(DecodeNvmeMeta(KeyOf(1), bad).has_value()) << "bit " << bit;
  }
}

}  // namespace
}  // namespace kvstow
