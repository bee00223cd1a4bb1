#include "storage/record.h"

#include <cstring>

#include "gtest/gtest.h"
#include "tests/storage/records.h"

namespace kvstow {
namespace {

using testing::FillUnit;
using testing::IsEqual;
using testing::KeyOf;
using testing::MetaOf;
using testing::RecordOf;

constexpr size_t kVersionOffset = 8;
constexpr size_t kCrcOffset = 16;
constexpr size_t kKCodecOffset = 52;
constexpr size_t kFirstUnit = 256;  // of the table; offset 8, length 4, codec 1, zero 3, XXH3 8

template <typename T>
void Poke(std::vector<std::byte>& record, size_t offset, T value) {
  std::memcpy(record.data() + offset, &value, sizeof(value));
}

template <typename T>
T Peek(const std::vector<std::byte>& record, size_t offset) {
  T value;
  std::memcpy(&value, record.data() + offset, sizeof(value));
  return value;
}

// Makes a forged header or table pass its checksum.
void Reseal(std::vector<std::byte>& record) {
  Poke<uint32_t>(record, kCrcOffset, 0);
  const uint32_t prefix_bytes = Peek<uint32_t>(record, 12);
  Poke(record, kCrcOffset, Crc32c(absl::MakeConstSpan(record).first(prefix_bytes)));
}

absl::Status ParseAndVerify(absl::Span<const std::byte> bytes) {
  KVSTOW_ASSIGN_OR_RETURN(const RecordView view, RecordView::Parse(bytes));
  return view.VerifyUnits();
}

TEST(Record, SaysWhatWasWritten) {
  RecordMeta meta = MetaOf(KeyOf(1));
  meta.calibration_id = Sha256("calibration");
  meta.plan_id = Sha256("plan");
  meta.codecs = {CodecId::kTqm4, CodecId::kTq4};
  meta.logical_bytes = int64_t{5} << 32;
  // Units of varying length, one empty.
  const std::vector<std::byte> record = RecordOf(meta, {100, 64, 0, 1, 4096});
  const absl::StatusOr<RecordView> view = RecordView::Parse(record);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->meta(), meta);
  ASSERT_EQ(view->num_units(), 5u);
  EXPECT_EQ(view->entry(0).offset, static_cast<uint64_t>(RecordPrefixBytes(5)));
  EXPECT_EQ(view->entry(1).offset, view->entry(0).offset + 128);
  EXPECT_EQ(view->unit(4).size(), 4096u);
  std::vector<std::byte> want(4096);
  FillUnit(meta.key, 4, absl::MakeSpan(want));
  EXPECT_TRUE(IsEqual(view->unit(4), want));
  EXPECT_TRUE(view->VerifyUnits().ok());
  EXPECT_EQ(record.size() % kUnitAlignment, 0u);
}

TEST(Record, EveryFlippedBitIsDataLoss) {
  const std::vector<std::byte> record = RecordOf(MetaOf(KeyOf(2)), {100, 64, 7});
  ASSERT_TRUE(ParseAndVerify(record).ok());
  for (size_t bit = 0; bit < record.size() * 8; ++bit) {
    std::vector<std::byte> bad = record;
    bad[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    ASSERT_TRUE(absl::IsDataLoss(ParseAndVerify(bad)))
        << "byte " << bit / 8 << ": " << ParseAndVerify(bad);
  }
}

TEST(Record, EveryCutAndEveryAddedByteIsDataLoss) {
  std::vector<std::byte> record = RecordOf(MetaOf(KeyOf(3)), {100, 64});
  for (size_t size = 0; size < record.size(); ++size) {
    ASSERT_TRUE(absl::IsDataLoss(ParseAndVerify(absl::MakeConstSpan(record).first(size)))) << size;
  }
  record.push_back(std::byte{0});
  EXPECT_TRUE(absl::IsDataLoss(ParseAndVerify(record)));
}

TEST(Record, UnknownVersionIsAFailedPreconditionAndNamesBoth) {
  std::vector<std::byte> record = RecordOf(MetaOf(KeyOf(4)), {64});
  Poke<uint16_t>(record, kVersionOffset, 2);
  Reseal(record);
  const absl::Status status = RecordView::Parse(record).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(status.message(), "record has version 2, this build reads 1");
}

TEST(Record, UnknownCodecOfTheBlockOrOfAUnitIsAFailedPrecondition) {
  std::vector<std::byte> record = RecordOf(MetaOf(KeyOf(5)), {64, 64});
  Poke<uint8_t>(record, kKCodecOffset, 200);
  Reseal(record);
  EXPECT_EQ(RecordView::Parse(record).status(),
            absl::FailedPreconditionError("record has codec 200, which this build does not know"));
  record = RecordOf(MetaOf(KeyOf(5)), {64, 64});
  Poke<uint8_t>(record, kFirstUnit + 24 + 12, 201);
  Reseal(record);
  EXPECT_EQ(RecordView::Parse(record).status(),
            absl::FailedPreconditionError("unit 1 has codec 201, which this build does not know"));
}

// Tables that no writer makes, but with a good checksum.
TEST(Record, RefusesForgedUnitTables) {
  const std::vector<std::byte> good = RecordOf(MetaOf(KeyOf(6)), {64, 64, 64});
  const uint64_t first = static_cast<uint64_t>(RecordPrefixBytes(3));
  struct Case {
    const char* name;
    uint64_t offset;  // of unit 1
    uint32_t length;
  };
  const Case cases[] = {
      {"overlaps the unit before", first, 64},      {"overlaps the unit behind", first + 64, 65},
      {"is out of order", first + 128, 64},         {"is not aligned", first + 65, 10},
      {"ends behind the record", first + 64, 1000}, {"starts behind the record", first + 6400, 0},
      {"overflows", UINT64_MAX - 63, 64},           {"lies in the header", 0, 64},
  };
  for (const Case& c : cases) {
    std::vector<std::byte> record = good;
    Poke(record, kFirstUnit + 24, c.offset);
    Poke(record, kFirstUnit + 24 + 8, c.length);
    Reseal(record);
    EXPECT_TRUE(absl::IsDataLoss(RecordView::Parse(record).status())) << c.name;
  }
}

TEST(Record, RefusesForgedCounts) {
  const std::vector<std::byte> good = RecordOf(MetaOf(KeyOf(7)), {64, 64});
  for (const uint32_t num_units : {0u, 1u, 3u, 1000u, kMaxUnitsPerRecord + 1, UINT32_MAX}) {
    std::vector<std::byte> record = good;
    Poke(record, 20, num_units);
    Reseal(record);
    EXPECT_TRUE(absl::IsDataLoss(RecordView::Parse(record).status())) << num_units;
  }
  for (const uint32_t prefix_bytes : {0u, 255u, 256u, 384u, 1u << 30, UINT32_MAX}) {
    std::vector<std::byte> record = good;
    Poke(record, 12, prefix_bytes);
    EXPECT_TRUE(absl::IsDataLoss(RecordView::Parse(record).status())) << prefix_bytes;
  }
  std::vector<std::byte> record = good;
  Poke(record, 32, uint64_t{127});  // payload bytes
  Reseal(record);
  EXPECT_TRUE(absl::IsDataLoss(RecordView::Parse(record).status()));
}

TEST(Record, PaddingHoldsNothingOfWhatTheMemoryHeld) {
  const RecordMeta meta = MetaOf(KeyOf(8));
  std::vector<uint64_t> offsets;
  const std::vector<uint32_t> lengths = {5, 70};
  std::vector<std::byte> dirty(static_cast<size_t>(LayOutUnits(lengths, offsets)), std::byte{0xaa});
  std::vector<UnitEntry> units;
  for (uint32_t i = 0; i < 2; ++i) {
    const absl::Span<std::byte> unit(dirty.data() + offsets[i], lengths[i]);
    FillUnit(meta.key, i, unit);
    units.push_back({offsets[i], lengths[i], CodecId::kRaw, Xxh3(unit)});
  }
  WriteRecordPrefix(meta, units, absl::MakeSpan(dirty));
  EXPECT_TRUE(IsEqual(dirty, RecordOf(meta, lengths)));
}

TEST(Record, VerifyNamesTheFirstBadUnit) {
  std::vector<std::byte> record = RecordOf(MetaOf(KeyOf(9)), {64, 64, 64});
  const absl::StatusOr<RecordView> view = RecordView::Parse(record);
  ASSERT_TRUE(view.ok());
  record[view->entry(1).offset + 3] ^= std::byte{1};
  record[view->entry(2).offset] ^= std::byte{1};
  const absl::Status status = view->VerifyUnits();
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_EQ(status.message().substr(0, 13), "unit 1 of 3 h") << status;
}

TEST(RecordDeathTest, WritingUnitsThatOverlapIsABugOfOurs) {
  std::vector<std::byte> record(1024);
  const UnitEntry unit{.offset = 320, .length = 65};
  const UnitEntry overlapping{.offset = 384, .length = 64};
  EXPECT_DEATH(WriteRecordPrefix(MetaOf(KeyOf(1)), {unit, overlapping}, absl::MakeSpan(record)),
               "check failed");
}

}  // namespace
}  // namespace kvstow
