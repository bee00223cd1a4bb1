#include "client/cli/kv_file.h"

#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr int kMaxRank = 3;  // [tokens, kv_heads, head_dim]

absl::Status Bad(const SafetensorsFile& file, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(file.path(), ": ", what));
}

absl::StatusOr<DType> KvDType(const SafetensorsFile& file, const Tensor& tensor) {
  const std::optional<DType> dtype = KvDTypeOf(tensor.type);
  if (dtype.has_value()) return *dtype;
  return Bad(file, absl::StrCat("tensor \"", tensor.name, "\" is ", tensor.ShapeText(),
                                ", want BF16, F16, F32, F8_E4M3, F8_E5M2 or I8"));
}

TensorType FileType(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return TensorType::kBf16;
    case DType::kF16:
      return TensorType::kF16;
    case DType::kF32:
      return TensorType::kF32;
    case DType::kF8E4M3:
      return TensorType::kF8E4M3;
    case DType::kF8E5M2:
      return TensorType::kF8E5M2;
    case DType::kInt8:
      return TensorType::kI8;
    case DType::kNvfp4:  // the engine's own bytes
    case DType::kOpaque:
      return TensorType::kU8;
  }
  return TensorType::kU8;
}

std::string TextOr(const SafetensorsFile& file, std::string_view name, std::string otherwise) {
  const std::string* found = file.FindMetadata(name);
  return found != nullptr ? *found : otherwise;
}

// "base=100000,half" from rope_base "100000.0" and rope_layout "half-split".
absl::StatusOr<std::string> RopeText(const SafetensorsFile& file) {
  if (const std::string* rope = file.FindMetadata("rope")) return *rope;
  const std::string* base_text = file.FindMetadata("rope_base");
  if (base_text == nullptr) return std::string();
  double base = 0;
  if (!absl::SimpleAtod(*base_text, &base) || !(base > 0)) {
    return Bad(file,
               absl::StrCat("metadata rope_base is \"", *base_text, "\", want a number above 0"));
  }
  std::string layout = TextOr(file, "rope_layout", "half-split");
  if (layout == "half-split") layout = "half";
  return absl::StrFormat("base=%.17g,%s", base, layout);
}

absl::StatusOr<bool> KeysAreRotated(const SafetensorsFile& file) {
  const std::string text = TextOr(file, "keys_rotated", "true");
  if (text == "true") return true;
  if (text == "false") return false;
  return Bad(file, absl::StrCat("metadata keys_rotated is \"", text, "\", want true or false"));
}

// Everything of the spec but the layer groups and the dtype, which tensors tell.
absl::StatusOr<ModelSpec> SpecFromMetadata(const SafetensorsFile& file,
                                           const KvFileOverrides& overrides) {
  ModelSpec spec;
  spec.name = overrides.model.empty() ? TextOr(file, "model", "") : overrides.model;
  if (spec.name.empty()) return Bad(file, "metadata has no model; give --model NAME");
  spec.weights = overrides.weights;
  if (spec.weights.empty()) {
    const std::string* digest = file.FindMetadata("weights_sha256");
    spec.weights =
        digest != nullptr ? absl::StrCat("sha256:", *digest) : TextOr(file, "weights", "");
  }
  if (spec.weights.empty()) {
    return Bad(file, "metadata has neither weights_sha256 nor weights; give --weights DIGEST");
  }
  KVSTOW_ASSIGN_OR_RETURN(spec.rope, RopeText(file));
  if (!overrides.rope.empty()) spec.rope = overrides.rope;
  KVSTOW_ASSIGN_OR_RETURN(spec.keys_are_rotated, KeysAreRotated(file));
  spec.tokenizer =
      overrides.tokenizer.empty() ? TextOr(file, "tokenizer", "") : overrides.tokenizer;
  const std::string tokens_text =
      TextOr(file, "tokens_per_block", absl::StrCat(spec.tokens_per_block));
  if (overrides.tokens_per_block != 0) {
    spec.tokens_per_block = overrides.tokens_per_block;
  } else if (!absl::SimpleAtoi(tokens_text, &spec.tokens_per_block)) {
    return Bad(file, absl::StrCat("metadata tokens_per_block is \"", tokens_text,
                                  "\", want a whole number"));
  }
  return spec;
}

