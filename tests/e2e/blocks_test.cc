// What may be found and what comes back: keys, layouts, dtypes, codecs, through a real daemon.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "tests/e2e/store_fixture.h"

namespace kvstow::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class Blocks : public RunningDaemon {};

// --- U02, lookups ---

TEST_F(Blocks, U02SharedPrefixOf70TokensSharesOneBlock) {
  StartDaemon({});
  const KvData a(model_.spec, 1, 4);
  KvData b(model_.spec, 2, 4);
  std::copy_n(a.tokens().begin(), 70, b.mutable_tokens().begin());
  MustPut(a, "raw");

  const absl::StatusOr<LookupSummary> lookup =
      client_->Lookup(model_, {}, absl::MakeConstSpan(b.tokens()));
  ASSERT_TRUE(lookup.ok()) << lookup.status();
  EXPECT_EQ(lookup->num_leading, 1);
  ASSERT_EQ(lookup->keys.size(), 4u);
  EXPECT_EQ(lookup->keys[0], KeysOf(a)[0]);

  const KvData got = KvData::Empty(model_.spec, 4);
  const std::vector<LayerRows> layers = got.layers();
  const absl::StatusOr<GetSummary> summary = client_->Get(model_, KeysOf(b), layers);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->num_leading, 1);
  EXPECT_TRUE(got.EqualsBlock(a, 0));
  for (int block = 1; block < 4; ++block) {
    EXPECT_EQ(summary->blocks[block].code(), absl::StatusCode::kNotFound);
    EXPECT_TRUE(got.IsUntouched(block));
  }
}

TEST_F(Blocks, U04AnythingThatChangesTheKvChangesTheKey) {
  StartDaemon({});
  const KvData kv(model_.spec, 3, 4);
  MustPut(kv, "raw");

  const auto leading = [&](const ModelSpec& spec, const KeyContext& context) {
    const absl::StatusOr<Model> other = client_->RegisterModel(spec);
    EXPECT_TRUE(other.ok()) << other.status();
    const auto lookup = client_->Lookup(*other, context, kv.tokens());
    EXPECT_TRUE(lookup.ok()) << lookup.status();
    return lookup.ok() ? lookup->num_leading : -1;
  };
  EXPECT_EQ(leading(model_.spec, {}), 4);
  EXPECT_EQ(leading(model_.spec, {.tenant = "team-b"}), 0);
  EXPECT_EQ(leading(model_.spec, {.lora_digest = "digest-of-weights"}), 0);
  EXPECT_EQ(leading(model_.spec, {.multimodal_digests = {"image"}}), 0);
  ModelSpec changed = model_.spec;
  changed.weights = "revision-2";
  EXPECT_EQ(leading(changed, {}), 0);
  changed = model_.spec;
  changed.kv_dtype = DType::kF16;
  EXPECT_EQ(leading(changed, {}), 0);
  changed = model_.spec;
  changed.rope = "base=20000,half";
  EXPECT_EQ(leading(changed, {}), 0);
  changed = model_.spec;
  changed.tokens_per_block = 32;
  EXPECT_EQ(leading(changed, {}), 0);
  changed = model_.spec;
  changed.tokenizer = "tokenizer-2";
  EXPECT_EQ(leading(changed, {}), 0);
}

TEST_F(Blocks, ThousandKeyPrefixIsOneLookup) {
  StartDaemon({.dram = "64MiB", .with_metrics = true});
  const KvData head(model_.spec, 4, 8);
  MustPut(head, "int8");
  std::vector<int32_t> tokens(head.tokens().begin(), head.tokens().end());
  tokens.resize(size_t{1000} * model_.spec.tokens_per_block, 7);

  const uint64_t before = Counter("lookups");
  const absl::StatusOr<LookupSummary> lookup = client_->Lookup(model_, {}, tokens);
  ASSERT_TRUE(lookup.ok()) << lookup.status();
  EXPECT_EQ(lookup->keys.size(), 1000u);
  EXPECT_EQ(lookup->num_leading, 8);
  EXPECT_EQ(Counter("lookups") - before, 1000u) << "keys counted";
}

