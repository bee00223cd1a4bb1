#include "service/model_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "kernels/codec/codec.h"
#include "tests/service/temp_dir.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;
using ::kvstow::testing::TempDir;
using ::testing::ElementsAre;

ModelSpec Spec(const std::string& name = "model") {
  ModelSpec spec;
  spec.name = name;
  spec.weights = "sha256:1";
  spec.groups = {{.first_layer = 0,
                  .num_layers = 2,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 1,
                  .k_dim = 64,
                  .v_dim = 64}};
  spec.tokens_per_block = 32;
  return spec;
}

std::string FileOf(const std::string& directory, const ModelSpec& spec) {
  return absl::StrCat(directory, "/", spec.Fingerprint().ToHex(), ".model");
}

TEST(ModelRegistry, RegisteringTwiceGivesTheSameModel) {
  auto registry = *ModelRegistry::Open("");
  const ModelRef first = *registry->Register(Spec());
  EXPECT_EQ(*registry->Register(Spec()), first);
  EXPECT_EQ(registry->List().size(), 1u);
  EXPECT_EQ(first->fingerprint(), Spec().Fingerprint());
}

TEST(ModelRegistry, UnknownFingerprintIsNotFoundAndSaysWhatToDo) {
  auto registry = *ModelRegistry::Open("");
  const absl::Status status = registry->Find(Spec().Fingerprint()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), absl::StrCat("model ", Spec().Fingerprint().ToHex(),
                                           " is not registered: call RegisterModel first"));
}

TEST(ModelRegistry, InvalidSpecIsRefusedAndNotKept) {
  auto registry = *ModelRegistry::Open("");
  ModelSpec spec = Spec();
  spec.groups[0].num_kv_heads = 0;
  const absl::Status status = registry->Register(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "model spec: groups[0].num_kv_heads is 0, want 1 to 1024");
  EXPECT_TRUE(registry->List().empty());
}

TEST(ModelRegistry, ModelsAreThereAfterARestart) {
  const TempDir dir;
  {
    auto registry = *ModelRegistry::Open(dir.path() + "/models");
    ASSERT_TRUE(registry->Register(Spec("a")).ok());
    ASSERT_TRUE(registry->Register(Spec("b")).ok());
  }
  auto registry = *ModelRegistry::Open(dir.path() + "/models");
  EXPECT_EQ(registry->List().size(), 2u);
  ASSERT_TRUE(registry->Find(Spec("b").Fingerprint()).ok());
  EXPECT_EQ((*registry->Find(Spec("b").Fingerprint()))->spec(), Spec("b"));
}

TEST(ModelRegistry, FileWithFlippedByteIsSetAside) {
  const TempDir dir;
  ASSERT_TRUE((*ModelRegistry::Open(dir.path()))->Register(Spec("a")).ok());
  ASSERT_TRUE((*ModelRegistry::Open(dir.path()))->Register(Spec("b")).ok());
  const std::string path = FileOf(dir.path(), Spec("a"));
  {
    // The name of the model: still a valid spec, of another fingerprint.
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    std::string bytes(std::istreambuf_iterator<char>(file), {});
    const size_t at = bytes.find(std::string("\1\0\0\0a", 5));
    ASSERT_NE(at, std::string::npos);
    file.seekp(static_cast<std::streamoff>(at + 4));
    file.put('x');
  }
  auto registry = *ModelRegistry::Open(dir.path());
  EXPECT_EQ(registry->List().size(), 1u);
  EXPECT_FALSE(registry->Find(Spec("a").Fingerprint()).ok());
  EXPECT_FALSE(registry->Find(Spec("x").Fingerprint()).ok());
  EXPECT_FALSE(fs::exists(path));
  EXPECT_TRUE(fs::exists(path + ".broken"));
}

TEST(ModelRegistry, FilesCutShortHugeOrEmptyAreSetAside) {
  const TempDir dir;
  const std::string path = FileOf(dir.path(), Spec("a"));
  const std::string good = Spec("a").Serialize();
  for (const std::string& bytes :
       {std::string(), good.substr(0, good.size() - 1), std::string(2 << 20, 'z')}) {
    std::ofstream(path, std::ios::binary) << bytes;
    auto registry = *ModelRegistry::Open(dir.path());
    EXPECT_TRUE(registry->List().empty());
    EXPECT_FALSE(fs::exists(path)) << bytes.size();
  }
}

TEST(ModelRegistry, LeftoversOfADeadWriterAreRemoved) {
  const TempDir dir;
  const std::string temp = FileOf(dir.path(), Spec("a")) + ".tmp0";
  std::ofstream(temp) << "half";
  std::ofstream(dir.path() + "/README") << "not ours";
  auto registry = *ModelRegistry::Open(dir.path());
  EXPECT_FALSE(fs::exists(temp));
  EXPECT_TRUE(fs::exists(dir.path() + "/README"));
}

TEST(ModelRegistry, RefusesMoreModelsThanItsLimitAndWritesNoFile) {
  const TempDir dir;
  auto registry = *ModelRegistry::Open("");
  for (int i = 0; i < ModelRegistry::kMaxModels; ++i) {
    ASSERT_TRUE(registry->Register(Spec(absl::StrCat("m", i))).ok());
  }
  const absl::Status status = registry->Register(Spec("one too many")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "models: 1024 of 1024 are registered");
  EXPECT_TRUE(registry->Register(Spec("m7")).ok());  // known ones still answer
}

TEST(ModelRegistry, DirectoryThatCannotBeMadeIsNamed) {
  const TempDir dir;
  std::ofstream(dir.path() + "/file") << "in the way";
  const absl::Status status = ModelRegistry::Open(dir.path() + "/file/models").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(),
            absl::StrCat("create directory ", dir.path(), "/file/models: Not a directory"));
}

TEST(ModelRegistry, DirectoryWithoutPermissionIsNamed) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write anywhere";
  const TempDir dir;
  fs::permissions(dir.path(), fs::perms::owner_read | fs::perms::owner_exec);
  const absl::Status status = ModelRegistry::Open(dir.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  fs::permissions(dir.path(), fs::perms::owner_all);
}

TEST(RegisteredModel, PlanHasTheEncodedSizeOfEveryPlane) {
  const ModelRef model = *RegisteredModel::Create(Spec());
  const CodecPair codecs = {.k = CodecId::kInt8, .v = CodecId::kTq4};
  const RegisteredModel::Plan plan = model->PlanFor(codecs);
  EXPECT_EQ(plan.codecs, codecs);
  const auto k = static_cast<uint32_t>(FindCodec(CodecId::kInt8)->plane_bytes(model->shape(0)));
  const auto v = static_cast<uint32_t>(FindCodec(CodecId::kTq4)->plane_bytes(model->shape(1)));
  EXPECT_THAT(*plan.unit_bytes, ElementsAre(k, v, k, v));
  EXPECT_EQ(model->PlanFor(codecs).unit_bytes, plan.unit_bytes);  // kept, not made again
}

TEST(RegisteredModel, QuantizedInputIsPlannedRawAndSaysSo) {
  ModelSpec spec = Spec();
  spec.kv_dtype = DType::kF8E4M3;
  const ModelRef model = *RegisteredModel::Create(spec);
  const RegisteredModel::Plan plan = model->PlanFor({.k = CodecId::kTqm4, .v = CodecId::kTq4});
  EXPECT_EQ(plan.codecs, CodecPair());
  EXPECT_THAT(*plan.unit_bytes, ElementsAre(2048, 2048, 2048, 2048));
}

}  // namespace
}  // namespace kvstow
