#include "proto/convert.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace kvstow {
namespace {

v1::ModelSpec GoodModel() {
  v1::ModelSpec message;
  message.set_name("toy");
  message.set_weights("sha256:1");
  message.set_kv_dtype(v1::DTYPE_BF16);
  v1::LayerGroup* full = message.add_groups();
  full->set_first_layer(0);
  full->set_num_layers(2);
  full->set_kind(v1::LAYER_KIND_FULL);
  full->set_num_kv_heads(3);
  full->set_k_dim(64);
  full->set_v_dim(32);
  v1::LayerGroup* mla = message.add_groups();
  mla->set_first_layer(2);
  mla->set_num_layers(1);
  mla->set_kind(v1::LAYER_KIND_MLA);
  mla->set_num_kv_heads(1);
  mla->set_k_dim(576);
  message.set_rope("base=10000");
  message.set_keys_are_rotated(true);
  message.set_tokens_per_block(64);
  message.set_tokenizer("sha256:2");
  return message;
}

void ExpectInvalid(const absl::Status& status, const std::string& message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()), message);
}

TEST(Convert, AModelSurvivesBothWays) {
  const absl::StatusOr<ModelSpec> spec = ModelSpecFromProto(GoodModel());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name, "toy");
  EXPECT_EQ(spec->weights, "sha256:1");
  EXPECT_EQ(spec->kv_dtype, DType::kBf16);
  ASSERT_EQ(spec->groups.size(), 2u);
  EXPECT_EQ(spec->groups[0], (LayerGroup{0, 2, LayerKind::kFull, 3, 64, 32}));
  EXPECT_EQ(spec->groups[1], (LayerGroup{2, 1, LayerKind::kMla, 1, 576, 0}));
  EXPECT_EQ(spec->rope, "base=10000");
  EXPECT_TRUE(spec->keys_are_rotated);
  EXPECT_EQ(spec->tokens_per_block, 64);
  EXPECT_EQ(spec->tokenizer, "sha256:2");
  EXPECT_EQ(ModelSpecToProto(*spec).SerializeAsString(), GoodModel().SerializeAsString());
}

struct BadModel {
  const char* name;
  std::function<void(v1::ModelSpec&)> spoil;
  std::string message;
};

void PrintTo(const BadModel& bad, std::ostream* out) { *out << bad.name; }

class BadModelTest : public ::testing::TestWithParam<BadModel> {};

