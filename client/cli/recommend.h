// Which codec each layer's keys and values should have: measured on a user's own KV, chosen by the
// exact best use of a budget.
//
//   CostTable table(spec, RecommendOptions{});
//   KVSTOW_RETURN_IF_ERROR(table.Add(file, probe, progress));   // one or more samples
//   KVSTOW_ASSIGN_OR_RETURN(Recommendation best, table.ForBudget(3.2));
//   // best.plan is what kvstow plan --set takes
//
// What is minimised is a KL, in nats, of attention weights, exact against decoded: the mean over
// layers, query heads and queries. Values do not change attention weights. Their error counts as
// the KL that keys would have where they change the outputs of attention as much, times
// kValueWeight. Perplexity is not looked at: that needs the model (kvstow.eval in Python).
//
// Thread safety: none.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/eval_math.h"
#include "client/cli/kv_file.h"
#include "kernels/codec/codec_plan.h"

namespace kvstow {

// An output error by values costs a model less than the same by keys. An estimate, from what tq
// values and tqm keys alone cost in next-token KL on one small model.
inline constexpr double kValueWeight = 0.45;

struct RecommendOptions {
  std::vector<CodecId> k_codecs = {CodecId::kRaw,  CodecId::kInt8, CodecId::kTqm4,
                                   CodecId::kTqm3, CodecId::kTqm2, CodecId::kTq4};
  std::vector<CodecId> v_codecs = {CodecId::kRaw, CodecId::kInt8, CodecId::kTq4, CodecId::kTq3,
                                   CodecId::kTq2};
};

// One codec for one layer and role.
struct CodecCost {
  CodecId codec = CodecId::kRaw;
  int64_t block_bytes = 0;  // units of a block, all heads
  double kl = 0;            // of keys: attention KL of the layer; of values: 0
  double output_error = 0;  // of the layer's attention outputs: squared error over squares
  double cost = 0;          // what it adds to the figure that is minimised
};

struct LayerChoice {
  int32_t layer_idx = 0;
  CodecCost k;
  CodecCost v;
};

struct Recommendation {
  CodecPlan plan;
  std::vector<LayerChoice> layers;
  double bits_per_value = 0;
  double attention_kl = 0;  // of the keys: measured
  double cost = 0;          // that and the values' share
  double output_error = 0;  // mean over layers; errors of keys and values added
};

class CostTable {
 public:
  // `spec` is one that Probe::Open takes.
  CostTable(const ModelSpec& spec, const RecommendOptions& options);

  // Measures one sample. kInvalidArgument: of another model, or without a full block.
  absl::Status Add(const KvFile& file, const Probe& probe,
                   const std::function<void(int32_t num_layers_done)>& progress);

  // The plan of least cost within `bits_per_value`. kInvalidArgument: no plan of these codecs is so
  // small; says what the smallest takes.
  absl::StatusOr<Recommendation> ForBudget(double bits_per_value) const;
  // The smallest plan of a cost of at most `max_kl`. kInvalidArgument: there is none.
  absl::StatusOr<Recommendation> ForKl(double max_kl) const;
  // The same pair of codecs in every layer. kInvalidArgument: it was not measured.
  absl::StatusOr<Recommendation> Uniform(const CodecPair& pair) const;
  // Of least cost within `bits_per_value`; kNotFound.
  absl::StatusOr<Recommendation> BestUniform(double bits_per_value) const;

 private:
  // [2 * layer + role][codec]; sums over samples until Rows() divides them.
  using Rows = std::vector<std::vector<CodecCost>>;
  struct Frontier;

  const std::vector<CodecId>& CodecsOf(Role role) const {
    return role == Role::kKey ? options_.k_codecs : options_.v_codecs;
  }
  void AddLayer(const KvFile& file, const Probe& probe, int32_t layer_idx);
  Rows Costs() const;
  Frontier MakeFrontier(const Rows& rows) const;
  Recommendation Describe(const Rows& rows, const std::vector<uint8_t>& chosen) const;
  double BitsPerValue(int64_t block_bytes) const;

  const ModelSpec spec_;
  const BlockLayout layout_;
  const RecommendOptions options_;
  Rows sums_;
  int64_t num_samples_ = 0;
};

// The plan as a file, with what it promises as comments.
std::string PlanFileText(const ModelSpec& spec, const Recommendation& recommendation);

}  // namespace kvstow
