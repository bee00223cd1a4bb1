#include "proto/convert.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/checksum.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

absl::Status BadField(std::string_view field, std::string_view found, std::string_view want) {
  return absl::InvalidArgumentError(
      absl::StrCat(ToAbsl(field), ": ", ToAbsl(found), ", want ", ToAbsl(want)));
}

// Numbers of the wire are unsigned, ours are not: what does not fit is named, not wrapped.
absl::StatusOr<int32_t> NumberOf(uint32_t value, const std::string& field) {
  if (value > INT32_MAX) {
    return BadField(field, absl::StrCat(value), absl::StrCat("at most ", INT32_MAX));
  }
  return static_cast<int32_t>(value);
}

absl::StatusOr<LayerGroup> LayerGroupFromProto(const v1::LayerGroup& message,
                                               const std::string& at) {
  LayerGroup group;
  KVSTOW_ASSIGN_OR_RETURN(group.first_layer, NumberOf(message.first_layer(), at + ".first_layer"));
  KVSTOW_ASSIGN_OR_RETURN(group.num_layers, NumberOf(message.num_layers(), at + ".num_layers"));
  if (message.kind() < v1::LAYER_KIND_FULL || message.kind() > v1::LAYER_KIND_OPAQUE) {
    return BadField(at + ".kind", absl::StrCat(static_cast<int>(message.kind())),
                    "full (1), sliding (2), mla (3) or opaque (4)");
  }
  group.kind = static_cast<LayerKind>(message.kind());
  KVSTOW_ASSIGN_OR_RETURN(group.num_kv_heads,
                          NumberOf(message.num_kv_heads(), at + ".num_kv_heads"));
  KVSTOW_ASSIGN_OR_RETURN(group.k_dim, NumberOf(message.k_dim(), at + ".k_dim"));
  KVSTOW_ASSIGN_OR_RETURN(group.v_dim, NumberOf(message.v_dim(), at + ".v_dim"));
  return group;
}

}  // namespace

absl::StatusOr<ModelSpec> ModelSpecFromProto(const v1::ModelSpec& message) {
  ModelSpec spec;
  spec.name = message.name();
  spec.weights = message.weights();
  if (!IsKnownDType(static_cast<int>(message.kv_dtype()))) {
    return BadField("kv_dtype", absl::StrCat(static_cast<int>(message.kv_dtype())),
                    "a known dtype, 1 to 8");
  }
  spec.kv_dtype = static_cast<DType>(message.kv_dtype());
  if (message.groups_size() > ModelSpec::kMaxLayers) {
    return BadField("groups", absl::StrCat(message.groups_size(), " groups"),
                    absl::StrCat("1 to ", ModelSpec::kMaxLayers));
  }
  for (int i = 0; i < message.groups_size(); ++i) {
    KVSTOW_ASSIGN_OR_RETURN(
        LayerGroup group, LayerGroupFromProto(message.groups(i), absl::StrCat("groups[", i, "]")));
    spec.groups.push_back(group);
  }
  spec.rope = message.rope();
  spec.keys_are_rotated = message.keys_are_rotated();
  KVSTOW_ASSIGN_OR_RETURN(spec.tokens_per_block,
                          NumberOf(message.tokens_per_block(), "tokens_per_block"));
  spec.tokenizer = message.tokenizer();
  KVSTOW_RETURN_IF_ERROR(spec.Validate());
  return spec;
}

v1::ModelSpec ModelSpecToProto(const ModelSpec& spec) {
  v1::ModelSpec message;
  message.set_name(spec.name);
  message.set_weights(spec.weights);
  message.set_kv_dtype(static_cast<v1::DType>(spec.kv_dtype));
  for (const LayerGroup& group : spec.groups) {
    v1::LayerGroup* out = message.add_groups();
    out->set_first_layer(static_cast<uint32_t>(group.first_layer));
    out->set_num_layers(static_cast<uint32_t>(group.num_layers));
    out->set_kind(static_cast<v1::LayerKind>(group.kind));
    out->set_num_kv_heads(static_cast<uint32_t>(group.num_kv_heads));
    out->set_k_dim(static_cast<uint32_t>(group.k_dim));
    out->set_v_dim(static_cast<uint32_t>(group.v_dim));
  }
  message.set_rope(spec.rope);
  message.set_keys_are_rotated(spec.keys_are_rotated);
  message.set_tokens_per_block(static_cast<uint32_t>(spec.tokens_per_block));
  message.set_tokenizer(spec.tokenizer);
  return message;
}