TEST_P(BadModelTest, IsRefusedWithTheFieldsName) {
  v1::ModelSpec message = GoodModel();
  GetParam().spoil(message);
  ExpectInvalid(ModelSpecFromProto(message).status(), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Convert, BadModelTest,
    ::testing::Values(
        BadModel{"DTypeUnset", [](auto& m) { m.clear_kv_dtype(); },
                 "kv_dtype: 0, want a known dtype, 1 to 8"},
        BadModel{"DTypeUnknown", [](auto& m) { m.set_kv_dtype(static_cast<v1::DType>(9)); },
                 "kv_dtype: 9, want a known dtype, 1 to 8"},
        BadModel{"KindUnset", [](auto& m) { m.mutable_groups(1)->clear_kind(); },
                 "groups[1].kind: 0, want full (1), sliding (2), mla (3) or opaque (4)"},
        BadModel{"KindUnknown",
                 [](auto& m) { m.mutable_groups(0)->set_kind(static_cast<v1::LayerKind>(7)); },
                 "groups[0].kind: 7, want full (1), sliding (2), mla (3) or opaque (4)"},
        BadModel{"KindWrapsToKnown",
                 [](auto& m) { m.mutable_groups(0)->set_kind(static_cast<v1::LayerKind>(257)); },
                 "groups[0].kind: 257, want full (1), sliding (2), mla (3) or opaque (4)"},
        BadModel{"HugeHeads", [](auto& m) { m.mutable_groups(0)->set_num_kv_heads(0x80000003u); },
                 "groups[0].num_kv_heads: 2147483651, want at most 2147483647"},
        BadModel{"HugeLayers", [](auto& m) { m.mutable_groups(0)->set_num_layers(0x80000000u); },
                 "groups[0].num_layers: 2147483648, want at most 2147483647"},
        BadModel{"HugeTokens", [](auto& m) { m.set_tokens_per_block(0x80000040u); },
                 "tokens_per_block: 2147483712, want at most 2147483647"},
        BadModel{"NoGroups", [](auto& m) { m.clear_groups(); },
                 "model spec: groups is empty, want at least one layer group"},
        BadModel{"ManyGroups",
                 [](auto& m) {
                   while (m.groups_size() < 1025) m.add_groups();
                 },
                 "groups: 1025 groups, want 1 to 1024"},
        BadModel{"ZeroHeads", [](auto& m) { m.mutable_groups(0)->set_num_kv_heads(0); },
                 "model spec: groups[0].num_kv_heads is 0, want 1 to 1024"}),
    [](const auto& info) { return info.param.name; });

v1::KeyContext GoodContext() {
  v1::KeyContext message;
  message.set_fingerprint(std::string(32, 'f'));
  message.set_tenant("team-a");
  message.set_lora_digest("l");
  message.add_multimodal_digests("m1");
  message.add_multimodal_digests("m2");
  return message;
}

TEST(Convert, AKeyContextSurvivesBothWays) {
  const absl::StatusOr<KeyContext> context = KeyContextFromProto(GoodContext());
  ASSERT_TRUE(context.ok()) << context.status();
  EXPECT_EQ(context->fingerprint.AsStringView(), std::string(32, 'f'));
  EXPECT_EQ(context->tenant, "team-a");
  EXPECT_EQ(context->lora_digest, "l");
  EXPECT_EQ(context->multimodal_digests, (std::vector<std::string>{"m1", "m2"}));
  EXPECT_EQ(KeyContextToProto(*context).SerializeAsString(), GoodContext().SerializeAsString());
}

TEST(Convert, AKeyContextOverItsLimitsIsRefused) {
  v1::KeyContext message = GoodContext();
  message.set_fingerprint("short");
  ExpectInvalid(KeyContextFromProto(message).status(), "context.fingerprint is 5 bytes, want 32");
  message = GoodContext();
  message.set_tenant(std::string(1025, 't'));
  ExpectInvalid(KeyContextFromProto(message).status(), "tenant: 1025 bytes, want at most 1024");
  message = GoodContext();
  message.set_lora_digest(std::string(65, 'l'));
  ExpectInvalid(KeyContextFromProto(message).status(), "lora_digest: 65 bytes, want at most 64");
  message = GoodContext();
  message.set_multimodal_digests(1, std::string(65, 'm'));
  ExpectInvalid(KeyContextFromProto(message).status(),
                "multimodal_digests[1]: 65 bytes, want at most 64");
  message = GoodContext();
  while (message.multimodal_digests_size() < 1025) message.add_multimodal_digests("m");
  ExpectInvalid(KeyContextFromProto(message).status(),
                "multimodal_digests: 1025 digests, want at most 1024");
}

TEST(Convert, AKeyContextAtItsLimitsIsTaken) {
  v1::KeyContext message = GoodContext();
  message.set_tenant(std::string(1024, 't'));
  message.set_lora_digest(std::string(64, 'l'));
  while (message.multimodal_digests_size() < 1024) {
    message.add_multimodal_digests(std::string(64, 'm'));
  }
  EXPECT_TRUE(KeyContextFromProto(message).ok());
}

TEST(Convert, KeysArePackedInOrder) {
  std::vector<BlockKey> keys(3);
  keys[0].bytes.fill(std::byte{1});
  keys[1].bytes.fill(std::byte{2});
  keys[2].bytes.back() = std::byte{3};
  const std::string packed = KeysToBytes(keys);
  EXPECT_EQ(packed, std::string(32, '\1') + std::string(32, '\2') + std::string(31, '\0') + '\3');
  const absl::StatusOr<std::vector<BlockKey>> read = KeysFromBytes(packed, "keys", 1);
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(*read, keys);
}

TEST(Convert, KeysOutsideTheLimitsAreRefused) {
  ExpectInvalid(KeysFromBytes("", "keys", 1).status(), "keys: 0 keys, want 1 to 65536");
  EXPECT_TRUE(KeysFromBytes("", "keys", 0).ok());
  ExpectInvalid(KeysFromBytes(std::string(33, 'k'), "keys", 1).status(),
                "keys: 33 bytes, want a multiple of 32");
  EXPECT_TRUE(KeysFromBytes(std::string(65536 * 32, 'k'), "keys", 1).ok());
  ExpectInvalid(KeysFromBytes(std::string(65537 * 32, 'k'), "keys", 1).status(),
                "keys: 65537 keys, want 1 to 65536");
}

TEST(Convert, TokensOutsideTheLimitsAreRefused) {
  ExpectInvalid(CheckNumTokens(0, "token_ids"), "token_ids: 0 tokens, want 1 to 1048576");
  EXPECT_TRUE(CheckNumTokens(1, "token_ids").ok());
  EXPECT_TRUE(CheckNumTokens(1048576, "token_ids").ok());
  ExpectInvalid(CheckNumTokens(1048577, "token_ids"),
                "token_ids: 1048577 tokens, want 1 to 1048576");
}

TEST(Convert, OnlyKnownFormsAreTaken) {
  EXPECT_EQ(*FormFromProto(1, v1::FORM_UNSPECIFIED), v1::FORM_ROWS);
  EXPECT_EQ(*FormFromProto(2, v1::FORM_UNSPECIFIED), v1::FORM_ENCODED);
  EXPECT_EQ(*FormFromProto(0, v1::FORM_ENCODED), v1::FORM_ENCODED);
  ExpectInvalid(FormFromProto(0, v1::FORM_UNSPECIFIED).status(),
                "form: 0, want rows (1) or encoded (2)");
  ExpectInvalid(FormFromProto(3, v1::FORM_ENCODED).status(),
                "form: 3, want rows (1) or encoded (2)");
}

TEST(Convert, CodecsAreTakenAndPresetsAreNot) {
  EXPECT_EQ(*CodecPairFromName("raw", "codec"), (CodecPair{}));
  EXPECT_EQ(*CodecPairFromName("k=tqm4,v=tq4", "codec"),
            (CodecPair{CodecId::kTqm4, CodecId::kTq4}));
  const std::string want = ", want codecs, such as \"k=tqm4,v=tq4\": the client resolves presets";
  ExpectInvalid(CodecPairFromName("safe", "blocks[0].codec").status(),
                "blocks[0].codec: preset \"safe\"" + want);
  ExpectInvalid(CodecPairFromName("tiny", "blocks[0].codec").status(),
                "blocks[0].codec: preset \"tiny\"" + want);
  EXPECT_EQ(*CodecPairFromName("k=tqm4,v=osu2", "codec"),
            (CodecPair{CodecId::kTqm4, CodecId::kOsu2}));
  ExpectInvalid(CodecPairFromName("lossless", "blocks[0].codec").status(),
                "blocks[0].codec: preset \"lossless\"" + want);
  const absl::Status unknown = CodecPairFromName("tq44", "blocks[7].codec").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(unknown.message()).rfind("blocks[7].codec: ", 0), 0u) << unknown;
}

