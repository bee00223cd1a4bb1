// Copies past the caches: every size and alignment around their limits, and only those bytes.
#include "kernels/core/stream_copy.h"

#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/checksum.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

constexpr uint64_t kSeed = 20261201;
constexpr std::byte kUntouched{0x5a};
constexpr size_t kMargin = 128;

// A copy of `size` bytes from and to odd places; `copy` returns the checksum it claims.
template <typename CopyFn>
void CheckCopy(size_t size, size_t from_offset, size_t to_offset, const CopyFn& copy) {
  SCOPED_TRACE(::testing::Message() << size << " bytes from +" << from_offset << " to +"
                                    << to_offset << ", seed " << kSeed);
  kvstow::testing::Rng rng(kSeed + size);
  std::vector<std::byte> source(size + 64);
  for (std::byte& b : source) b = static_cast<std::byte>(rng.Next());
  std::vector<std::byte> target(size + 64 + 2 * kMargin, kUntouched);
  const absl::Span<const std::byte> from(source.data() + from_offset, size);
  std::byte* const to = target.data() + kMargin + to_offset;
  const uint64_t xxh3 = copy(from, to);
  EXPECT_EQ(xxh3, Xxh3(from));
  EXPECT_TRUE(std::equal(from.begin(), from.end(), to));
  for (const std::byte* at = target.data(); at < target.data() + target.size(); ++at) {
    if (at >= to && at < to + size) continue;
    ASSERT_EQ(*at, kUntouched) << at - to;
  }
}

template <typename CopyFn>
void CheckSizes(const CopyFn& copy) {
  for (const size_t size :
       {0, 1, 63, 64, 2047, 2048, 2049, 4095, 4096, 4097, 16384, 70001, 262144, 600001}) {
    for (const size_t from_offset : {0, 1, 16}) {
      for (const size_t to_offset : {0, 1, 17, 63}) {
        CheckCopy(size, from_offset, to_offset, copy);
      }
    }
  }
}

TEST(StreamCopy, WritesExactlyTheBytes) {
  CheckSizes([](absl::Span<const std::byte> from, std::byte* to) {
    StreamCopy(from, to);
    return Xxh3({to, from.size()});
  });
}

TEST(CopyHashed, WritesExactlyTheBytesAndReturnsTheirXxh3) {
  CheckSizes([](absl::Span<const std::byte> from, std::byte* to) { return CopyHashed(from, to); });
}

}  // namespace
}  // namespace kvstow
