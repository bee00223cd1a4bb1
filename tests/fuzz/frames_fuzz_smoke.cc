// Frames against any bytes: no crash, no read outside, and whatever our parser takes the generated
// one takes too and reads alike.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvstow/v1/data.pb.h"
#include "proto/frames.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::Rng;

std::string PayloadBytes(const FramePayload& payload) {
  std::string bytes(payload.size(), '\0');
  payload.CopyTo(0, {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()});
  return bytes;
}

bool IsSame(const PutFrameHeader& header, const v1::PutFrame& frame) {
  return header.ticket == frame.ticket() && header.first_unit == frame.first_unit() &&
         header.channel == frame.channel() && header.window_offset == frame.window_offset() &&
         header.window_bytes == frame.window_bytes() &&
         header.unit_xxh3 ==
             std::vector<uint64_t>(frame.unit_xxh3().begin(), frame.unit_xxh3().end()) &&
         header.unit_bytes ==
             std::vector<uint32_t>(frame.unit_bytes().begin(), frame.unit_bytes().end()) &&
         header.unit_codec ==
             std::vector<uint32_t>(frame.unit_codec().begin(), frame.unit_codec().end()) &&
         header.unit_offset ==
             std::vector<uint64_t>(frame.unit_offset().begin(), frame.unit_offset().end());
}

bool IsSame(const GetFrameHeader& header, const v1::GetFrame& frame) {
  return header.block_idx == frame.block_idx() && header.code == frame.code() &&
         header.first_unit == frame.first_unit() && header.key == frame.key() &&
         header.fingerprint == frame.fingerprint() && header.num_units == frame.num_units() &&
         header.num_tokens == frame.num_tokens() && header.window_offset == frame.window_offset() &&
         header.window_bytes == frame.window_bytes() && header.is_placed == frame.is_placed() &&
         header.unit_xxh3 ==
             std::vector<uint64_t>(frame.unit_xxh3().begin(), frame.unit_xxh3().end()) &&
         header.unit_bytes ==
             std::vector<uint32_t>(frame.unit_bytes().begin(), frame.unit_bytes().end()) &&
         header.unit_codec ==
             std::vector<uint32_t>(frame.unit_codec().begin(), frame.unit_codec().end());
}

// Slices of exactly their bytes on the heap, so that the address sanitizer sees a read beyond.
grpc::ByteBuffer SlicedBuffer(const std::string& bytes, Rng& rng) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size();) {
    const size_t here = std::min<size_t>(1 + rng.Below(64), bytes.size() - at);
    auto* copy = new std::string(bytes, at, here);
    slices.emplace_back(
        copy->data(), here, [](void* owner) { delete static_cast<std::string*>(owner); }, copy);
    at += here;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// Returns whether the bytes were taken.
template <typename Header, typename Message>
bool TryOne(const std::string& bytes, Rng& rng) {
  Header header;
  FramePayload payload;
  if (!ParseFrame(SlicedBuffer(bytes, rng), header, payload).ok()) return false;
  Message message;
  EXPECT_TRUE(message.ParseFromString(bytes)) << "only our parser takes this";
  EXPECT_TRUE(IsSame(header, message));
  EXPECT_EQ(PayloadBytes(payload), message.payload());
  return true;
}

std::string Mutated(std::string bytes, Rng& rng) {
  for (uint64_t i = 1 + rng.Below(6); i > 0 && !bytes.empty(); --i) {
    const size_t at = rng.Below(bytes.size());
    switch (rng.Below(5)) {
      case 0:
        bytes[at] = static_cast<char>(rng.Next());
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng.Below(8)));
        break;
      case 2:
        bytes.erase(at, 1 + rng.Below(9));
        break;
      case 3:
        bytes.insert(at, 1 + rng.Below(9), static_cast<char>(rng.Next()));
        break;
      default:
        bytes.insert(at, bytes.substr(rng.Below(bytes.size()), rng.Below(40)));
    }
  }
  return bytes;
}

v1::PutFrame PutSeed() {
  v1::PutFrame frame;
  frame.set_ticket(0x0123456789abcdef);
  frame.set_first_unit(300);
  frame.set_channel(0xfedcba9876543210);
  frame.set_window_offset(1u << 20);
  frame.set_window_bytes(70000);
  for (int i = 0; i < 5; ++i) {
    frame.add_unit_xxh3(0x1111111111111111u * i);
    frame.add_unit_bytes(1000u * i);
    frame.add_unit_codec(i);
  }
  frame.set_payload("the payload of a frame, some bytes long");
  return frame;
}

v1::GetFrame GetSeed() {
  v1::GetFrame frame;
  frame.set_block_idx(3);
  frame.set_code(-5);
  frame.set_first_unit(70000);
  for (int i = 0; i < 5; ++i) {
    frame.add_unit_xxh3(0x1111111111111111u * i);
    frame.add_unit_bytes(1000u * i);
    frame.add_unit_codec(i);
  }
  frame.set_key(std::string(32, 'k'));
  frame.set_fingerprint(std::string(32, 'f'));
  frame.set_num_units(180);
  frame.set_num_tokens(64);
  frame.set_window_offset(1u << 20);
  frame.set_window_bytes(70000);
  frame.set_payload("the payload of a frame, some bytes long");
  return frame;
}

TEST(FramesFuzz, FramesCutAtEveryByteAreSafe) {
  Rng rng(1);
  const std::string put = PutSeed().SerializeAsString();
  const std::string get = GetSeed().SerializeAsString();
  for (size_t cut = 0; cut <= put.size(); ++cut) {
    TryOne<PutFrameHeader, v1::PutFrame>(put.substr(0, cut), rng);
  }
  for (size_t cut = 0; cut <= get.size(); ++cut) {
    TryOne<GetFrameHeader, v1::GetFrame>(get.substr(0, cut), rng);
  }
  EXPECT_TRUE((TryOne<PutFrameHeader, v1::PutFrame>(put, rng)));
  EXPECT_TRUE((TryOne<GetFrameHeader, v1::GetFrame>(get, rng)));
}

TEST(FramesFuzz, MutatedFramesAreSafeAndReadAsTheGeneratedClassesRead) {
  Rng rng(2);
  const std::string put = PutSeed().SerializeAsString();
  const std::string get = GetSeed().SerializeAsString();
  int num_taken = 0;
  for (int round = 0; round < 100000 && !HasFailure(); ++round) {
    num_taken += TryOne<PutFrameHeader, v1::PutFrame>(Mutated(put, rng), rng);
    num_taken += TryOne<GetFrameHeader, v1::GetFrame>(Mutated(get, rng), rng);
  }
  // Both sides of the border must have been tried.
  EXPECT_GT(num_taken, 10000);
  EXPECT_LT(num_taken, 190000);
}

}  // namespace
}  // namespace kvstow
