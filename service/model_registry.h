// ModelRegistry: the models whose KV this service may keep. With a disk tier they are files
// `<fingerprint>.model` (ModelSpec::Serialize), read and checked again at start.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto registry, ModelRegistry::Open("/var/lib/kvstow/models"));
//   KVSTOW_ASSIGN_OR_RETURN(auto model, registry->Register(spec));
//   const RegisteredModel::Plan plan = model->PlanFor(codecs);
//
// A model is never forgotten: at most kMaxModels, each of a few kilobytes.
// Thread safety: all methods may be called at once. Register may wait for the disk.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/codec/calibration.h"
#include "kernels/codec/codec.h"
#include "kernels/core/block_layout.h"
#include "kernels/core/model_spec.h"
#include "kernels/core/mutex.h"

namespace kvstow {

// A valid spec with what follows from it.
class RegisteredModel {
 public:
  // What a block of this model takes when stored with a pair of codecs.
  struct Plan {
    // The pair as it will be: a role none of whose planes its codec takes is raw.
    CodecPair codecs;
    // Bytes of each unit. A unit is a plane here.
    std::shared_ptr<const std::vector<uint32_t>> unit_bytes;
  };

  // kInvalidArgument where `spec` is invalid.
  static absl::StatusOr<std::shared_ptr<const RegisteredModel>> Create(const ModelSpec& spec);

  const ModelSpec& spec() const { return spec_; }
  const Digest& fingerprint() const { return fingerprint_; }
  const BlockLayout& layout() const { return layout_; }

  // `calibration`, here and below: the one that the block names, or null.
  PlaneShape shape(int32_t plane_idx, const Calibration* calibration = nullptr) const;
  // The codec that stores a plane of a block reserved with `codecs`.
  CodecId codec_of(int32_t plane_idx, const CodecPair& codecs,
                   const Calibration* calibration = nullptr) const;
  // Bytes of a plane encoded with `codec`, which must accept it or be kRaw.
  uint32_t unit_bytes(int32_t plane_idx, CodecId codec) const;

  // Kept after the first call: there are at most 256 x 256 pairs, and a handful in practice. Which
  // calibration it is makes no difference: each covers all planes.
  Plan PlanFor(const CodecPair& codecs, const Calibration* calibration = nullptr) const;

 private:
  RegisteredModel(const ModelSpec& spec, const BlockLayout& layout)
      : spec_(spec), fingerprint_(spec.Fingerprint()), layout_(layout) {}

  const ModelSpec spec_;
  const Digest fingerprint_;
  const BlockLayout layout_;
  mutable Mutex mutex_;
  using PlanKey = std::tuple<CodecId, CodecId, bool>;  // K, V, with a calibration
  mutable std::map<PlanKey, Plan> plans_ ABSL_GUARDED_BY(mutex_);
};

using ModelRef = std::shared_ptr<const RegisteredModel>;

class ModelRegistry {
 public:
  static constexpr int64_t kMaxModels = 1024;

  // `directory` is made where it is missing; empty for none. A file that does not hold the model
  // its name says is renamed to `<name>.broken` and logged.
  //   kPermissionDenied, kUnavailable  the directory cannot be used; it is named
  static absl::StatusOr<std::unique_ptr<ModelRegistry>> Open(const std::string& directory);

  // Registering the same spec again gives the same model.
  //   kInvalidArgument names the field   kResourceExhausted  kMaxModels are registered
  //   kUnavailable  the file cannot be written; the model is not registered
  absl::StatusOr<ModelRef> Register(const ModelSpec& spec);

  // kNotFound: register it first.
  absl::StatusOr<ModelRef> Find(const Digest& fingerprint) const;

  // In ascending order of fingerprints.
  std::vector<ModelRef> List() const;

 private:
  explicit ModelRegistry(const std::string& directory) : directory_(directory) {}
  absl::Status Load();
  absl::Status WriteFile(const RegisteredModel& model) const;
  absl::StatusOr<ModelRef> Insert(const ModelRef& model);
  absl::Status CheckRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string directory_;
  mutable Mutex mutex_;
  std::map<Digest, ModelRef> models_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