absl::Status CheckKeyContext(const KeyContext& context) {
  if (context.tenant.size() > kMaxTenantBytes) {
    return BadField("tenant", absl::StrCat(context.tenant.size(), " bytes"),
                    absl::StrCat("at most ", kMaxTenantBytes));
  }
  if (context.lora_digest.size() > kMaxContentDigestBytes) {
    return BadField("lora_digest", absl::StrCat(context.lora_digest.size(), " bytes"),
                    absl::StrCat("at most ", kMaxContentDigestBytes));
  }
  const std::vector<std::string>& digests = context.multimodal_digests;
  if (digests.size() > kMaxMultimodalDigests) {
    return BadField("multimodal_digests", absl::StrCat(digests.size(), " digests"),
                    absl::StrCat("at most ", kMaxMultimodalDigests));
  }
  for (size_t i = 0; i < digests.size(); ++i) {
    if (digests[i].size() > kMaxContentDigestBytes) {
      return BadField(absl::StrCat("multimodal_digests[", i, "]"),
                      absl::StrCat(digests[i].size(), " bytes"),
                      absl::StrCat("at most ", kMaxContentDigestBytes));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<KeyContext> KeyContextFromProto(const v1::KeyContext& message) {
  KeyContext context;
  KVSTOW_ASSIGN_OR_RETURN(context.fingerprint,
                          Digest::FromBytes(message.fingerprint(), "context.fingerprint"));
  context.tenant = message.tenant();
  context.lora_digest = message.lora_digest();
  context.multimodal_digests.assign(message.multimodal_digests().begin(),
                                    message.multimodal_digests().end());
  KVSTOW_RETURN_IF_ERROR(CheckKeyContext(context));
  return context;
}

v1::KeyContext KeyContextToProto(const KeyContext& context) {
  v1::KeyContext message;
  message.set_fingerprint(std::string(context.fingerprint.AsStringView()));
  message.set_tenant(context.tenant);
  message.set_lora_digest(context.lora_digest);
  for (const std::string& digest : context.multimodal_digests) {
    message.add_multimodal_digests(digest);
  }
  return message;
}

uint64_t PlaceXxh3(const v1::GetRequest& request) {
  std::string bytes;
  const auto add = [&bytes](auto number) {
    bytes.append(reinterpret_cast<const char*>(&number), sizeof(number));
  };
  add(uint64_t{request.channel()});
  bytes.append(request.keys());
  for (const v1::UnitRange& range : request.ranges()) {
    add(uint32_t{range.first()});
    add(uint32_t{range.count()});
  }
  for (const uint64_t place : request.unit_place()) add(place);
  return Xxh3({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
}

absl::Status CheckNumKeys(int64_t num_keys, std::string_view field, int64_t min_keys) {
  if (num_keys >= min_keys && num_keys <= kMaxKeysPerCall) return absl::OkStatus();
  return BadField(field, absl::StrCat(num_keys, " keys"),
                  absl::StrCat(min_keys, " to ", kMaxKeysPerCall));
}

absl::StatusOr<std::vector<BlockKey>> KeysFromBytes(std::string_view packed, std::string_view field,
                                                    int64_t min_keys) {
  constexpr size_t kKeyBytes = sizeof(BlockKey::bytes);
  if (packed.size() % kKeyBytes != 0) {
    return BadField(field, absl::StrCat(packed.size(), " bytes"),
                    absl::StrCat("a multiple of ", kKeyBytes));
  }
  const size_t num_keys = packed.size() / kKeyBytes;
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(num_keys), field, min_keys));
  std::vector<BlockKey> keys(num_keys);
  for (size_t i = 0; i < num_keys; ++i) {
    std::memcpy(keys[i].bytes.data(), packed.data() + i * kKeyBytes, kKeyBytes);
  }
  return keys;
}

absl::StatusOr<std::vector<UnitRange>> UnitRangesFromProto(
    const google::protobuf::RepeatedPtrField<v1::UnitRange>& messages) {
  if (messages.size() > kMaxUnitRanges) {
    return BadField("ranges", absl::StrCat(messages.size(), " ranges"),
                    absl::StrCat("at most ", kMaxUnitRanges));
  }
  std::vector<UnitRange> ranges;
  uint64_t end_before = 0;
  for (const v1::UnitRange& message : messages) {
    const uint64_t end = uint64_t{message.first()} + message.count();
    if (message.count() == 0 || message.first() < end_before || end > UINT32_MAX) {
      return BadField(absl::StrCat("ranges[", ranges.size(), "]"),
                      absl::StrCat("units ", message.first(), " to ", end),
                      absl::StrCat("at least one unit, from ", end_before, " on"));
    }
    ranges.push_back({message.first(), static_cast<uint32_t>(end)});
    end_before = end;
  }
  return ranges;
}

std::string KeysToBytes(absl::Span<const BlockKey> keys) {
  std::string packed;
  packed.reserve(keys.size() * sizeof(BlockKey::bytes));
  for (const BlockKey& key : keys) packed += key.AsStringView();
  return packed;
}

absl::Status CheckNumTokens(int64_t num_tokens, std::string_view field) {
  if (num_tokens >= 1 && num_tokens <= kMaxTokensPerCall) return absl::OkStatus();
  return BadField(field, absl::StrCat(num_tokens, " tokens"),
                  absl::StrCat("1 to ", kMaxTokensPerCall));
}

absl::StatusOr<WireHints> HintsFromProto(const v1::TurnHints& message) {
  if (message.session().size() > kMaxSessionBytes) {
    return BadField("hints.session", absl::StrCat(message.session().size(), " bytes"),
                    absl::StrCat("at most ", kMaxSessionBytes));
  }
  if (message.tenant().size() > kMaxTenantBytes) {
    return BadField("hints.tenant", absl::StrCat(message.tenant().size(), " bytes"),
                    absl::StrCat("at most ", kMaxTenantBytes));
  }
  if (message.pin_ms() > kMaxPinMs) {
    return BadField("hints.pin_ms", absl::StrCat(message.pin_ms()),
                    absl::StrCat("at most ", kMaxPinMs, ", a day"));
  }
  WireHints hints{.turn = message.turn(),
                  .session_over = message.session_over(),
                  .returns_within = absl::Milliseconds(message.returns_within_ms()),
                  .pin_for = absl::Milliseconds(message.pin_ms()),
                  .input_tokens = message.input_tokens(),
                  .output_tokens = message.output_tokens()};
  if (!message.session().empty()) {
    const Digest digest =
        DigestBuilder("kvstow.session.2").Add(message.tenant()).Add(message.session()).Finish();
    std::memcpy(&hints.session, digest.bytes.data(), sizeof(hints.session));
    hints.session |= 1;  // 0 is "not told"
  }
  return hints;
}

absl::StatusOr<v1::Form> FormFromProto(int value, v1::Form otherwise) {
  if (value == v1::FORM_UNSPECIFIED && otherwise != v1::FORM_UNSPECIFIED) return otherwise;
  if (value == v1::FORM_ROWS || value == v1::FORM_ENCODED) return static_cast<v1::Form>(value);
  return BadField("form", absl::StrCat(value), "rows (1) or encoded (2)");
}

absl::StatusOr<CodecPair> CodecPairFromName(std::string_view name, std::string_view field) {
  absl::StatusOr<CodecChoice> choice = ParseCodecChoice(name);
  if (!choice.ok()) {
    return absl::Status(choice.status().code(),
                        absl::StrCat(ToAbsl(field), ": ", choice.status().message()));
  }
  // A preset says more than a pair (its first block is raw) and may change between versions.
  if (choice->raw_first_block || name == "lossless") {
    return BadField(field, absl::StrCat("preset \"", ToAbsl(name), "\""),
                    "codecs, such as \"k=tqm4,v=tq4\": the client resolves presets");
  }
  return choice->pair;
}

absl::StatusOr<CodecId> CodecIdFromWire(uint32_t value) {
  if (value <= UINT8_MAX && FindCodec(static_cast<CodecId>(value)) != nullptr) {
    return static_cast<CodecId>(value);
  }
  return BadField("unit_codec", absl::StrCat(value), "a codec of this build");
}

}  // namespace kvstow
