// tq, tqm, olm and osu2 against vectors that independent code wrote from the same specification:
// every field of every case, on the scalar reference and on each instruction set of the Highway
// backend.
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/olm.h"
#include "kernels/codec/rotation.h"
#include "kernels/codec/simd.h"
#include "kernels/codec/tqm.h"
#include "nlohmann/json.hpp"

namespace kvstow {
namespace {

using Json = nlohmann::json;

std::vector<std::byte> Bytes(const Json& hex) {
  const std::string bytes = absl::HexStringToBytes(hex.get<std::string>());
  const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
  return {first, first + bytes.size()};
}

struct GoldenFile {
  std::map<std::pair<int, std::string>, Json> inputs;  // by head_dim and kind
  std::vector<Json> cases;                             // of tq and tqm
  std::vector<Json> rotated_cases;                     // of osu2 and olm
};

GoldenFile LoadGolden() {
  std::ifstream file(KVSTOW_TEST_DATA "/golden_integer.json");
  GoldenFile golden;
  const Json parsed = Json::parse(file);
  for (const Json& entry : parsed.at("cases")) {
    if (entry.contains("input")) {
      golden.inputs[{entry.at("input"), entry.value("kind", "rows")}] = entry;
    } else if (entry.at("family") == "tq" || entry.at("family") == "tqm") {
      golden.cases.push_back(entry);
    } else {
      EXPECT_TRUE(entry.at("family") == "osu2" || entry.at("family") == "olm")
          << entry.at("family");
      golden.rotated_cases.push_back(entry);
    }
  }
  return golden;
}

// A case put into the terms of the codecs: the plane that encode must give and decode must take.
struct Case {
  std::string name;
  TqFormat format;
  bool has_means = false;
  PlaneShape shape;
  std::vector<std::byte> rows;
  std::vector<std::byte> plane;
  std::vector<std::byte> decoded;
};

Case ToCase(const GoldenFile& golden, const Json& entry) {
  Case result;
  result.has_means = entry.at("family") == "tqm";
  const std::string kind = entry.value("kind", "rows");
  const int dim = entry.at("head_dim");
  const bool is_key = entry.at("role") == "K";
  const Json& input = golden.inputs.at({dim, kind});
  result.shape = {.num_tokens = entry.at("rows"),
                  .dim = dim,
                  .role = is_key ? Role::kKey : Role::kValue,
                  .dtype = DType::kBf16};
  result.format = {
      .bits = entry.at("bits"),
      .dim = dim,
      .role = result.shape.role,
      .scale = entry.at("scale") == "unbiased" ? TqScale::kUnbiased : TqScale::kLeastSquares};
  result.rows = Bytes(input.at("x_bf16"));
  result.decoded = Bytes(entry.at("decoded_bf16"));

  const TqLayout layout(result.format.bits, result.has_means, result.shape.num_tokens, dim);
  result.plane.resize(layout.plane_bytes);
  const auto put = [&](int64_t at, const std::vector<std::byte>& bytes) {
    std::copy(bytes.begin(), bytes.end(), result.plane.begin() + at);
  };
  put(0, Bytes(entry.at("scales_fp16")));
  if (result.has_means) {
    put(layout.means_at, Bytes(entry.at("mean_scale_fp16")));
    put(layout.means_at + 2, Bytes(entry.at("means_int8")));
  }
  put(layout.codes_at, Bytes(entry.at("codes")));
  result.name = entry.at("family").get<std::string>() + std::to_string(result.format.bits) + " " +
                kind + " head_dim=" + std::to_string(dim) +
                " role=" + entry.at("role").get<std::string>() + " " +
                entry.at("scale").get<std::string>();
  return result;
}

using Encode = EncodeResult (*)(const TqFormat&, const PlaneShape&, const std::byte*, std::byte*);
using Decode = void (*)(const TqFormat&, const PlaneShape&, const std::byte*, std::byte*);

void Check(const Case& c, const std::string& backend, Encode encode, Decode decode) {
  std::vector<std::byte> plane(c.plane.size(), std::byte{0xee});
  ASSERT_EQ(encode(c.format, c.shape, c.rows.data(), plane.data()), EncodeResult::kEncoded)
      << backend << " " << c.name;
  EXPECT_EQ(plane, c.plane) << backend << " encode " << c.name;
  std::vector<std::byte> rows(c.rows.size(), std::byte{0xee});
  decode(c.format, c.shape, c.plane.data(), rows.data());
  EXPECT_EQ(rows, c.decoded) << backend << " decode " << c.name;
}

TEST(GoldenInteger, ScalarReferenceGivesTheIndependentVectors) {
  const GoldenFile golden = LoadGolden();
  EXPECT_EQ(golden.cases.size(), 66u + 147u);
  EXPECT_EQ(golden.inputs.size(), 57u);
  for (const Json& entry : golden.cases) {
    const Case c = ToCase(golden, entry);
    Check(c, "scalar", c.has_means ? EncodeTqmScalar : EncodeTqScalar,
          c.has_means ? DecodeTqmScalar : DecodeTqScalar);
  }
}

TEST(GoldenInteger, HighwayGivesTheIndependentVectorsOnEveryInstructionSet) {
  const GoldenFile golden = LoadGolden();
  ASSERT_EQ(golden.cases.size(), 66u + 147u);
  for (std::string_view target : SimdTargets()) {
    ForceSimdTarget(target);
    for (const Json& entry : golden.cases) {
      const Case c = ToCase(golden, entry);
      Check(c, std::string(target), c.has_means ? EncodeTqmHighway : EncodeTqHighway,
            c.has_means ? DecodeTqmHighway : DecodeTqHighway);
    }
  }
  ForceSimdTarget("");
}

// A case of osu2 or olm, with the rotation of its input.
void CheckRotated(const GoldenFile& golden, const Json& entry, bool is_scalar) {
  const int dim = entry.at("head_dim");
  const Json& input = golden.inputs.at({dim, "rows"});
  const std::vector<std::byte> numbers = Bytes(input.at("rotation_int16"));
  std::vector<int16_t> matrix(numbers.size() / 2);
  std::memcpy(matrix.data(), numbers.data(), numbers.size());
  const absl::StatusOr<Rotation> rotation = Rotation::Create(dim, matrix);
  ASSERT_TRUE(rotation.ok()) << rotation.status();
  const bool is_unbiased = entry.at("scale") == "unbiased";
  const OlmFormat format{.bits = entry.at("bits"),
                         .scale = is_unbiased ? TqScale::kUnbiased : TqScale::kLeastSquares,
                         .shape = {.num_tokens = entry.at("rows"),
                                   .dim = dim,
                                   .role = entry.at("role") == "K" ? Role::kKey : Role::kValue,
                                   .dtype = DType::kBf16,
                                   .rotation = &*rotation}};
  std::vector<std::byte> want(format.layout().plane_bytes);
  const std::vector<std::byte> scales = Bytes(entry.at("scales_fp16"));
  const std::vector<std::byte> codes = Bytes(entry.at("codes"));
  std::copy(scales.begin(), scales.end(), want.begin());
  std::copy(codes.begin(), codes.end(), want.begin() + format.layout().codes_at);
  const std::vector<std::byte> rows = Bytes(input.at("x_bf16"));
  std::vector<std::byte> plane(want.size(), std::byte{0xee});
  ASSERT_EQ((is_scalar ? EncodeOlmScalar : EncodeOlmHighway)(format, rows.data(), plane.data()),
            EncodeResult::kEncoded);
  EXPECT_EQ(plane, want) << entry.at("family") << format.bits << " head_dim=" << dim;
  std::vector<std::byte> decoded(rows.size(), std::byte{0xee});
  (is_scalar ? DecodeOlmScalar : DecodeOlmHighway)(format, plane.data(), decoded.data());
  EXPECT_EQ(decoded, Bytes(entry.at("decoded_bf16"))) << entry.at("family") << format.bits;
}

TEST(GoldenInteger, CalibratedCodecsGiveTheIndependentVectors) {
  const GoldenFile golden = LoadGolden();
  EXPECT_EQ(golden.rotated_cases.size(), 18u);
  for (const Json& entry : golden.rotated_cases) {
    CheckRotated(golden, entry, /*is_scalar=*/true);
    for (std::string_view target : SimdTargets()) {
      ForceSimdTarget(target);
      CheckRotated(golden, entry, /*is_scalar=*/false);
    }
    ForceSimdTarget("");
  }
}

// The vectors hold both scales of keys; what the codecs of the table use is a choice of ours.
TEST(GoldenInteger, CodecsUseLeastSquaresForKeysWithTheirMeanAndUnbiasedElse) {
  const PlaneShape keys{.num_tokens = 1, .dim = 64, .role = Role::kKey};
  const PlaneShape values{.num_tokens = 1, .dim = 64, .role = Role::kValue};
  EXPECT_EQ(TqFormatOf(4, keys).scale, TqScale::kLeastSquares);
  EXPECT_EQ(TqFormatOf(4, values).scale, TqScale::kUnbiased);
  EXPECT_EQ(TqmFormatOf(4, keys).scale, TqScale::kUnbiased);
  EXPECT_EQ(OlmFormatOf(4, keys).scale, TqScale::kLeastSquares);
  EXPECT_EQ(OlmFormatOf(4, values).scale, TqScale::kUnbiased);
}

}  // namespace
}  // namespace kvstow