TEST(Convert, CodecNumbersOfOtherBuildsAreRefused) {
  for (const Codec& codec : AllCodecs()) {
    EXPECT_EQ(*CodecIdFromWire(static_cast<uint32_t>(codec.id)), codec.id);
  }
  ExpectInvalid(CodecIdFromWire(200).status(), "unit_codec: 200, want a codec of this build");
  // 256 is not 0.
  ExpectInvalid(CodecIdFromWire(256).status(), "unit_codec: 256, want a codec of this build");
}

TEST(Convert, RangesOfUnitsAscendAndHoldSomething) {
  v1::GetRequest message;
  const auto add = [&message](uint32_t first, uint32_t count) {
    v1::UnitRange* const range = message.add_ranges();
    range->set_first(first);
    range->set_count(count);
  };
  EXPECT_TRUE(UnitRangesFromProto(message.ranges())->empty());
  add(0, 1);
  add(1, 3);
  add(4294967290u, 5);
  EXPECT_EQ(*UnitRangesFromProto(message.ranges()),
            (std::vector<UnitRange>{{0, 1}, {1, 4}, {4294967290u, 4294967295u}}));
  add(4294967290u, 6);
  ExpectInvalid(
      UnitRangesFromProto(message.ranges()).status(),
      "ranges[3]: units 4294967290 to 4294967296, want at least one unit, from 4294967295 "
      "on");
  message.clear_ranges();
  add(5, 2);
  add(6, 1);
  ExpectInvalid(UnitRangesFromProto(message.ranges()).status(),
                "ranges[1]: units 6 to 7, want at least one unit, from 7 on");
  message.clear_ranges();
  add(5, 0);
  ExpectInvalid(UnitRangesFromProto(message.ranges()).status(),
                "ranges[0]: units 5 to 5, want at least one unit, from 0 on");
  message.clear_ranges();
  for (uint32_t i = 0; i <= kMaxUnitRanges; ++i) add(i, 1);
  ExpectInvalid(UnitRangesFromProto(message.ranges()).status(),
                "ranges: 65537 ranges, want at most 65536");
}

