// What every codec encodes to and decodes to, against vectors that codecs.py wrote from the formats
// alone: on the scalar reference and on each instruction set of the other backends. A change of
// these bytes is a change of the stored format.
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"
#include "kernels/codec/calibration.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/simd.h"
#include "kernels/core/digest.h"
#include "nlohmann/json.hpp"
#include "tests/kernels/rotation_for.h"

namespace kvstow {
namespace {

using Json = nlohmann::json;

std::vector<std::byte> Bytes(const Json& hex) {
  const std::string bytes = absl::HexStringToBytes(hex.get<std::string>());
  const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
  return {first, first + bytes.size()};
}

std::string HexOfSha256(const std::vector<std::byte>& bytes) {
  return Sha256({reinterpret_cast<const char*>(bytes.data()), bytes.size()}).ToHex();
}

struct Case {
  const Codec* codec = nullptr;
  PlaneShape shape;
  std::vector<std::byte> rows;
  Json entry;
  std::string name;
};

std::vector<Case> LoadCases() {
  std::ifstream file(KVSTOW_SOURCE_DIR "/tests/golden/codecs_v1.json");
  const Json golden = Json::parse(file);
  std::vector<Case> cases;
  for (const Json& entry : golden.at("cases")) {
    const Json& input = golden.at("inputs").at(entry.at("input").get<size_t>());
    Case c;
    c.name = entry.at("codec").get<std::string>();
    c.codec = FindCodec(std::string_view(c.name));
    EXPECT_NE(c.codec, nullptr) << c.name;
    if (c.codec == nullptr) continue;
    c.shape = {.num_tokens = input.at("tokens"),
               .dim = input.at("dim"),
               .role = entry.at("role") == "K" ? Role::kKey : Role::kValue,
               .dtype = *DTypeFromName(input.at("dtype").get<std::string>())};
    if (c.codec->needs_rotation) {
      c.shape.rotation = testing::RotationFor(c.shape.dim, c.shape.role);
    }
    c.rows = Bytes(input.at("rows"));
    c.entry = entry;
    c.name += " head_dim=" + std::to_string(c.shape.dim) + " " + entry.at("role").dump() + " " +
              input.at("dtype").dump() + " " + input.at("kind").dump();
    cases.push_back(std::move(c));
  }
  return cases;
}

void Check(const Case& c, const CodecBackend& backend, std::string_view target) {
  ASSERT_TRUE(c.codec->accepts(c.shape)) << c.name;
  std::vector<std::byte> plane(c.codec->plane_bytes(c.shape), std::byte{0xee});
  ASSERT_EQ(backend.encode(c.shape, c.rows.data(), plane.data()), EncodeResult::kEncoded)
      << backend.name << " " << target << " " << c.name;
  if (c.entry.contains("plane")) {
    ASSERT_EQ(plane, Bytes(c.entry.at("plane"))) << backend.name << " " << target << " " << c.name;
  }
  ASSERT_EQ(HexOfSha256(plane), c.entry.at("plane_sha256"))
      << backend.name << " " << target << " " << c.name;
  std::vector<std::byte> decoded(c.rows.size(), std::byte{0xee});
  backend.decode(c.shape, plane.data(), decoded.data());
  ASSERT_EQ(HexOfSha256(decoded), c.entry.at("decoded_sha256"))
      << backend.name << " " << target << " " << c.name;
}

TEST(CodecsGolden, EveryBackendGivesTheIndependentBytes) {
  const std::vector<Case> cases = LoadCases();
  std::set<std::pair<std::string, int>> covered;
  for (const Case& c : cases) {
    covered.emplace(c.codec->name, c.shape.dim);
    for (const CodecBackend& backend : c.codec->host) {
      if (!backend.supported()) continue;
      for (std::string_view target : SimdTargets()) {
        ForceSimdTarget(target);
        Check(c, backend, target);
      }
      ForceSimdTarget("");
    }
  }
  // The tq and tqm families have vectors of their own (golden_integer_test).
  for (const Codec& codec : AllCodecs()) {
    if (codec.name == "raw" || codec.name == "int8") continue;
    if (codec.id >= CodecId::kTq4 && codec.id <= CodecId::kTqm2) continue;
    for (int dim : {64, 80, 96, 112, 128, 192, 256, 576}) {
      EXPECT_TRUE(covered.contains({std::string(codec.name), dim})) << codec.name << " " << dim;
    }
  }
}

TEST(CalibrationGolden, BundleIsReadAndWrittenAsIndependentCodeDoes) {
  std::ifstream file(KVSTOW_SOURCE_DIR "/tests/golden/calibration_v1.bin", std::ios::binary);
  const std::string want((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  ASSERT_FALSE(want.empty());
  const absl::StatusOr<Calibration> read = Calibration::Parse(want, Sha256("a model"));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->source(), Sha256("samples"));
  std::vector<Calibration::Entry> entries;
  for (int layer : {0, 1}) {
    for (Role role : {Role::kKey, Role::kValue}) {
      const uint64_t seed = 10 * layer + (role == Role::kValue ? 1 : 0);
      const Rotation rotation = Rotation::Reflection(role == Role::kKey ? 16 : 8, seed).value();
      const Rotation* found = read->Find({.layer_idx = layer, .role = role});
      ASSERT_NE(found, nullptr);
      EXPECT_EQ(std::vector<int16_t>(found->matrix().begin(), found->matrix().end()),
                std::vector<int16_t>(rotation.matrix().begin(), rotation.matrix().end()));
      entries.push_back({{.layer_idx = layer, .role = role}, rotation});
    }
  }
  const auto written = Calibration::Create(Sha256("a model"), Sha256("samples"), entries);
  ASSERT_TRUE(written.ok());
  EXPECT_TRUE(written->Serialize() == want);
}

}  // namespace
}  // namespace kvstow
