// kvstow recommend: on the bundled KV, and on the command line.
#include "client/cli/recommend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/cli/commands.h"
#include "client/cli/plan_file.h"
#include "kernels/layout/planes.h"
#include "tests/client/run_cli.h"

namespace kvstow {
namespace {

using testing::CliResult;
using ::testing::HasSubstr;
using testing::RunKvstow;
using Json = nlohmann::json;

const char kFixture[] = KVSTOW_TEST_DATA "/smollm2_kv.safetensors";
const char kProbe[] = KVSTOW_TEST_DATA "/smollm2_kv_probe.safetensors";

// Measured once for all tests of this program.
class Recommend : public ::testing::Test {
 protected:
  static const CostTable& Table() {
    static const CostTable* const table = [] {
      const absl::StatusOr<KvFile> file = KvFile::Open(kFixture, {});
      EXPECT_TRUE(file.ok()) << file.status();
      const absl::StatusOr<Probe> probe = Probe::Open(kProbe, file->spec());
      EXPECT_TRUE(probe.ok()) << probe.status();
      auto* measured = new CostTable(file->spec(), {});
      EXPECT_TRUE(measured->Add(*file, *probe, nullptr).ok());
      return measured;
    }();
    return *table;
  }
};

TEST_F(Recommend, KeepsTheBudgetAndIsNoWorseThanAnyUniformPairWithinIt) {
  for (const double budget : {2.4, 2.8, 3.2, 3.6, 4.3, 6.0}) {
    const absl::StatusOr<Recommendation> best = Table().ForBudget(budget);
    ASSERT_TRUE(best.ok()) << best.status();
    EXPECT_LE(best->bits_per_value, budget);
    const absl::StatusOr<Recommendation> uniform = Table().BestUniform(budget);
    ASSERT_TRUE(uniform.ok()) << uniform.status();
    EXPECT_LE(best->cost, uniform->cost) << budget;
  }
}

// At the bits of the presets a plan by layers is better, not only no worse.
TEST_F(Recommend, BeatsThePresetsAtTheirOwnBits) {
  for (const char* preset : {"safe", "small", "tiny"}) {
    const CodecPair pair = ParseCodecChoice(preset)->pair;
    const absl::StatusOr<Recommendation> uniform = Table().Uniform(pair);
    ASSERT_TRUE(uniform.ok()) << uniform.status();
    const absl::StatusOr<Recommendation> best = Table().ForBudget(uniform->bits_per_value);
    ASSERT_TRUE(best.ok()) << best.status();
    EXPECT_LE(best->bits_per_value, uniform->bits_per_value) << preset;
    EXPECT_LT(best->cost, 0.95 * uniform->cost) << preset;
  }
}

TEST_F(Recommend, MoreBitsAreNeverWorseAndRawIsExact) {
  double last = 1e9;
  for (double budget = 2.4; budget <= 16; budget += 0.4) {
    const absl::StatusOr<Recommendation> best = Table().ForBudget(budget);
    ASSERT_TRUE(best.ok()) << best.status();
    EXPECT_LE(best->cost, last) << budget;
    last = best->cost;
  }
  const absl::StatusOr<Recommendation> raw = Table().ForBudget(16);
  EXPECT_NEAR(raw->cost, 0, 1e-12);
  EXPECT_NEAR(raw->bits_per_value, 16, 1e-9);
}

TEST_F(Recommend, KlIsKeptByTheSmallestPlanThatKeepsIt) {
  for (const double max_kl : {0.001, 0.01, 0.05}) {
    const absl::StatusOr<Recommendation> best = Table().ForKl(max_kl);
    ASSERT_TRUE(best.ok()) << best.status();
    EXPECT_LE(best->cost, max_kl);
    EXPECT_LE(best->attention_kl, best->cost);
    // A unit less does not keep it.
    const absl::StatusOr<Recommendation> smaller = Table().ForBudget(best->bits_per_value - 0.001);
    ASSERT_TRUE(smaller.ok()) << smaller.status();
    EXPECT_GT(smaller->cost, max_kl);
  }
  EXPECT_NEAR(Table().ForKl(0)->cost, 0, 1e-12) << "raw where nothing may be lost";
}

// The figures are those of eval: a uniform pair, measured there by other code.
TEST_F(Recommend, AttentionKlIsThatOfEval) {
  const KvFile file = *KvFile::Open(kFixture, {});
  const Probe probe = *Probe::Open(kProbe, file.spec());
  const BlockLayout layout = *BlockLayout::Create(file.spec());
  const int64_t num_tokens = file.num_full_blocks() * layout.tokens_per_block();
  const KvBuffer decoded(file.spec(), num_tokens);
  const CodecPair pair = {CodecId::kTqm4, CodecId::kTq3};
  for (int32_t i = 0; i < layout.num_planes(); ++i) {
    const PlaneInfo& plane = layout.plane(i);
    const bool is_key = plane.role == Role::kKey;
    const PlaneShape shape = {layout.tokens_per_block(), plane.dim, plane.role, layout.dtype()};
    const Codec& codec = *FindCodec(pair.of(plane.role));
    std::vector<std::byte> rows(plane.row_bytes), unit(codec.plane_bytes(shape));
    for (int64_t block = 0; block < file.num_full_blocks(); ++block) {
      const int64_t first = block * layout.tokens_per_block();
      const LayerRows& from = file.layers()[plane.layer_idx];
      const LayerRows& to = decoded.layers()[plane.layer_idx];
      GatherPlane(layout, i, is_key ? from.k : from.v, first, rows.data());
      BestBackend(codec).encode(shape, rows.data(), unit.data());
      BestBackend(codec).decode(shape, unit.data(), rows.data());
      ScatterPlane(layout, i, rows.data(), first, is_key ? to.k : to.v);
    }
  }
  const Quality quality =
      JudgeQuality({file.spec(), file.layers(), num_tokens}, decoded.layers(), probe).total;
  EXPECT_NEAR(Table().Uniform(pair)->attention_kl, quality.attention_kl,
              1e-9 + 1e-6 * quality.attention_kl);
}

TEST_F(Recommend, PlanFileReadsBackAsThePlan) {
  const Recommendation best = *Table().ForBudget(3.2);
  const std::string text = PlanFileText(KvFile::Open(kFixture, {})->spec(), best);
  EXPECT_EQ(*CodecPlan::Parse(text), best.plan);
  EXPECT_THAT(text, HasSubstr("bits per value, attention KL "));
}

TEST_F(Recommend, ImpossibleBudgetsSayWhatIsPossible) {
  const absl::Status status = Table().ForBudget(1.5).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("1.5 bits per value, the smallest plan"));
}

TEST_F(Recommend, SampleOfAnotherModelIsRefused) {
  const absl::StatusOr<KvFile> file = KvFile::Open(kFixture, {});
  KvFileOverrides overrides;
  overrides.model = "another";
  const absl::StatusOr<KvFile> other = KvFile::Open(kFixture, overrides);
  const absl::StatusOr<Probe> probe = Probe::Open(kProbe, file->spec());
  CostTable table(file->spec(), {});
  EXPECT_THAT(table.Add(*other, *probe, nullptr).message(), HasSubstr("is of another model"));
}

TEST(RecommendCommand, PrintsAPlanAndWritesIt) {
  char name[] = "/tmp/kvstow_recommend_XXXXXX";
  const std::string folder = mkdtemp(name);
  const CliResult run = RunKvstow({"recommend", kFixture, "--probe", kProbe, "--budget", "3.2bpv",
                                   "--k-codecs=raw,tqm4,tqm3", "--v-codecs=tq4,tq2", "--json", "-o",
                                   folder + "/plan.txt"});
  ASSERT_EQ(run.status, 0) << run.err;
  const Json result = Json::parse(run.out);
  EXPECT_LE(result["bits_per_value"], 3.2);
  EXPECT_EQ(result["layers"].size(), 30u);
  EXPECT_LE(result["cost"], result["best_uniform"]["cost"]);
  const absl::StatusOr<CodecPlan> plan = ReadPlanFile(folder + "/plan.txt");
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->Text(), result["plan"]);
  std::filesystem::remove_all(folder);
}

