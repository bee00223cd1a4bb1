// plan: which layers of a model the service stores with another codec than writers ask for.
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/connect.h"
#include "client/cli/plan_file.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

constexpr Option kPlanOptions[] = {
    {"set", "FILE", "from now on this plan, as kvstow recommend prints it"},
    {"to", "ITEMS", "from now on these items: layer0.k=raw,layer3-5=int8; \"\" for no exceptions"},
    {"derive", "", "forget the plan; the service derives one from what it is sent next"},
};

// The registered models that `word` names: whole or in part a fingerprint, or the model's name.
std::vector<ServiceModel> ModelsNamed(const ServiceStat& stat, const std::string& word) {
  std::vector<ServiceModel> named;
  for (const ServiceModel& model : stat.models) {
    if (word.empty() || model.name == word ||
        (word.size() >= 4 && model.fingerprint.ToHex().starts_with(word))) {
      named.push_back(model);
    }
  }
  return named;
}

absl::StatusOr<ServiceModel> FindModel(const ServiceStat& stat, const std::string& word) {
  const std::vector<ServiceModel> named = ModelsNamed(stat, word);
  if (named.size() == 1) return named[0];
  return absl::NotFoundError(
      absl::StrCat("\"", word, "\" names ", named.empty() ? "none" : "several", " of the ",
                   stat.models.size(), " models of the service: kvstow stat lists them"));
}

void ShowModel(const ServiceModel& model, Output& output) {
  output.Json({{"fingerprint", model.fingerprint.ToHex()},
               {"model", model.name},
               {"plan", model.plan.has_value() ? PlanJson(*model.plan) : Json()}});
  output.Line(absl::StrCat(model.name, " ", model.fingerprint.ToHex()));
  output.Line(absl::StrCat("  plan     ", PlanSummary(model.plan)));
  if (!model.plan.has_value()) return;
  output.Line(absl::StrCat("  plan id  ", model.plan->id.ToHex()));
  for (const std::string& reason : model.plan->reasons) {
    output.Line(absl::StrCat("  raw      ", reason));
  }
}

absl::Status ChangePlan(const Args& args, const Service& service, const ServiceModel& model) {
  if (args.Has("derive")) return service.admin->DerivePlan(model.fingerprint);
  std::string text = args.Text("to");
  if (args.Has("set")) {
    KVSTOW_ASSIGN_OR_RETURN(text, ReadPlanText(args.Text("set")));
  }
  return service.admin->SetPlan(model.fingerprint, text).status();
}

absl::Status RunPlan(const Args& args, Output& output) {
  const int num_changes = int{args.Has("set")} + int{args.Has("to")} + int{args.Has("derive")};
  if (num_changes > 1) return UsageError("--set, --to and --derive: want one of them");
  const std::string word = args.positionals().empty() ? "" : args.positionals()[0];
  if (num_changes == 1 && word.empty()) {
    return UsageError(
        "a plan belongs to a model: want kvstow plan MODEL with --set, --to, --derive");
  }
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  absl::StatusOr<ServiceStat> stat = service.admin->Stat();
  if (!stat.ok()) return service.Explain(stat.status());
  if (word.empty()) {
    for (const ServiceModel& model : stat->models) ShowModel(model, output);
    return absl::OkStatus();
  }
  KVSTOW_ASSIGN_OR_RETURN(ServiceModel model, FindModel(*stat, word));
  if (num_changes == 1) {
    const absl::Status changed = ChangePlan(args, service, model);
    if (!changed.ok()) return service.Explain(changed);
    stat = service.admin->Stat();
    if (!stat.ok()) return service.Explain(stat.status());
    KVSTOW_ASSIGN_OR_RETURN(model, FindModel(*stat, model.fingerprint.ToHex()));
  }
  ShowModel(model, output);
  return absl::OkStatus();
}

constexpr Command kPlanCommands[] = {
    {{.name = "plan",
      .summary = "layers of a model that have a codec of their own; or change them",
      .details =
          "The service derives a plan from the first rows it sees of a model: layers whose rows "
          "codecs would\nspoil (the biased keys of Qwen2) stay raw. A plan changes what is stored "
          "from now on; what is asked\nfor as raw stays raw. MODEL is a name or the start of a "
          "fingerprint, as kvstow stat shows them.",
      .positionals = "[MODEL]",
      .num_positionals_max = 1,
      .options = kPlanOptions,
      .example = "kvstow plan SmolLM2-135M-Instruct --to layer0.k=raw"},
     &RunPlan},
};

}  // namespace

absl::Span<const Command> PlanCommands() { return kPlanCommands; }

}  // namespace kvstow
