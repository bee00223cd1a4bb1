#include "client/cpp/calibration_cache.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/calibration_calls.h"
#include "client/cpp/connection.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

Caller CallerOf(Connection& connection, absl::Duration timeout) {
  return [&connection, timeout](const Connection::CallFn& call) {
    return connection.Call(timeout, call);
  };
}

}  // namespace

std::shared_ptr<const Calibration> CalibrationCache::FindKept(const Digest& id) {
  MutexLock lock(&mutex_);
  const auto found = std::find_if(kept_.begin(), kept_.end(),
                                  [&](const auto& calibration) { return calibration->id() == id; });
  if (found == kept_.end()) return nullptr;
  kept_.splice(kept_.begin(), kept_, found);
  return kept_.front();
}

void CalibrationCache::Keep(const std::shared_ptr<const Calibration>& calibration) {
  MutexLock lock(&mutex_);
  kept_.remove_if([&](const auto& kept) { return kept->id() == calibration->id(); });
  kept_.push_front(calibration);
  if (kept_.size() > kMaxKept) kept_.pop_back();
}

absl::StatusOr<std::shared_ptr<const Calibration>> CalibrationCache::Find(const Model& model,
                                                                          const Digest& id) {
  std::shared_ptr<const Calibration> calibration = FindKept(id);
  if (calibration == nullptr) {
    KVSTOW_ASSIGN_OR_RETURN(const std::string bundle,
                            FetchBundle(connection_.calibrations(), id,
                                        CallerOf(connection_, connection_.options().data_timeout)));
    KVSTOW_ASSIGN_OR_RETURN(Calibration parsed, Calibration::Parse(bundle, model.fingerprint));
    if (parsed.id() != id) {
      return absl::DataLossError(
          absl::StrCat("calibration ", id.ToHex(), ": the service sent ", parsed.id().ToHex()));
    }
    KVSTOW_RETURN_IF_ERROR(parsed.CheckCovers(*model.layout));
    calibration = std::make_shared<const Calibration>(std::move(parsed));
    Keep(calibration);
  }
  if (calibration->fingerprint() != model.fingerprint) {
    return absl::FailedPreconditionError(absl::StrCat("calibration ", id.ToHex(), " is of model ",
                                                      calibration->fingerprint().ToHex(),
                                                      ", want one of ", model.fingerprint.ToHex()));
  }
  return calibration;
}

absl::StatusOr<std::shared_ptr<const Calibration>> CalibrationCache::Choose(const Model& model,
                                                                            const Digest& id) {
  if (!id.is_zero()) return Find(model, id);
  KVSTOW_ASSIGN_OR_RETURN(
      const std::vector<ListedCalibration> list,
      ListBundles(connection_.calibrations(), model.fingerprint,
                  CallerOf(connection_, connection_.options().control_timeout)));
  if (list.size() == 1) return Find(model, list[0].id);
  return absl::FailedPreconditionError(absl::StrCat(
      "model ", model.fingerprint.ToHex(), " has ", list.size(), " calibrations at the service, ",
      list.empty() ? "want one: kvstow calibrate SAMPLES --upload" : "say which"));
}

}  // namespace kvstow
