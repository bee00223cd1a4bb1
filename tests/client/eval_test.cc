// The mathematics of `kvstow eval` on cases small enough for pencil and paper.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "client/cli/eval_bounds.h"
#include "client/cli/eval_math.h"
#include "client/cli/eval_page.h"
#include "client/cli/eval_report.h"
#include "client/cli/kv_file.h"

namespace kvstow {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// One layer, one KV head, two tokens, dim 4: so 1/sqrt(dim) = 1/2.
ModelSpec SmallSpec(int32_t num_kv_heads = 1) {
  ModelSpec spec;
  spec.name = "m";
  spec.weights = "w";
  spec.kv_dtype = DType::kF32;
  spec.groups = {{0, 1, LayerKind::kFull, num_kv_heads, 4, 4}};
  return spec;
}

void Set(const KvBuffer& buffer, Role role, const std::vector<float>& values) {
  const RowsView& view = role == Role::kKey ? buffer.layers()[0].k : buffer.layers()[0].v;
  std::memcpy(view.data, values.data(), values.size() * sizeof(float));
}

TEST(KlOfLogits, IsZeroForEqualDistributions) {
  const std::vector<double> a = {0.5, -1, 3};
  const std::vector<double> shifted = {100.5, 99, 103};  // the same softmax
  EXPECT_NEAR(KlOfLogits(a, a), 0, 1e-15);
  EXPECT_NEAR(KlOfLogits(a, shifted), 0, 1e-12);
}

TEST(KlOfLogits, AgreesWithAHandComputedCase) {
  // p = (3/4, 1/4), q = (1/2, 1/2): KL(p || q) = 3/4 ln 3/2 + 1/4 ln 1/2.
  const std::vector<double> p = {std::log(3.0), 0};
  const std::vector<double> q = {7, 7};
  EXPECT_NEAR(KlOfLogits(p, q), 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-12);
  // The other direction is another number: 1/2 ln 2/3 + 1/2 ln 2.
  EXPECT_NEAR(KlOfLogits(q, p), 0.5 * std::log(2.0 / 3) + 0.5 * std::log(2.0), 1e-12);
}

TEST(KlOfLogits, StandsLargeLogits) {
  const std::vector<double> a = {1e4, 0};
  const std::vector<double> b = {0, 1e4};
  EXPECT_NEAR(KlOfLogits(a, b), 1e4, 1e-6);
}

TEST(Softmax, SumsToOne) {
  std::vector<double> logits = {std::log(3.0), 0};
  Softmax(absl::MakeSpan(logits));
  EXPECT_NEAR(logits[0], 0.75, 1e-12);
  EXPECT_NEAR(logits[1], 0.25, 1e-12);
}

TEST(JudgeQuality, GivesZerosForEqualBytes) {
  const ModelSpec spec = SmallSpec();
  const KvBuffer exact(spec, 2);
  Set(exact, Role::kKey, {1, 2, 3, 4, 5, 6, 7, 8});
  Set(exact, Role::kValue, {1, 0, 0, 0, 0, 1, 0, std::numeric_limits<float>::quiet_NaN()});
  const Probe probe{1, 1, 4, {{1, 1, 1, 1}}};
  const Quality quality = JudgeQuality({spec, exact.layers(), 2}, exact.layers(), probe).total;
  EXPECT_EQ(quality.k_error, 0);
  EXPECT_EQ(quality.v_error, 0);  // a NaN that came back as it was is no error
  EXPECT_NEAR(quality.attention_kl, 0, 1e-15);
}

TEST(JudgeQuality, AgreesWithAHandComputedCaseOfTwoKeys) {
  const ModelSpec spec = SmallSpec();
  const KvBuffer exact(spec, 2);
  const KvBuffer decoded(spec, 2);
  // Query (2,0,0,0) over sqrt(4): the logit is the first value of the key. ln 3 and 0: p = 3/4,
  // 1/4.
  const float ln3 = std::log(3.0f);
  Set(exact, Role::kKey, {ln3, 0, 0, 0, 0, 0, 0, 0});
  Set(exact, Role::kValue, {1, 0, 0, 0, 0, 1, 0, 0});
  // Decoded: the first key is lost, so q = 1/2, 1/2; one value is doubled.
  Set(decoded, Role::kKey, {0, 0, 0, 0, 0, 0, 0, 0});
  Set(decoded, Role::kValue, {2, 0, 0, 0, 0, 1, 0, 0});
  const Probe probe{1, 1, 4, {{2, 0, 0, 0}}};
  const Quality quality = JudgeQuality({spec, exact.layers(), 2}, decoded.layers(), probe).total;
  EXPECT_NEAR(quality.k_error, 1, 1e-12);        // all of K's energy is gone
  EXPECT_NEAR(quality.v_error, 1.0 / 2, 1e-12);  // error 1 of energy 1 + 1
  EXPECT_NEAR(quality.attention_kl, 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-6);
  // Outputs (3/4, 1/4) and (1, 1/2): (1/16 + 1/16) / (9/16 + 1/16) = 2/10.
  EXPECT_NEAR(quality.output_error, 0.2, 1e-6);
}

TEST(JudgeQuality, QueryHeadsReadTheirOwnKvHead) {
  const ModelSpec spec = SmallSpec(/*num_kv_heads=*/2);
  const KvBuffer exact(spec, 2);
  const KvBuffer decoded(spec, 2);
  // [token][head][dim]; only KV head 1 is changed.
  Set(exact, Role::kKey, {1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  Set(decoded, Role::kKey, {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0});
  const auto judge = [&](const std::vector<float>& queries) {
    const Probe probe{1, 4, 4, {queries}};
    return JudgeQuality({spec, exact.layers(), 2}, decoded.layers(), probe);
  };
  // Four query heads, two to a KV head. Zero queries see no difference.
  std::vector<float> first_pair(16, 0);
  first_pair[0] = first_pair[4] = 2;
  std::vector<float> third(16, 0);
  third[8] = 2;
  EXPECT_NEAR(judge(first_pair).total.attention_kl, 0, 1e-12);
  const QualityMap map = judge(third);
  EXPECT_GT(map.total.attention_kl, 0.01);
  // The map says where: all of it in head 1, of which two query heads are the half of four.
  EXPECT_NEAR(map.at(0, 0).attention_kl, 0, 1e-12);
  EXPECT_NEAR(map.at(0, 1).attention_kl, 2 * map.total.attention_kl, 1e-12);
  EXPECT_EQ(map.at(0, 0).k_error, 0);
  EXPECT_GT(map.at(0, 1).k_error, 0);
}

TEST(Probe, OpensTheFixtureAndChecksItAgainstTheModel) {
  const auto file = KvFile::Open(KVSTOW_TEST_DATA "/smollm2_kv.safetensors", {});
  ASSERT_TRUE(file.ok());
  const std::string path = KVSTOW_TEST_DATA "/smollm2_kv_probe.safetensors";
  const auto probe = Probe::Open(path, file->spec());
  ASSERT_TRUE(probe.ok()) << probe.status();
  EXPECT_EQ(probe->num_tokens, 16);
  EXPECT_EQ(probe->num_q_heads, 9);
  EXPECT_EQ(probe->layers.size(), 30u);
  ModelSpec other = file->spec();
  other.groups[0].num_kv_heads = 4;
  EXPECT_THAT(std::string(Probe::Open(path, other).status().message()),
              HasSubstr("a multiple of 4"));
  other = file->spec();
  other.groups[0].num_layers = 31;
  EXPECT_THAT(std::string(Probe::Open(path, other).status().message()), HasSubstr("q.30"));
}

TEST(ToFloats, KnowsEachFloatType) {
  const uint16_t bits[] = {0x3fc0, 0x3e00};  // 1.5 as bf16, as f16
  float value = 0;
  ToFloats(DType::kBf16, reinterpret_cast<const std::byte*>(&bits[0]), 1, &value);
  EXPECT_EQ(value, 1.5f);
  ToFloats(DType::kF16, reinterpret_cast<const std::byte*>(&bits[1]), 1, &value);
  EXPECT_EQ(value, 1.5f);
}

TEST(BrokenBounds, NamesFoundAndAllowed) {
  const QualityBound* raw = FindQualityBound("raw");
  ASSERT_NE(raw, nullptr);
  EXPECT_TRUE(BrokenBounds(*raw, {}).empty());
  const std::vector<std::string> broken = BrokenBounds(*raw, {.v_error = 1e-9});
  ASSERT_EQ(broken.size(), 1u);
  EXPECT_THAT(broken[0], HasSubstr("error of V is 1e-09, allowed 0"));
  // What is not a number is no success.
  EXPECT_EQ(BrokenBounds(*raw, {.attention_kl = std::nan("")}).size(), 1u);
  EXPECT_EQ(FindQualityBound("no such codec"), nullptr);
}

// Two layers of one KV head; the second is much worse.
EvalReport SmallReport() {
  const Quality good{.k_error = 0.01, .v_error = 0.02, .attention_kl = 1e-4, .output_error = 1e-3};
  const Quality bad{.k_error = 0.5, .v_error = 0.02, .attention_kl = 1e-2, .output_error = 1e-1};
  JudgedCodec judged{.codec = "k=tqm4,v=tq4", .bits_per_value = 4.25};
  judged.quality = {.num_layers = 2, .num_heads = 1, .cells = {good, bad}, .total = bad};
  judged.k_bits = {4.5, 4.25};
  judged.v_bits = {4.25, 4.0};
  return {.model = "a <model>", .num_tokens = 128, .num_queries = 16, .codecs = {judged}};
}

TEST(EvalCsv, HasALineForAllAndOneForEachLayerAndHead) {
  EXPECT_EQ(EvalCsv(SmallReport()),
            "codec,layer,kv_head,k_bits,v_bits,k_error,v_error,attention_kl,output_error\n"
            "\"k=tqm4,v=tq4\",all,all,4.375,4.125,0.5,0.02,0.01,0.1\n"
            "\"k=tqm4,v=tq4\",0,0,4.5,4.25,0.01,0.02,0.0001,0.001\n"
            "\"k=tqm4,v=tq4\",1,0,4.25,4,0.5,0.02,0.01,0.1\n");
}

TEST(EvalPage, ShowsRatesAndAMapAndLoadsNothing) {
  const std::string page = EvalPage(SmallReport());
  EXPECT_THAT(page, HasSubstr("a &lt;model&gt;"));
  EXPECT_THAT(page, HasSubstr("<title>k=tqm4,v=tq4: 4.250 bits, KL 0.01</title>"));
  // One scale from 1e-4 to 1e-2: the good layer is empty, the bad one full.
  EXPECT_THAT(page, HasSubstr("fill-opacity=\"0.00\"><title>layer 0, head 0: KL 0.0001"));
  EXPECT_THAT(page, HasSubstr("fill-opacity=\"1.00\"><title>layer 1, head 0: KL 0.01"));
  EXPECT_THAT(page, Not(HasSubstr("http")));
  EXPECT_THAT(page, Not(HasSubstr("src=")));
}

TEST(EvalPage, StandsACodecWithoutLoss) {
  EvalReport report = SmallReport();
  report.codecs[0].quality.total = {};
  report.codecs[0].quality.cells = {{}, {}};
  EXPECT_THAT(EvalPage(report), Not(HasSubstr("nan")));
}

TEST(WriteTextFile, NamesAFileThatCannotBeWritten) {
  const absl::Status status = WriteTextFile("/nowhere/at/all.csv", "text");
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nowhere/at/all.csv: cannot be written"));
}

}  // namespace
}  // namespace kvstow
