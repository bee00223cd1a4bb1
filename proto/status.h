// Status: absl::Status <-> what goes over the wire, code by code.
//
// The codes of absl and gRPC have the same numbers, so nothing is translated. A retry hint travels
// as a payload of the absl::Status, as google.rpc.RetryInfo in the details of a failed call, and as
// a field of an ItemStatus:
//
//   absl::Status status = absl::ResourceExhaustedError("leases: 65536 of 65536 in use");
//   SetRetryAfter(status, absl::Milliseconds(200));
//   return ToGrpcStatus(status);                          // the client:
//   RetryAfter(FromGrpcStatus(s))
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kvstow/v1/control.pb.h"

namespace kvstow {

// Messages longer than this are cut on the way out: they travel in HTTP/2 headers.
inline constexpr int kMaxStatusTextBytes = 2048;

grpc::Status ToGrpcStatus(const absl::Status& status);
// An unknown code becomes kUnknown.
absl::Status FromGrpcStatus(const grpc::Status& status);

v1::ItemStatus ToItemStatus(const absl::Status& status);
absl::Status FromItemStatus(const v1::ItemStatus& item);

// Attaches when to try again; rounded up to a millisecond. No effect on an OK status.
void SetRetryAfter(absl::Status& status, absl::Duration delay);
// Zero where there is no hint.
absl::Duration RetryAfter(const absl::Status& status);

}  // namespace kvstow
