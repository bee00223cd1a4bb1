// Models whose keys are biased in some layers, through the real programs: the guard's plan, what it
// does to attention, how it is shown and changed.
#include <cstring>
#include <nlohmann/json.hpp>

#include "client/cli/eval_math.h"
#include "tests/e2e/store_fixture.h"
#include "tests/testing/biased_kv.h"

namespace kvstow::testing {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr int kBlocks = 4;

ModelSpec BiasedModel() {
  ModelSpec spec = SmallModel();
  spec.name = "biased-keys";
  spec.groups[0].num_layers = 8;
  return spec;
}

BiasedKv MakeKv(bool has_bias) {
  return BiasedKv({.num_tokens = 64 * kBlocks,
                   .biased_layers = has_bias ? std::vector<int>{0, 7} : std::vector<int>{}});
}

// As the engine holds it.
KvData DataOf(const BiasedKv& kv, uint64_t seed) {
  KvData data(BiasedModel(), seed, kBlocks);
  const int heads = kv.options().num_heads;
  const int64_t row_bytes = int64_t{2} * kv.options().dim;
  for (int layer = 0; layer < kv.options().num_layers; ++layer) {
    for (int head = 0; head < heads; ++head) {
      for (const Role role : {Role::kKey, Role::kValue}) {
        std::vector<std::byte>& to = role == Role::kKey ? data.k(layer) : data.v(layer);
        const auto rows = kv.PlaneRows(layer, role, head, 0, kv.options().num_tokens);
        for (int64_t t = 0; t < kv.options().num_tokens; ++t) {
          std::memcpy(&to[(t * heads + head) * row_bytes], &rows[t * row_bytes], row_bytes);
        }
      }
    }
  }
  return data;
}

Probe ProbeOf(const BiasedKv& kv) {
  Probe probe{.num_tokens = BiasedKv::kNumQueries,
              .num_q_heads = kv.options().num_heads,
              .head_dim = kv.options().dim};
  for (int layer = 0; layer < kv.options().num_layers; ++layer) {
    std::vector<float> rows;
    for (int t = 0; t < BiasedKv::kNumQueries; ++t) {
      for (int head = 0; head < probe.num_q_heads; ++head) {
        const auto first = kv.Queries(layer, head).begin() + t * probe.head_dim;
        rows.insert(rows.end(), first, first + probe.head_dim);
      }
    }
    probe.layers.push_back(std::move(rows));
  }
  return probe;
}

class Plans : public RunningDaemon {
 protected:
  // Puts the data as a conversation of its own and returns what a reader gets.
  KvData ThroughTheService(const KvData& data, const char* codec, CompressAt compress_at) {
    const std::vector<LayerRows> layers = data.layers();
    const absl::StatusOr<PutSummary> put =
        client_->Put(model_, {.tokens = data.tokens(),
                              .layers = layers,
                              .codec = ParseCodecChoice(codec).value(),
                              .compress_at = compress_at});
    EXPECT_TRUE(put.ok()) << put.status();
    EXPECT_EQ(put->num_stored, kBlocks) << put->first_refusal;
    KvData got = KvData::Empty(model_.spec, kBlocks);
    const std::vector<LayerRows> to = got.layers();
    const absl::StatusOr<GetSummary> summary = client_->Get(model_, put->keys, to);
    EXPECT_TRUE(summary.ok()) << summary.status();
    EXPECT_EQ(summary->num_leading, kBlocks);
    return got;
  }

  double AttentionKl(const BiasedKv& kv, const char* codec, CompressAt compress_at, uint64_t seed) {
    const KvData data = DataOf(kv, seed);
    const KvData got = ThroughTheService(data, codec, compress_at);
    const std::vector<LayerRows> exact = data.layers();
    const std::vector<LayerRows> decoded = got.layers();
    return JudgeQuality({model_.spec, exact, int64_t{64} * kBlocks}, decoded, ProbeOf(kv))
        .total.attention_kl;
  }

  Json StatJson() {
    const CommandResult stat =
        RunCommand({CliBinary(), "stat", "--json", "--target=" + daemon_->target()});
    EXPECT_EQ(stat.status, 0) << stat.output;
    return Json::parse(stat.output);
  }

