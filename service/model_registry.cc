#include "service/model_registry.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/synced_file.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".model";
// Far above the largest ModelSpec::Serialize (1024 groups and four texts).
constexpr int64_t kFileBytesMax = 1 << 20;

absl::StatusOr<ModelRef> ReadModel(const fs::path& path) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string bytes, ReadWholeFile(path, kFileBytesMax));
  KVSTOW_ASSIGN_OR_RETURN(const ModelSpec spec, ModelSpec::Parse(bytes));
  KVSTOW_ASSIGN_OR_RETURN(ModelRef model, RegisteredModel::Create(spec));
  if (model->fingerprint().ToHex() != path.stem().string()) {
    return absl::DataLossError(absl::StrCat("holds the model ", model->fingerprint().ToHex(),
                                            ", not the one of its name"));
  }
  return model;
}

}  // namespace

absl::StatusOr<ModelRef> RegisteredModel::Create(const ModelSpec& spec) {
  KVSTOW_ASSIGN_OR_RETURN(const BlockLayout layout, BlockLayout::Create(spec));
  return ModelRef(new RegisteredModel(spec, layout));
}

PlaneShape RegisteredModel::shape(int32_t plane_idx, const Calibration* calibration) const {
  return CalibratedShape(layout_, layout_.plane(plane_idx), calibration);
}

CodecId RegisteredModel::codec_of(int32_t plane_idx, const CodecPair& codecs,
                                  const Calibration* calibration) const {
  const PlaneShape plane_shape = shape(plane_idx, calibration);
  return EffectiveCodec(codecs.of(plane_shape.role), plane_shape);
}

uint32_t RegisteredModel::unit_bytes(int32_t plane_idx, CodecId codec) const {
  if (codec == CodecId::kRaw) return static_cast<uint32_t>(layout_.plane(plane_idx).row_bytes);
  const Codec* found = FindCodec(codec);
  KVSTOW_CHECK(found != nullptr);
  return static_cast<uint32_t>(found->plane_bytes(shape(plane_idx)));
}

RegisteredModel::Plan RegisteredModel::PlanFor(const CodecPair& codecs,
                                               const Calibration* calibration) const {
  const PlanKey key = {codecs.k, codecs.v, calibration != nullptr};
  MutexLock lock(&mutex_);
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  auto sizes = std::make_shared<std::vector<uint32_t>>();
  sizes->reserve(static_cast<size_t>(layout_.num_planes()));
  bool has_role[2] = {};
  bool is_encoded[2] = {};
  for (int32_t i = 0; i < layout_.num_planes(); ++i) {
    const auto role = static_cast<size_t>(layout_.plane(i).role);
    const CodecId codec = codec_of(i, codecs, calibration);
    has_role[role] = true;
    if (codec != CodecId::kRaw) is_encoded[role] = true;
    sizes->push_back(unit_bytes(i, codec));
  }
  Plan plan = {.codecs = codecs, .unit_bytes = std::move(sizes)};
  if (has_role[0] && !is_encoded[0]) plan.codecs.k = CodecId::kRaw;
  if (has_role[1] && !is_encoded[1]) plan.codecs.v = CodecId::kRaw;
  plans_[key] = plan;
  return plan;
}

absl::StatusOr<std::unique_ptr<ModelRegistry>> ModelRegistry::Open(const std::string& directory) {
  std::unique_ptr<ModelRegistry> registry(new ModelRegistry(directory));
  if (!directory.empty()) KVSTOW_RETURN_IF_ERROR(registry->Load());
  return registry;
}

absl::Status ModelRegistry::Load() {
  return LoadSyncedFiles(directory_, kSuffix,
                         [this](const fs::path& path) -> absl::Status {
                           KVSTOW_ASSIGN_OR_RETURN(const ModelRef model, ReadModel(path));
                           return Insert(model).status();
                         })
      .status();
}

absl::Status ModelRegistry::WriteFile(const RegisteredModel& model) const {
  return WriteSyncedFile(directory_, absl::StrCat(model.fingerprint().ToHex(), ToAbsl(kSuffix)),
                         model.spec().Serialize());
}

absl::StatusOr<ModelRef> ModelRegistry::Insert(const ModelRef& model) {
  MutexLock lock(&mutex_);
  const auto found = models_.find(model->fingerprint());
  if (found != models_.end()) return found->second;
  KVSTOW_RETURN_IF_ERROR(CheckRoom());
  models_[model->fingerprint()] = model;
  return model;
}

absl::Status ModelRegistry::CheckRoom() const {
  if (static_cast<int64_t>(models_.size()) < kMaxModels) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("models: ", models_.size(), " of ", kMaxModels, " are registered"));
}

absl::StatusOr<ModelRef> ModelRegistry::Register(const ModelSpec& spec) {
  KVSTOW_ASSIGN_OR_RETURN(ModelRef model, RegisteredModel::Create(spec));
  if (absl::StatusOr<ModelRef> known = Find(model->fingerprint()); known.ok()) return known;
  {
    MutexLock lock(&mutex_);
    KVSTOW_RETURN_IF_ERROR(CheckRoom());
  }
  // The file first: a model that was acknowledged is there after a crash. One file too many, when
  // the registry fills up meanwhile, is set aside at the next start.
  if (!directory_.empty()) KVSTOW_RETURN_IF_ERROR(WriteFile(*model));
  return Insert(model);
}

absl::StatusOr<ModelRef> ModelRegistry::Find(const Digest& fingerprint) const {
  {
    MutexLock lock(&mutex_);
    const auto found = models_.find(fingerprint);
    if (found != models_.end()) return found->second;
  }
  return absl::NotFoundError(
      absl::StrCat("model ", fingerprint.ToHex(), " is not registered: call RegisterModel first"));
}

std::vector<ModelRef> ModelRegistry::List() const {
  std::vector<ModelRef> models;
  MutexLock lock(&mutex_);
  models.reserve(models_.size());
  for (const auto& [fingerprint, model] : models_) models.push_back(model);
  return models;
}

}  // namespace kvstow
