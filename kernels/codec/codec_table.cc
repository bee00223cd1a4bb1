#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/int8.h"
#include "kernels/codec/raw.h"
#include "kernels/codec/simd.h"
#include "kernels/codec/tq.h"
#include "kernels/codec/tqm.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

bool Always() { return true; }

bool AcceptsAny(const PlaneShape& shape) { return shape.num_tokens >= 1 && shape.dim >= 1; }

bool AcceptsFloats(const PlaneShape& shape) {
  return AcceptsAny(shape) && IsFloatDType(shape.dtype);
}

bool AcceptsRotation(const PlaneShape& shape) {
  return AcceptsFloats(shape) && PaleyOrder(shape.dim) != 0;
}

bool AcceptsKeyRotation(const PlaneShape& shape) {
  return AcceptsRotation(shape) && shape.role == Role::kKey;
}

int64_t Int8Bytes(const PlaneShape& shape) {
  return Int8Layout(shape.num_tokens, shape.dim).plane_bytes;
}

constexpr std::array<CodecBackend, 1> kRawHost = {{{"scalar", Always, EncodeRaw, DecodeRaw}}};

constexpr std::array<CodecBackend, 2> kInt8Host = {{
    {"scalar", Always, EncodeInt8Scalar, DecodeInt8Scalar},
    {"highway", SimdSupported, EncodeInt8Highway, DecodeInt8Highway},
}};

// Gives a family's functions, which take the format, the table's signatures.
template <int kBits>
struct Tq {
  static int64_t Bytes(const PlaneShape& shape) {
    return TqLayout(kBits, /*has_means=*/false, shape.num_tokens, shape.dim).plane_bytes;
  }
  template <auto kEncode>
  static EncodeResult Encode(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
    return kEncode(TqFormatOf(kBits, shape), shape, rows, plane);
  }
  template <auto kDecode>
  static void Decode(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
    kDecode(TqFormatOf(kBits, shape), shape, plane, rows);
  }
  static constexpr std::array<CodecBackend, 2> kHost = {{
      {"scalar", Always, Encode<EncodeTqScalar>, Decode<DecodeTqScalar>},
      {"highway", SimdSupported, Encode<EncodeTqHighway>, Decode<DecodeTqHighway>},
  }};
};

template <int kBits>
struct Tqm {
  static int64_t Bytes(const PlaneShape& shape) {
    return TqLayout(kBits, /*has_means=*/true, shape.num_tokens, shape.dim).plane_bytes;
  }
  template <auto kEncode>
  static EncodeResult Encode(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
    return kEncode(TqmFormatOf(kBits, shape), shape, rows, plane);
  }
  template <auto kDecode>
  static void Decode(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
    kDecode(TqmFormatOf(kBits, shape), shape, plane, rows);
  }
  static constexpr std::array<CodecBackend, 2> kHost = {{
      {"scalar", Always, Encode<EncodeTqmScalar>, Decode<DecodeTqmScalar>},
      {"highway", SimdSupported, Encode<EncodeTqmHighway>, Decode<DecodeTqmHighway>},
  }};
};

// In the order of CodecId.
constexpr std::array<Codec, 8> kCodecs = {{
    {CodecId::kRaw, "raw", AcceptsAny, RawBytes, kRawHost},
    {CodecId::kInt8, "int8", AcceptsFloats, Int8Bytes, kInt8Host},
    {CodecId::kTq4, "tq4", AcceptsRotation, Tq<4>::Bytes, Tq<4>::kHost},
    {CodecId::kTq3, "tq3", AcceptsRotation, Tq<3>::Bytes, Tq<3>::kHost},
    {CodecId::kTq2, "tq2", AcceptsRotation, Tq<2>::Bytes, Tq<2>::kHost},
    {CodecId::kTqm4, "tqm4", AcceptsKeyRotation, Tqm<4>::Bytes, Tqm<4>::kHost},
    {CodecId::kTqm3, "tqm3", AcceptsKeyRotation, Tqm<3>::Bytes, Tqm<3>::kHost},
    {CodecId::kTqm2, "tqm2", AcceptsKeyRotation, Tqm<2>::Bytes, Tqm<2>::kHost},
}};

struct Preset {
  std::string_view name;
  CodecChoice choice;
};

constexpr std::array<Preset, 3> kPresets = {{
    {"lossless", {{CodecId::kRaw, CodecId::kRaw}, /*raw_first_block=*/false}},
    {"safe", {{CodecId::kTqm4, CodecId::kTq4}, /*raw_first_block=*/true}},
    {"small", {{CodecId::kTqm4, CodecId::kTq3}, /*raw_first_block=*/true}},
}};

