// Any bytes may come back from a disk: RecordView::Parse and VerifyUnits must survive them, and
// must never call good what is not. Seeded mutations of good records, and plain noise; run it under
// the address sanitizer. The exact same bytes on every run.
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "storage/nvme_meta.h"
#include "storage/record.h"
#include "tests/storage/records.h"

namespace kvstow {
namespace {

using testing::KeyOf;
using testing::MetaOf;
using testing::RecordOf;
using testing::Rng;

constexpr int kIterations = 60000;

// Reads everything that a caller would.
absl::Status Walk(absl::Span<const std::byte> bytes) {
  const absl::StatusOr<RecordView> view = RecordView::Parse(bytes);
  if (!view.ok()) {
    EXPECT_TRUE(absl::IsDataLoss(view.status()) || absl::IsFailedPrecondition(view.status()));
    return view.status();
  }
  uint64_t sum = 0;
  for (uint32_t i = 0; i < view->num_units(); ++i) {
    for (const std::byte b : view->unit(i)) sum += static_cast<uint64_t>(b);
  }
  // Uses the sum, so that the reads stay.
  EXPECT_LE(sum, 255 * bytes.size());
  return view->VerifyUnits();
}

// Makes the checksum of a mutated header good, so that the checks behind it are reached.
void FixCrc(std::vector<std::byte>& record) {
  uint32_t prefix_bytes;
  std::memcpy(&prefix_bytes, record.data() + 12, 4);
  if (prefix_bytes < 256 || prefix_bytes > record.size()) return;
  std::memset(record.data() + 16, 0, 4);
  const uint32_t crc = Crc32c(absl::MakeConstSpan(record).first(prefix_bytes));
  std::memcpy(record.data() + 16, &crc, 4);
}

void Mutate(Rng& rng, std::vector<std::byte>& record) {
  const uint64_t num_mutations = 1 + rng.Below(4);
  for (uint64_t i = 0; i < num_mutations && !record.empty(); ++i) {
    // Header and table are where the parser's decisions are.
    const size_t range = rng.Below(4) != 0 ? std::min<size_t>(record.size(), 384) : record.size();
    const size_t at = rng.Below(range);
    switch (rng.Below(5)) {
      case 0:
        record[at] ^= static_cast<std::byte>(1 << rng.Below(8));
        break;
      case 1:
        record[at] = static_cast<std::byte>(rng.Next());
        break;
      case 2: {
        const uint64_t values[] = {0,
                                   1,
                                   UINT64_MAX,
                                   uint64_t{1} << 31,
                                   uint64_t{1} << 32,
                                   uint64_t{1} << 63,
                                   record.size(),
                                   rng.Next()};
        const uint64_t value = values[rng.Below(8)];
        const size_t size = size_t{1} << rng.Below(4);
        if (at + size <= record.size()) std::memcpy(record.data() + at, &value, size);
        break;
      }
      case 3:
        record.resize(rng.Below(record.size() + 1));
        break;
      default:
        record.resize(record.size() + rng.Below(200));
    }
  }
}

TEST(RecordFuzz, MutatedRecordsAreNeverGoodUnlessTheyAreEqual) {
  constexpr uint64_t kSeed = 20261204;
  Rng rng(kSeed);
  const std::vector<std::vector<uint32_t>> shapes = {
      {64}, {100, 64, 0, 1}, {5, 5, 5, 5, 5, 5, 5}, {4096, 17}};
  int num_good_crc = 0;
  for (int i = 0; i < kIterations; ++i) {
    const std::vector<std::byte> good = RecordOf(MetaOf(KeyOf(7)), shapes[rng.Below(4)]);
    std::vector<std::byte> bad = good;
    Mutate(rng, bad);
    if (bad.size() >= 256 && rng.Below(2) == 0) {
      FixCrc(bad);
      ++num_good_crc;
      Walk(bad).IgnoreError();  // may be consistent by chance; must only be safe
    } else {
      const absl::Status status = Walk(bad);
      ASSERT_TRUE(!status.ok() || bad == good) << "seed " << kSeed << " iteration " << i;
    }
  }
  EXPECT_GT(num_good_crc, kIterations / 4);
}

TEST(RecordFuzz, NoiseIsNeverARecord) {
  Rng rng(1);
  for (int i = 0; i < 5000; ++i) {
    std::vector<std::byte> noise(rng.Below(2000));
    for (std::byte& b : noise) b = static_cast<std::byte>(rng.Next());
    if (noise.size() > 8 && rng.Below(2) == 0) std::memcpy(noise.data(), "KVSTOWR\n", 8);
    ASSERT_FALSE(Walk(noise).ok()) << i;
  }
}

TEST(RecordFuzz, NoiseIsNeverAMetaEntry) {
  Rng rng(2);
  for (int i = 0; i < 20000; ++i) {
    std::string noise(rng.Below(8) == 0 ? rng.Below(200) : kNvmeMetaBytes, '\0');
    for (char& c : noise) c = static_cast<char>(rng.Next());
    ASSERT_FALSE(DecodeNvmeMeta(KeyOf(1), noise).has_value()) << i;
  }
}

}  // namespace
}  // namespace kvstow