absl::Status CheckKvTensor(const SafetensorsFile& file, const Tensor& tensor, TensorType type,
                           int64_t num_tokens) {
  if (tensor.type != type || tensor.shape.size() != kMaxRank || tensor.shape[0] != num_tokens) {
    return Bad(file, absl::StrCat("tensor \"", tensor.name, "\" is ", tensor.ShapeText(), ", want ",
                                  ToAbsl(TensorTypeName(type)), " [", num_tokens,
                                  ", kv_heads, head_dim]"));
  }
  for (int i = 1; i < kMaxRank; ++i) {
    if (tensor.shape[i] < 1 || tensor.shape[i] > ModelSpec::kMaxDim) {
      return Bad(file, absl::StrCat("tensor \"", tensor.name, "\" is ", tensor.ShapeText(),
                                    ", want kv_heads and head_dim from 1 to ", ModelSpec::kMaxDim));
    }
  }
  return absl::OkStatus();
}

// Adds a layer to the groups: to the last one when it has the same shape.
void AddLayer(ModelSpec& spec, int32_t layer_idx, const LayerGroup& shape) {
  if (!spec.groups.empty()) {
    LayerGroup& last = spec.groups.back();
    if (last.kind == shape.kind && last.num_kv_heads == shape.num_kv_heads &&
        last.k_dim == shape.k_dim && last.v_dim == shape.v_dim) {
      ++last.num_layers;
      return;
    }
  }
  spec.groups.push_back(shape);
  spec.groups.back().first_layer = layer_idx;
  spec.groups.back().num_layers = 1;
}

RowsView View(DType dtype, int32_t num_heads, int32_t dim, std::byte* data) {
  const int64_t row_bytes = DTypeBytes(dtype, dim);
  return {
      .data = data, .token_stride_bytes = num_heads * row_bytes, .head_stride_bytes = row_bytes};
}

const LayerGroup& GroupOf(const ModelSpec& spec, int32_t layer_idx) {
  size_t i = 0;
  while (layer_idx >= spec.groups[i].first_layer + spec.groups[i].num_layers) ++i;
  return spec.groups[i];
}

}  // namespace

std::optional<DType> KvDTypeOf(TensorType type) {
  switch (type) {
    case TensorType::kBf16:
      return DType::kBf16;
    case TensorType::kF16:
      return DType::kF16;
    case TensorType::kF32:
      return DType::kF32;
    case TensorType::kF8E4M3:
      return DType::kF8E4M3;
    case TensorType::kF8E5M2:
      return DType::kF8E5M2;
    case TensorType::kI8:
      return DType::kInt8;
    default:
      return std::nullopt;
  }
}

absl::StatusOr<KvFile> KvFile::Open(const std::string& path, const KvFileOverrides& overrides) {
  KVSTOW_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  return FromSafetensors(std::move(file), overrides);
}

absl::StatusOr<KvFile> KvFile::FromSafetensors(SafetensorsFile file,
                                               const KvFileOverrides& overrides) {
  KvFile kv(std::move(file));
  KVSTOW_ASSIGN_OR_RETURN(kv.spec_, SpecFromMetadata(kv.file_, overrides));
  KVSTOW_RETURN_IF_ERROR(kv.ReadTokens());
  KVSTOW_RETURN_IF_ERROR(kv.ReadLayers());
  KVSTOW_RETURN_IF_ERROR(kv.spec_.Validate());
  return kv;
}

absl::Status KvFile::ReadTokens() {
  const Tensor* ids = file_.Find("token_ids");
  if (ids == nullptr) {
    return Bad(file_, "there is no tensor \"token_ids\": it names the blocks, I32 [tokens]");
  }
  if (ids->type != TensorType::kI32 || ids->shape.size() != 1) {
    return Bad(file_,
               absl::StrCat("tensor \"token_ids\" is ", ids->ShapeText(), ", want I32 [tokens]"));
  }
  tokens_.resize(ids->shape[0]);
  const absl::Span<const std::byte> bytes = file_.bytes(*ids);
  if (!bytes.empty()) std::memcpy(tokens_.data(), bytes.data(), bytes.size());
  return absl::OkStatus();
}

