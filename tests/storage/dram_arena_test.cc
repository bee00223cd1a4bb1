#include "storage/dram_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::Rng;

std::shared_ptr<DramArena> Arena(int64_t bytes) {
  absl::StatusOr<std::shared_ptr<DramArena>> arena = DramArena::Create(bytes);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *arena;
}

TEST(DramArena, IsPopulatedAtStart) {
  const std::shared_ptr<DramArena> arena = Arena(8 << 20);
  const std::optional<ArenaRegion> region = arena->Allocate(8 << 20);
  ASSERT_TRUE(region.has_value());
  const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident(region->bytes().size() / page_bytes);
  ASSERT_EQ(mincore(region->bytes().data(), region->bytes().size(), resident.data()), 0);
  for (size_t i = 0; i < resident.size(); ++i) ASSERT_TRUE(resident[i] & 1) << "page " << i;
}

TEST(DramArena, RefusesLessThanAGranule) {
  EXPECT_TRUE(absl::IsInvalidArgument(DramArena::Create(63).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DramArena::Create(-1).status()));
}

TEST(DramArena, RefusesMoreMemoryThanThereIsAddressSpace) {
  EXPECT_TRUE(absl::IsResourceExhausted(DramArena::Create(int64_t{1} << 60).status()));
}

TEST(DramArena, RoundsToGranulesAndWastesNothingOnARecord) {
  const std::shared_ptr<DramArena> arena = Arena((1 << 20) + 63);
  EXPECT_EQ(arena->capacity_bytes(), 1 << 20);
  const std::optional<ArenaRegion> small = arena->Allocate(1);
  EXPECT_EQ(arena->used_bytes(), 64);
  const std::optional<ArenaRegion> record = arena->Allocate(400 << 10);
  EXPECT_EQ(arena->used_bytes(), 64 + (400 << 10));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(record->bytes().data()) % 64, 0u);
}

TEST(DramArena, TakesTheSmallestHoleThatFits) {
  const std::shared_ptr<DramArena> arena = Arena(64 * 100);
  std::optional<ArenaRegion> a = arena->Allocate(64 * 10);
  std::optional<ArenaRegion> keep_a = arena->Allocate(64);
  std::optional<ArenaRegion> b = arena->Allocate(64 * 4);
  std::optional<ArenaRegion> keep_b = arena->Allocate(64);
  const std::byte* const place_of_b = b->bytes().data();
  a.reset();
  b.reset();
  EXPECT_EQ(arena->num_holes(), 3);
  EXPECT_EQ(arena->Allocate(64 * 3)->bytes().data(), place_of_b);
}

TEST(DramArena, MergesHolesOnBothSides) {
  const std::shared_ptr<DramArena> arena = Arena(64 * 8);
  std::vector<std::optional<ArenaRegion>> regions;
  for (int i = 0; i < 8; ++i) regions.push_back(arena->Allocate(64));
  EXPECT_EQ(arena->num_holes(), 0);
  EXPECT_FALSE(arena->Allocate(64).has_value());
  regions[2].reset();
  regions[4].reset();
  EXPECT_EQ(arena->num_holes(), 2);
  EXPECT_FALSE(arena->Allocate(65).has_value());  // 128 are free, but apart
  regions[3].reset();
  EXPECT_EQ(arena->num_holes(), 1);
  EXPECT_EQ(arena->largest_hole_bytes(), 64 * 3);
  EXPECT_TRUE(arena->Allocate(64 * 3).has_value());
}

TEST(DramArena, RegionsOutliveTheirOwner) {
  std::shared_ptr<DramArena> arena = Arena(1 << 20);
  std::optional<ArenaRegion> region = arena->Allocate(1000);
  arena.reset();
  std::memset(region->bytes().data(), 7, 1000);
  EXPECT_EQ(region->bytes()[999], std::byte{7});
}

