#include "client/cpp/calibration_calls.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "proto/convert.h"

namespace kvstow {
namespace {

absl::StatusOr<ListedCalibration> FromProto(const v1::CalibrationInfo& info) {
  ListedCalibration listed{.num_rotations = info.num_rotations(),
                           .bundle_bytes = info.bundle_bytes()};
  KVSTOW_ASSIGN_OR_RETURN(listed.id, Digest::FromBytes(info.id(), "calibration.id"));
  KVSTOW_ASSIGN_OR_RETURN(listed.fingerprint,
                          Digest::FromBytes(info.fingerprint(), "calibration.fingerprint"));
  KVSTOW_ASSIGN_OR_RETURN(listed.source, Digest::FromBytes(info.source(), "calibration.source"));
  return listed;
}

}  // namespace

absl::StatusOr<ListedCalibration> SendBundle(v1::Calibrations::Stub& stub, std::string_view bundle,
                                             const Caller& call) {
  v1::PutCalibrationResponse response;
  KVSTOW_RETURN_IF_ERROR(call([&](grpc::ClientContext* context) {
    const auto writer = stub.PutCalibration(context, &response);
    v1::PutCalibrationRequest request;
    request.set_bundle_bytes(bundle.size());
    for (size_t at = 0; at < bundle.size(); at += kMaxBundleChunkBytes) {
      request.set_chunk(std::string(bundle.substr(at, kMaxBundleChunkBytes)));
      if (!writer->Write(request)) break;  // the service has ended the call: Finish says why
      request.Clear();
    }
    writer->WritesDone();
    return writer->Finish();
  }));
  return FromProto(response.info());
}

absl::StatusOr<std::string> FetchBundle(v1::Calibrations::Stub& stub, const Digest& id,
                                        const Caller& call) {
  std::string bundle;
  uint64_t bundle_bytes = 0;
  absl::Status fault;
  KVSTOW_RETURN_IF_ERROR(call([&](grpc::ClientContext* context) {
    v1::GetCalibrationRequest request;
    request.set_id(std::string(id.AsStringView()));
    const auto reader = stub.GetCalibration(context, request);
    v1::GetCalibrationResponse response;
    while (reader->Read(&response)) {
      if (bundle_bytes == 0) bundle_bytes = response.bundle_bytes();
      if (bundle_bytes > static_cast<uint64_t>(kMaxBundleBytes) ||
          response.chunk().size() > bundle_bytes - bundle.size()) {
        fault = absl::DataLossError(absl::StrCat("calibration ", id.ToHex(), ": more than the ",
                                                 bundle_bytes, " bytes it was to have, at most ",
                                                 kMaxBundleBytes));
        context->TryCancel();
        continue;
      }
      bundle += response.chunk();
    }
    const grpc::Status status = reader->Finish();
    return fault.ok() ? status : grpc::Status::OK;
  }));
  KVSTOW_RETURN_IF_ERROR(fault);
  if (bundle.empty() || bundle.size() != bundle_bytes) {
    return absl::DataLossError(absl::StrCat("calibration ", id.ToHex(), ": ", bundle.size(),
                                            " bytes came, want ", bundle_bytes));
  }
  return bundle;
}

absl::StatusOr<std::vector<ListedCalibration>> ListBundles(v1::Calibrations::Stub& stub,
                                                           const Digest& fingerprint,
                                                           const Caller& call) {
  v1::ListCalibrationsRequest request;
  if (!fingerprint.is_zero()) {
    request.set_fingerprint(std::string(fingerprint.AsStringView()));
  }
  v1::ListCalibrationsResponse response;
  KVSTOW_RETURN_IF_ERROR(call([&](grpc::ClientContext* context) {
    return stub.ListCalibrations(context, request, &response);
  }));
  std::vector<ListedCalibration> list;
  for (const v1::CalibrationInfo& info : response.calibrations()) {
    KVSTOW_ASSIGN_OR_RETURN(list.emplace_back(), FromProto(info));
  }
  return list;
}

absl::Status DeleteBundle(v1::Calibrations::Stub& stub, const Digest& id, const Caller& call) {
  v1::DeleteCalibrationRequest request;
  request.set_id(std::string(id.AsStringView()));
  v1::DeleteCalibrationResponse response;
  return call([&](grpc::ClientContext* context) {
    return stub.DeleteCalibration(context, request, &response);
  });
}

}  // namespace kvstow