  CommandResult Kvstow(std::vector<std::string> words) {
    words.insert(words.begin(), CliBinary());
    words.push_back("--target=" + daemon_->target());
    return RunCommand(words);
  }
};

TEST_F(Plans, SafeIsSafeForBiasedKeysAndWouldNotBeWithoutTheGuard) {
  const BiasedKv biased = MakeKv(true), clean = MakeKv(false);
  StartDaemon({}, BiasedModel());
  const double of_clean = AttentionKl(clean, "safe", CompressAt::kService, 1);
  EXPECT_EQ(StatJson()["models"][0]["plan"]["codecs"], "") << "no false alarm";
  daemon_->Terminate();
  for (const CompressAt where : {CompressAt::kService, CompressAt::kWorker}) {
    StartDaemon({}, BiasedModel());
    EXPECT_LE(AttentionKl(biased, "safe", where, 2), 2 * of_clean);
    EXPECT_EQ(StatJson()["models"][0]["plan"]["codecs"], "layer0.k=raw,layer7.k=raw");
    // Codecs without a raw first block: nothing but encoded units, where the worker encodes.
    EXPECT_LE(AttentionKl(biased, "k=tqm4,v=tq4", where, 3), 3 * of_clean);
    daemon_->Terminate();
  }
  StartDaemon({.extra_flags = {"--guard.mode=off"}}, BiasedModel());
  EXPECT_GT(AttentionKl(biased, "safe", CompressAt::kService, 4), 20 * of_clean);
}

TEST_F(Plans, WorkerThatNeverSendsRawRowsGetsThePlanByItsFirstBlocks) {
  StartDaemon({}, BiasedModel());
  const KvData data = DataOf(MakeKv(true), 5);
  const KvData got = ThroughTheService(data, "k=tqm4,v=tq4", CompressAt::kWorker);
  EXPECT_EQ(
      std::memcmp(got.layers()[0].k.data, data.layers()[0].k.data, size_t{64} * kBlocks * 2 * 128),
      0)
      << "the biased keys came back bit for bit";
  EXPECT_GT(Counter("plan_refusals"), 0u);
}

TEST_F(Plans, LayerWiseUploadIsRefusedOnceAndThenGuarded) {
  StartDaemon({}, BiasedModel());
  const KvData data = DataOf(MakeKv(true), 10);
  const std::vector<LayerRows> layers = data.layers();
  const PutRequest request{.tokens = data.tokens(), .codec = ParseCodecChoice("safe").value()};
  const auto put = [&] {
    auto session = client_->StartPut(model_, request).value();
    for (int i = 0; i < model_.layout->num_layers(); ++i) {
      EXPECT_TRUE(session->PutLayer(i, layers[i]).ok());
    }
    return session->Finish().value();
  };
  const PutSummary first = put();
  EXPECT_EQ(first.num_stored, 1) << "the raw first block";
  EXPECT_EQ(first.num_refused, kBlocks - 1);
  EXPECT_EQ(first.first_refusal.code(), absl::StatusCode::kAborted);
  const PutSummary second = put();
  EXPECT_EQ(second.num_stored, kBlocks - 1);
  EXPECT_EQ(second.num_existing, 1);
}

TEST_F(Plans, PlanIsTheSameAfterKillAndRestart) {
  StartDaemon({.nvme = "64MiB"}, BiasedModel());
  ThroughTheService(DataOf(MakeKv(true), 6), "safe", CompressAt::kService);
  const Json before = StatJson()["models"];
  daemon_->Kill();
  Restart();
  EXPECT_EQ(StatJson()["models"], before);
  EXPECT_EQ(before[0]["plan"]["derived"], true);
  EXPECT_EQ(before[0]["plan"]["reasons"].size(), 2u);
}

TEST_F(Plans, StatShowsThePlanAndThePlanCommandChangesIt) {
  StartDaemon({}, BiasedModel());
  EXPECT_THAT(Kvstow({"stat"}).output, HasSubstr("no plan yet"));
  ThroughTheService(DataOf(MakeKv(true), 7), "safe", CompressAt::kService);
  EXPECT_THAT(Kvstow({"stat"}).output, HasSubstr("layer0.k=raw,layer7.k=raw (derived)"));
  EXPECT_THAT(Kvstow({"plan"}).output, HasSubstr("raw      layer 0 keys: 4 bits would leave"));
  const CommandResult set = Kvstow({"plan", "biased-keys", "--to", "layer0-7=int8"});
  EXPECT_EQ(set.status, 0) << set.output;
  EXPECT_THAT(set.output, HasSubstr("layer0-7.k=int8,layer0-7.v=int8 (set)"));
  const KvData data = DataOf(MakeKv(true), 8);
  const KvData got = ThroughTheService(data, "k=tqm4,v=tq4", CompressAt::kService);
  const KvData int8 = data.AfterCodec({CodecId::kInt8, CodecId::kInt8});
  for (int block = 0; block < kBlocks; ++block) EXPECT_TRUE(got.EqualsBlock(int8, block));
  EXPECT_THAT(Kvstow({"plan", "biased-keys", "--derive"}).output, HasSubstr("no plan yet"));
}

TEST_F(Plans, PlanCommandSaysWhatIsWrong) {
  StartDaemon({}, BiasedModel());
  const CommandResult item = Kvstow({"plan", "biased-keys", "--to", "layer9=raw"});
  EXPECT_EQ(item.status, 1);
  EXPECT_THAT(item.output, HasSubstr("layer 9, the model has layers 0 to 7"));
  EXPECT_THAT(Kvstow({"plan", "nobody"}).output,
              HasSubstr("\"nobody\" names none of the 1 models"));
  EXPECT_EQ(Kvstow({"plan", "--derive"}).status, 2);
  EXPECT_EQ(Kvstow({"plan", "biased-keys", "--derive", "--to", ""}).status, 2);
  EXPECT_THAT(Kvstow({"plan", "biased-keys", "--set", "/no/such/file"}).output,
              HasSubstr("/no/such/file: cannot be read"));
}

TEST_F(Plans, LayersOfAPutGoThroughPutStatAndGet) {
  StartDaemon({}, BiasedModel());
  const KvData data = DataOf(MakeKv(false), 9);
  const std::vector<LayerRows> layers = data.layers();
  const LayeredText words = SplitLayers("k=tqm4,v=tq3,layer0=raw,layer3.k=int8").value();
  for (const CompressAt where : {CompressAt::kService, CompressAt::kWorker}) {
    PutRequest request{.tokens = data.tokens(),
                       .layers = layers,
                       .codec = ParseCodecChoice(words.choice).value(),
                       .layer_codecs = words.layers,
                       .compress_at = where};
    request.context.tenant = where == CompressAt::kService ? "service" : "worker";
    const absl::StatusOr<PutSummary> put = client_->Put(model_, request);
    ASSERT_TRUE(put.ok()) << put.status();
    ASSERT_EQ(put->num_stored, kBlocks) << put->first_refusal;
    const auto encoded = client_->GetEncoded(model_, put->keys);
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    for (const EncodedBlock& block : *encoded) {
      for (int i = 0; i < model_.layout->num_planes(); ++i) {
        const PlaneInfo& plane = model_.layout->plane(i);
        const CodecPair want = words.layers.PairFor(plane.layer_idx, request.codec.pair);
        EXPECT_EQ(block.units[i].codec, want.of(plane.role)) << "plane " << i;
      }
    }
    const KvData got = KvData::Empty(model_.spec, kBlocks);
    const std::vector<LayerRows> to = got.layers();
    ASSERT_EQ(client_->Get(model_, put->keys, to)->num_leading, kBlocks);
    EXPECT_EQ(std::memcmp(to[0].v.data, layers[0].v.data, size_t{64} * kBlocks * 2 * 128), 0);
    EXPECT_NE(std::memcmp(to[1].v.data, layers[1].v.data, size_t{64} * kBlocks * 2 * 128), 0);
  }
  EXPECT_THAT(Kvstow({"stat"}).output, HasSubstr("k=tqm4,v=tq3"));
}

TEST_F(Plans, BundledModelHasNoFalseAlarm) {
  StartDaemon({}, BiasedModel());
  const std::string file = KVSTOW_TEST_DATA "/smollm2_kv.safetensors";
  ASSERT_EQ(Kvstow({"put", file, "--codec=safe"}).status, 0);
  const Json stat = StatJson();
  for (const Json& model : stat["models"]) {
    if (model["model"] == "biased-keys") continue;
    EXPECT_EQ(model["plan"]["codecs"], "") << model;
    EXPECT_EQ(model["plan"]["derived"], true);
  }
  EXPECT_EQ(Counter("plan_refusals"), 0u);
  // A file with layers of its own, by the command line.
  ASSERT_EQ(Kvstow({"put", file, "--codec=safe,layer0=raw", "--tenant=layers"}).status, 0);
}

}  // namespace
}  // namespace kvstow::testing
