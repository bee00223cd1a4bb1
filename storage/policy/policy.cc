#include "storage/policy/policy.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "storage/policy/arc.h"
#include "storage/policy/belady.h"
#include "storage/policy/gdsf.h"
#include "storage/policy/hazard.h"
#include "storage/policy/lru.h"
#include "storage/policy/rtv.h"
#include "storage/policy/s3fifo.h"
#include "storage/policy/told.h"

namespace kvstow::policy {
namespace {

using Make = std::unique_ptr<Policy> (*)(const PolicyOptions& options, const BlockTree& tree);

std::unique_ptr<Policy> MakeTold(const PolicyOptions& options, const BlockTree& tree,
                                 ToldPolicy::Knows knows, double alpha) {
  return std::make_unique<ToldPolicy>(tree, *options.future, knows, alpha);
}

struct Row {
  PolicyKind kind;
  Make make;
};

// The one list of policies.
const std::vector<Row>& Rows() {
  static const auto* rows = new std::vector<Row>{
      {{"lru", "the request used longest ago leaves first"},
       [](const PolicyOptions& options, const BlockTree& tree) -> std::unique_ptr<Policy> {
         return std::make_unique<LruPolicy>(tree);
       }},
      {{"s3fifo", "three queues: new, used again, ghosts", false, true},
       [](const PolicyOptions& options, const BlockTree& tree) -> std::unique_ptr<Policy> {
         return std::make_unique<S3FifoPolicy>(tree, options.tier_blocks);
       }},
      {{"arc", "used once against used again, border by ghosts", false, true},
       [](const PolicyOptions& options, const BlockTree& tree) -> std::unique_ptr<Policy> {
         return std::make_unique<ArcPolicy>(tree, options.tier_blocks);
       }},
      {{"gdsf", "small sessions of many turns stay"},
       [](const PolicyOptions& options, const BlockTree& tree) -> std::unique_ptr<Policy> {
         return std::make_unique<GdsfPolicy>(tree);
       }},
      {{"hazard", "return rate by turn and idle time"},
       [](const PolicyOptions& options, const BlockTree& tree) -> std::unique_ptr<Policy> {
         return std::make_unique<HazardPolicy>(tree, options.hazard_window_s);
       }},
      {{"rtv", "learned return time, value per block and second (the default)"},
       [](const PolicyOptions& options, const BlockTree& tree) -> std::unique_ptr<Policy> {
         return std::make_unique<RtvPolicy>(tree, options.alpha);
       }},
      {{"told-who", "oracle: told which sessions return", true},
       [](const PolicyOptions& options, const BlockTree& tree) {
         return MakeTold(options, tree, ToldPolicy::Knows::kWho, 0);
       }},
      {{"told-both", "oracle: told which return, and when", true},
       [](const PolicyOptions& options, const BlockTree& tree) {
         return MakeTold(options, tree, ToldPolicy::Knows::kBoth, 0);
       }},
      {{"told-both-size", "oracle: the same, whole sessions per block", true},
       [](const PolicyOptions& options, const BlockTree& tree) {
         return MakeTold(options, tree, ToldPolicy::Knows::kBoth, 1);
       }},
      {{"belady", "oracle: the block used again last leaves first", true},
       [](const PolicyOptions& options, const BlockTree& tree) -> std::unique_ptr<Policy> {
         return std::make_unique<BeladyPolicy>(tree, *options.future);
       }},
  };
  return *rows;
}

}  // namespace

absl::Status PolicyOptions::Validate() const {
  if (tier_blocks.empty() || tier_blocks.size() > kTiersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("tier_blocks has ", tier_blocks.size(), " tiers, must have 1 to ", kTiersMax));
  }
  for (size_t i = 0; i < tier_blocks.size(); ++i) {
    if (tier_blocks[i] < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tier_blocks: tier ", i, " has ", tier_blocks[i], " blocks, must be at least 1"));
    }
  }
  if (!(alpha >= 0 && alpha <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("alpha is ", alpha, ", must be in [0, 1]"));
  }
  if (!(hazard_window_s > 0 && hazard_window_s <= 1e6)) {
    return absl::InvalidArgumentError(absl::StrCat("hazard_window_s is ", hazard_window_s,
                                                   ", must be above 0 and at most 1000000"));
  }
  return absl::OkStatus();
}

const std::vector<PolicyKind>& AllPolicies() {
  static const auto* kinds = [] {
    auto* list = new std::vector<PolicyKind>;
    for (const Row& row : Rows()) list->push_back(row.kind);
    return list;
  }();
  return *kinds;
}

absl::StatusOr<std::unique_ptr<Policy>> MakePolicy(std::string_view name,
                                                   const PolicyOptions& options,
                                                   const BlockTree& tree) {
  KVSTOW_RETURN_IF_ERROR(options.Validate());
  std::vector<std::string> names;
  for (const Row& row : Rows()) {
    names.emplace_back(row.kind.name);
    if (row.kind.name != name) continue;
    if (row.kind.is_oracle && options.future == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("policy ", ToAbsl(name), " is an oracle: it needs the future of a trace"));
    }
    return row.make(options, tree);
  }
  std::string all;
  for (const std::string& known : names) absl::StrAppend(&all, all.empty() ? "" : ", ", known);
  const std::string nearest = NearestName(name, names);
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown policy `", ToAbsl(name), "`",
      nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?"), " Known: ", all));
}

}  // namespace kvstow::policy
