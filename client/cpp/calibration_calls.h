// Calibration calls: bundles to and from a service. Private to the client library.
//
//   KVSTOW_ASSIGN_OR_RETURN(std::string bundle, FetchBundle(stub, id, call));
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/admin_client.h"
#include "client/cpp/connection.h"
#include "kernels/core/digest.h"
#include "kvstow/v1/calibrations.grpc.pb.h"

namespace kvstow {

// Makes one call, with its deadline.
using Caller = std::function<absl::Status(const Connection::CallFn&)>;

absl::StatusOr<ListedCalibration> SendBundle(v1::Calibrations::Stub& stub, std::string_view bundle,
                                             const Caller& call);
// The bytes as they came: Calibration::Parse checks them. kNotFound, kDataLoss.
absl::StatusOr<std::string> FetchBundle(v1::Calibrations::Stub& stub, const Digest& id,
                                        const Caller& call);
// Of one model unless `fingerprint` is zero.
absl::StatusOr<std::vector<ListedCalibration>> ListBundles(v1::Calibrations::Stub& stub,
                                                           const Digest& fingerprint,
                                                           const Caller& call);
absl::Status DeleteBundle(v1::Calibrations::Stub& stub, const Digest& id, const Caller& call);

}  // namespace kvstow