// A put and the reads of one prompt, over several channels and batches, are one turn; what the
// client says of it arrives.
TEST_F(Blocks, AConversationIsFoundByItsPromptAndHintsArrive) {
  StartDaemon({});
  const KvData kv(model_.spec, 5, 40);
  const std::vector<LayerRows> layers = kv.layers();
  const absl::StatusOr<PutSummary> put =
      client_->Put(model_, {.tokens = kv.tokens(),
                            .layers = layers,
                            .codec = ParseCodecChoice("raw").value(),
                            .conversation = {.session = "chat", .turn = 1}});
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_EQ(CountHits(kv), 40);
  EXPECT_EQ(CountHits(kv), 40);
  EXPECT_EQ(Counter("turns"), 1u);
  EXPECT_EQ(Counter("follow_up_turns"), 0u);
  const absl::StatusOr<LookupSummary> slow =
      client_->Lookup(KeysOf(kv), {.prefill_tokens_per_s = 0.001});
  ASSERT_TRUE(slow.ok()) << slow.status();
  EXPECT_EQ(slow->advice.num_worth_loading, 40);
  EXPECT_GT(slow->advice.recompute_ms, slow->advice.load_ms);
  const absl::StatusOr<LookupSummary> over =
      client_->Lookup({KeysOf(kv)[0]}, {.conversation = {.session = "chat", .session_over = true}});
  ASSERT_TRUE(over.ok()) << over.status();
  EXPECT_EQ(Counter("sessions_over"), 1u);
  EXPECT_EQ(client_->Lookup(KeysOf(kv), {.conversation = {.session = std::string(65, 'x')}})
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(Blocks, TenMillionKeyLookupIsRefusedAndTheDaemonLivesOn) {
  StartDaemon({});
  const std::vector<BlockKey> keys(65537);
  EXPECT_EQ(client_->Lookup(keys).status().code(), absl::StatusCode::kInvalidArgument);

  v1::LookupRequest request;
  request.set_keys(PackKeys(keys));
  v1::LookupResponse response;
  grpc::Status status = daemon_->control().Lookup(Deadline().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("65537"), HasSubstr("65536")));

  request.mutable_keys()->resize(size_t{10'000'000} * 32);
  status = daemon_->control().Lookup(Deadline().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_EQ(daemon_->Stat().num_blocks(), 0u);
}

// --- odd prompts ---

TEST_F(Blocks, PromptsShorterThanABlockAreRefusedAndTailsAreLeftOver) {
  StartDaemon({});
  const KvData kv(model_.spec, 5, 2);
  const std::vector<LayerRows> layers = kv.layers();
  const auto put = [&](int64_t num_tokens) {
    return client_->Put(model_, {.tokens = kv.tokens().subspan(0, num_tokens), .layers = layers});
  };
  EXPECT_EQ(put(0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(put(1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(put(63).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(daemon_->Stat().num_blocks(), 0u);
  const absl::StatusOr<PutSummary> stored = put(100);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->num_stored, 1);
  EXPECT_EQ(stored->num_leftover_tokens, 36);
}

// --- U06, layouts ---

ModelSpec HybridModel() {
  ModelSpec spec = SmallModel();
  spec.name = "e2e-hybrid";
  spec.groups = {{.first_layer = 0,
                  .num_layers = 2,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 4,
                  .k_dim = 96,
                  .v_dim = 64},
                 {.first_layer = 2,
                  .num_layers = 3,
                  .kind = LayerKind::kSliding,
                  .num_kv_heads = 1,
                  .k_dim = 128,
                  .v_dim = 128}};
  return spec;
}

ModelSpec MlaModel() {
  ModelSpec spec = SmallModel();
  spec.name = "e2e-mla";
  spec.groups = {{.first_layer = 0,
                  .num_layers = 3,
                  .kind = LayerKind::kMla,
                  .num_kv_heads = 1,
                  .k_dim = 576,
                  .v_dim = 0}};
  return spec;
}

TEST_F(Blocks, U06HybridLayoutComesBackByteForByte) {
  StartDaemon({}, HybridModel());
  const KvData kv(model_.spec, 6, 3);
  MustPut(kv, "lossless");
  EXPECT_EQ(CountHits(kv), 3);
}

TEST_F(Blocks, U06MlaLayoutComesBackByteForByte) {
  StartDaemon({}, MlaModel());
  const KvData kv(model_.spec, 7, 3);
  MustPut(kv, "lossless");
  EXPECT_EQ(CountHits(kv), 3);
}

TEST_F(Blocks, U06BadLayoutsAreRefusedAtRegistrationByFieldName) {
  StartDaemon({});
  const auto expect_refused = [&](const char* field, auto change) {
    v1::RegisterModelRequest request;
    v1::ModelSpec& spec = *request.mutable_spec();
    spec.set_name("bad");
    spec.set_weights("revision-1");
    spec.set_rope("base=10000,half");
    spec.set_tokenizer("tokenizer-1");
    spec.set_kv_dtype(v1::DTYPE_BF16);
    spec.set_tokens_per_block(64);
    for (const uint32_t first : {0u, 2u}) {
      v1::LayerGroup& group = *spec.add_groups();
      group.set_first_layer(first);
      group.set_num_layers(2);
      group.set_kind(v1::LAYER_KIND_FULL);
      group.set_num_kv_heads(2);
      group.set_k_dim(64);
      group.set_v_dim(64);
    }
    change(spec);
    v1::RegisterModelResponse response;
    const grpc::Status status =
        daemon_->models().RegisterModel(Deadline().get(), request, &response);
    if (std::string_view(field).empty()) {
      EXPECT_TRUE(status.ok()) << status.error_message();
      return;
    }
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << field;
    EXPECT_THAT(status.error_message(), HasSubstr(field));
  };
  using Spec = v1::ModelSpec;
  expect_refused("", [](Spec&) {});  // unchanged it is good
  expect_refused("first_layer", [](Spec& s) { s.mutable_groups(1)->set_first_layer(1); });
  expect_refused("first_layer", [](Spec& s) { s.mutable_groups(1)->set_first_layer(3); });
  expect_refused("num_kv_heads", [](Spec& s) { s.mutable_groups(1)->set_num_kv_heads(0); });
  expect_refused("k_dim", [](Spec& s) { s.mutable_groups(0)->set_k_dim(0); });
  expect_refused("v_dim", [](Spec& s) { s.mutable_groups(0)->set_v_dim(0); });
  expect_refused("num_layers", [](Spec& s) { s.mutable_groups(0)->set_num_layers(0); });
  expect_refused("kind",
                 [](Spec& s) { s.mutable_groups(0)->set_kind(static_cast<v1::LayerKind>(77)); });
  expect_refused("kv_dtype", [](Spec& s) { s.set_kv_dtype(static_cast<v1::DType>(99)); });
  expect_refused("tokens_per_block", [](Spec& s) { s.set_tokens_per_block(33); });
}

// --- U07, U08: what codecs must not touch ---

TEST_F(Blocks, U07QuantizedKvIsKeptByteForByteAndShownAsRaw) {
  ModelSpec spec = SmallModel();
  spec.kv_dtype = DType::kF8E4M3;
  StartDaemon({}, spec);
  const KvData kv(model_.spec, 8, 2);
  MustPut(kv, "k=tq4,v=tq4");
  EXPECT_EQ(CountHits(kv), 2);
  for (const v1::BlockInfo& block : daemon_->List()) EXPECT_EQ(block.codec(), "raw");
}

void SetRow(KvData& kv, int layer_idx, int row_idx, uint16_t bits) {
  constexpr int kValues = 64;
  for (int i = 0; i < kValues; ++i) {
    std::memcpy(&kv.k(layer_idx)[(size_t{1} * row_idx * kValues + i) * 2], &bits, sizeof(bits));
  }
}

TEST_F(Blocks, U08OddRowsComeBackAsTheyWereOrWithinTheirCodec) {
  StartDaemon({});
  KvData kv(model_.spec, 9, 2);
  // Rows are [tokens, 2 heads]: row 0 is token 0 of head 0.
  SetRow(kv, 0, 0, 0x7fc0);  // NaN
  SetRow(kv, 1, 0, 0xff80);  // -Inf
  SetRow(kv, 2, 2, 0x0000);  // all zero
  SetRow(kv, 2, 4, 0x0001);  // smallest subnormal
  SetRow(kv, 3, 0, 0x7f7f);  // largest finite: its scale does not fit fp16
  const uint64_t before = Counter("raw_fallback_units");
  for (const char* codec : {"int8", "k=tqm4,v=tq4"}) {
    MustPut(kv, codec);
    // AfterCodec keeps planes the scalar reference will not encode, and those only.
    EXPECT_EQ(CountHits(kv.AfterCodec(ParseCodecChoice(codec)->pair)), 2) << codec;
    ASSERT_TRUE(client_->Delete(KeysOf(kv)).ok());
  }
  EXPECT_GE(Counter("raw_fallback_units") - before, 4u) << "NaN and Inf planes, twice";
}

TEST_F(Blocks, U08ReferenceKeepsNonFinitePlanesBitForBitAndMakesNoNan) {
  KvData kv(SmallModel(), 10, 1);
  SetRow(kv, 0, 0, 0x7fc0);
  SetRow(kv, 1, 0, 0xff80);
  SetRow(kv, 2, 2, 0x0000);
  SetRow(kv, 2, 4, 0x0001);
  for (const char* codec : {"int8", "k=tqm4,v=tq4"}) {
    const KvData after = kv.AfterCodec(ParseCodecChoice(codec)->pair);
    const std::vector<std::byte> was = kv.RowForm(0);
    const std::vector<std::byte> is = after.RowForm(0);
    for (const PlaneInfo& plane : kv.layout().planes()) {
      bool was_finite = true;
      bool is_finite = true;
      for (int64_t i = plane.row_offset; i < plane.row_offset + plane.row_bytes; i += 2) {
        const auto value = [i](const std::vector<std::byte>& rows) {
          uint16_t bits = 0;
          std::memcpy(&bits, &rows[i], sizeof(bits));
          return Bf16ToFloat(bits);
        };
        was_finite = was_finite && std::isfinite(value(was));
        is_finite = is_finite && std::isfinite(value(is));
      }
      EXPECT_EQ(was_finite, is_finite) << codec;
      if (!was_finite) {
        EXPECT_EQ(std::memcmp(&was[plane.row_offset], &is[plane.row_offset], plane.row_bytes), 0);
      }
    }
  }
}

TEST_F(Blocks, QuantizedBlocksDifferFromTheirRowsAndFollowTheReference) {
  StartDaemon({});
  const KvData kv(model_.spec, 11, 2);
  const CodecPair safe = ParseCodecChoice("k=tqm4,v=tq4")->pair;
  const KvData after = kv.AfterCodec(safe);
  ASSERT_FALSE(after.EqualsBlock(kv, 0)) << "the codec must do something";
  MustPut(kv, "k=tqm4,v=tq4");
  EXPECT_EQ(CountHits(after), 2);
}

TEST_F(Blocks, PresetSafeKeepsTheFirstBlockRaw) {
  StartDaemon({});
  const KvData kv(model_.spec, 12, 3);
  MustPut(kv, "safe");
  const KvData got = KvData::Empty(model_.spec, 3);
  const std::vector<LayerRows> layers = got.layers();
  ASSERT_TRUE(client_->Get(model_, KeysOf(kv), layers).ok());
  EXPECT_TRUE(got.EqualsBlock(kv, 0));
  EXPECT_FALSE(got.EqualsBlock(kv, 1));
}

TEST_F(Blocks, EncodingAtTheWorkerStoresTheSameBytes) {
  StartDaemon({});
  const KvData kv(model_.spec, 13, 2);
  MustPut(kv, "k=tqm4,v=tq4");
  const auto at_service = client_->GetEncoded(model_, KeysOf(kv));
  ASSERT_TRUE(at_service.ok()) << at_service.status();
  ASSERT_TRUE(client_->Delete(KeysOf(kv)).ok());
  const std::vector<LayerRows> layers = kv.layers();
  ASSERT_TRUE(client_
                  ->Put(model_, {.tokens = kv.tokens(),
                                 .layers = layers,
                                 .codec = ParseCodecChoice("k=tqm4,v=tq4").value(),
                                 .compress_at = CompressAt::kWorker})
                  .ok());
  const auto at_worker = client_->GetEncoded(model_, KeysOf(kv));
  ASSERT_TRUE(at_worker.ok()) << at_worker.status();
  for (int block = 0; block < 2; ++block) {
    const auto& a = (*at_service)[block].units;
    const auto& b = (*at_worker)[block].units;
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].codec, b[i].codec);
      EXPECT_EQ(a[i].bytes, b[i].bytes) << "unit " << i;
    }
  }
}

// --- U16, U17 ---

TEST_F(Blocks, U16CapacityIsCountedInStoredBytes) {
  const auto resident = [&](const char* codec, double& record_bytes) {
    const TempFolder place;
    // Without headroom: no block leaves between the two answers that are compared.
    Daemon small(place, {.dram = "16MiB", .extra_flags = {"--dram.headroom=0"}});
    EXPECT_TRUE(small.Start()) << small.log();
    const auto own_client = small.NewClient();
    const Model own_model = own_client->RegisterModel(SmallModel()).value();
    for (uint64_t i = 0; i < 80; ++i) {
      const KvData kv(own_model.spec, 100 + i, 8);
      const std::vector<LayerRows> layers = kv.layers();
      const auto put = own_client->Put(
          own_model,
          {.tokens = kv.tokens(), .layers = layers, .codec = ParseCodecChoice(codec).value()});
      EXPECT_TRUE(put.ok()) << put.status();
      EXPECT_EQ(put->num_stored, 8) << put->first_refusal;
    }
    const v1::TierStat dram = TierOf(small.Stat(), "dram");
    uint64_t sum = 0;
    for (const v1::BlockInfo& block : small.List()) sum += block.record_bytes();
    EXPECT_EQ(dram.sealed_bytes(), sum) << codec;
    EXPECT_LE(dram.used_bytes(), dram.capacity_bytes());
    record_bytes = static_cast<double>(sum) / static_cast<double>(dram.num_blocks());
    return static_cast<double>(dram.num_blocks());
  };
  double raw_bytes = 0;
  double tq4_bytes = 0;
  const double num_raw = resident("raw", raw_bytes);
  const double num_tq4 = resident("k=tq4,v=tq4", tq4_bytes);
  EXPECT_NEAR(num_tq4 / num_raw, raw_bytes / tq4_bytes, 0.03 * raw_bytes / tq4_bytes)
      << num_raw << " raw blocks of " << raw_bytes << " B, " << num_tq4 << " tq4 blocks of "
      << tq4_bytes << " B";
}

TEST_F(Blocks, U17TwoWritersOfOneKeySealOnce) {
  StartDaemon({});
  const auto second = daemon_->NewClient();
  ASSERT_TRUE(second->GetModel(model_.fingerprint).ok());
  constexpr int kRounds = 200;
  int num_first_won = 0;
  for (int round = 0; round < kRounds; ++round) {
    const KvData kv(model_.spec, 1000 + round, 1);
    const std::vector<LayerRows> layers = kv.layers();
    std::array<absl::StatusOr<PutSummary>, 2> puts;
    const auto put = [&](KvClient& from, const char* codec, int slot) {
      puts[slot] = from.Put(
          model_,
          {.tokens = kv.tokens(), .layers = layers, .codec = ParseCodecChoice(codec).value()});
    };
    std::thread other([&] { put(*second, "int8", 1); });
    put(*client_, "raw", 0);
    other.join();
    ASSERT_TRUE(puts[0].ok() && puts[1].ok()) << puts[0].status() << puts[1].status();
    ASSERT_EQ(puts[0]->num_stored + puts[1]->num_stored, 1) << "round " << round;
    const PutSummary& loser = puts[0]->num_stored == 1 ? *puts[1] : *puts[0];
    EXPECT_EQ(loser.num_existing, 1) << loser.first_refusal;
    EXPECT_EQ(loser.sent_bytes, 0) << "a second writer moves nothing";
    const bool raw_won = puts[0]->num_stored == 1;
    num_first_won += raw_won ? 1 : 0;
    const KvData want =
        raw_won ? kv.AfterCodec({}) : kv.AfterCodec({CodecId::kInt8, CodecId::kInt8});
    ASSERT_EQ(CountHits(want), 1) << "round " << round;
  }
  EXPECT_EQ(daemon_->Stat().num_blocks(), static_cast<uint64_t>(kRounds));
}

}  // namespace
}  // namespace kvstow::testing
