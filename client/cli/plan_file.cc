#include "client/cli/plan_file.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"

namespace kvstow {

absl::StatusOr<std::string> ReadPlanText(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  if (!in.good()) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  if (text.str().size() > CodecPlan::kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": ", text.str().size(), " bytes, a plan has at most ", CodecPlan::kMaxTextBytes));
  }
  return text.str();
}

absl::StatusOr<CodecPlan> ReadPlanFile(const std::string& path) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string text, ReadPlanText(path));
  absl::StatusOr<CodecPlan> plan = CodecPlan::Parse(text);
  if (plan.ok()) return plan;
  return absl::Status(plan.status().code(), absl::StrCat(path, ": ", plan.status().message()));
}

nlohmann::ordered_json PlanJson(const ServicePlan& plan) {
  return {{"codecs", plan.codecs},
          {"id", plan.id.ToHex()},
          {"derived", plan.is_derived},
          {"reasons", plan.reasons}};
}

std::string PlanSummary(const std::optional<ServicePlan>& plan) {
  if (!plan.has_value()) return "no plan yet";
  return absl::StrCat(plan->codecs.empty() ? "none" : plan->codecs,
                      plan->is_derived ? " (derived)" : " (set)");
}

}  // namespace kvstow
