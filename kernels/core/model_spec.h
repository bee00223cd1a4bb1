// ModelSpec: everything about a model that decides what its KV bytes mean.
//
//   ModelSpec spec;
//   spec.name = "SmolLM2-135M-Instruct";
//   spec.weights = "sha256:b179c952...";
//   spec.kv_dtype = DType::kBf16;
//   spec.groups = {{.first_layer = 0, .num_layers = 30, .kind = LayerKind::kFull,
//                   .num_kv_heads = 3, .k_dim = 64, .v_dim = 64}};
//   KVSTOW_RETURN_IF_ERROR(spec.Validate());
//   Digest fingerprint = spec.Fingerprint();
//
// Registered once; its fingerprint goes into every block key and every record, so KV of another
// model, revision, dtype or layout is never found, let alone returned.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/digest.h"
#include "kernels/core/dtype.h"

namespace kvstow {

// Part of the fingerprint: never renumber, never reuse.
enum class LayerKind : uint8_t {
  kFull = 1,     // K and V of every token
  kSliding = 2,  // K and V, attended within a window
  kMla = 3,      // one latent row per token (ckv and kpe): role K only, one head, v_dim 0
  kOpaque = 4,   // k_dim bytes per token and head of an engine's own record; v_dim 0
};

std::string_view LayerKindName(LayerKind kind);  // "full", "sliding", "mla", "opaque"
absl::StatusOr<LayerKind> LayerKindFromName(std::string_view name);

// Consecutive layers of equal shape. Dims count values (bytes for opaque and nvfp4).
struct LayerGroup {
  int32_t first_layer = 0;
  int32_t num_layers = 0;
  LayerKind kind = LayerKind::kFull;
  int32_t num_kv_heads = 0;
  int32_t k_dim = 0;
  int32_t v_dim = 0;
  bool operator==(const LayerGroup&) const = default;
};

struct ModelSpec {
  static constexpr int kMaxLayers = 1024;
  static constexpr int kMaxKvHeads = 1024;
  static constexpr int kMaxDim = 8192;
  static constexpr int kMaxTokensPerBlock = 1024;
  static constexpr int64_t kMaxPlaneBytes = int64_t{2} << 20;  // so that a plane fits one frame
  static constexpr int64_t kMaxBlockBytes = int64_t{1} << 30;
  static constexpr int kMaxTextBytes = 1024;  // of name, weights, tokenizer, rope

  std::string name;     // for people; part of the fingerprint all the same
  std::string weights;  // digest or revision of the weights
  DType kv_dtype = DType::kBf16;
  std::vector<LayerGroup> groups;  // cover layers 0..n-1, each once, in ascending order
  std::string rope;  // canonical text of the RoPE parameters, for example "base=100000,half"
  bool keys_are_rotated = true;   // keys are stored after RoPE
  int32_t tokens_per_block = 64;  // a multiple of 32
  std::string tokenizer;          // digest of the tokenizer

  bool operator==(const ModelSpec&) const = default;

  // kInvalidArgument names the field, what was found and what is allowed: unknown or contradictory
  // layouts are refused here, once (missing or overlapping layers, zero heads, zero dims).
  absl::Status Validate() const;

  int32_t num_layers() const;

  // Canonical bytes: fixed order, length-prefixed. Equal specs give equal bytes.
  std::string Serialize() const;
  // Inverse of Serialize, validated. kInvalidArgument on any deviation.
  static absl::StatusOr<ModelSpec> Parse(std::string_view bytes);

  // SHA-256 of a domain tag and Serialize().
  Digest Fingerprint() const;
};

}  // namespace kvstow
