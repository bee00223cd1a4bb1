// PlanBook: the plan of each model: which layers are stored with another codec than a writer asks
// for (kernels/codec/codec_plan.h). Derived by the guard from the first rows that are seen of the
// model, or set by an operator. With a disk tier plans are files `<fingerprint>.plan` beside the
// models, read again at start.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto plans, PlanBook::Open(directory, /*derives=*/true));
//   plans->Observe(model, plane_idx, CodecId::kRaw, rows);  // each plane, until the plan is there
//   const PlanRef plan = plans->Current(fingerprint);       // null: none yet
//
// A model gets its plan when each of its planes has been seen once, in whichever blocks, with rows
// that tell something; from then on it changes only when an operator sets another. There is one at
// any time: what two writers send at once goes into the same statistics, and the plane that
// completes them makes the plan. Blocks that were reserved before and would be stored otherwise
// under it are not sealed (CheckSeal): their writer sends them again.
//
// Thread safety: all methods may be called at once. Set, Clear and the Observe that completes a
// plan wait for the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/codec/codec_plan.h"
#include "kernels/codec/guard.h"
#include "kernels/core/mutex.h"
#include "service/model_registry.h"
#include "storage/record.h"

namespace kvstow {

enum class PlanOrigin : uint8_t {
  kDerived,  // by the guard
  kSet,      // by an operator
  kRequest,  // layers that a writer asked for, with the model's plan over them
};

struct ModelPlan {
  CodecPlan codecs;
  Digest id;  // codecs.Id()
  PlanOrigin origin = PlanOrigin::kDerived;
  std::vector<std::string> reasons;  // of the guard; none for the others
};
using PlanRef = std::shared_ptr<const ModelPlan>;

// Whether some layer of a block needs a calibration. `plan` may be null, here and below.
bool NeedsCalibration(const RegisteredModel& model, const CodecPair& codecs, const ModelPlan* plan);

// What a block of `model` takes when stored with a pair of codecs under a plan.
RegisteredModel::Plan PlannedBlock(const RegisteredModel& model, const CodecPair& codecs,
                                   const ModelPlan* plan, const Calibration* calibration = nullptr);

class PlanBook {
 public:
  // Plans besides the current one that open tickets of a model may still name.
  static constexpr size_t kPlansKept = 64;
  // Planes with nothing to tell (zeros) that are looked at before a plan is made without them.
  static constexpr int kUselessPlanesMax = 4096;

  // `directory` as for ModelRegistry; empty for none. `derives`: false leaves models without a
  // plan unless one is set. A file that holds no plan is renamed to `<name>.broken` and logged.
  //   kPermissionDenied, kUnavailable  the directory cannot be used; it is named
  static absl::StatusOr<std::unique_ptr<PlanBook>> Open(const std::string& directory, bool derives);

  // The model's plan; null: none yet.
  PlanRef Current(const Digest& fingerprint) const;
  // A plan that the model has or lately had; null for a zero id. kAborted: forgotten.
  absl::StatusOr<PlanRef> Find(const Digest& fingerprint, const Digest& plan_id) const;
  // `current` over `layers`, which a writer asks for. Null: there is neither.
  PlanRef ForRequest(const Digest& fingerprint, const PlanRef& current, const CodecPlan& layers);

  // Whether Observe would do anything.
  bool IsWatching(const Digest& fingerprint) const;
  // A plane that is about to be committed: its unit in `codec`. What a worker encoded is decoded,
  // with the block's calibration where it has one.
  void Observe(const RegisteredModel& model, int32_t plane_idx, CodecId codec,
               absl::Span<const std::byte> unit, const Calibration* calibration = nullptr);

  // kAborted where the model's plan would store the block otherwise than its ticket was told to.
  absl::Status CheckSeal(const RegisteredModel& model, const RecordMeta& meta) const;

  // From now on. kInvalidArgument: the plan does not fit the model. Others: it holds, but would not
  // survive a restart.
  absl::StatusOr<PlanRef> Set(const RegisteredModel& model, const CodecPlan& codecs);
  // Forgets the model's plan: the guard derives one from what comes next.
  absl::Status Clear(const Digest& fingerprint);

 private:
  struct Entry {
    PlanRef current;
    std::vector<PlanRef> past;  // and those of requests; the latest last
    std::vector<PlaneStats> stats;
    std::vector<bool> is_seen;
    int num_seen = 0;
    int num_useless = 0;
  };

  PlanBook(const std::string& directory, bool derives) : directory_(directory), derives_(derives) {}
  absl::Status Load();
  bool NeedsPlane(const RegisteredModel& model, int32_t plane_idx);
  // True where it was the last plane: there is a plan now.
  bool AddPlane(const RegisteredModel& model, int32_t plane_idx, const PlaneStats& stats);
  void Replace(const Digest& fingerprint, PlanRef plan);
  static void Remember(const PlanRef& plan, Entry& entry);
  // Brings the file to what holds now, whoever changes it meanwhile.
  absl::Status WriteCurrent(const Digest& fingerprint) const;

  const std::string directory_;
  const bool derives_;
  mutable Mutex mutex_;
  std::map<Digest, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
