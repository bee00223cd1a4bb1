// ControlService, ModelService: the calls of control.proto and model.proto, each brought to the
// thread it belongs on. What is short runs on the RPC thread; what may wait for the disk or take
// milliseconds goes to the control executor.
#pragma once

#include "kvstow/v1/control.grpc.pb.h"
#include "kvstow/v1/model.grpc.pb.h"
#include "service/service_parts.h"

namespace kvstow {

class ModelService final : public v1::Models::CallbackService {
 public:
  // `parts` must outlive the server this is registered with.
  explicit ModelService(const ServiceParts& parts) : parts_(parts) {}

  grpc::ServerUnaryReactor* RegisterModel(grpc::CallbackServerContext* context,
                                          const v1::RegisterModelRequest* request,
                                          v1::RegisterModelResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* SetPlan(grpc::CallbackServerContext* context,
                                    const v1::SetPlanRequest* request,
                                    v1::SetPlanResponse* response) override;

 private:
  const ServiceParts& parts_;
};

class ControlService final : public v1::Control::CallbackService {
 public:
  explicit ControlService(const ServiceParts& parts) : parts_(parts) {}

  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* context,
                                   const v1::LookupRequest* request,
                                   v1::LookupResponse* response) override;
  grpc::ServerUnaryReactor* Reserve(grpc::CallbackServerContext* context,
                                    const v1::ReserveRequest* request,
                                    v1::ReserveResponse* response) override;
  grpc::ServerUnaryReactor* Seal(grpc::CallbackServerContext* context,
                                 const v1::SealRequest* request,
                                 v1::SealResponse* response) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* response) override;
  grpc::ServerUnaryReactor* Acquire(grpc::CallbackServerContext* context,
                                    const v1::AcquireRequest* request,
                                    v1::AcquireResponse* response) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context,
                                    const v1::ReleaseRequest* request,
                                    v1::ReleaseResponse* response) override;
  grpc::ServerUnaryReactor* Delete(grpc::CallbackServerContext* context,
                                   const v1::DeleteRequest* request,
                                   v1::DeleteResponse* response) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListRequest* request,
                                 v1::ListResponse* response) override;
  grpc::ServerUnaryReactor* Stat(grpc::CallbackServerContext* context,
                                 const v1::StatRequest* request,
                                 v1::StatResponse* response) override;
  grpc::ServerWriteReactor<v1::VerifyProgress>* Verify(grpc::CallbackServerContext* context,
                                                       const v1::VerifyRequest* request) override;

 private:
  const ServiceParts& parts_;
};

}  // namespace kvstow