bool ServesOnlyKeys(const Codec& codec) {
  return codec.accepts({.num_tokens = 1, .dim = 64, .role = Role::kKey}) &&
         !codec.accepts({.num_tokens = 1, .dim = 64, .role = Role::kValue});
}

std::string NameOf(CodecId id) {
  const Codec* codec = FindCodec(id);
  return codec == nullptr ? absl::StrCat("codec ", static_cast<int>(id)) : std::string(codec->name);
}

absl::Status UnknownName(const std::string& name, bool presets_too) {
  std::vector<std::string> known;
  for (const Codec& codec : kCodecs) known.emplace_back(codec.name);
  std::string wanted;
  for (const std::string& codec : known)
    absl::StrAppend(&wanted, wanted.empty() ? "" : ", ", codec);
  if (presets_too) {
    for (const Preset& preset : kPresets) known.emplace_back(preset.name);
    absl::StrAppend(&wanted, ", a pair such as k=tqm4,v=tq4, or a preset: lossless, safe, small");
  }
  const std::string nearest = NearestName(name, known);
  return absl::InvalidArgumentError(
      absl::StrCat("codec \"", name, "\" is not known",
                   nearest.empty() ? "" : absl::StrCat("; did you mean \"", nearest, "\"?"),
                   " (known: ", wanted, ")"));
}

absl::StatusOr<CodecId> ParseForRole(const std::string& name, Role role) {
  const Codec* codec = FindCodec(std::string_view(name));
  if (codec == nullptr) return UnknownName(name, /*presets_too=*/false);
  if (role == Role::kValue && ServesOnlyKeys(*codec)) {
    return absl::InvalidArgumentError(
        absl::StrCat("codec \"", name, "\" serves keys only, not values; for values use \"tq",
                     name.substr(3), "\""));
  }
  return codec->id;
}

}  // namespace

absl::Span<const Codec> AllCodecs() { return kCodecs; }

const Codec* FindCodec(CodecId id) {
  for (const Codec& codec : kCodecs) {
    if (codec.id == id) return &codec;
  }
  return nullptr;
}

const Codec* FindCodec(std::string_view name) {
  for (const Codec& codec : kCodecs) {
    if (codec.name == name) return &codec;
  }
  return nullptr;
}

const CodecBackend& BestBackend(const Codec& codec) {
  for (size_t i = codec.host.size(); i-- > 1;) {
    if (codec.host[i].supported()) return codec.host[i];
  }
  return codec.host[0];
}

absl::StatusOr<CodecChoice> ParseCodecChoice(std::string_view text) {
  for (const Preset& preset : kPresets) {
    if (preset.name == text) return preset.choice;
  }
  const std::string whole(text);
  if (whole.find_first_of("=,") == std::string::npos) {
    if (FindCodec(text) == nullptr) return UnknownName(whole, /*presets_too=*/true);
    CodecChoice choice;
    KVSTOW_ASSIGN_OR_RETURN(choice.pair.k, ParseForRole(whole, Role::kKey));
    KVSTOW_ASSIGN_OR_RETURN(choice.pair.v, ParseForRole(whole, Role::kValue));
    return choice;
  }
  CodecChoice choice;
  bool has_k = false;
  bool has_v = false;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(whole, ','))) {
    const bool is_k = part.rfind("k=", 0) == 0;
    const bool is_v = part.rfind("v=", 0) == 0;
    if ((!is_k && !is_v) || (is_k && has_k) || (is_v && has_v)) {
      return absl::InvalidArgumentError(
          absl::StrCat("codec choice \"", whole, "\" is not of the form k=CODEC,v=CODEC: \"", part,
                       "\" is ", is_k || is_v ? "given twice" : "neither k=CODEC nor v=CODEC"));
    }
    (is_k ? has_k : has_v) = true;
    KVSTOW_ASSIGN_OR_RETURN((is_k ? choice.pair.k : choice.pair.v),
                            ParseForRole(part.substr(2), is_k ? Role::kKey : Role::kValue));
  }
  if (!has_k || !has_v) {
    return absl::InvalidArgumentError(absl::StrCat("codec choice \"", whole, "\" lacks ",
                                                   has_k ? "v=CODEC" : "k=CODEC",
                                                   ", want k=CODEC,v=CODEC"));
  }
  return choice;
}

std::string CodecPairName(const CodecPair& pair) {
  if (pair.k == pair.v) return NameOf(pair.k);
  return absl::StrCat("k=", NameOf(pair.k), ",v=", NameOf(pair.v));
}

CodecId EffectiveCodec(CodecId wanted, const PlaneShape& shape) {
  const Codec* codec = FindCodec(wanted);
  return codec != nullptr && codec->accepts(shape) ? wanted : CodecId::kRaw;
}

}  // namespace kvstow