absl::Status KvFile::ReadLayers() {
  const Tensor* first = file_.Find("k.0");
  if (first == nullptr) {
    return Bad(file_, "there is no tensor \"k.0\": keys are named k.{layer}, values v.{layer}");
  }
  KVSTOW_ASSIGN_OR_RETURN(spec_.kv_dtype, KvDType(file_, *first));
  const int64_t num_tokens = static_cast<int64_t>(tokens_.size());
  for (int32_t layer_idx = 0; layer_idx <= ModelSpec::kMaxLayers; ++layer_idx) {
    const Tensor* k = file_.Find(absl::StrCat("k.", layer_idx));
    const Tensor* v = file_.Find(absl::StrCat("v.", layer_idx));
    if (k == nullptr && v == nullptr) break;
    if (k == nullptr)
      return Bad(file_, absl::StrCat("there is v.", layer_idx, " but no k.", layer_idx));
    KVSTOW_RETURN_IF_ERROR(CheckKvTensor(file_, *k, first->type, num_tokens));
    LayerGroup shape{.kind = LayerKind::kMla,
                     .num_kv_heads = static_cast<int32_t>(k->shape[1]),
                     .k_dim = static_cast<int32_t>(k->shape[2])};
    if (v != nullptr) {
      KVSTOW_RETURN_IF_ERROR(CheckKvTensor(file_, *v, first->type, num_tokens));
      if (v->shape[1] != k->shape[1]) {
        return Bad(file_, absl::StrCat("k.", layer_idx, " has ", k->shape[1], " heads, v.",
                                       layer_idx, " has ", v->shape[1], ", want as many"));
      }
      shape.kind = LayerKind::kFull;
      shape.v_dim = static_cast<int32_t>(v->shape[2]);
    }
    AddLayer(spec_, layer_idx, shape);
    LayerRows rows;
    rows.k = View(spec_.kv_dtype, shape.num_kv_heads, shape.k_dim,
                  const_cast<std::byte*>(file_.bytes(*k).data()));
    if (v != nullptr) {
      rows.v = View(spec_.kv_dtype, shape.num_kv_heads, shape.v_dim,
                    const_cast<std::byte*>(file_.bytes(*v).data()));
    }
    layers_.push_back(rows);
  }
  return CheckLayerCount();
}

// No tensor is left aside in silence: a gap in the numbering would lose all layers above it.
absl::Status KvFile::CheckLayerCount() const {
  const int32_t num_layers = static_cast<int32_t>(layers_.size());
  for (const Tensor& tensor : file_.tensors()) {
    if (!tensor.name.starts_with("k.") && !tensor.name.starts_with("v.")) continue;
    int32_t layer_idx = -1;
    if (!absl::SimpleAtoi(tensor.name.substr(2), &layer_idx) || layer_idx < 0 ||
        layer_idx >= num_layers) {
      return Bad(file_,
                 absl::StrCat("tensor \"", tensor.name, "\" is out of place: layers 0 to ",
                              num_layers - 1, " were found, k.", num_layers, " is not there"));
    }
  }
  const std::string want = TextOr(file_, "layers", absl::StrCat(num_layers));
  if (want != absl::StrCat(num_layers)) {
    return Bad(file_, absl::StrCat("metadata layers is \"", want, "\", the file has ", num_layers));
  }
  return absl::OkStatus();
}

absl::Status KvFile::CheckHasBlocks() const {
  if (num_full_blocks() > 0) return absl::OkStatus();
  return Bad(file_, absl::StrCat("its ", tokens_.size(), " tokens do not fill a block of ",
                                 spec_.tokens_per_block));
}

