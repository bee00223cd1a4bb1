// Tensor parallelism: who has which heads, and blocks from ranks of one number to another.
#include "kernels/layout/ranks.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/block_layout.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

ModelSpec Spec(std::vector<LayerGroup> groups) {
  ModelSpec spec;
  spec.name = "m";
  spec.weights = "w";
  spec.groups = std::move(groups);
  spec.tokens_per_block = 32;
  return spec;
}

// Layers of unlike shapes: full, sliding with fewer heads, and one latent head for all.
ModelSpec HybridSpec() {
  return Spec({{0, 2, LayerKind::kFull, 8, 16, 24},
               {2, 1, LayerKind::kSliding, 2, 32, 32},
               {3, 2, LayerKind::kMla, 1, 48, 0}});
}

using Part = std::vector<std::byte>;

Part RandomBlock(const ModelSpec& spec, uint64_t seed) {
  testing::Rng rng(seed);
  Part block(BlockLayout::Create(spec)->block_bytes());
  for (std::byte& b : block) b = static_cast<std::byte>(rng.Next());
  return block;
}

std::vector<Part> Reshard(const ModelSpec& spec, const std::vector<Part>& from, int num_ranks) {
  std::vector<absl::Span<const std::byte>> views(from.begin(), from.end());
  const int64_t bytes = BlockLayout::Create(*SpecOfRanks(spec, num_ranks))->block_bytes();
  std::vector<Part> to(num_ranks, Part(bytes, std::byte{0xee}));
  for (int rank = 0; rank < num_ranks; ++rank) {
    const absl::Status status =
        ReshardBlock(spec, views, {.rank = rank, .num_ranks = num_ranks}, absl::MakeSpan(to[rank]));
    EXPECT_TRUE(status.ok()) << status;
  }
  return to;
}

TEST(Ranks, HeadsAreDealtOutEvenlyAndInOrder) {
  EXPECT_EQ(*HeadsOfRank(8, {.rank = 0, .num_ranks = 1}), (HeadRange{0, 8}));
  EXPECT_EQ(*HeadsOfRank(8, {.rank = 3, .num_ranks = 4}), (HeadRange{6, 2}));
  EXPECT_EQ(*HeadsOfRank(8, {.rank = 7, .num_ranks = 8}), (HeadRange{7, 1}));
  // Fewer heads than ranks: neighbours share.
  EXPECT_EQ(*HeadsOfRank(2, {.rank = 3, .num_ranks = 8}), (HeadRange{0, 1}));
  EXPECT_EQ(*HeadsOfRank(2, {.rank = 4, .num_ranks = 8}), (HeadRange{1, 1}));
  EXPECT_EQ(*HeadsOfRank(1, {.rank = 5, .num_ranks = 6}), (HeadRange{0, 1}));
}

