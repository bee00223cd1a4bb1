#include "service/calibration_store.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/synced_file.h"
#include "kernels/core/text.h"
#include "proto/convert.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".kvc";

std::string FileName(const Digest& id) { return absl::StrCat(id.ToHex(), ToAbsl(kSuffix)); }

absl::StatusOr<CalibrationStore::Held> ParseBundle(std::string_view bundle) {
  KVSTOW_ASSIGN_OR_RETURN(const Digest fingerprint, Calibration::ModelOf(bundle));
  KVSTOW_ASSIGN_OR_RETURN(Calibration calibration, Calibration::Parse(bundle, fingerprint));
  return CalibrationStore::Held{std::make_shared<const Calibration>(std::move(calibration)),
                                static_cast<int64_t>(bundle.size())};
}

absl::StatusOr<CalibrationStore::Held> ReadBundle(const fs::path& path) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string bundle, ReadWholeFile(path, kMaxBundleBytes));
  KVSTOW_ASSIGN_OR_RETURN(CalibrationStore::Held held, ParseBundle(bundle));
  if (FileName(held.calibration->id()) != path.filename().string()) {
    return absl::DataLossError(absl::StrCat(
        "holds the calibration ", held.calibration->id().ToHex(), ", not the one of its name"));
  }
  return held;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CalibrationStore>> CalibrationStore::Open(
    const std::string& directory) {
  std::unique_ptr<CalibrationStore> store(new CalibrationStore(directory));
  if (!directory.empty()) KVSTOW_RETURN_IF_ERROR(store->Load());
  return store;
}

absl::Status CalibrationStore::Load() {
  KVSTOW_ASSIGN_OR_RETURN(
      const int64_t num_broken,
      LoadSyncedFiles(directory_, kSuffix, [this](const fs::path& path) -> absl::Status {
        KVSTOW_ASSIGN_OR_RETURN(Held held, ReadBundle(path));
        return Insert(std::move(held)).status();
      }));
  num_set_aside_ = num_broken;
  return absl::OkStatus();
}

absl::Status CalibrationStore::CheckRoom(int64_t bundle_bytes) const {
  if (static_cast<int64_t>(held_.size()) >= kMaxCalibrations) {
    return absl::ResourceExhaustedError(absl::StrCat("calibrations: ", held_.size(), " of ",
                                                     kMaxCalibrations,
                                                     " are kept; delete one that is not used"));
  }
  if (bundle_bytes > kMaxBytes - num_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "calibrations: ", num_bytes_, " of ", kMaxBytes, " bytes are kept, no room for ",
        bundle_bytes, "; delete one that is not used"));
  }
  return absl::OkStatus();
}

absl::StatusOr<CalibrationRef> CalibrationStore::Insert(Held held) {
  MutexLock lock(&mutex_);
  const auto found = held_.find(held.calibration->id());
  if (found != held_.end()) return found->second.calibration;
  KVSTOW_RETURN_IF_ERROR(CheckRoom(held.bundle_bytes));
  num_bytes_ += held.bundle_bytes;
  CalibrationRef calibration = held.calibration;
  held_[calibration->id()] = std::move(held);
  return calibration;
}

absl::StatusOr<CalibrationRef> CalibrationStore::Put(std::string_view bundle,
                                                     const ModelRegistry& models) {
  const auto bundle_bytes = static_cast<int64_t>(bundle.size());
  if (bundle_bytes > kMaxBundleBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("calibration: ", bundle_bytes, " bytes, want at most ", kMaxBundleBytes));
  }
  KVSTOW_ASSIGN_OR_RETURN(Held held, ParseBundle(bundle));
  const Digest& fingerprint = held.calibration->fingerprint();
  const absl::StatusOr<ModelRef> model = models.Find(fingerprint);
  if (!model.ok()) {
    return absl::FailedPreconditionError(absl::StrCat("calibration of model ", fingerprint.ToHex(),
                                                      ", which is not registered here"));
  }
  KVSTOW_RETURN_IF_ERROR(held.calibration->CheckCovers((*model)->layout()));
  const Digest id = held.calibration->id();
  if (CalibrationRef known = Find(id); known != nullptr) return known;
  {
    MutexLock lock(&mutex_);
    KVSTOW_RETURN_IF_ERROR(CheckRoom(bundle_bytes));
  }
  // The file first: what was acknowledged is there after a crash. One file too many, when the store
  // fills up meanwhile, is set aside at the next start.
  if (!directory_.empty()) {
    KVSTOW_RETURN_IF_ERROR(WriteSyncedFile(directory_, FileName(id), bundle));
  }
  return Insert(std::move(held));
}

CalibrationRef CalibrationStore::Find(const Digest& id) const {
  MutexLock lock(&mutex_);
  const auto found = held_.find(id);
  return found == held_.end() ? nullptr : found->second.calibration;
}

absl::StatusOr<CalibrationRef> CalibrationStore::Choose(const Digest& fingerprint,
                                                        const Digest& id) const {
  if (!id.is_zero()) {
    CalibrationRef calibration = Find(id);
    if (calibration == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(
          "calibration ", id.ToHex(), " is not here: upload it (kvstow calibration put FILE)"));
    }
    if (calibration->fingerprint() != fingerprint) {
      return absl::FailedPreconditionError(absl::StrCat("calibration ", id.ToHex(), " is of model ",
                                                        calibration->fingerprint().ToHex(),
                                                        ", want one of ", fingerprint.ToHex()));
    }
    return calibration;
  }
  const std::vector<Held> held = List(fingerprint);
  if (held.size() == 1) return held[0].calibration;
  if (held.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("model ", fingerprint.ToHex(),
                     " has no calibration here: kvstow calibrate SAMPLES --upload"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("model ", fingerprint.ToHex(), " has ", held.size(),
                   " calibrations, say which (--calibration): ", held[0].calibration->id().ToHex(),
                   ", ", held[1].calibration->id().ToHex(), held.size() > 2 ? ", ..." : ""));
}

std::vector<CalibrationStore::Held> CalibrationStore::List(const Digest& fingerprint) const {
  std::vector<Held> list;
  MutexLock lock(&mutex_);
  for (const auto& [id, held] : held_) {
    if (fingerprint.is_zero() || held.calibration->fingerprint() == fingerprint) {
      list.push_back(held);
    }
  }
  return list;
}

absl::Status CalibrationStore::Delete(const Digest& id) {
  if (Find(id) == nullptr) {
    return absl::NotFoundError(absl::StrCat("calibration ", id.ToHex(), " is not here"));
  }
  if (!directory_.empty()) {
    std::error_code error;
    fs::remove(fs::path(directory_) / FileName(id), error);
    if (error) {
      return absl::UnavailableError(
          absl::StrCat("calibration ", id.ToHex(), ": cannot remove its file: ", error.message()));
    }
  }
  MutexLock lock(&mutex_);
  const auto found = held_.find(id);
  if (found == held_.end()) return absl::OkStatus();
  num_bytes_ -= found->second.bundle_bytes;
  held_.erase(found);
  return absl::OkStatus();
}

int64_t CalibrationStore::num_bytes() const {
  MutexLock lock(&mutex_);
  return num_bytes_;
}

int64_t CalibrationStore::num_held() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(held_.size());
}

std::vector<std::pair<std::string_view, int64_t>> CalibrationStore::Counters() const {
  return {{"calibration_misses", num_misses_.load(std::memory_order_relaxed)},
          {"calibrations_set_aside", num_set_aside_.load(std::memory_order_relaxed)}};
}

}  // namespace kvstow
