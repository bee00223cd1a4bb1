// BlockLayout: where each plane of a block lies, for uniform, hybrid and latent models.
#include "kernels/core/block_layout.h"

#include "gtest/gtest.h"

namespace kvstow {
namespace {

ModelSpec Spec(std::vector<LayerGroup> groups) {
  ModelSpec spec;
  spec.name = "m";
  spec.weights = "w";
  spec.groups = std::move(groups);
  return spec;
}

TEST(BlockLayout, PlanesAreLayerMajorKeysFirst) {
  const auto layout = BlockLayout::Create(Spec({{0, 2, LayerKind::kFull, 3, 64, 32}}));
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->num_layers(), 2);
  EXPECT_EQ(layout->num_planes(), 2 * (3 + 3));
  EXPECT_EQ(layout->tokens_per_block(), 64);
  EXPECT_EQ(layout->dtype(), DType::kBf16);
  const int64_t k_bytes = 64 * 64 * 2, v_bytes = 64 * 32 * 2;
  EXPECT_EQ(layout->block_bytes(), 2 * 3 * (k_bytes + v_bytes));
  const PlaneInfo& first_v = layout->plane(3);
  EXPECT_EQ(first_v.layer_idx, 0);
  EXPECT_EQ(first_v.role, Role::kValue);
  EXPECT_EQ(first_v.head_idx, 0);
  EXPECT_EQ(first_v.dim, 32);
  EXPECT_EQ(first_v.row_bytes, v_bytes);
  EXPECT_EQ(first_v.row_offset, 3 * k_bytes);
  const PlaneInfo& last = layout->plane(11);
  EXPECT_EQ(last.layer_idx, 1);
  EXPECT_EQ(last.head_idx, 2);
  EXPECT_EQ(last.row_offset + last.row_bytes, layout->block_bytes());
}

// Planes of any layout follow each other without holes, and plane_idx finds each of them.
void CheckContiguous(const BlockLayout& layout) {
  int64_t offset = 0;
  for (int32_t i = 0; i < layout.num_planes(); ++i) {
    const PlaneInfo& plane = layout.plane(i);
    EXPECT_EQ(plane.row_offset, offset) << i;
    EXPECT_EQ(plane.row_bytes,
              DTypeBytes(layout.dtype(), int64_t{plane.dim} * layout.tokens_per_block()))
        << i;
    EXPECT_EQ(layout.plane_idx(plane.layer_idx, plane.role, plane.head_idx), i);
    offset += plane.row_bytes;
  }
  EXPECT_EQ(layout.block_bytes(), offset);
}

TEST(BlockLayout, HybridModelsHaveLayersOfUnlikeShapes) {
  ModelSpec spec = Spec({{0, 1, LayerKind::kFull, 2, 128, 96},
                         {1, 3, LayerKind::kSliding, 5, 64, 64},
                         {4, 1, LayerKind::kFull, 2, 128, 96}});
  spec.tokens_per_block = 32;
  spec.kv_dtype = DType::kF32;
  const auto layout = BlockLayout::Create(spec);
  ASSERT_TRUE(layout.ok());
  CheckContiguous(*layout);
  EXPECT_EQ(layout->num_layers(), 5);
  EXPECT_EQ(layout->num_planes(), 4 + 3 * 10 + 4);
  EXPECT_EQ(layout->first_plane_of_layer(0), 0);
  EXPECT_EQ(layout->num_planes_of_layer(0), 4);
  EXPECT_EQ(layout->first_plane_of_layer(2), 14);
  EXPECT_EQ(layout->num_planes_of_layer(2), 10);
  EXPECT_EQ(layout->first_plane_of_layer(4), 34);
  EXPECT_EQ(layout->num_planes_of_layer(4), 4);
}

TEST(BlockLayout, LatentAndOpaqueLayersHaveKeysOnly) {
  const auto layout = BlockLayout::Create(
      Spec({{0, 2, LayerKind::kMla, 1, 576, 0}, {2, 1, LayerKind::kOpaque, 3, 100, 0}}));
  ASSERT_TRUE(layout.ok());
  CheckContiguous(*layout);
  EXPECT_EQ(layout->num_planes(), 2 + 3);
  EXPECT_EQ(layout->plane(0).dim, 576);
  EXPECT_EQ(layout->plane_idx(0, Role::kValue, 0), -1);
  EXPECT_EQ(layout->plane_idx(2, Role::kKey, 2), 4);
}

TEST(BlockLayout, PlanesThatDoNotExistAreNotFound) {
  const auto layout = BlockLayout::Create(Spec({{0, 2, LayerKind::kFull, 3, 64, 64}}));
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->plane_idx(-1, Role::kKey, 0), -1);
  EXPECT_EQ(layout->plane_idx(2, Role::kKey, 0), -1);
  EXPECT_EQ(layout->plane_idx(0, Role::kKey, 3), -1);
  EXPECT_EQ(layout->plane_idx(0, Role::kKey, -1), -1);
}

TEST(BlockLayout, InvalidSpecsHaveNone) {
  const auto layout = BlockLayout::Create(Spec({{1, 2, LayerKind::kFull, 3, 64, 64}}));
  EXPECT_EQ(layout.status().message(),
            "model spec: groups[0].first_layer is 1, want 0: layers are missing");
}

}  // namespace
}  // namespace kvstow
