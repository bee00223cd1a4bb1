#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/gear.h"
#include "kernels/codec/int4.h"
#include "kernels/codec/int8.h"
#include "kernels/codec/kivi.h"
#include "kernels/codec/olm.h"
#include "kernels/codec/oscar.h"
#include "kernels/codec/raw.h"
#include "kernels/codec/simd.h"
#include "kernels/codec/tq.h"
#include "kernels/codec/tq_mixed.h"
#include "kernels/codec/tq_prod.h"
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

bool AcceptsHadamard(const PlaneShape& shape) {
  return AcceptsFloats(shape) && PaleyOrder(shape.dim) != 0;
}

bool AcceptsKeyHadamard(const PlaneShape& shape) {
  return AcceptsHadamard(shape) && shape.role == Role::kKey;
}

int64_t Int8Bytes(const PlaneShape& shape) {
  return Int8Layout(shape.num_tokens, shape.dim).plane_bytes;
}

int64_t Int4Bytes(const PlaneShape& shape) {
  return Int4Layout(shape.num_tokens, shape.dim).plane_bytes;
}

int64_t OscarBytes(const PlaneShape& shape) { return OscarFormat{shape}.plane_bytes(); }

int64_t GearBytes(const PlaneShape& shape) { return GearFormat{shape}.plane_bytes(); }

constexpr std::array<CodecBackend, 1> kRawHost = {{{"scalar", Always, EncodeRaw, DecodeRaw}}};

constexpr std::array<CodecBackend, 2> kInt8Host = {{
    {"scalar", Always, EncodeInt8Scalar, DecodeInt8Scalar},
    {"highway", SimdSupported, EncodeInt8Highway, DecodeInt8Highway},
}};

constexpr std::array<CodecBackend, 2> kInt4Host = {{
    {"scalar", Always, EncodeInt4Scalar, DecodeInt4Scalar},
    {"highway", SimdSupported, EncodeInt4Highway, DecodeInt4Highway},
}};

constexpr std::array<CodecBackend, 2> kOscarHost = {{
    {"scalar", Always, EncodeOscarScalar, DecodeOscarScalar},
    {"highway", SimdSupported, EncodeOscarHighway, DecodeOscarHighway},
}};

constexpr std::array<CodecBackend, 1> kGearHost = {
    {{"scalar", Always, EncodeGearScalar, DecodeGearScalar}}};

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

template <int kBits>
struct Kivi {
  static int64_t Bytes(const PlaneShape& shape) { return KiviFormatOf(kBits, shape).plane_bytes(); }
  template <auto kEncode>
  static EncodeResult Encode(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
    return kEncode(KiviFormatOf(kBits, shape), shape, rows, plane);
  }
  template <auto kDecode>
  static void Decode(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
    kDecode(KiviFormatOf(kBits, shape), shape, plane, rows);
  }
  static constexpr std::array<CodecBackend, 2> kHost = {{
      {"scalar", Always, Encode<EncodeKiviScalar>, Decode<DecodeKiviScalar>},
      {"highway", SimdSupported, Encode<EncodeKiviHighway>, Decode<DecodeKiviHighway>},
  }};
};

// Families whose format holds the shape.
template <class Format>
struct Shaped {
  template <int kBits>
  static int64_t Bytes(const PlaneShape& shape) {
    return Format{.bits = kBits, .shape = shape}.plane_bytes();
  }
  template <int kBits, auto kEncode>
  static EncodeResult Encode(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
    return kEncode(Format{.bits = kBits, .shape = shape}, rows, plane);
  }
  template <int kBits, auto kDecode>
  static void Decode(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
    kDecode(Format{.bits = kBits, .shape = shape}, plane, rows);
  }
};

template <int kBits>
struct TqMixed : Shaped<TqMixedFormat> {
  static constexpr std::array<CodecBackend, 2> kHost = {{
      {"scalar", Always, Encode<kBits, EncodeTqMixedScalar>, Decode<kBits, DecodeTqMixedScalar>},
      {"highway", SimdSupported, Encode<kBits, EncodeTqMixedHighway>,
       Decode<kBits, DecodeTqMixedHighway>},
  }};
};

template <int kBits>
struct TqProd : Shaped<TqProdFormat> {
  static constexpr std::array<CodecBackend, 1> kHost = {
      {{"scalar", Always, Encode<kBits, EncodeTqProdScalar>, Decode<kBits, DecodeTqProdScalar>}}};
};

