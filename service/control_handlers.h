// The control calls as plain functions: request in, response out. No gRPC; control_service.cc
// brings them to the right thread.
//
// Each returns the status of the call as a whole; a batch has a status per item in its response.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kvstow/v1/control.pb.h"
#include "kvstow/v1/model.pb.h"
#include "service/service_parts.h"

namespace kvstow {

absl::Status DoRegisterModel(const ServiceParts& parts, const v1::RegisterModelRequest& request,
                             v1::RegisterModelResponse* response);
absl::Status DoGetModel(const ServiceParts& parts, const v1::GetModelRequest& request,
                        v1::GetModelResponse* response);
absl::Status DoListModels(const ServiceParts& parts, const v1::ListModelsRequest& request,
                          v1::ListModelsResponse* response);

absl::Status DoLookup(const ServiceParts& parts, const v1::LookupRequest& request,
                      v1::LookupResponse* response);
absl::Status DoReserve(const ServiceParts& parts, const v1::ReserveRequest& request,
                       v1::ReserveResponse* response);
// `timeout`: how long a durable seal may wait for the disk.
absl::Status DoSeal(const ServiceParts& parts, const v1::SealRequest& request,
                    absl::Duration timeout, v1::SealResponse* response);
absl::Status DoAbort(const ServiceParts& parts, const v1::AbortRequest& request,
                     v1::AbortResponse* response);
absl::Status DoAcquire(const ServiceParts& parts, const v1::AcquireRequest& request,
                       v1::AcquireResponse* response);
absl::Status DoRelease(const ServiceParts& parts, const v1::ReleaseRequest& request,
                       v1::ReleaseResponse* response);
absl::Status DoDelete(const ServiceParts& parts, const v1::DeleteRequest& request,
                      v1::DeleteResponse* response);
absl::Status DoList(const ServiceParts& parts, const v1::ListRequest& request,
                    v1::ListResponse* response);
absl::Status DoStat(const ServiceParts& parts, const v1::StatRequest& request,
                    v1::StatResponse* response);

}  // namespace kvstow
