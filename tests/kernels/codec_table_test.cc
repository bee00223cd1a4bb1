// The codec table and the ways people name a codec.
#include <set>
#include <string>

#include "gtest/gtest.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/rotation.h"
#include "kernels/codec/simd.h"
#include "kernels/codec/tq.h"

namespace kvstow {
namespace {

PlaneShape Shape(int dim, Role role = Role::kKey, DType dtype = DType::kBf16, int num_tokens = 64) {
  return {.num_tokens = num_tokens, .dim = dim, .role = role, .dtype = dtype};
}

std::string ErrorOf(std::string_view text) {
  const auto choice = ParseCodecChoice(text);
  if (choice.ok()) return "ok";
  EXPECT_EQ(choice.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(choice.status().message().data(), choice.status().message().size());
}

TEST(CodecTable, NumbersAndNamesAreTheStoredOnes) {
  const std::vector<std::string> names = {
      "raw",      "int8",     "tq4",   "tq3",   "tq2",   "tqm4",   "tqm3",
      "tqm2",     "int4",     "kivi4", "kivi2", "tq3.5", "tq2.5",  "tq_prod4",
      "tq_prod3", "tq_prod2", "olm4",  "olm3",  "osu2",  "oscar2", "gear"};
  ASSERT_EQ(AllCodecs().size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(static_cast<size_t>(AllCodecs()[i].id), i);
    EXPECT_EQ(AllCodecs()[i].name, names[i]);
    EXPECT_EQ(FindCodec(static_cast<CodecId>(i)), &AllCodecs()[i]);
    EXPECT_EQ(FindCodec(std::string_view(names[i])), &AllCodecs()[i]);
    EXPECT_EQ(AllCodecs()[i].host[0].name, "scalar");
    EXPECT_TRUE(AllCodecs()[i].host[0].supported());
  }
  EXPECT_EQ(FindCodec(static_cast<CodecId>(names.size())), nullptr);
  EXPECT_EQ(FindCodec(static_cast<CodecId>(255)), nullptr);
  EXPECT_EQ(FindCodec(std::string_view("tq5")), nullptr);
  EXPECT_EQ(FindCodec(std::string_view("")), nullptr);
}

TEST(CodecTable, BestBackendIsHighwayWhereTheMachineHasVectors) {
  const std::set<std::string_view> references = {"raw", "tq_prod4", "tq_prod3", "tq_prod2", "gear"};
  for (std::string_view name : references) EXPECT_EQ(BestBackend(*FindCodec(name)).name, "scalar");
  for (const Codec& codec : AllCodecs()) {
    if (references.contains(codec.name)) continue;
    EXPECT_EQ(BestBackend(codec).name, SimdSupported() ? "highway" : "scalar") << codec.name;
  }
}

TEST(CodecTable, PlaneBytesAreThoseOfTheLayout) {
  const auto bytes = [](std::string_view name, const PlaneShape& shape) {
    return FindCodec(name)->plane_bytes(shape);
  };
  EXPECT_EQ(bytes("raw", Shape(128)), 64 * 128 * 2);
  EXPECT_EQ(bytes("raw", Shape(7, Role::kKey, DType::kF8E4M3, 3)), 21);
  EXPECT_EQ(bytes("int8", Shape(128)), 128 + 64 * 128);
  EXPECT_EQ(bytes("int8", Shape(5, Role::kKey, DType::kF32, 3)), 64);  // 16 + 15
  EXPECT_EQ(bytes("int4", Shape(128)), 128 + 64 * 64);                 // 4.125 bits
  EXPECT_EQ(bytes("int4", Shape(5, Role::kKey, DType::kF32, 3)), 64);  // 16 + 9
  EXPECT_EQ(bytes("kivi4", Shape(128)), 64 * 128 * 5 / 8);
  EXPECT_EQ(bytes("kivi4", Shape(128, Role::kValue)), 64 * 128 * 5 / 8);
  EXPECT_EQ(bytes("kivi2", Shape(128)), 64 * 128 * 3 / 8);
  EXPECT_EQ(bytes("kivi2", Shape(80, Role::kValue)), 64 * 3 * 4 + 64 * 20);  // 2.5 groups a row
  EXPECT_EQ(bytes("tq2.5", Shape(128)),
            64 * 2 + 64 * 12 + (64 * 2 + 64 * 24) + 64);  // 2.5 bits and the marks
  EXPECT_EQ(bytes("tq3.5", Shape(128)), 64 * 2 + 64 * 16 + (64 * 2 + 64 * 36) + 64);
  EXPECT_EQ(bytes("tq_prod4", Shape(128)), 64 * 4 + 64 * 64);  // 4.25 bits
  EXPECT_EQ(bytes("tq_prod2", Shape(128)), 64 * 4 + 64 * 32);
  EXPECT_EQ(bytes("olm4", Shape(128)), bytes("tq4", Shape(128)));
  EXPECT_EQ(bytes("olm3", Shape(80)), bytes("tq3", Shape(80)));
  EXPECT_EQ(bytes("osu2", Shape(128)), bytes("tq2", Shape(128)));
  EXPECT_EQ(bytes("oscar2", Shape(128)), 64 * 4 + 64 * 32);                  // 2.25 bits
  EXPECT_EQ(bytes("gear", Shape(128)), 64 * 48 + (64 + 128) * 4 + 128 * 8);  // 4.75 bits
  EXPECT_EQ(bytes("gear", Shape(128, Role::kValue)), 64 * 48 + (64 + 128) * 4 + 64 * 8);
  EXPECT_EQ(bytes("tq4", Shape(128)), 128 + 64 * 64);  // 4.125 bits
  EXPECT_EQ(bytes("tq3", Shape(128)), 128 + 64 * 48);
  EXPECT_EQ(bytes("tq2", Shape(128)), 128 + 64 * 32);
  EXPECT_EQ(bytes("tqm4", Shape(128)), 128 + 2 + 128 + 14 + 64 * 64 + 48);
  EXPECT_EQ(bytes("tqm2", Shape(64, Role::kKey, DType::kBf16, 1)), 128);  // 80 + 16
  EXPECT_EQ(bytes("tq4", Shape(64, Role::kKey, DType::kF32)), bytes("tq4", Shape(64)));
}

TEST(CodecTable, CodecsAcceptTheirShapesOnly) {
  const auto accepts = [](std::string_view name, const PlaneShape& shape) {
    return FindCodec(name)->accepts(shape);
  };
  for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    EXPECT_TRUE(accepts("tq4", Shape(64, Role::kValue, dtype)));
    EXPECT_TRUE(accepts("tqm4", Shape(576, Role::kKey, dtype)));
    EXPECT_TRUE(accepts("int8", Shape(13, Role::kValue, dtype)));
  }
  for (DType dtype :
       {DType::kF8E4M3, DType::kF8E5M2, DType::kInt8, DType::kNvfp4, DType::kOpaque}) {
    for (const Codec& codec : AllCodecs().subspan(1)) {
      EXPECT_FALSE(codec.accepts(Shape(64, Role::kKey, dtype))) << codec.name;
      EXPECT_FALSE(codec.accepts(Shape(64, Role::kValue, dtype))) << codec.name;
    }
    EXPECT_TRUE(accepts("raw", Shape(64, Role::kValue, dtype)));
  }
  EXPECT_TRUE(accepts("int4", Shape(13, Role::kValue, DType::kF16)));
  EXPECT_TRUE(accepts("kivi4", Shape(80, Role::kKey, DType::kBf16, 32)));
  EXPECT_FALSE(accepts("kivi4", Shape(80, Role::kKey, DType::kBf16, 33)));
  EXPECT_TRUE(accepts("kivi4", Shape(80, Role::kValue, DType::kBf16, 33)));
  EXPECT_FALSE(accepts("kivi2", Shape(72, Role::kValue)));
  EXPECT_FALSE(accepts("tq2.5", Shape(512)));  // no two sets with a Hadamard matrix
  EXPECT_FALSE(accepts("tq3.5", Shape(32)));
  EXPECT_FALSE(accepts("tq2", Shape(100)));
  EXPECT_FALSE(accepts("tq2", Shape(4)));
  EXPECT_FALSE(accepts("tq2", Shape(8192)));
  EXPECT_FALSE(accepts("tqm3", Shape(64, Role::kValue)));
  EXPECT_FALSE(accepts("int8", Shape(64, Role::kKey, DType::kBf16, 0)));
  EXPECT_FALSE(accepts("raw", Shape(0)));
}

TEST(CodecTable, CalibratedCodecsAcceptPlanesWithARotationOfTheirDimOnly) {
  const Rotation rotation = Rotation::Reflection(64, 1).value();
  for (std::string_view name : {"olm4", "olm3", "osu2", "oscar2"}) {
    const Codec& codec = *FindCodec(name);
    EXPECT_TRUE(codec.needs_rotation);
    PlaneShape shape = Shape(64);
    EXPECT_FALSE(codec.accepts(shape)) << name;
    EXPECT_EQ(EffectiveCodec(codec.id, shape), CodecId::kRaw) << name;
    shape.rotation = &rotation;
    EXPECT_TRUE(codec.accepts(shape)) << name;
    EXPECT_EQ(EffectiveCodec(codec.id, shape), codec.id) << name;
    shape.dim = 128;
    EXPECT_FALSE(codec.accepts(shape)) << name;
  }
}

TEST(CodecTable, EffectiveCodecFallsBackToRaw) {
  EXPECT_EQ(EffectiveCodec(CodecId::kTq4, Shape(128)), CodecId::kTq4);
  EXPECT_EQ(EffectiveCodec(CodecId::kTq4, Shape(100)), CodecId::kRaw);
  EXPECT_EQ(EffectiveCodec(CodecId::kTqm4, Shape(128, Role::kValue)), CodecId::kRaw);
  EXPECT_EQ(EffectiveCodec(CodecId::kInt8, Shape(128, Role::kKey, DType::kF8E4M3)), CodecId::kRaw);
  EXPECT_EQ(EffectiveCodec(static_cast<CodecId>(77), Shape(128)), CodecId::kRaw);
}

TEST(ParseCodecChoice, ReadsCodecsPairsAndPresets) {
  const auto parsed = [](std::string_view text) {
    const auto choice = ParseCodecChoice(text);
    EXPECT_TRUE(choice.ok()) << text;
    return choice.ok() ? *choice : CodecChoice{};
  };
  EXPECT_EQ(parsed("tq4").pair, (CodecPair{CodecId::kTq4, CodecId::kTq4}));
  EXPECT_FALSE(parsed("tq4").raw_first_block);
  EXPECT_EQ(parsed("k=tqm3,v=tq2").pair, (CodecPair{CodecId::kTqm3, CodecId::kTq2}));
  EXPECT_EQ(parsed("v=raw,k=int8").pair, (CodecPair{CodecId::kInt8, CodecId::kRaw}));
  EXPECT_EQ(parsed("lossless").pair, (CodecPair{CodecId::kRaw, CodecId::kRaw}));
  EXPECT_FALSE(parsed("lossless").raw_first_block);
  EXPECT_EQ(parsed("safe").pair, (CodecPair{CodecId::kTqm4, CodecId::kTq4}));
  EXPECT_TRUE(parsed("safe").raw_first_block);
  EXPECT_EQ(parsed("small").pair, (CodecPair{CodecId::kTqm4, CodecId::kTq3}));
  EXPECT_TRUE(parsed("small").raw_first_block);
  EXPECT_EQ(parsed("small").num_raw_last_tokens, 0);
  EXPECT_EQ(parsed("tiny").pair, (CodecPair{CodecId::kTqm3, CodecId::kTq2}));
  EXPECT_TRUE(parsed("tiny").raw_first_block);
  EXPECT_EQ(parsed("tiny").num_raw_last_tokens, 64);
}

TEST(ParseCodecChoice, ErrorsNameWhatIsWrongAndTheNearestRightName) {
  std::string names;
  for (const Codec& codec : AllCodecs()) {
    names += (names.empty() ? "" : ", ") + std::string(codec.name);
  }
  const std::string known_codecs = " (known: " + names + ")";
  const std::string known =
      " (known: " + names +
      ", a pair such as k=tqm4,v=tq4, or a preset: lossless, safe, small, tiny)";
  EXPECT_EQ(ErrorOf("saef"), "codec \"saef\" is not known; did you mean \"safe\"?" + known);
  EXPECT_EQ(ErrorOf("losless"),
            "codec \"losless\" is not known; did you mean \"lossless\"?" + known);
  EXPECT_EQ(ErrorOf("somethingelse"), "codec \"somethingelse\" is not known" + known);
  EXPECT_EQ(ErrorOf("k=tqm4,v=int9"),
            "codec \"int9\" is not known; did you mean \"int8\"?" + known_codecs);
  EXPECT_EQ(ErrorOf("tqm4"), "codec \"tqm4\" serves keys only, not values; for values use \"tq4\"");
  EXPECT_EQ(ErrorOf("k=tq4,v=tqm3"),
            "codec \"tqm3\" serves keys only, not values; for values use \"tq3\"");
  EXPECT_EQ(ErrorOf("k=tq4"), "codec choice \"k=tq4\" lacks v=CODEC, want k=CODEC,v=CODEC");
  EXPECT_EQ(ErrorOf("v=tq4"), "codec choice \"v=tq4\" lacks k=CODEC, want k=CODEC,v=CODEC");
  EXPECT_EQ(
      ErrorOf("k=tq4,k=tq3"),
      "codec choice \"k=tq4,k=tq3\" is not of the form k=CODEC,v=CODEC: \"k=tq3\" is given twice");
  EXPECT_EQ(ErrorOf("tq4,tq4"),
            "codec choice \"tq4,tq4\" is not of the form k=CODEC,v=CODEC: \"tq4\" is "
            "neither k=CODEC nor v=CODEC");
  EXPECT_NE(ErrorOf("k=safe,v=tq4"), "ok");  // a preset is no codec
  EXPECT_NE(ErrorOf(""), "ok");
  EXPECT_NE(ErrorOf("TQ4"), "ok");
  EXPECT_NE(ErrorOf("k=tq4,v=tq4,"), "ok");
}

// Which of `num_blocks` blocks stay raw: "r..r".
std::string RawBlocks(std::string_view preset, int num_blocks, int tokens_per_block) {
  const CodecChoice choice = ParseCodecChoice(preset).value();
  std::string text;
  for (int i = 0; i < num_blocks; ++i) {
    const CodecPair pair = choice.OfBlock(i, num_blocks, tokens_per_block);
    text += pair == CodecPair{} ? 'r' : '.';
    EXPECT_TRUE(pair == CodecPair{} || pair == choice.pair);
  }
  return text;
}

TEST(CodecChoice, PresetsKeepTheFirstBlockAndTinyTheLast64TokensRaw) {
  EXPECT_EQ(RawBlocks("tq4", 4, 64), "....");
  EXPECT_EQ(RawBlocks("safe", 4, 64), "r...");
  EXPECT_EQ(RawBlocks("tiny", 4, 64), "r..r");
  EXPECT_EQ(RawBlocks("tiny", 6, 32), "r...rr");
  EXPECT_EQ(RawBlocks("tiny", 3, 128), "r.r");
  EXPECT_EQ(RawBlocks("tiny", 1, 64), "r");
  EXPECT_EQ(RawBlocks("tiny", 4, 96), "r..r");
}

TEST(CodecPairName, IsReadBackByParse) {
  EXPECT_EQ(CodecPairName({CodecId::kTq4, CodecId::kTq4}), "tq4");
  EXPECT_EQ(CodecPairName({CodecId::kTqm4, CodecId::kTq4}), "k=tqm4,v=tq4");
  EXPECT_EQ(CodecPairName({static_cast<CodecId>(77), CodecId::kRaw}), "k=codec 77,v=raw");
  for (const Codec& k : AllCodecs()) {
    for (const Codec& v : AllCodecs()) {
      const CodecPair pair{k.id, v.id};
      const auto choice = ParseCodecChoice(CodecPairName(pair));
      if (v.name.substr(0, 3) == "tqm") {
        EXPECT_FALSE(choice.ok());
      } else {
        ASSERT_TRUE(choice.ok());
        EXPECT_EQ(choice->pair, pair);
      }
    }
  }
}

}  // namespace
}  // namespace kvstow
