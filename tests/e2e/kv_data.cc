#include "tests/e2e/kv_data.h"

#include <algorithm>
#include <cstring>

#include "kernels/core/check.h"
#include "kernels/layout/planes.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {
namespace {

constexpr std::byte kUntouched{0xA5};

BlockLayout LayoutOf(const ModelSpec& spec) {
  absl::StatusOr<BlockLayout> layout = BlockLayout::Create(spec);
  KVSTOW_CHECK(layout.ok());
  return *std::move(layout);
}

const LayerGroup& GroupOfLayer(const ModelSpec& spec, int layer_idx) {
  for (const LayerGroup& group : spec.groups) {
    if (layer_idx < group.first_layer + group.num_layers) return group;
  }
  KVSTOW_CHECK(false);
}

RowsView ViewOf(const std::vector<std::byte>& bytes, int64_t row_bytes, int num_heads) {
  return {.data = const_cast<std::byte*>(bytes.data()),
          .token_stride_bytes = row_bytes * num_heads,
          .head_stride_bytes = row_bytes};
}

// Values in [-2, 2) of every sign and exponent near there; cheap to make.
void FillRows(std::vector<std::byte>& bytes, DType dtype, Rng& rng) {
  if (dtype != DType::kBf16) {
    for (std::byte& b : bytes) b = static_cast<std::byte>(rng.Next());
    return;
  }
  for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
    const uint16_t bits = FloatToBf16(static_cast<float>(rng.Uniform() * 4.0 - 2.0));
    std::memcpy(&bytes[i], &bits, sizeof(bits));
  }
}

}  // namespace

ModelSpec SmallModel() {
  ModelSpec spec;
  spec.name = "e2e-small";
  spec.weights = "revision-1";
  spec.kv_dtype = DType::kBf16;
  spec.groups = {{.first_layer = 0,
                  .num_layers = 4,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 2,
                  .k_dim = 64,
                  .v_dim = 64}};
  spec.rope = "base=10000,half";
  spec.tokens_per_block = 64;
  spec.tokenizer = "tokenizer-1";
  return spec;
}

ModelSpec LargerModel() {
  ModelSpec spec = SmallModel();
  spec.name = "e2e-larger";
  spec.groups[0].num_layers = 16;
  return spec;
}

KvData::KvData(const ModelSpec& spec, int num_blocks)
    : spec_(spec), layout_(LayoutOf(spec)), num_blocks_(num_blocks) {
  const int64_t num_tokens = int64_t{num_blocks} * spec.tokens_per_block;
  for (int layer = 0; layer < spec.num_layers(); ++layer) {
    const LayerGroup& group = GroupOfLayer(spec, layer);
    const int64_t rows = num_tokens * group.num_kv_heads;
    k_.emplace_back(rows * DTypeBytes(spec.kv_dtype, group.k_dim), kUntouched);
    v_.emplace_back(rows * DTypeBytes(spec.kv_dtype, group.v_dim), kUntouched);
  }
}

KvData::KvData(const ModelSpec& spec, uint64_t seed, int num_blocks) : KvData(spec, num_blocks) {
  Rng rng(seed * 0x9e3779b97f4a7c15u + 1);
  for (int64_t i = 0; i < int64_t{num_blocks} * spec.tokens_per_block; ++i) {
    tokens_.push_back(static_cast<int32_t>(rng.Below(50000)));
  }
  for (int layer = 0; layer < spec.num_layers(); ++layer) {
    FillRows(k_[layer], spec.kv_dtype, rng);
    FillRows(v_[layer], spec.kv_dtype, rng);
  }
}

KvData KvData::Empty(const ModelSpec& spec, int num_blocks) { return KvData(spec, num_blocks); }

std::vector<LayerRows> KvData::layers() const {
  std::vector<LayerRows> layers;
  for (int layer = 0; layer < spec_.num_layers(); ++layer) {
    const LayerGroup& group = GroupOfLayer(spec_, layer);
    layers.push_back(
        {.k = ViewOf(k_[layer], DTypeBytes(spec_.kv_dtype, group.k_dim), group.num_kv_heads),
         .v = ViewOf(v_[layer], DTypeBytes(spec_.kv_dtype, group.v_dim), group.num_kv_heads)});
  }
  return layers;
}

std::vector<std::byte> KvData::RowForm(int block_idx) const {
  std::vector<std::byte> bytes(layout_.block_bytes());
  const std::vector<LayerRows> rows = layers();
  const int64_t first_token = int64_t{block_idx} * spec_.tokens_per_block;
  for (int32_t i = 0; i < layout_.num_planes(); ++i) {
    const PlaneInfo& plane = layout_.plane(i);
    const LayerRows& layer = rows[plane.layer_idx];
    GatherPlane(layout_, i, plane.role == Role::kKey ? layer.k : layer.v, first_token,
                bytes.data() + plane.row_offset);
  }
  return bytes;
}

void KvData::SetBlock(int block_idx, const std::vector<std::byte>& row_form) {
  const std::vector<LayerRows> rows = layers();
  const int64_t first_token = int64_t{block_idx} * spec_.tokens_per_block;
  for (int32_t i = 0; i < layout_.num_planes(); ++i) {
    const PlaneInfo& plane = layout_.plane(i);
    const LayerRows& layer = rows[plane.layer_idx];
    ScatterPlane(layout_, i, row_form.data() + plane.row_offset, first_token,
                 plane.role == Role::kKey ? layer.k : layer.v);
  }
}

KvData KvData::AfterCodec(const CodecPair& codecs, const Calibration* calibration) const {
  KvData out(spec_, num_blocks_);
  out.tokens_ = tokens_;
  std::vector<std::byte> encoded;
  for (int block = 0; block < num_blocks_; ++block) {
    std::vector<std::byte> rows = RowForm(block);
    for (const PlaneInfo& plane : layout_.planes()) {
      const PlaneShape shape = CalibratedShape(layout_, plane, calibration);
      const Codec& codec = *FindCodec(EffectiveCodec(codecs.of(plane.role), shape));
      const CodecBackend& scalar = codec.host[0];
      encoded.resize(codec.plane_bytes(shape));
      std::byte* const in = rows.data() + plane.row_offset;
      if (scalar.encode(shape, in, encoded.data()) == EncodeResult::kEncoded) {
        scalar.decode(shape, encoded.data(), in);
      }
    }
    out.SetBlock(block, rows);
  }
  return out;
}

bool KvData::EqualsBlock(const KvData& other, int block_idx) const {
  return EqualsBlockAt(block_idx, other, block_idx);
}

bool KvData::EqualsBlockAt(int block_idx, const KvData& other, int other_block_idx) const {
  return RowForm(block_idx) == other.RowForm(other_block_idx);
}

bool KvData::IsUntouched(int block_idx) const {
  const std::vector<std::byte> rows = RowForm(block_idx);
  return std::all_of(rows.begin(), rows.end(), [](std::byte b) { return b == kUntouched; });
}

}  // namespace kvstow::testing
