#include "service/control_service.h"

#include "service/call_deadline.h"
#include "service/control_handlers.h"
#include "service/plan_handlers.h"
#include "service/unary_answer.h"
#include "service/verify_call.h"

namespace kvstow {
namespace {

// A lookup of so many keys, or the hashing of so many tokens, takes about a millisecond.
constexpr size_t kShortLookupKeyBytes = 4096 * sizeof(BlockKey::bytes);
constexpr int kShortLookupTokens = 16384;
constexpr int kShortBatch = 64;

Where WhereFor(bool is_short) { return is_short ? Where::kRpcThread : Where::kControlExecutor; }

}  // namespace

grpc::ServerUnaryReactor* ModelService::RegisterModel(grpc::CallbackServerContext* context,
                                                      const v1::RegisterModelRequest* request,
                                                      v1::RegisterModelResponse* response) {
  return Answer(parts_, context, Method::kRegisterModel, Where::kControlExecutor,
                [this, request, response] { return DoRegisterModel(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ModelService::GetModel(grpc::CallbackServerContext* context,
                                                 const v1::GetModelRequest* request,
                                                 v1::GetModelResponse* response) {
  return Answer(parts_, context, Method::kGetModel, Where::kRpcThread,
                [this, request, response] { return DoGetModel(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ModelService::ListModels(grpc::CallbackServerContext* context,
                                                   const v1::ListModelsRequest* request,
                                                   v1::ListModelsResponse* response) {
  return Answer(parts_, context, Method::kListModels, Where::kRpcThread,
                [this, request, response] { return DoListModels(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ModelService::SetPlan(grpc::CallbackServerContext* context,
                                                const v1::SetPlanRequest* request,
                                                v1::SetPlanResponse* response) {
  return Answer(parts_, context, Method::kSetPlan, Where::kControlExecutor,
                [this, request, response] { return DoSetPlan(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ControlService::Lookup(grpc::CallbackServerContext* context,
                                                 const v1::LookupRequest* request,
                                                 v1::LookupResponse* response) {
  const bool is_short = request->keys().size() <= kShortLookupKeyBytes &&
                        request->prefix().token_ids_size() <= kShortLookupTokens &&
                        (request->local_only() || parts_.peers->empty());
  return Answer(parts_, context, Method::kLookup, WhereFor(is_short),
                [this, request, response] { return DoLookup(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ControlService::Reserve(grpc::CallbackServerContext* context,
                                                  const v1::ReserveRequest* request,
                                                  v1::ReserveResponse* response) {
  return Answer(parts_, context, Method::kReserve, WhereFor(request->blocks_size() <= kShortBatch),
                [this, request, response] { return DoReserve(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ControlService::Seal(grpc::CallbackServerContext* context,
                                               const v1::SealRequest* request,
                                               v1::SealResponse* response) {
  // Always off the RPC thread: units of odd sizes are moved together when their block is sealed.
  const absl::Duration timeout = CallDeadline(*context).Left();
  return Answer(
      parts_, context, Method::kSeal, Where::kControlExecutor,
      [this, request, timeout, response] { return DoSeal(parts_, *request, timeout, response); });
}

grpc::ServerUnaryReactor* ControlService::Abort(grpc::CallbackServerContext* context,
                                                const v1::AbortRequest* request,
                                                v1::AbortResponse* response) {
  return Answer(parts_, context, Method::kAbort, WhereFor(request->tickets_size() <= kShortBatch),
                [this, request, response] { return DoAbort(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ControlService::Acquire(grpc::CallbackServerContext* context,
                                                  const v1::AcquireRequest* request,
                                                  v1::AcquireResponse* response) {
  return Answer(parts_, context, Method::kAcquire,
                WhereFor(request->keys().size() <= kShortLookupKeyBytes),
                [this, request, response] { return DoAcquire(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ControlService::Release(grpc::CallbackServerContext* context,
                                                  const v1::ReleaseRequest* request,
                                                  v1::ReleaseResponse* response) {
  return Answer(parts_, context, Method::kRelease, Where::kRpcThread,
                [this, request, response] { return DoRelease(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ControlService::Delete(grpc::CallbackServerContext* context,
                                                 const v1::DeleteRequest* request,
                                                 v1::DeleteResponse* response) {
  return Answer(parts_, context, Method::kDelete, Where::kControlExecutor,
                [this, request, response] { return DoDelete(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ControlService::List(grpc::CallbackServerContext* context,
                                               const v1::ListRequest* request,
                                               v1::ListResponse* response) {
  return Answer(parts_, context, Method::kList, Where::kControlExecutor,
                [this, request, response] { return DoList(parts_, *request, response); });
}

grpc::ServerUnaryReactor* ControlService::Stat(grpc::CallbackServerContext* context,
                                               const v1::StatRequest* request,
                                               v1::StatResponse* response) {
  return Answer(parts_, context, Method::kStat, Where::kControlExecutor,
                [this, request, response] { return DoStat(parts_, *request, response); });
}

grpc::ServerWriteReactor<v1::VerifyProgress>* ControlService::Verify(
    grpc::CallbackServerContext*, const v1::VerifyRequest* request) {
  return VerifyCall::Start(parts_, *request);
}

}  // namespace kvstow
