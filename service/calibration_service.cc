#include "service/calibration_service.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "service/calibration_store.h"
#include "service/unary_answer.h"

namespace kvstow {
namespace {

void ToProto(const CalibrationStore::Held& held, v1::CalibrationInfo* info) {
  const Calibration& calibration = *held.calibration;
  info->set_id(std::string(calibration.id().AsStringView()));
  info->set_fingerprint(std::string(calibration.fingerprint().AsStringView()));
  info->set_source(std::string(calibration.source().AsStringView()));
  info->set_num_rotations(static_cast<uint32_t>(calibration.num_rotations()));
  info->set_bundle_bytes(static_cast<uint64_t>(held.bundle_bytes));
}

// A bundle larger than all that calls may hold counts as that much.
absl::StatusOr<Permit> HoldBundle(const ServiceParts& parts, int64_t bytes) {
  return parts.admission->HoldBytes(
      std::min(bytes, parts.options->limits.bytes_in_flight_max - kCallBytes));
}

// One upload. A read, or the work at its end, is out: never both, so the rest needs no lock.
class PutCalibrationCall final : public grpc::ServerReadReactor<v1::PutCalibrationRequest> {
 public:
  PutCalibrationCall(const ServiceParts& parts, v1::PutCalibrationResponse* response)
      : parts_(parts), timer_(parts.metrics, Method::kPutCalibration), response_(response) {}

  void Start() {
    absl::StatusOr<Permit> permit = parts_.admission->AdmitCall(kCallBytes);
    if (!permit.ok()) return End(permit.status());
    call_permit_ = *std::move(permit);
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (ok) {
      const absl::Status status = Take();
      if (!status.ok()) return End(status);
      StartRead(&request_);
      return;
    }
    if (bundle_.size() != bundle_bytes_) {
      return End(absl::DataLossError(absl::StrCat(
          "calibration: ", bundle_.size(), " bytes came, the first message says ", bundle_bytes_)));
    }
    const absl::Status submitted = parts_.control->Submit([this] { End(Keep()); });
    if (!submitted.ok()) End(submitted);
  }

  void OnDone() override { delete this; }

 private:
  absl::Status Take() {
    if (bundle_bytes_ == 0) {
      const uint64_t bytes = request_.bundle_bytes();
      if (bytes < 1 || bytes > static_cast<uint64_t>(kMaxBundleBytes)) {
        return absl::InvalidArgumentError(
            absl::StrCat("bundle_bytes: ", bytes, ", want 1 to ", kMaxBundleBytes));
      }
      KVSTOW_ASSIGN_OR_RETURN(bundle_permit_, HoldBundle(parts_, static_cast<int64_t>(bytes)));
      bundle_bytes_ = bytes;
    }
    if (request_.chunk().size() > kMaxBundleChunkBytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "chunk: ", request_.chunk().size(), " bytes, want at most ", kMaxBundleChunkBytes));
    }
    if (request_.chunk().size() > bundle_bytes_ - bundle_.size()) {
      return absl::DataLossError(
          absl::StrCat("calibration: more than the ", bundle_bytes_, " bytes it was to have"));
    }
    bundle_ += request_.chunk();
    return absl::OkStatus();
  }

  absl::Status Keep() {
    KVSTOW_ASSIGN_OR_RETURN(const CalibrationRef kept,
                            parts_.calibrations->Put(bundle_, *parts_.models));
    ToProto({kept, static_cast<int64_t>(bundle_.size())}, response_->mutable_info());
    return absl::OkStatus();
  }

  void End(const absl::Status& status) {
    timer_.Done(status.code());
    bundle_permit_ = Permit();
    call_permit_ = Permit();
    Finish(ToGrpcStatus(WithRetryHint(status)));
  }

  const ServiceParts& parts_;
  const CallTimer timer_;
  v1::PutCalibrationResponse* const response_;
  Permit call_permit_;
  Permit bundle_permit_;
  v1::PutCalibrationRequest request_;
  uint64_t bundle_bytes_ = 0;  // 0 until the first message
  std::string bundle_;
};

