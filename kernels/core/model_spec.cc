#include "kernels/core/model_spec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr std::array<std::pair<std::string_view, LayerKind>, 4> kKindNames = {{
    {"full", LayerKind::kFull},
    {"sliding", LayerKind::kSliding},
    {"mla", LayerKind::kMla},
    {"opaque", LayerKind::kOpaque},
}};

constexpr std::string_view kMagic = "kvstow.model.1";

void PutU32(std::string& out, uint32_t value) {
  for (int i = 0; i < 4; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

void PutText(std::string& out, std::string_view text) {
  PutU32(out, static_cast<uint32_t>(text.size()));
  out += text;
}

// Reads what Put* wrote; after the first short read every further one gives zeros.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  uint32_t U32() {
    if (rest_.size() < 4) {
      ok_ = false;
      return 0;
    }
    uint32_t value = 0;
    for (int i = 3; i >= 0; --i) value = (value << 8) | static_cast<uint8_t>(rest_[i]);
    rest_.remove_prefix(4);
    return value;
  }
  std::string Text() {
    const uint32_t size = U32();
    if (!ok_ || size > rest_.size()) {
      ok_ = false;
      return {};
    }
    std::string text(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return text;
  }
  bool ok() const { return ok_; }
  bool done() const { return ok_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

absl::Status BadField(std::string_view field, std::string_view found, std::string_view want) {
  return absl::InvalidArgumentError(
      absl::StrCat("model spec: ", ToAbsl(field), " is ", ToAbsl(found), ", want ", ToAbsl(want)));
}

absl::Status CheckRange(std::string_view field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return BadField(field, absl::StrCat(value), absl::StrCat(min, " to ", max));
}

absl::Status CheckText(std::string_view field, const std::string& text) {
  if (text.size() <= ModelSpec::kMaxTextBytes) return absl::OkStatus();
  return BadField(field, absl::StrCat(text.size(), " bytes"),
                  absl::StrCat("at most ", ModelSpec::kMaxTextBytes, " bytes"));
}

absl::Status CheckGroupShape(const LayerGroup& group, const std::string& at) {
  KVSTOW_RETURN_IF_ERROR(
      CheckRange(absl::StrCat(at, ".num_layers"), group.num_layers, 1, ModelSpec::kMaxLayers));
  KVSTOW_RETURN_IF_ERROR(
      CheckRange(absl::StrCat(at, ".num_kv_heads"), group.num_kv_heads, 1, ModelSpec::kMaxKvHeads));
  KVSTOW_RETURN_IF_ERROR(
      CheckRange(absl::StrCat(at, ".k_dim"), group.k_dim, 1, ModelSpec::kMaxDim));
  switch (group.kind) {
    case LayerKind::kFull:
    case LayerKind::kSliding:
      return CheckRange(absl::StrCat(at, ".v_dim"), group.v_dim, 1, ModelSpec::kMaxDim);
    case LayerKind::kMla:
      KVSTOW_RETURN_IF_ERROR(
          CheckRange(absl::StrCat(at, ".num_kv_heads (mla)"), group.num_kv_heads, 1, 1));
      return CheckRange(absl::StrCat(at, ".v_dim (mla)"), group.v_dim, 0, 0);
    case LayerKind::kOpaque:
      return CheckRange(absl::StrCat(at, ".v_dim (opaque)"), group.v_dim, 0, 0);
  }
  return BadField(absl::StrCat(at, ".kind"), absl::StrCat(static_cast<int>(group.kind)),
                  "full (1), sliding (2), mla (3) or opaque (4)");
}

absl::Status CheckGroupBytes(const LayerGroup& group, const ModelSpec& spec, const std::string& at,
                             int64_t& block_bytes) {
  for (int32_t dim : {group.k_dim, group.v_dim}) {
    const int64_t plane_bytes = DTypeBytes(spec.kv_dtype, int64_t{dim} * spec.tokens_per_block);
    if (plane_bytes > ModelSpec::kMaxPlaneBytes) {
      return BadField(absl::StrCat(at, " plane size"), absl::StrCat(plane_bytes, " bytes"),
                      absl::StrCat("at most ", ModelSpec::kMaxPlaneBytes, " bytes"));
    }
    block_bytes += plane_bytes * group.num_kv_heads * group.num_layers;
  }
  return CheckRange("bytes per block", block_bytes, 1, ModelSpec::kMaxBlockBytes);
}

}  // namespace

std::string_view LayerKindName(LayerKind kind) {
  for (const auto& [name, value] : kKindNames) {
    if (value == kind) return name;
  }
  return "unknown";
}

absl::StatusOr<LayerKind> LayerKindFromName(std::string_view name) {
  for (const auto& [known, value] : kKindNames) {
    if (known == name) return value;
  }
  return BadField("kind", absl::StrCat("\"", ToAbsl(name), "\""), "full, sliding, mla or opaque");
}

absl::Status ModelSpec::Validate() const {
  if (name.empty()) return BadField("name", "empty", "the model's name");
  if (weights.empty()) return BadField("weights", "empty", "a digest or revision of the weights");
  KVSTOW_RETURN_IF_ERROR(CheckText("name", name));
  KVSTOW_RETURN_IF_ERROR(CheckText("weights", weights));
  KVSTOW_RETURN_IF_ERROR(CheckText("rope", rope));
  KVSTOW_RETURN_IF_ERROR(CheckText("tokenizer", tokenizer));
  if (!IsKnownDType(static_cast<int>(kv_dtype))) {
    return BadField("kv_dtype", absl::StrCat(static_cast<int>(kv_dtype)), "a known dtype, 1 to 8");
  }
  KVSTOW_RETURN_IF_ERROR(CheckRange("tokens_per_block", tokens_per_block, 32, kMaxTokensPerBlock));
  if (tokens_per_block % 32 != 0) {
    return BadField("tokens_per_block", absl::StrCat(tokens_per_block), "a multiple of 32");
  }
  if (groups.empty()) return BadField("groups", "empty", "at least one layer group");
  int64_t next_layer = 0;
  int64_t block_bytes = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    const LayerGroup& group = groups[i];
    const std::string at = absl::StrCat("groups[", i, "]");
    KVSTOW_RETURN_IF_ERROR(CheckGroupShape(group, at));
    if (group.first_layer != next_layer) {
      return BadField(
          absl::StrCat(at, ".first_layer"), absl::StrCat(group.first_layer),
          absl::StrCat(next_layer, group.first_layer < next_layer ? ": layers overlap"
                                                                  : ": layers are missing"));
    }
    next_layer += group.num_layers;
    KVSTOW_RETURN_IF_ERROR(CheckRange("number of layers", next_layer, 1, kMaxLayers));
    KVSTOW_RETURN_IF_ERROR(CheckGroupBytes(group, *this, at, block_bytes));
  }
  return absl::OkStatus();
}

int32_t ModelSpec::num_layers() const {
  int32_t total = 0;
  for (const LayerGroup& group : groups) total += group.num_layers;
  return total;
}

std::string ModelSpec::Serialize() const {
  std::string out;
  PutText(out, kMagic);
  PutText(out, name);
  PutText(out, weights);
  PutU32(out, static_cast<uint32_t>(kv_dtype));
  PutU32(out, static_cast<uint32_t>(groups.size()));
  for (const LayerGroup& group : groups) {
    for (int32_t value : {group.first_layer, group.num_layers, static_cast<int32_t>(group.kind),
                          group.num_kv_heads, group.k_dim, group.v_dim}) {
      PutU32(out, static_cast<uint32_t>(value));
    }
  }
  PutText(out, rope);
  PutU32(out, keys_are_rotated ? 1 : 0);
  PutU32(out, static_cast<uint32_t>(tokens_per_block));
  PutText(out, tokenizer);
  return out;
}

absl::StatusOr<ModelSpec> ModelSpec::Parse(std::string_view bytes) {
  Reader reader(bytes);
  ModelSpec spec;
  if (reader.Text() != kMagic) return BadField("magic", "something else", kMagic);
  spec.name = reader.Text();
  spec.weights = reader.Text();
  spec.kv_dtype = static_cast<DType>(reader.U32());
  const uint32_t num_groups = reader.U32();
  KVSTOW_RETURN_IF_ERROR(CheckRange("number of groups", num_groups, 1, kMaxLayers));
  for (uint32_t i = 0; i < num_groups && reader.ok(); ++i) {
    LayerGroup group;
    group.first_layer = static_cast<int32_t>(reader.U32());
    group.num_layers = static_cast<int32_t>(reader.U32());
    group.kind = static_cast<LayerKind>(reader.U32());
    group.num_kv_heads = static_cast<int32_t>(reader.U32());
    group.k_dim = static_cast<int32_t>(reader.U32());
    group.v_dim = static_cast<int32_t>(reader.U32());
    spec.groups.push_back(group);
  }
  spec.rope = reader.Text();
  spec.keys_are_rotated = reader.U32() != 0;
  spec.tokens_per_block = static_cast<int32_t>(reader.U32());
  spec.tokenizer = reader.Text();
  if (!reader.done()) return BadField("length", absl::StrCat(bytes.size(), " bytes"), "another");
  KVSTOW_RETURN_IF_ERROR(spec.Validate());
  // Narrowing casts above could hide a wrong number: the bytes must be the canonical ones.
  if (spec.Serialize() != bytes) return BadField("encoding", "not canonical", "canonical bytes");
  return spec;
}

Digest ModelSpec::Fingerprint() const {
  return DigestBuilder("kvstow.fingerprint.1").Add(Serialize()).Finish();
}

}  // namespace kvstow