TEST(Ranks, UnevenSharesAndRanksThatDoNotExistAreRefused) {
  const auto refused = [](int heads, TpRank rank) {
    const absl::Status status = HeadsOfRank(heads, rank).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const std::string uneven =
      "ranks: 4 ranks cannot share 3 KV heads evenly, want numbers of which"
      " one divides the other";
  EXPECT_EQ(refused(3, {.rank = 0, .num_ranks = 4}), uneven);
  EXPECT_EQ(refused(6, {.rank = 1, .num_ranks = 4}).substr(0, 39),
            "ranks: 4 ranks cannot share 6 KV heads ");
  EXPECT_EQ(refused(8, {.rank = 4, .num_ranks = 4}),
            "ranks: rank is 4 of 4, want one from 0 to num_ranks - 1");
  EXPECT_EQ(refused(8, {.rank = -1, .num_ranks = 4}),
            "ranks: rank is -1 of 4, want one from 0 to num_ranks - 1");
  EXPECT_EQ(refused(8, {.rank = 0, .num_ranks = 0}),
            "ranks: rank is 0 of 0, want one from 0 to num_ranks - 1");
  EXPECT_EQ(SpecOfRanks(Spec({{0, 1, LayerKind::kFull, 3, 16, 16}}), 4).status().message(), uneven);
  EXPECT_FALSE(SpecOfRanks(Spec({}), 2).ok()) << "a model that is none";
  Part part(4);
  EXPECT_EQ(ReshardBlock(Spec({{0, 1, LayerKind::kFull, 3, 16, 16}}), {part}, {.num_ranks = 4},
                         absl::MakeSpan(part))
                .message(),
            uneven);
}

// Each rank's bytes are those of its heads in the whole block, looked up plane by plane.
TEST(Ranks, APartHoldsTheHeadsOfItsRank) {
  const ModelSpec spec = HybridSpec();
  const BlockLayout layout = *BlockLayout::Create(spec);
  const Part whole = RandomBlock(spec, 1);
  for (const int num_ranks : {1, 2, 4, 8}) {
    const std::vector<Part> parts = Reshard(spec, {whole}, num_ranks);
    const BlockLayout of_rank = *BlockLayout::Create(*SpecOfRanks(spec, num_ranks));
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (const PlaneInfo& plane : of_rank.planes()) {
        int num_heads = 0;
        while (layout.plane_idx(plane.layer_idx, Role::kKey, num_heads) >= 0) ++num_heads;
        const int head = HeadsOfRank(num_heads, {rank, num_ranks})->first + plane.head_idx;
        const PlaneInfo& in_whole =
            layout.plane(layout.plane_idx(plane.layer_idx, plane.role, head));
        ASSERT_EQ(plane.row_bytes, in_whole.row_bytes);
        EXPECT_EQ(std::memcmp(parts[rank].data() + plane.row_offset,
                              whole.data() + in_whole.row_offset, plane.row_bytes),
                  0)
            << "rank " << rank << " of " << num_ranks << ", layer " << plane.layer_idx;
      }
    }
  }
}

TEST(Ranks, FromAnyNumberToAnyOtherAndBackIsTheSameBlock) {
  for (const ModelSpec& spec : {HybridSpec(), Spec({{0, 3, LayerKind::kFull, 8, 16, 16}})}) {
    const Part whole = RandomBlock(spec, 2);
    for (const int from : {1, 2, 4, 8}) {
      const std::vector<Part> parts = Reshard(spec, {whole}, from);
      for (const int to : {1, 2, 4, 8}) {
        const std::vector<Part> resharded = Reshard(spec, parts, to);
        EXPECT_EQ(resharded, Reshard(spec, {whole}, to)) << from << " to " << to;
        EXPECT_EQ(Reshard(spec, resharded, from), parts) << to << " back to " << from;
      }
    }
  }
}

TEST(Ranks, OnlyTheRanksThatAreReadNeedToBeThere) {
  const ModelSpec spec = Spec({{0, 1, LayerKind::kFull, 4, 16, 16}});
  const std::vector<Part> parts = Reshard(spec, {RandomBlock(spec, 3)}, 4);
  const std::vector<Part> halves = Reshard(spec, parts, 2);
  Part out(halves[1].size());
  const absl::Span<const std::byte> none;
  const TpRank second{.rank = 1, .num_ranks = 2};
  ASSERT_TRUE(
      ReshardBlock(spec, {none, none, parts[2], parts[3]}, second, absl::MakeSpan(out)).ok());
  EXPECT_EQ(out, halves[1]);
  const Part before(out.size(), std::byte{7});
  out = before;
  EXPECT_EQ(ReshardBlock(spec, {none, none, parts[2], none}, second, absl::MakeSpan(out)).message(),
            "ranks: the part of rank 3 has 0 bytes, want 2048");
  EXPECT_EQ(out, before);
  EXPECT_EQ(
      ReshardBlock(spec, {none, none, parts[2], parts[3]}, second, absl::MakeSpan(out).subspan(1))
          .message(),
      "ranks: the part of rank 1 has 4095 bytes, want 4096");
}

}  // namespace
}  // namespace kvstow