TEST(RecommendCommand, BadInputIsSaid) {
  const auto refusal = [](std::vector<std::string> words, int status = 2) {
    words.insert(words.begin(), "recommend");
    const CliResult run = RunKvstow(words);
    EXPECT_EQ(run.status, status) << run.err;
    return run.err;
  };
  const std::string probe = std::string("--probe=") + kProbe;
  EXPECT_THAT(refusal({kFixture, probe}), HasSubstr("want --budget BITS or --max-kl KL"));
  EXPECT_THAT(refusal({kFixture, probe, "--budget=3", "--max-kl=1"}), HasSubstr("one of them"));
  EXPECT_THAT(refusal({kFixture, "--max-ppl=1%"}),
              HasSubstr("python3 -m kvstow.eval.recommend MODEL --docs FILES --max-ppl 1%"));
  EXPECT_THAT(refusal({kFixture, probe, "--budget=x"}), HasSubstr("--budget is \"x\", want"));
  EXPECT_THAT(refusal({kFixture, probe, "--max-kl=-1"}), HasSubstr("--max-kl is \"-1\", want"));
  EXPECT_THAT(refusal({kFixture, "--budget=3"}), HasSubstr("--probe FILE is missing"));
  EXPECT_THAT(refusal({kFixture, kFixture, probe, "--budget=3"}), HasSubstr("1 files for 2 of KV"));
  EXPECT_THAT(refusal({kFixture, probe, "--budget=3", "--k-codecs=tqm9"}),
              HasSubstr("did you mean \"tqm4\"?"));
  EXPECT_THAT(refusal({kFixture, probe, "--budget=3", "--v-codecs=tqm4"}), HasSubstr("keys only"));
  EXPECT_THAT(refusal({kFixture, probe, "--budget=3", "--k-codecs=olm4"}),
              HasSubstr("needs a calibration"));
  EXPECT_THAT(refusal({"/no/such/file", probe, "--budget=3"}, 1), HasSubstr("/no/such/file"));
}

}  // namespace
}  // namespace kvstow