KvBuffer::KvBuffer(const ModelSpec& spec, int64_t num_tokens)
    : spec_(spec), num_tokens_(num_tokens) {
  int64_t num_bytes = 0;
  for (const LayerGroup& group : spec_.groups) {
    num_bytes += DTypeBytes(spec_.kv_dtype, int64_t{group.k_dim} + group.v_dim) *
                 group.num_kv_heads * group.num_layers * num_tokens;
  }
  memory_.resize(num_bytes);
  std::byte* next = memory_.data();
  for (int32_t layer_idx = 0; layer_idx < spec_.num_layers(); ++layer_idx) {
    const LayerGroup& group = GroupOf(spec_, layer_idx);
    LayerRows rows;
    rows.k = View(spec_.kv_dtype, group.num_kv_heads, group.k_dim, next);
    next += rows.k.token_stride_bytes * num_tokens;
    rows.v = View(spec_.kv_dtype, group.num_kv_heads, group.v_dim, next);
    next += rows.v.token_stride_bytes * num_tokens;
    layers_.push_back(rows);
  }
}

absl::Span<const std::byte> RowBytes(const ModelSpec& spec, const LayerRows& rows,
                                     int32_t layer_idx, Role role, int64_t num_tokens) {
  const LayerGroup& group = GroupOf(spec, layer_idx);
  const int32_t dim = role == Role::kKey ? group.k_dim : group.v_dim;
  const RowsView& view = role == Role::kKey ? rows.k : rows.v;
  const int64_t num_bytes = DTypeBytes(spec.kv_dtype, dim) * group.num_kv_heads * num_tokens;
  return {view.data, static_cast<size_t>(num_bytes)};
}

TensorMetadata DescribeLike(const KvFile& file, int64_t num_tokens) {
  TensorMetadata metadata = file.safetensors().metadata();
  for (auto& [name, value] : metadata) {
    if (name == "tokens") value = absl::StrCat(num_tokens);
  }
  return metadata;
}

TensorMetadata DescribeSpec(const ModelSpec& spec, int64_t num_tokens) {
  return {{"model", spec.name},
          {"weights", spec.weights},
          {"layers", absl::StrCat(spec.num_layers())},
          {"rope", spec.rope},
          {"keys_rotated", spec.keys_are_rotated ? "true" : "false"},
          {"tokenizer", spec.tokenizer},
          {"tokens_per_block", absl::StrCat(spec.tokens_per_block)},
          {"tokens", absl::StrCat(num_tokens)},
          {"layout", "k.{layer} and v.{layer}: [tokens, kv_heads, head_dim]"}};
}

absl::Status WriteKvFile(const std::string& path, const TensorMetadata& metadata,
                         const KvBuffer& buffer, absl::Span<const int32_t> tokens,
                         int64_t num_tokens) {
  const ModelSpec& spec = buffer.spec();
  SafetensorsWriter writer;
  writer.SetMetadata(metadata);
  if (!tokens.empty()) {
    const absl::Span<const int32_t> ids = tokens.first(num_tokens);
    KVSTOW_RETURN_IF_ERROR(
        writer.Add("token_ids", TensorType::kI32, {num_tokens},
                   {reinterpret_cast<const std::byte*>(ids.data()), ids.size() * sizeof(int32_t)}));
  }
  const TensorType type = FileType(spec.kv_dtype);
  for (int32_t layer_idx = 0; layer_idx < spec.num_layers(); ++layer_idx) {
    const LayerGroup& group = GroupOf(spec, layer_idx);
    const LayerRows& rows = buffer.layers()[layer_idx];
    KVSTOW_RETURN_IF_ERROR(writer.Add(absl::StrCat("k.", layer_idx), type,
                                      {num_tokens, group.num_kv_heads, group.k_dim},
                                      RowBytes(spec, rows, layer_idx, Role::kKey, num_tokens)));
    if (group.v_dim == 0) continue;
    KVSTOW_RETURN_IF_ERROR(writer.Add(absl::StrCat("v.", layer_idx), type,
                                      {num_tokens, group.num_kv_heads, group.v_dim},
                                      RowBytes(spec, rows, layer_idx, Role::kValue, num_tokens)));
  }
  return writer.Write(path);
}

}  // namespace kvstow
