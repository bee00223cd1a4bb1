// Plans of models on the wire: SetPlan, and what other answers say of them.
#pragma once

#include "absl/status/status.h"
#include "kvstow/v1/control.pb.h"
#include "kvstow/v1/model.pb.h"
#include "service/plan_book.h"
#include "service/service_parts.h"

namespace kvstow {

absl::Status DoSetPlan(const ServiceParts& parts, const v1::SetPlanRequest& request,
                       v1::SetPlanResponse* response);

v1::ModelPlan PlanToProto(const ModelPlan& plan);

// StatResponse.models.
void AddModelStats(const ServiceParts& parts, v1::StatResponse& response);

}  // namespace kvstow
