// Plans of codecs for commands: read from a file, shown to people.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/admin_client.h"
#include "kernels/codec/codec_plan.h"

namespace kvstow {

// The text of a plan. kNotFound: the file cannot be read; kInvalidArgument: it is too large.
absl::StatusOr<std::string> ReadPlanText(const std::string& path);
// kInvalidArgument names the file and the item.
absl::StatusOr<CodecPlan> ReadPlanFile(const std::string& path);

nlohmann::ordered_json PlanJson(const ServicePlan& plan);

// In a few words: "none yet", "none (derived)", "layer0.k=raw (derived)".
std::string PlanSummary(const std::optional<ServicePlan>& plan);

}  // namespace kvstow
