// tests/golden/record_v1.bin: the stored format, byte for byte. It must never change; a new version
// gets a new file (storage/FORMAT.md).
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/checksum.h"
#include "kernels/core/digest.h"
#include "storage/nvme_meta.h"
#include "storage/record.h"

namespace kvstow {
namespace {

std::vector<std::byte> GoldenBytes(const std::string& name) {
  std::ifstream in(std::string(KVSTOW_SOURCE_DIR) + "/tests/golden/" + name, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(in), {});
  const std::byte* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

// The worked example of FORMAT.md: three units of 5, 64 and 0 bytes that count up from 0x10.
RecordMeta GoldenMeta() {
  RecordMeta meta;
  for (int i = 0; i < 32; ++i) {
    meta.key.bytes[i] = static_cast<std::byte>(i);
    meta.fingerprint.bytes[i] = static_cast<std::byte>(0x40 + i);
    meta.calibration_id.bytes[i] = static_cast<std::byte>(0x80 + i);
    meta.plan_id.bytes[i] = static_cast<std::byte>(0xc0 + i);
  }
  meta.codecs = {CodecId::kTqm4, CodecId::kTq4};
  meta.num_tokens = 64;
  meta.logical_bytes = 0x0102030405;
  return meta;
}

std::vector<std::byte> GoldenRecord() {
  const uint32_t lengths[] = {5, 64, 0};
  const CodecId codecs[] = {CodecId::kTqm4, CodecId::kRaw, CodecId::kTq4};
  std::vector<uint64_t> offsets;
  std::vector<std::byte> record(static_cast<size_t>(LayOutUnits(lengths, offsets)));
  std::vector<UnitEntry> units;
  for (int i = 0; i < 3; ++i) {
    const absl::Span<std::byte> unit(record.data() + offsets[i], lengths[i]);
    for (size_t j = 0; j < unit.size(); ++j) unit[j] = static_cast<std::byte>(0x10 + j);
    units.push_back({offsets[i], lengths[i], codecs[i], Xxh3(unit)});
  }
  WriteRecordPrefix(GoldenMeta(), units, absl::MakeSpan(record));
  return record;
}

TEST(RecordGolden, IsReadAndWrittenAgainByteForByte) {
  const std::vector<std::byte> golden = GoldenBytes("record_v1.bin");
  ASSERT_EQ(golden.size(), 512u);
  const absl::StatusOr<RecordView> view = RecordView::Parse(golden);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_TRUE(view->VerifyUnits().ok());
  EXPECT_EQ(view->meta(), GoldenMeta());
  std::vector<std::byte> again(golden.size(), std::byte{0xee});
  std::vector<UnitEntry> units;
  for (uint32_t i = 0; i < view->num_units(); ++i) {
    units.push_back(view->entry(i));
    std::copy(view->unit(i).begin(), view->unit(i).end(), again.begin() + units[i].offset);
  }
  WriteRecordPrefix(view->meta(), units, absl::MakeSpan(again));
  EXPECT_EQ(again, golden);
  EXPECT_EQ(GoldenRecord(), golden);
}

// The places that FORMAT.md gives, without the code's own structs.
TEST(RecordGolden, FieldsStandWhereTheFormatSays) {
  const std::vector<std::byte> golden = GoldenBytes("record_v1.bin");
  ASSERT_EQ(golden.size(), 512u);
  const auto number = [&](size_t offset, size_t size) {
    uint64_t value = 0;
    for (size_t i = size; i-- > 0;) value = value << 8 | static_cast<uint8_t>(golden[offset + i]);
    return value;
  };
  EXPECT_EQ(std::memcmp(golden.data(), "KVSTOWR\n", 8), 0);
  EXPECT_EQ(number(8, 2), 1u);  // version
  EXPECT_EQ(number(10, 2), 0u);
  EXPECT_EQ(number(12, 4), 384u);           // header and table
  EXPECT_EQ(number(20, 4), 3u);             // units
  EXPECT_EQ(number(24, 8), 512u);           // record
  EXPECT_EQ(number(32, 8), 69u);            // payload
  EXPECT_EQ(number(40, 8), 0x0102030405u);  // logical bytes
  EXPECT_EQ(number(48, 4), 64u);            // tokens
  EXPECT_EQ(number(52, 1), 5u);             // tqm4
  EXPECT_EQ(number(53, 1), 2u);             // tq4
  EXPECT_EQ(number(56, 1), 0x00u);          // key
  EXPECT_EQ(number(88, 1), 0x40u);          // fingerprint
  EXPECT_EQ(number(120, 1), 0x80u);         // calibration
  EXPECT_EQ(number(152, 1), 0xc0u);         // plan
  EXPECT_EQ(number(184, 8), 0u);
  // Table.
  EXPECT_EQ(number(256, 8), 384u);
  EXPECT_EQ(number(264, 4), 5u);
  EXPECT_EQ(number(268, 1), 5u);
  EXPECT_EQ(number(280, 8), 448u);
  EXPECT_EQ(number(288, 4), 64u);
  EXPECT_EQ(number(292, 1), 0u);
  EXPECT_EQ(number(304, 8), 512u);
  EXPECT_EQ(number(312, 4), 0u);
  EXPECT_EQ(number(316, 1), 2u);
  // XXH3 of no bytes, seed 0, as published.
  EXPECT_EQ(number(320, 8), 0x2d06800538d394c2u);
  // Units.
  EXPECT_EQ(number(384, 4), 0x13121110u);
  EXPECT_EQ(number(389, 8), 0u);
  EXPECT_EQ(number(448, 4), 0x13121110u);
  // CRC32C of the first 384 bytes with its own field as zero.
  std::vector<std::byte> prefix(golden.begin(), golden.begin() + 384);
  std::fill(prefix.begin() + 16, prefix.begin() + 20, std::byte{0});
  EXPECT_EQ(number(16, 4), Crc32c(prefix));
}

TEST(NvmeMetaGolden, IsReadAndWrittenAgainByteForByte) {
  const std::vector<std::byte> golden = GoldenBytes("nvme_meta_v1.bin");
  ASSERT_EQ(golden.size(), kNvmeMetaBytes);
  const std::string text(reinterpret_cast<const char*>(golden.data()), golden.size());
  const std::optional<BlockInfo> block = DecodeNvmeMeta(GoldenMeta().key, text);
  ASSERT_TRUE(block.has_value());
  EXPECT_EQ(block->fingerprint, GoldenMeta().fingerprint);
  EXPECT_EQ(block->record_bytes, 512);
  EXPECT_EQ(block->logical_bytes, 0x0102030405);
  EXPECT_EQ(block->num_tokens, 64);
  EXPECT_EQ(block->codecs, GoldenMeta().codecs);
  EXPECT_EQ(EncodeNvmeMeta(*block), text);
}

}  // namespace
}  // namespace kvstow
