// Frames: our hand-written messages and the generated classes are held to each other, byte by byte.
#include "proto/frames.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kvstow/v1/data.pb.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::Rng;

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// `bytes` as a buffer of slices of random sizes, empty ones among them.
grpc::ByteBuffer SlicedBuffer(const std::string& bytes, Rng& rng, size_t slice_bytes_max) {
  std::vector<grpc::Slice> slices;
  size_t at = 0;
  while (at < bytes.size()) {
    const size_t here = std::min<size_t>(rng.Below(slice_bytes_max + 1), bytes.size() - at);
    slices.emplace_back(bytes.data() + at, here);
    at += here;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string PayloadBytes(const FramePayload& payload) {
  std::string bytes(payload.size(), '\0');
  payload.CopyTo(0, {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()});
  return bytes;
}

// Numbers of every magnitude, zero often.
uint64_t RandomNumber(Rng& rng) { return rng.Below(4) == 0 ? 0 : rng.Next() >> rng.Below(64); }

std::string RandomBytes(Rng& rng, size_t bytes) {
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(rng.Next());
  return text;
}

PutFrameHeader RandomPut(Rng& rng) {
  PutFrameHeader header;
  header.ticket = RandomNumber(rng);
  header.first_unit = static_cast<uint32_t>(RandomNumber(rng));
  const bool is_encoded = rng.Below(2) == 0;
  for (uint64_t i = rng.Below(20); i > 0; --i) {
    header.unit_xxh3.push_back(RandomNumber(rng));
    if (!is_encoded) continue;
    header.unit_bytes.push_back(static_cast<uint32_t>(RandomNumber(rng)));
    header.unit_codec.push_back(static_cast<uint32_t>(rng.Below(200)));
  }
  header.channel = RandomNumber(rng);
  header.window_offset = RandomNumber(rng);
  header.window_bytes = RandomNumber(rng);
  if (rng.Below(2) == 0) header.unit_offset = header.unit_xxh3;
  return header;
}

GetFrameHeader RandomGet(Rng& rng) {
  GetFrameHeader header;
  header.block_idx = static_cast<uint32_t>(RandomNumber(rng));
  header.code = static_cast<int32_t>(RandomNumber(rng));
  header.first_unit = static_cast<uint32_t>(RandomNumber(rng));
  for (uint64_t i = rng.Below(20); i > 0; --i) {
    header.unit_xxh3.push_back(RandomNumber(rng));
    header.unit_bytes.push_back(static_cast<uint32_t>(RandomNumber(rng)));
    header.unit_codec.push_back(static_cast<uint32_t>(rng.Below(200)));
  }
  header.key = RandomBytes(rng, rng.Below(2) * 32);
  header.fingerprint = RandomBytes(rng, rng.Below(2) * 32);
  header.num_units = static_cast<uint32_t>(RandomNumber(rng));
  header.num_tokens = static_cast<uint32_t>(RandomNumber(rng));
  header.window_offset = RandomNumber(rng);
  header.window_bytes = RandomNumber(rng);
  header.calibration_id = RandomBytes(rng, rng.Below(2) * 32);
  header.is_placed = rng.Below(2) == 0;
  return header;
}

v1::PutFrame MessageOf(const PutFrameHeader& header, const std::string& payload) {
  v1::PutFrame frame;
  frame.set_ticket(header.ticket);
  frame.set_first_unit(header.first_unit);
  frame.mutable_unit_xxh3()->Assign(header.unit_xxh3.begin(), header.unit_xxh3.end());
  frame.mutable_unit_bytes()->Assign(header.unit_bytes.begin(), header.unit_bytes.end());
  frame.mutable_unit_codec()->Assign(header.unit_codec.begin(), header.unit_codec.end());
  frame.set_channel(header.channel);
  frame.set_window_offset(header.window_offset);
  frame.set_window_bytes(header.window_bytes);
  frame.mutable_unit_offset()->Assign(header.unit_offset.begin(), header.unit_offset.end());
  frame.set_payload(payload);
  return frame;
}

v1::GetFrame MessageOf(const GetFrameHeader& header, const std::string& payload) {
  v1::GetFrame frame;
  frame.set_block_idx(header.block_idx);
  frame.set_code(header.code);
  frame.set_first_unit(header.first_unit);
  frame.mutable_unit_xxh3()->Assign(header.unit_xxh3.begin(), header.unit_xxh3.end());
  frame.mutable_unit_bytes()->Assign(header.unit_bytes.begin(), header.unit_bytes.end());
  frame.mutable_unit_codec()->Assign(header.unit_codec.begin(), header.unit_codec.end());
  frame.set_key(header.key);
  frame.set_fingerprint(header.fingerprint);
  frame.set_num_units(header.num_units);
  frame.set_num_tokens(header.num_tokens);
  frame.set_window_offset(header.window_offset);
  frame.set_window_bytes(header.window_bytes);
  frame.set_calibration_id(header.calibration_id);
  frame.set_is_placed(header.is_placed);
  frame.set_payload(payload);
  return frame;
}

template <typename Header>
void ExpectSameBytesBothWays(const Header& header, const std::string& payload, Rng& rng) {
  const std::string generated = MessageOf(header, payload).SerializeAsString();
  std::vector<grpc::Slice> slices;
  slices.emplace_back(payload.data(), payload.size() / 2);
  slices.emplace_back(payload.data() + payload.size() / 2, payload.size() - payload.size() / 2);
  ASSERT_EQ(BytesOf(BuildFrame(header, slices)), generated);

  Header read;
  FramePayload read_payload;
  const grpc::ByteBuffer received = SlicedBuffer(generated, rng, 1 + rng.Below(100));
  const absl::Status status = ParseFrame(received, read, read_payload);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(MessageOf(read, PayloadBytes(read_payload)).SerializeAsString(), generated);
}

TEST(Frames, PutFramesEqualTheGeneratedMessagesBothWays) {
  Rng rng(1);
  for (int round = 0; round < 500; ++round) {
    SCOPED_TRACE(round);
    ExpectSameBytesBothWays(RandomPut(rng), RandomBytes(rng, rng.Below(300)), rng);
  }
}

TEST(Frames, GetFramesEqualTheGeneratedMessagesBothWays) {
  Rng rng(2);
  for (int round = 0; round < 500; ++round) {
    SCOPED_TRACE(round);
    ExpectSameBytesBothWays(RandomGet(rng), RandomBytes(rng, rng.Below(300)), rng);
  }
}

TEST(Frames, ListsSentUnpackedAreRead) {
  // Field 3 as two separate fixed64, fields 4 and 5 as two separate varints each.
  const std::string bytes(
      "\x19\x01\0\0\0\0\0\0\0\x19\x02\0\0\0\0\0\0\0\x20\x05\x28\x07\x20\x06\x28\x08", 26);
  PutFrameHeader header;
  FramePayload payload;
  Rng rng(3);
  ASSERT_TRUE(ParseFrame(SlicedBuffer(bytes, rng, 3), header, payload).ok());
  EXPECT_EQ(header.unit_xxh3, (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(header.unit_bytes, (std::vector<uint32_t>{5, 6}));
  EXPECT_EQ(header.unit_codec, (std::vector<uint32_t>{7, 8}));
}

TEST(Frames, UnknownFieldsAreSkipped) {
  // Field 11 as varint, 12 as fixed64, 13 as bytes, 14 as fixed32; then first_unit = 9.
  const std::string bytes(
      "\x58\x7f\x61********\x6a\x03"
      "abc"
      "\x75"
      "****"
      "\x10\x09",
      24 - 1);
  PutFrameHeader header;
  FramePayload payload;
  Rng rng(4);
  const absl::Status status = ParseFrame(SlicedBuffer(bytes, rng, 5), header, payload);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(header.first_unit, 9u);
}

TEST(Frames, AFieldOfAnotherWireTypeIsUnknown) {
  const std::string bytes("\x08\x05\x10\x02", 4);  // `ticket` as varint; first_unit = 2
  PutFrameHeader header;
  FramePayload payload;
  Rng rng(5);
  ASSERT_TRUE(ParseFrame(SlicedBuffer(bytes, rng, 5), header, payload).ok());
  EXPECT_EQ(header.ticket, 0u);
  EXPECT_EQ(header.first_unit, 2u);
}

TEST(Frames, BuildFrameDoesNotCopyThePayload) {
  std::string memory(4096, 'x');
  bool is_released = false;
  {
    grpc::ByteBuffer frame;
    {
      std::vector<grpc::Slice> payload;
      payload.emplace_back(
          memory.data(), memory.size(), [](void* flag) { *static_cast<bool*>(flag) = true; },
          &is_released);
      frame = BuildFrame(PutFrameHeader{.ticket = 1, .unit_xxh3 = {2}}, std::move(payload));
    }
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(frame.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 2u);
    EXPECT_EQ(slices[1].begin(), reinterpret_cast<const uint8_t*>(memory.data()));
    EXPECT_FALSE(is_released);
  }
  EXPECT_TRUE(is_released);
}

TEST(Frames, ParseFrameDoesNotCopyThePayload) {
  const std::string bytes =
      MessageOf(PutFrameHeader{.ticket = 1, .unit_xxh3 = {2}}, std::string(4096, 'x'))
          .SerializeAsString();
  grpc::Slice slice(bytes.data(), bytes.size(), grpc::Slice::STATIC_SLICE);
  PutFrameHeader header;
  FramePayload payload;
  ASSERT_TRUE(ParseFrame(grpc::ByteBuffer(&slice, 1), header, payload).ok());
  const absl::Span<const std::byte> all = payload.Contiguous(0, 4096);
  ASSERT_EQ(all.size(), 4096u);
  EXPECT_EQ(reinterpret_cast<const char*>(all.data()), bytes.data() + bytes.size() - 4096);
}

TEST(Frames, PayloadIsReadAtAnyOffsetAcrossPieces) {
  Rng rng(6);
  const std::string content = RandomBytes(rng, 1000);
  const std::string bytes = MessageOf(PutFrameHeader{}, content).SerializeAsString();
  for (int round = 0; round < 200; ++round) {
    FramePayload payload;
    {
      PutFrameHeader header;
      FramePayload first;
      ASSERT_TRUE(ParseFrame(SlicedBuffer(bytes, rng, 120), header, first).ok());
      payload = first;  // a copy keeps its own hold on the memory
    }
    const int64_t offset = static_cast<int64_t>(rng.Below(1001));
    const int64_t size = static_cast<int64_t>(rng.Below(1001 - offset));
    std::string out(size, '\0');
    payload.CopyTo(offset, {reinterpret_cast<std::byte*>(out.data()), out.size()});
    EXPECT_EQ(out, content.substr(offset, size));
    const absl::Span<const std::byte> piece = payload.Contiguous(offset, size);
    if (!piece.empty()) {
      EXPECT_EQ(std::memcmp(piece.data(), content.data() + offset, size), 0);
    }
  }
}

struct BadBytes {
  const char* name;
  std::string bytes;
  std::string message;
};

void PrintTo(const BadBytes& bad, std::ostream* out) { *out << bad.name; }

class BadPutFrame : public ::testing::TestWithParam<BadBytes> {};

TEST_P(BadPutFrame, IsRefusedWithItsReason) {
  PutFrameHeader header;
  FramePayload payload;
  Rng rng(7);
  const absl::Status status =
      ParseFrame(SlicedBuffer(GetParam().bytes, rng, 1000), header, payload);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()), GetParam().message);
}

std::string Message(const std::string& payload) {
  return MessageOf(PutFrameHeader{.ticket = 1}, payload).SerializeAsString();
}

INSTANTIATE_TEST_SUITE_P(
    Frames, BadPutFrame,
    ::testing::Values(
        BadBytes{"CutInNumber", Message("").substr(0, 5), "frame: cut short"},
        BadBytes{"CutInPayload", Message("abcdef").substr(0, 13),
                 "frame: cut short: a field of 6 bytes where 2 are left"},
        BadBytes{"PayloadNotLast", Message("abc") + "\x10\x01",
                 "frame: the payload is not last: 2 bytes follow it"},
        BadBytes{"PayloadTwice", Message("abc") + "\x7a\x01z",
                 "frame: the payload is not last: 3 bytes follow it"},
        BadBytes{"FieldZero", std::string("\x00\x01", 2), "frame: tag 0 is none"},
        BadBytes{"Group", "\x0b\x0c", "frame: field 1 has wire type 3"},
        BadBytes{"LongNumber", "\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
                 "frame: a number with too many bytes"},
        BadBytes{"LongTag", std::string("\x90\x80\x80\x80\x80\x00", 6),
                 "frame: a number with too many bytes"},
        BadBytes{"OddList", std::string("\x1a\x07") + "1234567",
                 "frame: a list of 8-byte numbers has 7 bytes"},
        BadBytes{"ListOverrun", std::string("\x22\x01\x80\x01", 4),
                 "frame: a list's last number runs over its end"},
        BadBytes{"LongHeader", std::string("\x6a\x81\x80\x04", 4) + std::string(65537, 'x'),
                 "frame: the header is over 65536 bytes"},
        BadBytes{"LongHeaderInParts",
                 (std::string("\x6a\x80\x80\x02") + std::string(32768, 'x')) +
                     (std::string("\x6a\x80\x80\x02") + std::string(32768, 'x')),
                 "frame: the header is over 65536 bytes"},
        BadBytes{"LongFrame", Message(std::string(4128768, 'x')),
                 "frame: 4128782 bytes, want at most 4128768"},
        BadBytes{
            "UnequalLists",
            MessageOf(PutFrameHeader{.unit_xxh3 = {1, 2}, .unit_bytes = {3}, .unit_codec = {4}}, "")
                .SerializeAsString(),
            "frame: 2 checksums, 1 lengths and 1 codecs, want as many of each (rows: checksums "
            "only)"},
        BadBytes{"UnequalOffsets",
                 MessageOf(PutFrameHeader{.unit_xxh3 = {1, 2}, .unit_offset = {3}}, "")
                     .SerializeAsString(),
                 "frame: 2 checksums and 1 offsets, want as many of each or no offsets"},
        BadBytes{
            "NoCodecs",
            MessageOf(PutFrameHeader{.unit_xxh3 = {1}, .unit_bytes = {3}}, "").SerializeAsString(),
            "frame: 1 checksums, 1 lengths and 0 codecs, want as many of each (rows: checksums "
            "only)"}),
    [](const auto& info) { return info.param.name; });

TEST(Frames, ABufferWithoutBytesIsRefused) {
  PutFrameHeader header;
  FramePayload payload;
  EXPECT_EQ(ParseFrame(grpc::ByteBuffer(), header, payload),
            absl::InvalidArgumentError("frame: no bytes"));
}

TEST(Frames, TheLargestFrameIsBuiltAndRead) {
  std::string memory(kMaxFrameBytes - 32, 'x');
  std::vector<grpc::Slice> slices;
  slices.emplace_back(memory.data(), memory.size(), grpc::Slice::STATIC_SLICE);
  PutFrameHeader header;
  FramePayload payload;
  const grpc::ByteBuffer frame = BuildFrame(PutFrameHeader{.ticket = 1, .unit_xxh3 = {2}}, slices);
  ASSERT_TRUE(ParseFrame(frame, header, payload).ok());
  EXPECT_EQ(payload.size(), static_cast<int64_t>(memory.size()));
}

TEST(FramesDeathTest, BuildFrameStopsOnAFrameOverTheLimit) {
  std::string memory(kMaxFrameBytes, 'x');
  std::vector<grpc::Slice> slices;
  slices.emplace_back(memory.data(), memory.size(), grpc::Slice::STATIC_SLICE);
  EXPECT_DEATH(BuildFrame(PutFrameHeader{.ticket = 1}, slices), "check failed");
}

}  // namespace
}  // namespace kvstow
