// CalibrationCache: the calibrations that a client's blocks need, fetched from the service once.
// Private to the client library.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto calibration, cache.Find(model, id));
//
// Keeps at most kMaxKept; the one that was used longest ago goes first. Thread safety: all methods
// may be called at once; calls that miss at the same time each ask the service.
#pragma once

#include <cstdint>
#include <list>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/codec/calibration.h"
#include "kernels/core/digest.h"
#include "kernels/core/mutex.h"

namespace kvstow {

class Connection;
struct Model;

class CalibrationCache {
 public:
  static constexpr size_t kMaxKept = 8;

  // `connection` must outlive the cache.
  explicit CalibrationCache(Connection* connection) : connection_(*connection) {}

  //   kNotFound   the service does not have it
  //   kDataLoss, kFailedPrecondition  what came is not it, or is of another model
  absl::StatusOr<std::shared_ptr<const Calibration>> Find(const Model& model, const Digest& id);

  // `id`, or where that is zero the model's only one. kFailedPrecondition: it has none, or several.
  absl::StatusOr<std::shared_ptr<const Calibration>> Choose(const Model& model, const Digest& id);

 private:
  std::shared_ptr<const Calibration> FindKept(const Digest& id);
  void Keep(const std::shared_ptr<const Calibration>& calibration);

  Connection& connection_;
  Mutex mutex_;
  // The last used first.
  std::list<std::shared_ptr<const Calibration>> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