TEST(Convert, HintsAreReadAndTheirLimitsNamed) {
  v1::TurnHints message;
  const WireHints nothing = *HintsFromProto(message);
  EXPECT_EQ(nothing.session, 0u);
  EXPECT_FALSE(nothing.session_over);
  EXPECT_EQ(nothing.returns_within, absl::ZeroDuration());
  message.set_session(std::string(64, 's'));
  message.set_turn(3);
  message.set_session_over(true);
  message.set_returns_within_ms(1500);
  message.set_pin_ms(kMaxPinMs);
  message.set_input_tokens(100);
  message.set_output_tokens(7);
  const WireHints hints = *HintsFromProto(message);
  EXPECT_NE(hints.session, 0u);
  EXPECT_EQ(hints.turn, 3u);
  EXPECT_TRUE(hints.session_over);
  EXPECT_EQ(hints.returns_within, absl::Milliseconds(1500));
  EXPECT_EQ(hints.pin_for, absl::Hours(24));
  EXPECT_EQ(hints.input_tokens, 100);
  EXPECT_EQ(hints.output_tokens, 7);
  EXPECT_EQ(HintsFromProto(message)->session, hints.session);
  message.set_session("t");
  EXPECT_NE(HintsFromProto(message)->session, hints.session);
  message.set_session(std::string(64, 's'));
  message.set_tenant(std::string(1024, 't'));
  EXPECT_NE(HintsFromProto(message)->session, hints.session);
  message.set_tenant(std::string(1025, 't'));
  ExpectInvalid(HintsFromProto(message).status(), "hints.tenant: 1025 bytes, want at most 1024");
  message.set_tenant("");
  message.set_session(std::string(65, 's'));
  ExpectInvalid(HintsFromProto(message).status(), "hints.session: 65 bytes, want at most 64");
  message.set_session("");
  message.set_pin_ms(kMaxPinMs + 1);
  ExpectInvalid(HintsFromProto(message).status(),
                "hints.pin_ms: 86400001, want at most 86400000, a day");
}

}  // namespace
}  // namespace kvstow
