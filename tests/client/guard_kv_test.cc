// The guard on a real model's KV: no alarm, and how far from one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "client/cli/kv_file.h"
#include "kernels/codec/guard.h"
#include "kernels/layout/planes.h"

namespace kvstow {
namespace {

const char kFixture[] = KVSTOW_TEST_DATA "/smollm2_kv.safetensors";

std::vector<PlaneStats> StatsOfBlock(const KvFile& file, const BlockLayout& layout, int64_t block) {
  std::vector<PlaneStats> stats;
  for (int32_t i = 0; i < layout.num_planes(); ++i) {
    const PlaneInfo& plane = layout.plane(i);
    const LayerRows& layer = file.layers()[plane.layer_idx];
    std::vector<std::byte> rows(plane.row_bytes);
    GatherPlane(layout, i, plane.role == Role::kKey ? layer.k : layer.v,
                block * layout.tokens_per_block(), rows.data());
    stats.push_back(MeasurePlane({.num_tokens = layout.tokens_per_block(),
                                  .dim = plane.dim,
                                  .role = plane.role,
                                  .dtype = layout.dtype()},
                                 rows.data()));
  }
  return stats;
}

TEST(GuardOnKv, OrdinaryModelKeepsNothingRawByAWideMargin) {
  const absl::StatusOr<KvFile> file = KvFile::Open(kFixture, {});
  ASSERT_TRUE(file.ok()) << file.status();
  const BlockLayout layout = *BlockLayout::Create(file->spec());
  for (int64_t block = 0; block < file->num_full_blocks(); ++block) {
    const std::vector<PlaneStats> stats = StatsOfBlock(*file, layout, block);
    EXPECT_EQ(DerivePlan(layout, stats).plan.Text(), "") << "block " << block;
    // Three quarters of every limit.
    const GuardLimits limits = {
        .error_ratio = 3, .top_share = 0.675, .norm_ratio = 22.5, .kurtosis = 2.25};
    const GuardVerdict close = DerivePlan(layout, stats, limits);
    EXPECT_EQ(close.plan.Text(), "") << "block " << block;
    for (const std::string& reason : close.reasons) std::printf("%s\n", reason.c_str());
  }
}

// What kernels/codec/README.md says of this model: the largest figure of each rule.
TEST(GuardOnKv, LargestFiguresOfTheBundledModel) {
  const absl::StatusOr<KvFile> file = KvFile::Open(kFixture, {});
  ASSERT_TRUE(file.ok()) << file.status();
  const BlockLayout layout = *BlockLayout::Create(file->spec());
  // The limit at which the first layer stands out, by halving.
  const auto largest = [&](double GuardLimits::*limit, double low, double high) {
    double most = low;
    for (int64_t block = 0; block < file->num_full_blocks(); ++block) {
      const std::vector<PlaneStats> stats = StatsOfBlock(*file, layout, block);
      double below = low, above = high;
      for (int i = 0; i < 30; ++i) {
        GuardLimits limits = {
            .error_ratio = 1e9, .top_share = 1e9, .norm_ratio = 1e9, .kurtosis = 1e9};
        limits.*limit = (below + above) / 2;
        (DerivePlan(layout, stats, limits).plan.empty() ? above : below) = limits.*limit;
      }
      most = std::max(most, above);
    }
    return most;
  };
  const double error_ratio = largest(&GuardLimits::error_ratio, 0, 100);
  const double top_share = largest(&GuardLimits::top_share, 0, 1);
  const double norm_ratio = largest(&GuardLimits::norm_ratio, 0, 1000);
  const double kurtosis = largest(&GuardLimits::kurtosis, -3, 100);
  std::printf("error ratio %.2f, top share %.3f, norm ratio %.2f, kurtosis %.2f\n", error_ratio,
              top_share, norm_ratio, kurtosis);
  EXPECT_GT(error_ratio, 1) << "no layer is above the median: the test measures nothing";
}

}  // namespace
}  // namespace kvstow
