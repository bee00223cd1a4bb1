#include "service/plan_handlers.h"

#include <string>

#include "kernels/core/status_macros.h"

namespace kvstow {

v1::ModelPlan PlanToProto(const ModelPlan& plan) {
  v1::ModelPlan message;
  message.set_plan(plan.codecs.Text());
  message.set_plan_id(std::string(plan.id.AsStringView()));
  message.set_is_derived(plan.origin == PlanOrigin::kDerived);
  for (const std::string& reason : plan.reasons) message.add_reasons(reason);
  return message;
}

absl::Status DoSetPlan(const ServiceParts& parts, const v1::SetPlanRequest& request,
                       v1::SetPlanResponse* response) {
  KVSTOW_ASSIGN_OR_RETURN(const Digest fingerprint,
                          Digest::FromBytes(request.fingerprint(), "fingerprint"));
  KVSTOW_ASSIGN_OR_RETURN(const ModelRef model, parts.models->Find(fingerprint));
  if (request.derive()) {
    if (!request.plan().empty()) {
      return absl::InvalidArgumentError("plan: a plan and derive, want one of them");
    }
    return parts.plans->Clear(fingerprint);
  }
  KVSTOW_ASSIGN_OR_RETURN(const CodecPlan codecs, CodecPlan::Parse(request.plan()));
  KVSTOW_ASSIGN_OR_RETURN(const PlanRef plan, parts.plans->Set(*model, codecs));
  *response->mutable_plan() = PlanToProto(*plan);
  return absl::OkStatus();
}

void AddModelStats(const ServiceParts& parts, v1::StatResponse& response) {
  for (const ModelRef& model : parts.models->List()) {
    v1::ModelStat* out = response.add_models();
    out->set_fingerprint(std::string(model->fingerprint().AsStringView()));
    out->set_name(model->spec().name);
    const PlanRef plan = parts.plans->Current(model->fingerprint());
    if (plan != nullptr) *out->mutable_plan() = PlanToProto(*plan);
  }
}

}  // namespace kvstow