template <int kBits>
struct Olm {
  static int64_t Bytes(const PlaneShape& shape) {
    return OlmFormatOf(kBits, shape).layout().plane_bytes;
  }
  template <auto kEncode>
  static EncodeResult Encode(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
    return kEncode(OlmFormatOf(kBits, shape), rows, plane);
  }
  template <auto kDecode>
  static void Decode(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
    kDecode(OlmFormatOf(kBits, shape), plane, rows);
  }
  static constexpr std::array<CodecBackend, 2> kHost = {{
      {"scalar", Always, Encode<EncodeOlmScalar>, Decode<DecodeOlmScalar>},
      {"highway", SimdSupported, Encode<EncodeOlmHighway>, Decode<DecodeOlmHighway>},
  }};
};

// In the order of CodecId.
constexpr std::array<Codec, 21> kCodecs = {{
    {CodecId::kRaw, "raw", false, AcceptsAny, RawBytes, kRawHost},
    {CodecId::kInt8, "int8", false, AcceptsFloats, Int8Bytes, kInt8Host},
    {CodecId::kTq4, "tq4", false, AcceptsHadamard, Tq<4>::Bytes, Tq<4>::kHost},
    {CodecId::kTq3, "tq3", false, AcceptsHadamard, Tq<3>::Bytes, Tq<3>::kHost},
    {CodecId::kTq2, "tq2", false, AcceptsHadamard, Tq<2>::Bytes, Tq<2>::kHost},
    {CodecId::kTqm4, "tqm4", false, AcceptsKeyHadamard, Tqm<4>::Bytes, Tqm<4>::kHost},
    {CodecId::kTqm3, "tqm3", false, AcceptsKeyHadamard, Tqm<3>::Bytes, Tqm<3>::kHost},
    {CodecId::kTqm2, "tqm2", false, AcceptsKeyHadamard, Tqm<2>::Bytes, Tqm<2>::kHost},
    {CodecId::kInt4, "int4", false, AcceptsFloats, Int4Bytes, kInt4Host},
    {CodecId::kKivi4, "kivi4", false, KiviAccepts, Kivi<4>::Bytes, Kivi<4>::kHost},
    {CodecId::kKivi2, "kivi2", false, KiviAccepts, Kivi<2>::Bytes, Kivi<2>::kHost},
    {CodecId::kTq3Mixed, "tq3.5", false, TqMixedAccepts, TqMixed<3>::Bytes<3>, TqMixed<3>::kHost},
    {CodecId::kTq2Mixed, "tq2.5", false, TqMixedAccepts, TqMixed<2>::Bytes<2>, TqMixed<2>::kHost},
    {CodecId::kTqProd4, "tq_prod4", false, AcceptsHadamard, TqProd<4>::Bytes<4>, TqProd<4>::kHost},
    {CodecId::kTqProd3, "tq_prod3", false, AcceptsHadamard, TqProd<3>::Bytes<3>, TqProd<3>::kHost},
    {CodecId::kTqProd2, "tq_prod2", false, AcceptsHadamard, TqProd<2>::Bytes<2>, TqProd<2>::kHost},
    {CodecId::kOlm4, "olm4", true, OlmAccepts, Olm<4>::Bytes, Olm<4>::kHost},
    {CodecId::kOlm3, "olm3", true, OlmAccepts, Olm<3>::Bytes, Olm<3>::kHost},
    {CodecId::kOsu2, "osu2", true, OlmAccepts, Olm<2>::Bytes, Olm<2>::kHost},
    {CodecId::kOscar2, "oscar2", true, OlmAccepts, OscarBytes, kOscarHost},
    {CodecId::kGear, "gear", false, GearAccepts, GearBytes, kGearHost},
}};

struct Preset {
  std::string_view name;
  CodecChoice choice;
};

constexpr std::array<Preset, 4> kPresets = {{
    {"lossless", {{CodecId::kRaw, CodecId::kRaw}, /*raw_first_block=*/false}},
    {"safe", {{CodecId::kTqm4, CodecId::kTq4}, /*raw_first_block=*/true}},
    {"small", {{CodecId::kTqm4, CodecId::kTq3}, /*raw_first_block=*/true}},
    {"tiny",
     {{CodecId::kTqm3, CodecId::kTq2}, /*raw_first_block=*/true, /*num_raw_last_tokens=*/64}},
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
    absl::StrAppend(&wanted,
                    ", a pair such as k=tqm4,v=tq4, or a preset: lossless, safe, small, tiny");
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

bool NeedsCalibration(const CodecPair& pair) {
  const auto needs = [](CodecId id) {
    const Codec* codec = FindCodec(id);
    return codec != nullptr && codec->needs_rotation;
  };
  return needs(pair.k) || needs(pair.v);
}

CodecId EffectiveCodec(CodecId wanted, const PlaneShape& shape) {
  const Codec* codec = FindCodec(wanted);
  return codec != nullptr && codec->accepts(shape) ? wanted : CodecId::kRaw;
}

}  // namespace kvstow
