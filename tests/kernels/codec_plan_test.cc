#include "kernels/codec/codec_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace kvstow {
namespace {

using ::testing::HasSubstr;

std::string Refusal(std::string_view text) {
  const absl::StatusOr<CodecPlan> plan = CodecPlan::Parse(text);
  if (plan.ok()) return "accepted";
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(plan.status().message());
}

std::string Canonical(std::string_view text) {
  const absl::StatusOr<CodecPlan> plan = CodecPlan::Parse(text);
  return plan.ok() ? plan->Text() : plan.status().ToString();
}

TEST(CodecPlan, ReadsItemsRangesFilesAndComments) {
  const CodecPlan plan =
      *CodecPlan::Parse("# a file\nlayer0.k=raw  # biased\n\n layer2-4=int8, layer7.v=tq2\n");
  EXPECT_EQ(plan.Find(0, Role::kKey), CodecId::kRaw);
  EXPECT_EQ(plan.Find(0, Role::kValue), std::nullopt);
  EXPECT_EQ(plan.Find(3, Role::kKey), CodecId::kInt8);
  EXPECT_EQ(plan.Find(4, Role::kValue), CodecId::kInt8);
  EXPECT_EQ(plan.Find(7, Role::kValue), CodecId::kTq2);
  EXPECT_EQ(plan.Find(5, Role::kKey), std::nullopt);
}

TEST(CodecPlan, TextIsCanonicalAndReadsBack) {
  EXPECT_EQ(Canonical("layer1.v=tq4,layer1.k=tqm4,layer0.k=tqm4"), "layer0-1.k=tqm4,layer1.v=tq4");
  EXPECT_EQ(Canonical("layer5=raw"), "layer5.k=raw,layer5.v=raw");
  EXPECT_EQ(Canonical("layer0.k=raw,layer1.k=int8,layer2.k=raw"),
            "layer0.k=raw,layer1.k=int8,layer2.k=raw");
  EXPECT_EQ(Canonical(" \n# nothing\n"), "");
  const CodecPlan plan = *CodecPlan::Parse("layer0-3.k=raw,layer2.v=tq3,layer1023=int4");
  EXPECT_EQ(*CodecPlan::Parse(plan.Text()), plan);
}

TEST(CodecPlan, IdFollowsTheMeaningAndIsNeverZero) {
  EXPECT_EQ(CodecPlan::Parse("layer1.k=raw, layer0.k=raw")->Id(),
            CodecPlan::Parse("layer0-1.k=raw")->Id());
  EXPECT_NE(CodecPlan::Parse("layer0.k=raw")->Id(), CodecPlan::Parse("layer0.v=raw")->Id());
  EXPECT_FALSE(CodecPlan().Id().is_zero());
}

TEST(CodecPlan, ChangesWhatIsAskedForButNotRaw) {
  const CodecPlan plan = *CodecPlan::Parse("layer0.k=raw,layer1.k=int8");
  EXPECT_EQ(plan.CodecFor(0, Role::kKey, CodecId::kTqm4), CodecId::kRaw);
  EXPECT_EQ(plan.CodecFor(0, Role::kValue, CodecId::kTq4), CodecId::kTq4);
  EXPECT_EQ(plan.CodecFor(1, Role::kKey, CodecId::kRaw), CodecId::kRaw);
  const CodecPair pair = plan.PairFor(1, {.k = CodecId::kTqm4, .v = CodecId::kTq4});
  EXPECT_EQ(pair, (CodecPair{.k = CodecId::kInt8, .v = CodecId::kTq4}));
}

TEST(CodecPlan, OverTakesItsOwnCodecsAndLeavesRawBelow) {
  const CodecPlan guard = *CodecPlan::Parse("layer0.k=raw,layer1.k=int8");
  const CodecPlan below = *CodecPlan::Parse("layer0.k=tqm3,layer1.k=raw,layer2.k=tqm2");
  EXPECT_EQ(guard.Over(below).Text(), "layer0-1.k=raw,layer2.k=tqm2");
}

TEST(CodecPlan, RefusalsNameTheItemAndWhatIsWrong) {
  EXPECT_THAT(Refusal("layer0.k=tqm5"), HasSubstr("did you mean \"tqm4\"?"));
  EXPECT_THAT(Refusal("layer0.v=tqm4"), HasSubstr("serves keys only"));
  EXPECT_THAT(Refusal("layer0=tqm4"), HasSubstr("serves keys only"));
  EXPECT_THAT(Refusal("layer0.k=olm4"), HasSubstr("needs a calibration"));
  EXPECT_THAT(Refusal("layer0=safe"), HasSubstr("is a preset, want one codec"));
  EXPECT_THAT(Refusal("layer0.k=safe"), HasSubstr("codec \"safe\" is not known"));
  EXPECT_THAT(Refusal("layer0.q=raw"), HasSubstr("\"0.q\" is no layer"));
  EXPECT_THAT(Refusal("layer3-1=raw"), HasSubstr("ends before it starts"));
  EXPECT_THAT(Refusal("layer1024=raw"), HasSubstr("is no layer of 0 to 1023"));
  EXPECT_THAT(Refusal("layer-1=raw"), HasSubstr("is no layer"));
  EXPECT_THAT(Refusal("layer1=raw,layer0-2.k=int8"), HasSubstr("keys of layer 1 are given twice"));
  EXPECT_THAT(Refusal("k=raw"), HasSubstr("want layerN=CODEC"));
  EXPECT_THAT(Refusal(std::string(CodecPlan::kMaxTextBytes + 1, ' ')), HasSubstr("at most"));
}

TEST(CodecPlan, CheckFitsNamesLayersAndRowsThatTheModelDoesNotHave) {
  ModelSpec spec;
  spec.name = "m";
  spec.weights = "w";
  spec.groups = {{.first_layer = 0,
                  .num_layers = 2,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 1,
                  .k_dim = 64,
                  .v_dim = 72}};
  const BlockLayout layout = *BlockLayout::Create(spec);
  EXPECT_TRUE(CodecPlan::Parse("layer0-1.k=tqm4,layer1.v=int8")->CheckFits(layout).ok());
  EXPECT_THAT(CodecPlan::Parse("layer2=raw")->CheckFits(layout).message(),
              HasSubstr("layer 2, the model has layers 0 to 1"));
  EXPECT_THAT(CodecPlan::Parse("layer1.v=tq4")->CheckFits(layout).message(),
              HasSubstr("does not take rows of 72 values of bf16"));
}

TEST(SplitLayers, TakesTheLayersOutOfAChoice) {
  const LayeredText words = *SplitLayers("k=tqm4,v=tq3,layer0=raw,layer3.k=int8");
  EXPECT_EQ(words.choice, "k=tqm4,v=tq3");
  EXPECT_EQ(words.layers.Text(), "layer0.k=raw,layer3.k=int8,layer0.v=raw");
  EXPECT_EQ(SplitLayers("safe")->choice, "safe");
  EXPECT_TRUE(SplitLayers("safe")->layers.empty());
  EXPECT_FALSE(SplitLayers("safe,layer0=what").ok());
}

}  // namespace
}  // namespace kvstow
