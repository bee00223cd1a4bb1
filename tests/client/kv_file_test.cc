#include "client/cli/kv_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "client/cli/compare.h"

namespace kvstow {
namespace {

using ::testing::HasSubstr;

const char kFixture[] = KVSTOW_TEST_DATA "/smollm2_kv.safetensors";

// A small file in memory that tests bend.
struct Sample {
  struct Entry {
    std::string name;
    TensorType type;
    std::vector<int64_t> shape;
  };
  TensorMetadata metadata = {{"model", "m"},
                             {"weights_sha256", "ab"},
                             {"rope_base", "10000.0"},
                             {"rope_layout", "half-split"}};
  std::vector<Entry> entries = {{"token_ids", TensorType::kI32, {70}},
                                {"k.0", TensorType::kF16, {70, 2, 32}},
                                {"v.0", TensorType::kF16, {70, 2, 32}},
                                {"k.1", TensorType::kF16, {70, 2, 32}},
                                {"v.1", TensorType::kF16, {70, 2, 32}}};

  Entry& At(const std::string& name) {
    for (Entry& entry : entries) {
      if (entry.name == name) return entry;
    }
    return entries.emplace_back();
  }

  std::string Bytes() const {
    SafetensorsWriter writer;
    writer.SetMetadata(metadata);
    std::vector<std::vector<std::byte>> memory;
    memory.reserve(entries.size());
    for (const Entry& entry : entries) {
      int64_t num_bytes = TensorTypeBytes(entry.type);
      for (int64_t dim : entry.shape) num_bytes *= dim;
      memory.emplace_back(num_bytes, std::byte{7});
      EXPECT_TRUE(writer.Add(entry.name, entry.type, entry.shape, memory.back()).ok());
    }
    return writer.Serialize();
  }
};

absl::StatusOr<KvFile> Load(const std::string& bytes, const KvFileOverrides& overrides = {}) {
  auto file = SafetensorsFile::Parse(
      "sample", {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
  EXPECT_TRUE(file.ok()) << file.status();
  return KvFile::FromSafetensors(*std::move(file), overrides);
}

std::string MessageOf(const Sample& sample) {
  const std::string bytes = sample.Bytes();
  const absl::Status status = Load(bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(KvFile, ReadsTheFixtureAsAModel) {
  const auto file = KvFile::Open(kFixture, {});
  ASSERT_TRUE(file.ok()) << file.status();
  const ModelSpec& spec = file->spec();
  EXPECT_EQ(spec.name, "SmolLM2-135M-Instruct");
  EXPECT_EQ(spec.weights,
            "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53");
  EXPECT_EQ(spec.kv_dtype, DType::kBf16);
  EXPECT_EQ(spec.rope, "base=100000,half");
  EXPECT_TRUE(spec.keys_are_rotated);
  EXPECT_EQ(spec.tokens_per_block, 64);
  const std::vector<LayerGroup> want = {{.first_layer = 0,
                                         .num_layers = 30,
                                         .kind = LayerKind::kFull,
                                         .num_kv_heads = 3,
                                         .k_dim = 64,
                                         .v_dim = 64}};
  EXPECT_EQ(spec.groups, want);
  EXPECT_EQ(file->tokens().size(), 256u);
  EXPECT_EQ(file->num_full_blocks(), 4);
  ASSERT_EQ(file->layers().size(), 30u);
  EXPECT_EQ(file->layers()[0].k.token_stride_bytes, 3 * 64 * 2);
  EXPECT_EQ(file->layers()[0].v.head_stride_bytes, 64 * 2);
}

TEST(KvFile, ViewsAreTheTensorsOfTheirLayerAndRole) {
  const auto file = KvFile::Open(kFixture, {});
  ASSERT_TRUE(file.ok());
  const SafetensorsFile& raw = file->safetensors();
  EXPECT_EQ(file->layers()[12].k.data, raw.bytes(*raw.Find("k.12")).data());
  EXPECT_EQ(file->layers()[12].v.data, raw.bytes(*raw.Find("v.12")).data());
}

TEST(KvFile, OverridesTakeThePlaceOfMetadata) {
  const auto file = KvFile::Open(kFixture, {.model = "other",
                                            .weights = "rev-2",
                                            .rope = "base=5,half",
                                            .tokenizer = "tok",
                                            .tokens_per_block = 32});
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->spec().name, "other");
  EXPECT_EQ(file->spec().weights, "rev-2");
  EXPECT_EQ(file->spec().rope, "base=5,half");
  EXPECT_EQ(file->spec().tokenizer, "tok");
  EXPECT_EQ(file->num_full_blocks(), 8);
}

TEST(KvFile, LayersOfUnlikeShapeBecomeGroups) {
  Sample sample;
  sample.At("k.1").shape = {70, 4, 64};
  sample.At("v.1").shape = {70, 4, 96};
  sample.entries.push_back({"k.2", TensorType::kF16, {70, 1, 576}});  // MLA: no values
  const std::string bytes = sample.Bytes();
  const auto file = Load(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->spec().groups.size(), 3u);
  EXPECT_EQ(file->spec().groups[1].num_kv_heads, 4);
  EXPECT_EQ(file->spec().groups[1].v_dim, 96);
  EXPECT_EQ(file->spec().groups[2].kind, LayerKind::kMla);
  EXPECT_EQ(file->spec().groups[2].v_dim, 0);
}

TEST(KvFile, RefusesAWrongShapeAndSaysBoth) {
  Sample sample;
  sample.At("v.1").shape = {69, 2, 32};
  EXPECT_THAT(MessageOf(sample), HasSubstr("\"v.1\" is F16 [69, 2, 32], want F16 [70"));
  sample = {};
  sample.At("v.1").type = TensorType::kBf16;
  EXPECT_THAT(MessageOf(sample), HasSubstr("want F16"));
  sample = {};
  sample.At("v.1").shape = {70, 3, 32};
  EXPECT_THAT(MessageOf(sample), HasSubstr("k.1 has 2 heads, v.1 has 3"));
  sample = {};
  sample.At("k.0").type = TensorType::kI64;
  EXPECT_THAT(MessageOf(sample), HasSubstr("I64 [70, 2, 32], want BF16"));
}

TEST(KvFile, RefusesAGapInTheLayers) {
  Sample sample;
  sample.At("k.1").name = "k.2";
  sample.At("v.1").name = "v.2";
  EXPECT_THAT(MessageOf(sample), HasSubstr("\"k.2\" is out of place"));
  sample = {};
  sample.metadata.emplace_back("layers", "3");
  EXPECT_THAT(MessageOf(sample), HasSubstr("layers is \"3\", the file has 2"));
}

TEST(KvFile, RefusesMissingNames) {
  Sample sample;
  sample.metadata = {{"weights", "w"}};
  EXPECT_THAT(MessageOf(sample), HasSubstr("--model NAME"));
  sample.metadata = {{"model", "m"}};
  EXPECT_THAT(MessageOf(sample), HasSubstr("--weights DIGEST"));
  sample = {};
  sample.At("token_ids").name = "tokens";
  EXPECT_THAT(MessageOf(sample), HasSubstr("token_ids"));
  sample = {};
  sample.At("token_ids").type = TensorType::kI64;
  EXPECT_THAT(MessageOf(sample), HasSubstr("want I32 [tokens]"));
  sample = {};
  sample.metadata.emplace_back("keys_rotated", "perhaps");
  EXPECT_THAT(MessageOf(sample), HasSubstr("perhaps"));
}

TEST(KvFile, SaysWhenTheTokensFillNoBlock) {
  Sample sample;
  const std::string bytes = sample.Bytes();  // 70 tokens
  EXPECT_TRUE(Load(bytes)->CheckHasBlocks().ok());
  const absl::Status status = Load(bytes, {.tokens_per_block = 96})->CheckHasBlocks();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("70 tokens do not fill a block of 96"));
}

TEST(KvFile, EachPartOfTheMetadataChangesTheFingerprint) {
  Sample sample;
  const std::string plain = sample.Bytes();
  const Digest fingerprint = Load(plain)->spec().Fingerprint();
  for (const auto& [name, value] : TensorMetadata{{"model", "n"},
                                                  {"weights_sha256", "ac"},
                                                  {"rope_base", "20000.0"},
                                                  {"rope_layout", "interleaved"},
                                                  {"keys_rotated", "false"},
                                                  {"tokenizer", "t"},
                                                  {"tokens_per_block", "32"}}) {
    Sample changed;
    bool is_set = false;
    for (auto& entry : changed.metadata) {
      if (entry.first == name) {
        entry.second = value;
        is_set = true;
      }
    }
    if (!is_set) changed.metadata.emplace_back(name, value);
    const std::string bytes = changed.Bytes();
    EXPECT_NE(Load(bytes)->spec().Fingerprint(), fingerprint) << name;
  }
}

TEST(KvFile, DescribedSpecOpensAsTheSameModel) {
  ModelSpec spec;
  spec.name = "m";
  spec.weights = "sha256:cd";
  spec.kv_dtype = DType::kF32;
  spec.rope = "base=7,interleaved";
  spec.keys_are_rotated = false;
  spec.tokens_per_block = 32;
  spec.tokenizer = "tok";
  spec.groups = {{0, 2, LayerKind::kFull, 2, 32, 16}, {2, 1, LayerKind::kMla, 1, 48, 0}};
  KvBuffer buffer(spec, 40);
  const std::vector<int32_t> tokens(40, 5);
  const std::string path = ::testing::TempDir() + "/kv_file_test_" + std::to_string(getpid());
  ASSERT_TRUE(WriteKvFile(path, DescribeSpec(spec, 32), buffer, tokens, 32).ok());
  const auto file = KvFile::Open(path, {});
  std::filesystem::remove(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->spec(), spec);
  EXPECT_EQ(file->tokens().size(), 32u);
}

TEST(KvFile, WritesTheFixtureAgainThroughABuffer) {
  const auto file = KvFile::Open(kFixture, {});
  ASSERT_TRUE(file.ok());
  KvBuffer buffer(file->spec(), 256);
  for (int32_t layer_idx = 0; layer_idx < 30; ++layer_idx) {
    for (Role role : {Role::kKey, Role::kValue}) {
      const auto from = RowBytes(file->spec(), file->layers()[layer_idx], layer_idx, role, 256);
      const auto to = RowBytes(file->spec(), buffer.layers()[layer_idx], layer_idx, role, 256);
      std::memcpy(const_cast<std::byte*>(to.data()), from.data(), from.size());
    }
  }
  const std::string path = ::testing::TempDir() + "/kv_again_" + std::to_string(getpid());
  ASSERT_TRUE(WriteKvFile(path, DescribeLike(*file, 256), buffer, file->tokens(), 256).ok());
  const auto again = SafetensorsFile::Open(path);
  std::filesystem::remove(path);
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_EQ(again->metadata(), file->safetensors().metadata());
  for (const Tensor& tensor : file->safetensors().tensors()) {
    const auto same = again->Expect(tensor.name, tensor.type, tensor.shape);
    ASSERT_TRUE(same.ok()) << same.status();
    EXPECT_TRUE(again->bytes(**same) == file->safetensors().bytes(tensor)) << tensor.name;
  }
}

TEST(CompareBlocks, CountsDifferencesOfTheBlocksThatCame) {
  const auto file = KvFile::Open(kFixture, {});
  ASSERT_TRUE(file.ok());
  KvBuffer buffer(file->spec(), 256);
  for (int32_t layer_idx = 0; layer_idx < 30; ++layer_idx) {
    for (Role role : {Role::kKey, Role::kValue}) {
      const auto from = RowBytes(file->spec(), file->layers()[layer_idx], layer_idx, role, 256);
      const auto to = RowBytes(file->spec(), buffer.layers()[layer_idx], layer_idx, role, 256);
      std::memcpy(const_cast<std::byte*>(to.data()), from.data(), from.size());
    }
  }
  std::vector<absl::Status> blocks(4);
  EXPECT_EQ(CompareBlocks(buffer, *file, blocks)->num_different_bytes, 0);
  EXPECT_EQ(CompareBlocks(buffer, *file, blocks)->num_compared_bytes, 256 * 3 * 64 * 2 * 2 * 30);
  // The last byte of the last row of block 2, layer 29, V.
  const auto rows = RowBytes(file->spec(), buffer.layers()[29], 29, Role::kValue, 192);
  const_cast<std::byte&>(rows[rows.size() - 1]) ^= std::byte{1};
  const auto one = CompareBlocks(buffer, *file, blocks);
  EXPECT_EQ(one->num_different_bytes, 1);
  EXPECT_EQ(one->first, "layer 29, V, tokens 128 to 191");
  blocks[2] = absl::NotFoundError("gone");  // a miss is not compared
  EXPECT_EQ(CompareBlocks(buffer, *file, blocks)->num_different_bytes, 0);
}

}  // namespace
}  // namespace kvstow