// One download. A write, or the work before it, is out.
class GetCalibrationCall final : public grpc::ServerWriteReactor<v1::GetCalibrationResponse> {
 public:
  explicit GetCalibrationCall(const ServiceParts& parts)
      : parts_(parts), timer_(parts.metrics, Method::kGetCalibration) {}

  void Start(const v1::GetCalibrationRequest& request) {
    const absl::StatusOr<Digest> id = Digest::FromBytes(request.id(), "id");
    if (!id.ok()) return End(id.status());
    absl::StatusOr<Permit> permit = parts_.admission->AdmitCall(kCallBytes);
    if (!permit.ok()) return End(permit.status());
    call_permit_ = *std::move(permit);
    const absl::Status submitted = parts_.control->Submit([this, id = *id] { Open(id); });
    if (!submitted.ok()) End(submitted);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(absl::CancelledError("the client is gone"));
    WriteNext();
  }
  void OnDone() override { delete this; }

 private:
  void Open(const Digest& id) {
    const CalibrationRef calibration = parts_.calibrations->Find(id);
    if (calibration == nullptr) {
      return End(absl::NotFoundError(absl::StrCat("calibration ", id.ToHex(), " is not here")));
    }
    bundle_ = calibration->Serialize();
    absl::StatusOr<Permit> permit = HoldBundle(parts_, static_cast<int64_t>(bundle_.size()));
    if (!permit.ok()) return End(permit.status());
    bundle_permit_ = *std::move(permit);
    WriteNext();
  }

  void WriteNext() {
    if (at_ == bundle_.size()) return End(absl::OkStatus());
    response_.Clear();
    if (at_ == 0) response_.set_bundle_bytes(bundle_.size());
    response_.set_chunk(bundle_.substr(at_, kMaxBundleChunkBytes));
    at_ += response_.chunk().size();
    StartWrite(&response_);
  }

  void End(const absl::Status& status) {
    timer_.Done(status.code());
    bundle_permit_ = Permit();
    call_permit_ = Permit();
    Finish(ToGrpcStatus(WithRetryHint(status)));
  }

  const ServiceParts& parts_;
  const CallTimer timer_;
  Permit call_permit_;
  Permit bundle_permit_;
  std::string bundle_;
  size_t at_ = 0;
  v1::GetCalibrationResponse response_;
};

}  // namespace

grpc::ServerReadReactor<v1::PutCalibrationRequest>* CalibrationService::PutCalibration(
    grpc::CallbackServerContext*, v1::PutCalibrationResponse* response) {
  auto* call = new PutCalibrationCall(parts_, response);
  call->Start();
  return call;
}

grpc::ServerWriteReactor<v1::GetCalibrationResponse>* CalibrationService::GetCalibration(
    grpc::CallbackServerContext*, const v1::GetCalibrationRequest* request) {
  auto* call = new GetCalibrationCall(parts_);
  call->Start(*request);
  return call;
}

grpc::ServerUnaryReactor* CalibrationService::ListCalibrations(
    grpc::CallbackServerContext* context, const v1::ListCalibrationsRequest* request,
    v1::ListCalibrationsResponse* response) {
  return Answer(
      parts_, context, Method::kListCalibrations, Where::kRpcThread,
      [this, request, response]() -> absl::Status {
        Digest fingerprint;
        if (!request->fingerprint().empty()) {
          KVSTOW_ASSIGN_OR_RETURN(fingerprint,
                                  Digest::FromBytes(request->fingerprint(), "fingerprint"));
        }
        for (const CalibrationStore::Held& held : parts_.calibrations->List(fingerprint)) {
          ToProto(held, response->add_calibrations());
        }
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* CalibrationService::DeleteCalibration(
    grpc::CallbackServerContext* context, const v1::DeleteCalibrationRequest* request,
    v1::DeleteCalibrationResponse*) {
  return Answer(parts_, context, Method::kDeleteCalibration, Where::kControlExecutor,
                [this, request]() -> absl::Status {
                  KVSTOW_ASSIGN_OR_RETURN(const Digest id, Digest::FromBytes(request->id(), "id"));
                  return parts_.calibrations->Delete(id);
                });
}

}  // namespace kvstow
