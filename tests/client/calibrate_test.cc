// `kvstow calibrate` on files: what it writes, and which files it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <list>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/cli/commands.h"
#include "client/cpp/safetensors.h"
#include "kernels/codec/calibration.h"
#include "kernels/core/dtype.h"
#include "tests/client/run_cli.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::CliResult;
using ::testing::HasSubstr;
using testing::RunKvstow;
using Json = nlohmann::json;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class Calibrate : public ::testing::Test {
 protected:
  static constexpr int64_t kDim = 32;

  std::string Path(const std::string& name) const {
    return ::testing::TempDir() + "/calibrate_" + std::to_string(getpid()) + "_" + name;
  }

  // A tensor of the file; `type` may be one that no calibration takes.
  void Add(const std::string& name, int64_t num_tokens, int64_t num_heads,
           TensorType type = TensorType::kBf16) {
    testing::Rng rng(names_.size() + 1);
    std::string& bytes =
        memory_.emplace_back(num_tokens * num_heads * kDim * TensorTypeBytes(type), '\1');
    for (size_t at = 0; type == TensorType::kBf16 && at < bytes.size(); at += 2) {
      const uint16_t bits = FloatToBf16(static_cast<float>(rng.Gaussian()));
      std::memcpy(bytes.data() + at, &bits, 2);
    }
    names_.push_back({name, type, {num_tokens, num_heads, kDim}});
  }

  std::string Write(int64_t num_tokens) {
    SafetensorsWriter writer;
    writer.SetMetadata({{"model", "small"}, {"weights", "w"}});
    const std::vector<int32_t> tokens(num_tokens, 7);
    EXPECT_TRUE(writer
                    .Add("token_ids", TensorType::kI32, {num_tokens},
                         {reinterpret_cast<const std::byte*>(tokens.data()),
                          static_cast<size_t>(4 * num_tokens)})
                    .ok());
    auto bytes = memory_.begin();
    for (const Tensor& tensor : names_) {
      EXPECT_TRUE(writer
                      .Add(tensor.name, tensor.type, tensor.shape,
                           {reinterpret_cast<const std::byte*>(bytes->data()), bytes->size()})
                      .ok());
      ++bytes;
    }
    const std::string path = Path("samples.safetensors");
    EXPECT_TRUE(writer.Write(path).ok());
    return path;
  }

  // The error of calibrating what was added.
  std::string Refusal(int64_t num_tokens) {
    const CliResult result = RunKvstow({"calibrate", Write(num_tokens), "-o", Path("refused.kvc")});
    EXPECT_EQ(result.status, 1);
    EXPECT_TRUE(ReadFile(Path("refused.kvc")).empty());
    return result.err;
  }

  std::vector<Tensor> names_;
  std::list<std::string> memory_;
};

TEST_F(Calibrate, WritesABundleOfTheModelWithTheHashOfItsSourceAndTellsOfEveryHead) {
  for (const char* layer : {"0", "1"}) {
    Add(std::string("q.") + layer, 80, 4);
    Add(std::string("k.") + layer, 80, 2);
    Add(std::string("v.") + layer, 80, 2);
  }
  const std::string samples = Write(80);
  const CliResult result = RunKvstow({"calibrate", samples, "-o", Path("a.kvc"), "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  std::vector<Json> lines;
  std::istringstream text(result.out);
  for (std::string line; std::getline(text, line);) lines.push_back(Json::parse(line));
  ASSERT_EQ(lines.size(), 9u) << "eight heads and the whole";
  EXPECT_EQ(lines[5]["layer"], 1);
  EXPECT_EQ(lines[5]["role"], "k");
  EXPECT_EQ(lines[5]["head"], 1);
  EXPECT_NEAR(lines[5]["rms_norm"].get<double>(), std::sqrt(kDim), 0.5);

  const Json& whole = lines[8];
  const std::string bundle = ReadFile(Path("a.kvc"));
  const absl::StatusOr<Calibration> calibration =
      Calibration::Parse(bundle, Calibration::ModelOf(bundle).value());
  ASSERT_TRUE(calibration.ok()) << calibration.status();
  EXPECT_EQ(whole["id"], calibration->id().ToHex());
  EXPECT_EQ(whole["fingerprint"], calibration->fingerprint().ToHex());
  EXPECT_EQ(calibration->source(), Sha256(ReadFile(samples)));
  EXPECT_EQ(calibration->num_rotations(), 8);
  EXPECT_THAT(whole["warnings"][0].get<std::string>(), HasSubstr("80 tokens"));
  EXPECT_THAT(result.err, HasSubstr("warning: 80 tokens"));

  ASSERT_EQ(RunKvstow({"calibrate", samples, "-o", Path("b.kvc"), "--threads=1"}).status, 0);
  EXPECT_EQ(ReadFile(Path("b.kvc")), bundle) << "the same samples, the same bytes";
  unlink(Path("a.kvc").c_str());
  unlink(Path("b.kvc").c_str());
}

TEST_F(Calibrate, TooFewTokensSaysHowManyAreNeeded) {
  Add("k.0", 63, 1);
  Add("v.0", 63, 1);
  EXPECT_THAT(Refusal(63), HasSubstr("63 tokens, want at least 64 for head dim 32"));
}

TEST_F(Calibrate, MissingLayersAreNamed) {
  Add("q.0", 64, 1);
  Add("k.0", 64, 1);
  Add("v.0", 64, 1);
  Add("k.1", 64, 1);
  Add("v.1", 64, 1);
  EXPECT_THAT(Refusal(64), HasSubstr("layer 1, queries: there are none, want rows of every layer"));
  Add("k.3", 64, 1);
  EXPECT_THAT(Refusal(64), HasSubstr("\"k.3\" is out of place: layers 0 to 1 were found"));
}

TEST_F(Calibrate, LayersWithoutValuesAreRefused) {
  Add("k.0", 64, 1);
  EXPECT_THAT(Refusal(64), HasSubstr("layer 0, values: there are none"));
}

TEST_F(Calibrate, TypesThatAreNoFloatsAreRefused) {
  Add("k.0", 64, 1, TensorType::kF8E4M3);
  Add("v.0", 64, 1, TensorType::kF8E4M3);
  EXPECT_THAT(Refusal(64), HasSubstr("layer 0, keys: f8_e4m3, want bf16, f16 or f32"));
  names_.clear();
  memory_.clear();
  Add("k.0", 64, 1);
  Add("v.0", 64, 1);
  Add("q.0", 64, 1, TensorType::kI32);
  EXPECT_THAT(Refusal(64), HasSubstr("tensor \"q.0\" is I32 [64, 1, 32], want BF16, F16 or F32"));
}

TEST_F(Calibrate, WrongCommandLinesEndWithStatus2) {
  EXPECT_THAT(RunKvstow({"calibrate", "x"}).err, HasSubstr("where to: --out FILE, --upload"));
  EXPECT_EQ(RunKvstow({"calibrate", "x"}).status, 2);
  EXPECT_THAT(RunKvstow({"calibration", "drop"}).err, HasSubstr("want ls, put, get or rm"));
  EXPECT_EQ(RunKvstow({"calibration", "put"}).status, 2);
  EXPECT_EQ(RunKvstow({"calibration", "ls", "x"}).status, 2);
}

}  // namespace
}  // namespace kvstow
