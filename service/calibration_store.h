// CalibrationStore: the calibrations that records of this service may name. With a disk tier they
// are files `<id>.kvc`, read and checked again at start.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto store, CalibrationStore::Open("/var/lib/kvstow/calibrations"));
//   KVSTOW_ASSIGN_OR_RETURN(CalibrationRef calibration, store->Put(bundle, models));
//   CalibrationRef of_record = store->Find(meta.calibration_id);  // null: the record is a miss
//
// In memory a bundle takes three times its bytes. Thread safety: all methods may be called at once.
// Put and Delete may wait for the disk.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/calibration.h"
#include "kernels/core/mutex.h"
#include "service/model_registry.h"

namespace kvstow {

using CalibrationRef = std::shared_ptr<const Calibration>;

class CalibrationStore {
 public:
  static constexpr int64_t kMaxBytes = int64_t{256} << 20;  // of all bundles
  static constexpr int64_t kMaxCalibrations = 64;

  struct Held {
    CalibrationRef calibration;
    int64_t bundle_bytes = 0;
  };

  // `directory` is made where it is missing; empty for none. A file that is cut short, changed or
  // under another name is renamed to `<name>.broken`, logged and counted.
  //   kPermissionDenied, kUnavailable  the directory cannot be used; it is named
  static absl::StatusOr<std::unique_ptr<CalibrationStore>> Open(const std::string& directory);

  // Keeps a bundle, on disk first. Again is fine.
  //   kDataLoss, kInvalidArgument  as Calibration::Parse, or more than kMaxBundleBytes
  //   kFailedPrecondition  its model is not registered, or it does not cover the model's planes
  //   kResourceExhausted   kMaxCalibrations or kMaxBytes
  //   kUnavailable         the file cannot be written; the bundle is not kept
  absl::StatusOr<CalibrationRef> Put(std::string_view bundle, const ModelRegistry& models);

  CalibrationRef Find(const Digest& id) const;  // null where there is none

  // The one that blocks of a model are encoded with: `id`, or where that is zero its only one.
  //   kFailedPrecondition  it is not here or of another model; there is none, or more than one
  absl::StatusOr<CalibrationRef> Choose(const Digest& fingerprint, const Digest& id) const;

  // In ascending order of ids; of one model unless `fingerprint` is zero.
  std::vector<Held> List(const Digest& fingerprint) const;

  // kNotFound; kUnavailable: the file is still there.
  absl::Status Delete(const Digest& id);

  // A record could not be read, and was dropped, because its calibration is not here.
  void CountMiss() { num_misses_.fetch_add(1, std::memory_order_relaxed); }

  int64_t num_bytes() const;
  int64_t num_held() const;
  // By the names of the metrics.
  std::vector<std::pair<std::string_view, int64_t>> Counters() const;

 private:
  explicit CalibrationStore(const std::string& directory) : directory_(directory) {}
  absl::Status Load();
  absl::StatusOr<CalibrationRef> Insert(Held held);
  absl::Status CheckRoom(int64_t bundle_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string directory_;
  std::atomic<int64_t> num_misses_{0};
  std::atomic<int64_t> num_set_aside_{0};
  mutable Mutex mutex_;
  std::map<Digest, Held> held_ ABSL_GUARDED_BY(mutex_);
  int64_t num_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvstow
