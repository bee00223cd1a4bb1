// KvFile: the KV cache of one prompt as a safetensors file, and back.
//
//   KVSTOW_ASSIGN_OR_RETURN(KvFile file, KvFile::Open("kv.safetensors", {}));
//   client.RegisterModel(file.spec()); client.Put(model, {.tokens = file.tokens(),
//                                                         .layers = file.layers(), ...});
//   KvBuffer got(file.spec(), num_tokens);
//   client.Get(model, keys, got.layers());
//   KVSTOW_RETURN_IF_ERROR(WriteKvFile("out.safetensors", DescribeLike(file), got, tokens));
//
// The convention: `k.{layer}` and `v.{layer}` are [tokens, kv_heads, head_dim] of one type; a layer
// without `v` holds MLA latents; `token_ids` is I32 [tokens]. `__metadata__` gives what tensors
// cannot: model, weights_sha256 or weights, rope_base and rope_layout (or rope), keys_rotated,
// tokenizer, tokens_per_block. Layers of equal shape in a row become one layer group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/kv_client.h"
#include "client/cpp/safetensors.h"
#include "kernels/core/dtype.h"
#include "kernels/core/model_spec.h"

namespace kvstow {

// Takes the place of what the file's metadata says; empty or 0 leaves it.
struct KvFileOverrides {
  std::string model;
  std::string weights;
  std::string rope;
  std::string tokenizer;
  int32_t tokens_per_block = 0;
};

// The dtype that a KV tensor of this type has; nothing for types that hold no KV.
std::optional<DType> KvDTypeOf(TensorType type);

class KvFile {
 public:
  // kInvalidArgument names the file, the tensor or the metadata, what was found and what is wanted.
  static absl::StatusOr<KvFile> Open(const std::string& path, const KvFileOverrides& overrides);
  static absl::StatusOr<KvFile> FromSafetensors(SafetensorsFile file,
                                                const KvFileOverrides& overrides);

  const std::string& path() const { return file_.path(); }
  const SafetensorsFile& safetensors() const { return file_; }
  const ModelSpec& spec() const { return spec_; }
  absl::Span<const int32_t> tokens() const { return tokens_; }
  // Views of the file's own memory: for reading only, though RowsView could write.
  absl::Span<const LayerRows> layers() const { return layers_; }

  // kInvalidArgument where the tokens fill no block: there is nothing to name, store or fetch.
  absl::Status CheckHasBlocks() const;
  int64_t num_full_blocks() const {
    return static_cast<int64_t>(tokens_.size()) / spec_.tokens_per_block;
  }

 private:
  explicit KvFile(SafetensorsFile file) : file_(std::move(file)) {}
  absl::Status ReadTokens();
  absl::Status ReadLayers();
  absl::Status CheckLayerCount() const;

  SafetensorsFile file_;
  ModelSpec spec_;
  std::vector<int32_t> tokens_;
  std::vector<LayerRows> layers_;
};

// Memory for the KV of `num_tokens` tokens in the file's layout, zeroed.
class KvBuffer {
 public:
  KvBuffer(const ModelSpec& spec, int64_t num_tokens);

  const ModelSpec& spec() const { return spec_; }
  int64_t num_tokens() const { return num_tokens_; }
  absl::Span<const LayerRows> layers() const { return layers_; }
  int64_t num_bytes() const { return static_cast<int64_t>(memory_.size()); }

 private:
  ModelSpec spec_;
  int64_t num_tokens_;
  std::vector<std::byte> memory_;
  std::vector<LayerRows> layers_;
};

// The rows of the first `num_tokens` tokens of (layer, role): contiguous bytes.
absl::Span<const std::byte> RowBytes(const ModelSpec& spec, const LayerRows& rows,
                                     int32_t layer_idx, Role role, int64_t num_tokens);

// Metadata for a file that holds the first `num_tokens` tokens of `file`: the same, but for the
// token count.
TensorMetadata DescribeLike(const KvFile& file, int64_t num_tokens);
// Metadata from which KvFile::Open makes this spec again (but for sliding layers, which a file
// cannot tell from full ones).
TensorMetadata DescribeSpec(const ModelSpec& spec, int64_t num_tokens);

// Writes the first `num_tokens` tokens of `buffer`. `tokens` may be empty: then there is no
// token_ids.
absl::Status WriteKvFile(const std::string& path, const TensorMetadata& metadata,
                         const KvBuffer& buffer, absl::Span<const int32_t> tokens,
                         int64_t num_tokens);

}  // namespace kvstow
