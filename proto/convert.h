// Convert: wire messages <-> domain values. What comes in is checked here, once: behind this file
// the types carry the proof. Every refusal is kInvalidArgument and names the field, what was found
// and what is allowed.
//
//   KVSTOW_ASSIGN_OR_RETURN(ModelSpec spec, ModelSpecFromProto(request.spec()));
//   KVSTOW_ASSIGN_OR_RETURN(auto keys, KeysFromBytes(request.keys(), "keys", 1));
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/codec/codec.h"
#include "kernels/core/block_key.h"
#include "kernels/core/model_spec.h"
#include "kvstow/v1/control.pb.h"
#include "kvstow/v1/data.pb.h"
#include "kvstow/v1/model.pb.h"

namespace kvstow {

// Limits of the wire: both ends refuse more.
inline constexpr int64_t kMaxKeysPerCall = 65536;
inline constexpr int64_t kMaxTokensPerCall = 1048576;
inline constexpr int64_t kMaxBlocksPerReserve = 4096;
inline constexpr int64_t kMaxTicketsPerCall = 4096;
inline constexpr int64_t kMaxListPage = 10000;
inline constexpr int64_t kDefaultListPage = 1000;
inline constexpr int kMaxUnitRanges = 65536;
inline constexpr int kMaxTenantBytes = 1024;
inline constexpr int kMaxContentDigestBytes = 64;  // lora_digest, each of multimodal_digests
inline constexpr int kMaxMultimodalDigests = 1024;
inline constexpr int kMaxSessionBytes = 64;
inline constexpr uint32_t kMaxPinMs = 24 * 3600 * 1000;
inline constexpr int64_t kMaxBundleBytes = int64_t{128} << 20;  // of a calibration
inline constexpr size_t kMaxBundleChunkBytes = size_t{1} << 20;

// TurnHints as plain values.
struct WireHints {
  uint64_t session = 0;  // 0: not told
  uint32_t turn = 0;
  bool session_over = false;
  absl::Duration returns_within;
  absl::Duration pin_for;
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
};

// The result is valid (ModelSpec::Validate).
absl::StatusOr<ModelSpec> ModelSpecFromProto(const v1::ModelSpec& message);
v1::ModelSpec ModelSpecToProto(const ModelSpec& spec);

absl::StatusOr<KeyContext> KeyContextFromProto(const v1::KeyContext& message);
v1::KeyContext KeyContextToProto(const KeyContext& context);
// The same limits, for a context made by a caller of the client library.
absl::Status CheckKeyContext(const KeyContext& context);

// Keys of 32 bytes, one after the other: min_keys to kMaxKeysPerCall of them.
absl::StatusOr<std::vector<BlockKey>> KeysFromBytes(std::string_view packed, std::string_view field,
                                                    int64_t min_keys);
std::string KeysToBytes(absl::Span<const BlockKey> keys);
// What GetRequest.place_xxh3 is to be.
uint64_t PlaceXxh3(const v1::GetRequest& request);
// kInvalidArgument unless min_keys <= num_keys <= kMaxKeysPerCall.
absl::Status CheckNumKeys(int64_t num_keys, std::string_view field, int64_t min_keys);

// kInvalidArgument for no tokens or more than kMaxTokensPerCall.
absl::Status CheckNumTokens(int64_t num_tokens, std::string_view field);

// kInvalidArgument: a session of more than 64 bytes, a tenant of more than 1024, a pin of more than
// a day. Tenant and session become a number: 64 bits of their digest.
absl::StatusOr<WireHints> HintsFromProto(const v1::TurnHints& message);

// Units [first, end) of a block.
struct UnitRange {
  uint32_t first = 0;
  uint32_t end = 0;
  bool operator==(const UnitRange&) const = default;
};

// kInvalidArgument: more than kMaxUnitRanges, an empty range, one that does not lie behind the one
// before it.
absl::StatusOr<std::vector<UnitRange>> UnitRangesFromProto(
    const google::protobuf::RepeatedPtrField<v1::UnitRange>& messages);

// FORM_ROWS or FORM_ENCODED; FORM_UNSPECIFIED gives `otherwise`, which may be FORM_UNSPECIFIED to
// refuse it. Unknown values are refused.
absl::StatusOr<v1::Form> FormFromProto(int value, v1::Form otherwise);

// "raw", "int8", "k=tqm4,v=tq4". Presets are refused: the client resolves them.
absl::StatusOr<CodecPair> CodecPairFromName(std::string_view name, std::string_view field);

// A codec number of a frame: kInvalidArgument where this build does not know it.
absl::StatusOr<CodecId> CodecIdFromWire(uint32_t value);

}  // namespace kvstow