TEST(DramArena, AMovedRegionIsFreedOnce) {
  const std::shared_ptr<DramArena> arena = Arena(1 << 20);
  {
    std::optional<ArenaRegion> first = arena->Allocate(640);
    ArenaRegion second = *std::move(first);
    std::optional<ArenaRegion> third = arena->Allocate(1280);
    second = *std::move(third);  // frees what it had
    EXPECT_EQ(arena->used_bytes(), 1280);
  }
  EXPECT_EQ(arena->used_bytes(), 0);
  EXPECT_EQ(arena->largest_hole_bytes(), 1 << 20);
}

// Random use against a model: regions never overlap, bytes stay, sums agree, all comes back.
TEST(DramArena, RandomUseKeepsItsInvariants) {
  constexpr uint64_t kSeed = 20261201;
  constexpr int64_t kCapacity = 4 << 20;
  Rng rng(kSeed);
  const std::shared_ptr<DramArena> arena = Arena(kCapacity);
  struct Held {
    ArenaRegion region;
    uint8_t tag;
  };
  std::map<const std::byte*, Held> held;
  int64_t used = 0;
  int64_t num_refused = 0;
  for (int step = 0; step < 20000; ++step) {
    if (held.empty() || rng.Below(100) < 55) {
      const int64_t bytes = 1 + static_cast<int64_t>(rng.Below(rng.Below(8) == 0 ? 400000 : 20000));
      const int64_t rounded = (bytes + 63) / 64 * 64;
      const bool should_fit = arena->largest_hole_bytes() >= rounded;
      std::optional<ArenaRegion> region = arena->Allocate(bytes);
      ASSERT_EQ(region.has_value(), should_fit) << "seed " << kSeed << " step " << step;
      if (!region.has_value()) {
        ++num_refused;
        continue;
      }
      const std::byte* begin = region->bytes().data();
      const auto next = held.lower_bound(begin);
      ASSERT_TRUE(next == held.end() || begin + rounded <= next->first) << "step " << step;
      if (next != held.begin()) {
        const auto& before = std::prev(next)->second.region.bytes();
        ASSERT_LE(before.data() + before.size(), begin) << "step " << step;
      }
      const uint8_t tag = static_cast<uint8_t>(rng.Next());
      std::memset(region->bytes().data(), tag, region->bytes().size());
      used += rounded;
      held.emplace(begin, Held{*std::move(region), tag});
    } else {
      auto victim = held.begin();
      std::advance(victim, static_cast<int64_t>(rng.Below(held.size())));
      for (const std::byte b : victim->second.region.bytes()) {
        ASSERT_EQ(b, static_cast<std::byte>(victim->second.tag)) << "step " << step;
      }
      used -= (victim->second.region.size() + 63) / 64 * 64;
      held.erase(victim);
    }
    ASSERT_EQ(arena->used_bytes(), used) << "step " << step;
  }
  EXPECT_GT(num_refused, 0);  // the arena was full now and then
  held.clear();
  EXPECT_EQ(arena->used_bytes(), 0);
  EXPECT_EQ(arena->num_holes(), 1);
  EXPECT_EQ(arena->largest_hole_bytes(), kCapacity);
}

// Blocks of two sizes, oldest freed first as eviction does: what is lost to fragments stays small.
TEST(DramArena, MixedSizesInOrderOfAgeFragmentLittle) {
  constexpr uint64_t kSeed = 7;
  constexpr int64_t kCapacity = 64 << 20;
  Rng rng(kSeed);
  const std::shared_ptr<DramArena> arena = Arena(kCapacity);
  std::vector<std::optional<ArenaRegion>> ring;
  size_t oldest = 0;
  int64_t least_used = kCapacity;
  for (int step = 0; step < 5000; ++step) {
    const int64_t bytes = rng.Below(2) == 0 ? 190 << 10 : 737 << 10;
    std::optional<ArenaRegion> region = arena->Allocate(bytes);
    while (!region.has_value()) {
      ring[oldest++].reset();
      region = arena->Allocate(bytes);
    }
    ring.push_back(std::move(region));
    if (step > 1000) least_used = std::min(least_used, arena->used_bytes());
  }
  EXPECT_GT(least_used, kCapacity * 9 / 10);
}

}  // namespace
}  // namespace kvstow
