// Checksums against published vectors.
#include "kernels/core/checksum.h"

#include <string_view>
#include <vector>

#include "gtest/gtest.h"

namespace kvstow {
namespace {

absl::Span<const std::byte> AsBytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// RFC 3720, appendix B.4; the last one is the check value of the polynomial.
TEST(Crc32c, GivesTheVectorsOfRfc3720) {
  std::vector<std::byte> bytes(32, std::byte{0});
  EXPECT_EQ(Crc32c(bytes), 0x8a9136aau);
  bytes.assign(32, std::byte{0xff});
  EXPECT_EQ(Crc32c(bytes), 0x62a8ab43u);
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(Crc32c(bytes), 0x46dd794eu);
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(31 - i);
  EXPECT_EQ(Crc32c(bytes), 0x113fdb5cu);
  EXPECT_EQ(Crc32c(AsBytes("123456789")), 0xe3069283u);
  EXPECT_EQ(Crc32c({}), 0u);
}

// The self-check of the xxHash project: its buffer and its results for seed 0.
TEST(Xxh3, GivesThePublishedVectors) {
  std::vector<std::byte> bytes(2367);
  uint64_t generator = 2654435761u;
  for (std::byte& b : bytes) {
    b = static_cast<std::byte>(generator >> 56);
    generator *= 11400714785074694797u;
  }
  const std::pair<size_t, uint64_t> vectors[] = {
      {0, 0x2d06800538d394c2u},   {1, 0xc44bdff4074eecdbu},    {6, 0x27b56a84cd2d7325u},
      {12, 0xa713daf0dfbb77e7u},  {24, 0xa3fe70bf9d3510ebu},   {48, 0x397da259ecba1f11u},
      {80, 0xbcdefbbb2c47c90au},  {195, 0xcd94217ee362ec3au},  {403, 0xcdeb804d65c6dea4u},
      {512, 0x617e49599013cb6bu}, {2048, 0xdd59e2c3a5f038e0u}, {2240, 0x6e73a90539cf2948u},
      {2367, 0xcb37aeb9e5d361edu}};
  for (const auto& [size, want] : vectors) {
    const absl::Span<const std::byte> all = absl::MakeConstSpan(bytes).first(size);
    EXPECT_EQ(Xxh3(all), want) << size << " bytes";
    Xxh3Stream stream;
    stream.Add(all.first(size / 3));
    stream.Add(all.subspan(size / 3));
    EXPECT_EQ(stream.Value(), want) << size << " bytes in two pieces";
  }
}

TEST(Checksums, SeeEverySingleFlippedBit) {
  std::vector<std::byte> bytes(200, std::byte{0x5a});
  const uint64_t xxh3 = Xxh3(bytes);
  const uint32_t crc = Crc32c(bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    const auto flip = static_cast<std::byte>(1 << (bit % 8));
    bytes[bit / 8] ^= flip;
    EXPECT_NE(Xxh3(bytes), xxh3) << bit;
    EXPECT_NE(Crc32c(bytes), crc) << bit;
    bytes[bit / 8] ^= flip;
  }
}

}  // namespace
}  // namespace kvstow
