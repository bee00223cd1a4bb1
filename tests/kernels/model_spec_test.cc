// ModelSpec: what is refused and how, canonical bytes, the fingerprint.
#include "kernels/core/model_spec.h"

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace kvstow {
namespace {

ModelSpec Spec() {
  ModelSpec spec;
  spec.name = "m";
  spec.weights = "w";
  spec.groups = {{.first_layer = 0,
                  .num_layers = 2,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 3,
                  .k_dim = 64,
                  .v_dim = 64}};
  spec.rope = "base=1";
  spec.tokenizer = "tok";
  return spec;
}

ModelSpec Hybrid() {
  ModelSpec spec = Spec();
  spec.groups = {{.first_layer = 0,
                  .num_layers = 1,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 2,
                  .k_dim = 128,
                  .v_dim = 96},
                 {.first_layer = 1,
                  .num_layers = 5,
                  .kind = LayerKind::kSliding,
                  .num_kv_heads = 8,
                  .k_dim = 64,
                  .v_dim = 64},
                 {.first_layer = 6,
                  .num_layers = 2,
                  .kind = LayerKind::kMla,
                  .num_kv_heads = 1,
                  .k_dim = 576,
                  .v_dim = 0},
                 {.first_layer = 8,
                  .num_layers = 1,
                  .kind = LayerKind::kOpaque,
                  .num_kv_heads = 4,
                  .k_dim = 100,
                  .v_dim = 0}};
  return spec;
}

// The message of Validate after `change`.
std::string ErrorAfter(const std::function<void(ModelSpec&)>& change) {
  ModelSpec spec = Hybrid();
  change(spec);
  const absl::Status status = spec.Validate();
  if (status.ok()) return "ok";
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(ModelSpec, GoodSpecsAreValid) {
  EXPECT_TRUE(Spec().Validate().ok());
  EXPECT_TRUE(Hybrid().Validate().ok());
  EXPECT_EQ(Hybrid().num_layers(), 9);
}

TEST(ModelSpec, EachContradictionIsNamedWithItsNumbers) {
  const std::pair<std::function<void(ModelSpec&)>, std::string> cases[] = {
      {[](ModelSpec& s) { s.name = ""; }, "name is empty, want the model's name"},
      {[](ModelSpec& s) { s.weights = ""; },
       "weights is empty, want a digest or revision of the weights"},
      {[](ModelSpec& s) { s.name.assign(1025, 'n'); },
       "name is 1025 bytes, want at most 1024 bytes"},
      {[](ModelSpec& s) { s.weights.assign(1025, 'n'); },
       "weights is 1025 bytes, want at most 1024 bytes"},
      {[](ModelSpec& s) { s.rope.assign(1025, 'n'); },
       "rope is 1025 bytes, want at most 1024 bytes"},
      {[](ModelSpec& s) { s.tokenizer.assign(1025, 'n'); },
       "tokenizer is 1025 bytes, want at most 1024 bytes"},
      {[](ModelSpec& s) { s.kv_dtype = static_cast<DType>(0); },
       "kv_dtype is 0, want a known dtype, 1 to 8"},
      {[](ModelSpec& s) { s.kv_dtype = static_cast<DType>(9); },
       "kv_dtype is 9, want a known dtype, 1 to 8"},
      {[](ModelSpec& s) { s.tokens_per_block = 0; }, "tokens_per_block is 0, want 32 to 1024"},
      {[](ModelSpec& s) { s.tokens_per_block = 1056; },
       "tokens_per_block is 1056, want 32 to 1024"},
      {[](ModelSpec& s) { s.tokens_per_block = 48; },
       "tokens_per_block is 48, want a multiple of 32"},
      {[](ModelSpec& s) { s.groups.clear(); }, "groups is empty, want at least one layer group"},
      {[](ModelSpec& s) { s.groups[1].num_layers = 0; },
       "groups[1].num_layers is 0, want 1 to 1024"},
      {[](ModelSpec& s) { s.groups[0].num_kv_heads = 0; },
       "groups[0].num_kv_heads is 0, want 1 to 1024"},
      {[](ModelSpec& s) { s.groups[0].num_kv_heads = 1025; },
       "groups[0].num_kv_heads is 1025, want 1 to 1024"},
      {[](ModelSpec& s) { s.groups[0].k_dim = 0; }, "groups[0].k_dim is 0, want 1 to 8192"},
      {[](ModelSpec& s) { s.groups[1].v_dim = 0; }, "groups[1].v_dim is 0, want 1 to 8192"},
      {[](ModelSpec& s) { s.groups[1].v_dim = -5; }, "groups[1].v_dim is -5, want 1 to 8192"},
      {[](ModelSpec& s) { s.groups[2].num_kv_heads = 2; },
       "groups[2].num_kv_heads (mla) is 2, want 1 to 1"},
      {[](ModelSpec& s) { s.groups[2].v_dim = 64; }, "groups[2].v_dim (mla) is 64, want 0 to 0"},
      {[](ModelSpec& s) { s.groups[3].v_dim = 64; }, "groups[3].v_dim (opaque) is 64, want 0 to 0"},
      {[](ModelSpec& s) { s.groups[0].kind = static_cast<LayerKind>(7); },
       "groups[0].kind is 7, want full (1), sliding (2), mla (3) or opaque (4)"},
      {[](ModelSpec& s) { s.groups[0].first_layer = 1; },
       "groups[0].first_layer is 1, want 0: layers are missing"},
      {[](ModelSpec& s) { s.groups[2].first_layer = 5; },
       "groups[2].first_layer is 5, want 6: layers overlap"},
      {[](ModelSpec& s) { s.groups[3].num_layers = 1017; },
       "number of layers is 1025, want 1 to 1024"},
      {[](ModelSpec& s) {
         s.groups[0].k_dim = 8192;
         s.tokens_per_block = 256;
       },
       "groups[0] plane size is 4194304 bytes, want at most 2097152 bytes"},
      {[](ModelSpec& s) {
         s.groups[1].num_kv_heads = 1024;
         s.groups[1].k_dim = 4096;
         s.groups[1].v_dim = 4096;
       },
       "bytes per block is 5368766464, want 1 to 1073741824"}};
  for (const auto& [change, want] : cases) EXPECT_EQ(ErrorAfter(change), "model spec: " + want);
}

// Written with another implementation from the definition.
TEST(ModelSpec, SerializesToTheCanonicalBytes) {
  const std::string bytes = Spec().Serialize();
  std::string hex;
  for (const unsigned char c : bytes) {
    hex += "0123456789abcdef"[c >> 4];
    hex += "0123456789abcdef"[c & 15];
  }
  EXPECT_EQ(hex,
            "0e0000006b7673746f772e6d6f64656c2e31010000006d0100000077010000000100000000000000020000"
            "0001000000"
            "03000000400000004000000006000000626173653d31010000004000000003000000746f6b");
  EXPECT_EQ(Spec().Fingerprint().ToHex(),
            "927458b277661813941c85a2ca380ba7f72ddd8e8bf7901c5dafdd19f28128bb");
}

TEST(ModelSpec, ParseIsTheInverseOfSerialize) {
  for (const ModelSpec& spec : {Spec(), Hybrid()}) {
    const auto parsed = ModelSpec::Parse(spec.Serialize());
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(*parsed, spec);
  }
}

TEST(ModelSpec, EveryTruncationAndEveryAppendedByteIsRefused) {
  const std::string bytes = Hybrid().Serialize();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(ModelSpec::Parse(bytes.substr(0, size)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << size;
  }
  EXPECT_EQ(ModelSpec::Parse(bytes + std::string(1, '\0')).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// A flipped bit either is refused or reads as another spec whose canonical bytes these are.
TEST(ModelSpec, BitFlipsNeverReadAsTheSameSpec) {
  const ModelSpec spec = Hybrid();
  std::string bytes = spec.Serialize();
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    const auto parsed = ModelSpec::Parse(bytes);
    if (parsed.ok()) {
      EXPECT_FALSE(*parsed == spec) << bit;
      EXPECT_EQ(parsed->Serialize(), bytes) << bit;
    }
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
  }
}

TEST(ModelSpec, AnyOneFieldChangedGivesAnotherFingerprint) {
  const std::vector<std::function<void(ModelSpec&)>> changes = {
      [](ModelSpec&) {},
      [](ModelSpec& s) { s.name = "n"; },
      [](ModelSpec& s) { s.weights = "x"; },
      [](ModelSpec& s) { s.kv_dtype = DType::kF16; },
      [](ModelSpec& s) { s.groups[0].num_layers = 3; },
      [](ModelSpec& s) { s.groups[0].kind = LayerKind::kSliding; },
      [](ModelSpec& s) { s.groups[0].num_kv_heads = 4; },
      [](ModelSpec& s) { s.groups[0].k_dim = 128; },
      [](ModelSpec& s) { s.groups[0].v_dim = 128; },
      [](ModelSpec& s) {
        s.groups.push_back({2, 1, LayerKind::kFull, 1, 64, 64});
      },
      [](ModelSpec& s) { s.rope = "base=2"; },
      [](ModelSpec& s) { s.keys_are_rotated = false; },
      [](ModelSpec& s) { s.tokens_per_block = 32; },
      [](ModelSpec& s) { s.tokenizer = "tik"; }};
  std::set<std::string> fingerprints;
  for (const auto& change : changes) {
    ModelSpec spec = Spec();
    change(spec);
    ASSERT_TRUE(spec.Validate().ok());
    fingerprints.insert(spec.Fingerprint().ToHex());
  }
  EXPECT_EQ(fingerprints.size(), changes.size());
}

TEST(LayerKind, NamesAreReadBack) {
  for (LayerKind kind :
       {LayerKind::kFull, LayerKind::kSliding, LayerKind::kMla, LayerKind::kOpaque}) {
    EXPECT_EQ(*LayerKindFromName(LayerKindName(kind)), kind);
  }
  EXPECT_EQ(LayerKindFromName("linear").status().message(),
            "model spec: kind is \"linear\", want full, sliding, mla or opaque");
}

}  // namespace
}  // namespace kvstow
