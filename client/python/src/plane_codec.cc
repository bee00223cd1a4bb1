#include "client/python/src/plane_codec.h"

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/python/src/errors.h"
#include "kernels/codec/calibration.h"
#include "kernels/codec/codec_plan.h"

namespace kvstow::python {

namespace py = pybind11;

namespace {

constexpr int32_t kMaxTokensPerBlock = ModelSpec::kMaxTokensPerBlock;

Role RoleOf(const std::string& name) {
  if (name == "k") return Role::kKey;
  if (name == "v") return Role::kValue;
  RaiseInvalidArgument(absl::StrCat("role: \"", name, "\", want \"k\" or \"v\""));
}

int32_t CheckRange(const char* name, int32_t value, int32_t max) {
  if (value < 1 || value > max) {
    RaiseInvalidArgument(absl::StrCat(name, ": ", value, ", want 1 to ", max));
  }
  return value;
}

bool IsContiguous(const HostArray& array) {
  int64_t next = array.item_bytes();
  for (size_t i = array.shape().size(); i-- > 0;) {
    if (array.shape()[i] != 1 && array.strides()[i] != next) return false;
    next *= array.shape()[i];
  }
  return true;
}

std::shared_ptr<const Rotation> RotationOf(const py::object& object, int32_t dim) {
  const std::shared_ptr<HostArray> array = HostArray::Open(object, "rotation", false);
  if (array->kind() != ValueKind::kInt || array->item_bytes() != 2 || !IsContiguous(*array) ||
      array->shape() != std::vector<int64_t>{dim, dim}) {
    RaiseInvalidArgument(absl::StrCat("rotation: ", array->TypeText(), " ", array->ShapeText(),
                                      ", want contiguous int16 [", dim, ", ", dim, "]"));
  }
  std::vector<int16_t> matrix(int64_t{dim} * dim);
  std::memcpy(matrix.data(), array->data(), matrix.size() * sizeof(int16_t));
  return std::make_shared<const Rotation>(ValueOrRaise(Rotation::Create(dim, matrix)));
}

}  // namespace

PlaneCodec::PlaneCodec(const Wanted& wanted) {
  const Codec* codec = FindCodec(std::string_view(wanted.codec));
  // ParseCodecChoice knows how to say which names there are.
  if (codec == nullptr) {
    ValueOrRaise(ParseCodecChoice(absl::StrCat("k=", wanted.codec, ",v=raw")));
  }
  shape_ = {
      .num_tokens = CheckRange("tokens_per_block", wanted.tokens_per_block, kMaxTokensPerBlock),
      .dim = CheckRange("dim", wanted.dim, ModelSpec::kMaxDim),
      .role = RoleOf(wanted.role),
      .dtype = ValueOrRaise(DTypeFromName(wanted.dtype))};
  if (!wanted.rotation.is_none()) {
    rotation_ = RotationOf(wanted.rotation, shape_.dim);
    shape_.rotation = rotation_.get();
  }
  codec_ = FindCodec(EffectiveCodec(codec->id, shape_));
}

PlaneCodec::Blocks PlaneCodec::Open(const py::object& rows, const py::object& planes,
                                    bool rows_are_written) const {
  Blocks blocks;
  blocks.rows_array = HostArray::Open(rows, "rows", rows_are_written);
  blocks.planes_array = HostArray::Open(planes, "planes", !rows_are_written);
  const std::vector<int64_t>& shape = blocks.rows_array->shape();
  if (shape.size() != 3 || shape[0] < 1 || shape[0] % shape_.num_tokens != 0 || shape[1] < 1 ||
      shape[1] > ModelSpec::kMaxKvHeads) {
    RaiseInvalidArgument(absl::StrCat("rows: shape ", blocks.rows_array->ShapeText(),
                                      ", want [a multiple of ", shape_.num_tokens, " tokens, 1 to ",
                                      ModelSpec::kMaxKvHeads, " heads, ", shape_.dim, "]"));
  }
  blocks.num_blocks = shape[0] / shape_.num_tokens;
  blocks.num_heads = shape[1];
  blocks.rows = RowsOf(*blocks.rows_array, {.dtype = shape_.dtype,
                                            .num_heads = static_cast<int32_t>(blocks.num_heads),
                                            .dim = shape_.dim,
                                            .min_tokens = shape[0],
                                            .is_written = rows_are_written});
  const HostArray& array = *blocks.planes_array;
  const std::vector<int64_t> want = {blocks.num_blocks, blocks.num_heads, plane_bytes()};
  if (array.shape() != want || array.item_bytes() != 1 || !IsContiguous(array)) {
    RaiseInvalidArgument(absl::StrCat("planes: ", array.TypeText(), " ", array.ShapeText(),
                                      ", want contiguous uint8 [", want[0], ", ", want[1], ", ",
                                      want[2], "]"));
  }
  blocks.planes = array.data();
  return blocks;
}

std::byte* PlaneCodec::RowAt(const Blocks& blocks, int64_t plane_idx, int64_t token) const {
  const int64_t block_idx = plane_idx / blocks.num_heads;
  const int64_t head_idx = plane_idx % blocks.num_heads;
  return blocks.rows.data +
         (block_idx * shape_.num_tokens + token) * blocks.rows.token_stride_bytes +
         head_idx * blocks.rows.head_stride_bytes;
}

py::bytes PlaneCodec::Encode(const py::object& rows, const py::object& planes) const {
  const Blocks blocks = Open(rows, planes, /*rows_are_written=*/false);
  const CodecBackend& backend = BestBackend(*codec_);
  const int64_t row_bytes = DTypeBytes(shape_.dtype, shape_.dim);
  const int64_t num_plane_bytes = plane_bytes();
  std::string kept_raw(blocks.num_blocks * blocks.num_heads, '\0');
  {
    const py::gil_scoped_release release;
    std::vector<std::byte> plane_rows(row_bytes * shape_.num_tokens);
    for (size_t i = 0; i < kept_raw.size(); ++i) {
      const int64_t plane_idx = static_cast<int64_t>(i);
      for (int64_t token = 0; token < shape_.num_tokens; ++token) {
        std::memcpy(plane_rows.data() + token * row_bytes, RowAt(blocks, plane_idx, token),
                    row_bytes);
      }
      const EncodeResult result =
          backend.encode(shape_, plane_rows.data(), blocks.planes + plane_idx * num_plane_bytes);
      kept_raw[i] = result == EncodeResult::kKeepRaw ? 1 : 0;
    }
  }
  return py::bytes(kept_raw);
}

void PlaneCodec::Decode(const py::object& planes, const std::string& kept_raw,
                        const py::object& rows) const {
  const Blocks blocks = Open(rows, planes, /*rows_are_written=*/true);
  if (static_cast<int64_t>(kept_raw.size()) != blocks.num_blocks * blocks.num_heads) {
    RaiseInvalidArgument(absl::StrCat("kept_raw: ", kept_raw.size(), " planes, want ",
                                      blocks.num_blocks * blocks.num_heads));
  }
  const CodecBackend& backend = BestBackend(*codec_);
  const int64_t row_bytes = DTypeBytes(shape_.dtype, shape_.dim);
  const int64_t num_plane_bytes = plane_bytes();
  const py::gil_scoped_release release;
  std::vector<std::byte> plane_rows(row_bytes * shape_.num_tokens);
  for (size_t i = 0; i < kept_raw.size(); ++i) {
    if (kept_raw[i] != 0) continue;
    const int64_t plane_idx = static_cast<int64_t>(i);
    backend.decode(shape_, blocks.planes + plane_idx * num_plane_bytes, plane_rows.data());
    for (int64_t token = 0; token < shape_.num_tokens; ++token) {
      std::memcpy(RowAt(blocks, plane_idx, token), plane_rows.data() + token * row_bytes,
                  row_bytes);
    }
  }
}

py::tuple CodecChoiceToPython(const std::string& text) {
  const CodecChoice choice = ValueOrRaise(ParseCodecChoice(text));
  return py::make_tuple(std::string(FindCodec(choice.pair.k)->name),
                        std::string(FindCodec(choice.pair.v)->name), choice.raw_first_block,
                        choice.num_raw_last_tokens);
}

py::tuple LayersToPython(const std::string& text) {
  const LayeredText layered = ValueOrRaise(SplitLayers(text));
  py::list layers;
  for (Role role : {Role::kKey, Role::kValue}) {
    for (int32_t layer_idx = 0; layer_idx < ModelSpec::kMaxLayers; ++layer_idx) {
      const std::optional<CodecId> codec = layered.layers.Find(layer_idx, role);
      if (!codec.has_value()) continue;
      layers.append(py::make_tuple(role == Role::kKey ? "k" : "v", layer_idx,
                                   std::string(FindCodec(*codec)->name)));
    }
  }
  return py::make_tuple(layered.choice, layers);
}

py::tuple BundleToPython(const std::string& bytes) {
  const Digest model = ValueOrRaise(Calibration::ModelOf(bytes));
  const Calibration calibration = ValueOrRaise(Calibration::Parse(bytes, model));
  py::list rotations;
  for (const Calibration::Entry& entry : calibration.entries()) {
    const absl::Span<const int16_t> matrix = entry.rotation.matrix();
    rotations.append(py::make_tuple(
        entry.place.layer_idx, entry.place.role == Role::kKey ? "k" : "v", entry.place.head_idx,
        entry.rotation.dim(),
        py::bytes(reinterpret_cast<const char*>(matrix.data()), matrix.size() * sizeof(int16_t))));
  }
  return py::make_tuple(calibration.id().ToHex(), rotations);
}

py::list CodecsToPython() {
  py::list codecs;
  for (const Codec& codec : AllCodecs()) {
    codecs.append(py::make_tuple(std::string(codec.name), codec.needs_rotation));
  }
  return codecs;
}

}  // namespace kvstow::python
