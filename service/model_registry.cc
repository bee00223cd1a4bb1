#include "service/model_registry.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".model";
// Far above the largest ModelSpec::Serialize (1024 groups and four texts).
constexpr uintmax_t kFileBytesMax = 1 << 20;

absl::Status FileError(std::string_view what, const std::string& path, int error) {
  const std::string text = absl::StrCat(ToAbsl(what), " ", path, ": ", std::strerror(error));
  if (error == EACCES || error == EPERM || error == EROFS) {
    return absl::PermissionDeniedError(text);
  }
  return absl::UnavailableError(text);
}

// Writes and syncs a new file.
absl::Status WriteSynced(const std::string& path, const std::string& bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return FileError("create", path, errno);
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written = write(fd, bytes.data() + done, bytes.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    done += static_cast<size_t>(written);
  }
  const int error = done < bytes.size() || fsync(fd) != 0 ? errno : 0;
  close(fd);
  if (error == 0) return absl::OkStatus();
  unlink(path.c_str());
  return FileError("write", path, error);
}

// A rename is durable only when the directory is synced too.
absl::Status SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return FileError("open", path, errno);
  const int error = fsync(fd) != 0 ? errno : 0;
  close(fd);
  return error == 0 ? absl::OkStatus() : FileError("sync", path, error);
}

absl::StatusOr<ModelRef> ReadModel(const fs::path& path) {
  std::error_code error;
  const uintmax_t size = fs::file_size(path, error);
  if (error || size > kFileBytesMax) {
    return absl::DataLossError(absl::StrCat(size, " bytes, want at most ", kFileBytesMax));
  }
  std::ifstream in(path, std::ios::binary);
  std::stringstream bytes;
  bytes << in.rdbuf();
  KVSTOW_ASSIGN_OR_RETURN(const ModelSpec spec, ModelSpec::Parse(bytes.str()));
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

PlaneShape RegisteredModel::shape(int32_t plane_idx) const {
  const PlaneInfo& plane = layout_.plane(plane_idx);
  return {.num_tokens = layout_.tokens_per_block(),
          .dim = plane.dim,
          .role = plane.role,
          .dtype = layout_.dtype()};
}

CodecId RegisteredModel::codec_of(int32_t plane_idx, const CodecPair& codecs) const {
  const PlaneShape plane_shape = shape(plane_idx);
  return EffectiveCodec(codecs.of(plane_shape.role), plane_shape);
}

uint32_t RegisteredModel::unit_bytes(int32_t plane_idx, CodecId codec) const {
  if (codec == CodecId::kRaw) return static_cast<uint32_t>(layout_.plane(plane_idx).row_bytes);
  const Codec* found = FindCodec(codec);
  KVSTOW_CHECK(found != nullptr);
  return static_cast<uint32_t>(found->plane_bytes(shape(plane_idx)));
}

RegisteredModel::Plan RegisteredModel::PlanFor(const CodecPair& codecs) const {
  MutexLock lock(&mutex_);
  const auto found = plans_.find({codecs.k, codecs.v});
  if (found != plans_.end()) return found->second;
  auto sizes = std::make_shared<std::vector<uint32_t>>();
  sizes->reserve(static_cast<size_t>(layout_.num_planes()));
  bool has_role[2] = {};
  bool is_encoded[2] = {};
  for (int32_t i = 0; i < layout_.num_planes(); ++i) {
    const auto role = static_cast<size_t>(layout_.plane(i).role);
    const CodecId codec = codec_of(i, codecs);
    has_role[role] = true;
    if (codec != CodecId::kRaw) is_encoded[role] = true;
    sizes->push_back(unit_bytes(i, codec));
  }
  Plan plan = {.codecs = codecs, .unit_bytes = std::move(sizes)};
  if (has_role[0] && !is_encoded[0]) plan.codecs.k = CodecId::kRaw;
  if (has_role[1] && !is_encoded[1]) plan.codecs.v = CodecId::kRaw;
  plans_[{codecs.k, codecs.v}] = plan;
  return plan;
}

absl::StatusOr<std::unique_ptr<ModelRegistry>> ModelRegistry::Open(const std::string& directory) {
  std::unique_ptr<ModelRegistry> registry(new ModelRegistry(directory));
  if (!directory.empty()) KVSTOW_RETURN_IF_ERROR(registry->Load());
  return registry;
}

absl::Status ModelRegistry::Load() {
  std::error_code error;
  fs::create_directories(directory_, error);
  if (error) return FileError("create directory", directory_, error.value());
  if (access(directory_.c_str(), W_OK | X_OK) != 0) {
    return FileError("write to directory", directory_, errno);
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(directory_, error)) {
    const fs::path& path = entry.path();
    if (path.string().find(".model.tmp") != std::string::npos) {
      fs::remove(path, error);  // of a process that died while it wrote
      continue;
    }
    if (path.extension() != kSuffix) continue;
    absl::StatusOr<ModelRef> model = ReadModel(path);
    if (model.ok()) model = Insert(*model);
    if (model.ok()) continue;
    Log(Severity::kWarning, "model file set aside",
        {{"file", path.string()}, {"reason", std::string(model.status().message())}});
    fs::rename(path, path.string() + ".broken", error);
  }
  return absl::OkStatus();
}

absl::Status ModelRegistry::WriteFile(const RegisteredModel& model) const {
  // Two calls may write the same model at once: each has a name of its own, the last rename wins.
  const std::string path =
      absl::StrCat(directory_, "/", model.fingerprint().ToHex(), ToAbsl(kSuffix));
  const std::string temp = absl::StrCat(path, ".tmp", num_writes_.fetch_add(1));
  KVSTOW_RETURN_IF_ERROR(WriteSynced(temp, model.spec().Serialize()));
  if (rename(temp.c_str(), path.c_str()) != 0) {
    const absl::Status status = FileError("rename to", path, errno);
    unlink(temp.c_str());
    return status;
  }
  return SyncDirectory(directory_);
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
