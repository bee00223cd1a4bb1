#include "client/cli/recommend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "kernels/layout/planes.h"

namespace kvstow {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

BlockLayout LayoutOf(const ModelSpec& spec) {
  absl::StatusOr<BlockLayout> layout = BlockLayout::Create(spec);
  KVSTOW_CHECK(layout.ok());
  return *std::move(layout);
}

size_t RowOf(int32_t layer_idx, Role role) {
  return 2 * static_cast<size_t>(layer_idx) + static_cast<size_t>(role);
}

// The full blocks of one layer, role and head as floats, [num_tokens, dim].
struct PlaneFloats {
  std::vector<float> values;
  int64_t unit_bytes = 0;  // of one block; planes that cannot be encoded are counted as if
};

// As a reader gets it back.
PlaneFloats ThroughCodec(const KvFile& file, const BlockLayout& layout, int32_t plane_idx,
                         CodecId wanted) {
  const PlaneInfo& plane = layout.plane(plane_idx);
  const PlaneShape shape = {.num_tokens = layout.tokens_per_block(),
                            .dim = plane.dim,
                            .role = plane.role,
                            .dtype = layout.dtype()};
  const Codec& codec = *FindCodec(EffectiveCodec(wanted, shape));
  const CodecBackend& backend = BestBackend(codec);
  const LayerRows& layer = file.layers()[plane.layer_idx];
  const int64_t block_values = int64_t{plane.dim} * layout.tokens_per_block();
  PlaneFloats out{.unit_bytes = codec.plane_bytes(shape)};
  out.values.resize(block_values * file.num_full_blocks());
  std::vector<std::byte> rows(plane.row_bytes);
  std::vector<std::byte> unit(codec.plane_bytes(shape));
  for (int64_t block = 0; block < file.num_full_blocks(); ++block) {
    GatherPlane(layout, plane_idx, plane.role == Role::kKey ? layer.k : layer.v,
                block * layout.tokens_per_block(), rows.data());
    if (backend.encode(shape, rows.data(), unit.data()) == EncodeResult::kEncoded) {
      backend.decode(shape, unit.data(), rows.data());
    }
    ToFloats(layout.dtype(), rows.data(), block_values, out.values.data() + block * block_values);
  }
  return out;
}

// One query head on one KV head.
class HeadJudge {
 public:
  HeadJudge(const PlaneFloats& k, const PlaneFloats& v, int32_t dim) : k_(k), v_(v), dim_(dim) {}

  // Makes `query` the one that is judged.
  void Ask(const float* query) {
    query_ = query;
    exact_logits_ = Logits(k_);
    weights_ = exact_logits_;
    Softmax(absl::MakeSpan(weights_));
    exact_output_ = Output(weights_, v_);
    energy_ =
        std::inner_product(exact_output_.begin(), exact_output_.end(), exact_output_.begin(), 0.0);
  }
  void JudgeKeys(const PlaneFloats& decoded, CodecCost& cost) const {
    std::vector<double> logits = Logits(decoded);
    cost.kl += KlOfLogits(exact_logits_, logits);
    Softmax(absl::MakeSpan(logits));
    cost.output_error += ErrorOf(Output(logits, v_));
  }
  void JudgeValues(const PlaneFloats& decoded, CodecCost& cost) const {
    cost.output_error += ErrorOf(Output(weights_, decoded));
  }

 private:
  std::vector<double> Logits(const PlaneFloats& keys) const {
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim_));
    std::vector<double> logits(keys.values.size() / dim_);
    for (size_t t = 0; t < logits.size(); ++t) {
      const float* key = keys.values.data() + t * dim_;
      double sum = 0;
      for (int32_t i = 0; i < dim_; ++i) sum += static_cast<double>(query_[i]) * key[i];
      logits[t] = sum * scale;
    }
    return logits;
  }
  std::vector<double> Output(const std::vector<double>& weights, const PlaneFloats& values) const {
    std::vector<double> out(dim_);
    for (size_t t = 0; t < weights.size(); ++t) {
      const float* value = values.values.data() + t * dim_;
      for (int32_t i = 0; i < dim_; ++i) out[i] += weights[t] * value[i];
    }
    return out;
  }
  // Squared error over squares, of this query.
  double ErrorOf(const std::vector<double>& output) const {
    double error = 0;
    for (int32_t i = 0; i < dim_; ++i) {
      error += (output[i] - exact_output_[i]) * (output[i] - exact_output_[i]);
    }
    return energy_ > 0 ? error / energy_ : 0;
  }

  const PlaneFloats& k_;
  const PlaneFloats& v_;
  const int32_t dim_;
  const float* query_ = nullptr;
  std::vector<double> exact_logits_;
  std::vector<double> weights_;
  std::vector<double> exact_output_;
  double energy_ = 0;
};

}  // namespace

// Least cost for every number of bytes, and how it is reached.
struct CostTable::Frontier {
  int64_t unit = 1;                          // bytes of a step: all sizes are multiples
  int64_t least_steps = 0;                   // of the smallest plan
  std::vector<double> cost;                  // [steps]: with at most so many; infinite: none
  std::vector<std::vector<uint8_t>> chosen;  // [row][steps]

  // The codecs of the cheapest plan of at most `steps`.
  std::vector<uint8_t> Trace(const Rows& rows, int64_t steps) const {
    std::vector<uint8_t> codecs(rows.size());
    for (size_t row = rows.size(); row-- > 0;) {
      codecs[row] = chosen[row][steps];
      steps -= rows[row][codecs[row]].block_bytes / unit;
    }
    return codecs;
  }
};

CostTable::CostTable(const ModelSpec& spec, const RecommendOptions& options)
    : spec_(spec), layout_(LayoutOf(spec)), options_(options) {
  sums_.resize(2 * static_cast<size_t>(spec.num_layers()));
  for (int32_t layer_idx = 0; layer_idx < spec.num_layers(); ++layer_idx) {
    for (const Role role : {Role::kKey, Role::kValue}) {
      for (const CodecId codec : CodecsOf(role)) {
        sums_[RowOf(layer_idx, role)].push_back({.codec = codec});
      }
    }
  }
}

absl::Status CostTable::Add(const KvFile& file, const Probe& probe,
                            const std::function<void(int32_t)>& progress) {
  if (file.spec() != spec_) {
    return absl::InvalidArgumentError(absl::StrCat(file.path(), " is of another model (",
                                                   file.spec().name, ") than the first file (",
                                                   spec_.name, "): want samples of one model"));
  }
  KVSTOW_RETURN_IF_ERROR(file.CheckHasBlocks());
  for (int32_t layer_idx = 0; layer_idx < spec_.num_layers(); ++layer_idx) {
    AddLayer(file, probe, layer_idx);
    if (progress) progress(layer_idx + 1);
  }
  ++num_samples_;
  return absl::OkStatus();
}

void CostTable::AddLayer(const KvFile& file, const Probe& probe, int32_t layer_idx) {
  const LayerGroup& group = spec_.groups[0];
  const int32_t gqa_group_size = probe.num_q_heads / group.num_kv_heads;
  const double per_query = 1.0 / (static_cast<double>(probe.num_q_heads) * probe.num_tokens);
  std::vector<CodecCost>& k_sums = sums_[RowOf(layer_idx, Role::kKey)];
  std::vector<CodecCost>& v_sums = sums_[RowOf(layer_idx, Role::kValue)];
  for (int32_t head = 0; head < group.num_kv_heads; ++head) {
    const auto decode = [&](Role role, CodecId codec) {
      return ThroughCodec(file, layout_, layout_.plane_idx(layer_idx, role, head), codec);
    };
    const PlaneFloats k = decode(Role::kKey, CodecId::kRaw);
    const PlaneFloats v = decode(Role::kValue, CodecId::kRaw);
    HeadJudge judge(k, v, group.k_dim);
    const auto ask_all = [&](const auto& judge_query) {
      for (int32_t q = 0; q < gqa_group_size; ++q) {
        for (int32_t token = 0; token < probe.num_tokens; ++token) {
          judge.Ask(probe.query(layer_idx, token, head * gqa_group_size + q));
          judge_query();
        }
      }
    };
    std::vector<PlaneFloats> k_decoded, v_decoded;
    for (const CodecId codec : options_.k_codecs) k_decoded.push_back(decode(Role::kKey, codec));
    for (const CodecId codec : options_.v_codecs) v_decoded.push_back(decode(Role::kValue, codec));
    std::vector<CodecCost> k_costs(k_decoded.size()), v_costs(v_decoded.size());
    ask_all([&] {
      for (size_t i = 0; i < k_decoded.size(); ++i) judge.JudgeKeys(k_decoded[i], k_costs[i]);
      for (size_t i = 0; i < v_decoded.size(); ++i) judge.JudgeValues(v_decoded[i], v_costs[i]);
    });
    const auto add = [&](const PlaneFloats& decoded, const CodecCost& cost, CodecCost& sum) {
      sum.block_bytes += decoded.unit_bytes;
      sum.kl += cost.kl * per_query;
      sum.output_error += cost.output_error * per_query;
    };
    for (size_t i = 0; i < k_decoded.size(); ++i) add(k_decoded[i], k_costs[i], k_sums[i]);
    for (size_t i = 0; i < v_decoded.size(); ++i) add(v_decoded[i], v_costs[i], v_sums[i]);
  }
}

CostTable::Rows CostTable::Costs() const {
  Rows rows = sums_;
  const double samples = static_cast<double>(std::max<int64_t>(num_samples_, 1));
  // Attention KL for an output error, by keys: the median over layers and codecs, in which a layer
  // that is spoilt counts no more than another.
  std::vector<double> ratios;
  for (size_t row = 0; row < rows.size(); ++row) {
    for (CodecCost& choice : rows[row]) {
      choice.block_bytes /= std::max<int64_t>(num_samples_, 1);
      choice.kl /= samples;
      choice.output_error /= samples;
      if (row % 2 == 0 && choice.output_error > 0)
        ratios.push_back(choice.kl / choice.output_error);
    }
  }
  double kl_per_error = 0;
  if (!ratios.empty()) {
    std::nth_element(ratios.begin(), ratios.begin() + ratios.size() / 2, ratios.end());
    kl_per_error = ratios[ratios.size() / 2];
  }
  for (size_t row = 0; row < rows.size(); ++row) {
    for (CodecCost& choice : rows[row]) {
      const double kl =
          row % 2 == 0 ? choice.kl : kValueWeight * kl_per_error * choice.output_error;
      choice.cost = kl / spec_.num_layers();
    }
  }
  return rows;
}

CostTable::Frontier CostTable::MakeFrontier(const Rows& rows) const {
  Frontier frontier;
  int64_t unit = 0;
  int64_t largest_bytes = 0;
  for (const std::vector<CodecCost>& row : rows) {
    int64_t largest = 0;
    for (const CodecCost& choice : row) {
      unit = std::gcd(unit, choice.block_bytes);
      largest = std::max(largest, choice.block_bytes);
    }
    largest_bytes += largest;
  }
  frontier.unit = std::max<int64_t>(unit, 1);
  const int64_t num_steps = largest_bytes / frontier.unit + 1;
  frontier.cost.assign(num_steps, 0.0);
  for (const std::vector<CodecCost>& row : rows) {
    std::vector<double> next(num_steps, kInfinite);
    std::vector<uint8_t> chosen(num_steps);
    for (size_t i = 0; i < row.size(); ++i) {
      const int64_t size = row[i].block_bytes / frontier.unit;
      for (int64_t steps = size; steps < num_steps; ++steps) {
        const double cost = frontier.cost[steps - size] + row[i].cost;
        if (cost >= next[steps]) continue;
        next[steps] = cost;
        chosen[steps] = static_cast<uint8_t>(i);
      }
    }
    frontier.cost = std::move(next);
    frontier.chosen.push_back(std::move(chosen));
  }
  const auto first = std::find_if(frontier.cost.begin(), frontier.cost.end(),
                                  [](double cost) { return cost < kInfinite; });
  frontier.least_steps = first - frontier.cost.begin();
  return frontier;
}

double CostTable::BitsPerValue(int64_t block_bytes) const {
  const double num_values = static_cast<double>(layout_.block_bytes()) /
                            static_cast<double>(DTypeBytes(layout_.dtype(), 1));
  return 8.0 * static_cast<double>(block_bytes) / num_values;
}

Recommendation CostTable::Describe(const Rows& rows, const std::vector<uint8_t>& chosen) const {
  Recommendation result;
  int64_t block_bytes = 0;
  for (int32_t layer_idx = 0; layer_idx < spec_.num_layers(); ++layer_idx) {
    const size_t k_row = RowOf(layer_idx, Role::kKey);
    const size_t v_row = RowOf(layer_idx, Role::kValue);
    const LayerChoice layer{layer_idx, rows[k_row][chosen[k_row]], rows[v_row][chosen[v_row]]};
    result.plan.Set(layer_idx, Role::kKey, layer.k.codec);
    result.plan.Set(layer_idx, Role::kValue, layer.v.codec);
    block_bytes += layer.k.block_bytes + layer.v.block_bytes;
    result.attention_kl += layer.k.kl / spec_.num_layers();
    result.cost += layer.k.cost + layer.v.cost;
    result.output_error += (layer.k.output_error + layer.v.output_error) / spec_.num_layers();
    result.layers.push_back(layer);
  }
  result.bits_per_value = BitsPerValue(block_bytes);
  return result;
}

absl::StatusOr<Recommendation> CostTable::ForBudget(double bits_per_value) const {
  const Rows rows = Costs();
  const Frontier frontier = MakeFrontier(rows);
  const auto num_steps = static_cast<int64_t>(frontier.cost.size());
  int64_t steps = num_steps - 1;
  while (steps >= 0 && BitsPerValue(steps * frontier.unit) > bits_per_value) --steps;
  if (steps < frontier.least_steps) {
    return absl::InvalidArgumentError(
        absl::StrFormat("budget: %.4g bits per value, the smallest plan of these codecs takes %.4g",
                        bits_per_value, BitsPerValue(frontier.least_steps * frontier.unit)));
  }
  // Bytes that buy nothing are not spent.
  while (steps > frontier.least_steps && frontier.cost[steps - 1] <= frontier.cost[steps]) --steps;
  return Describe(rows, frontier.Trace(rows, steps));
}

absl::StatusOr<Recommendation> CostTable::ForKl(double max_kl) const {
  const Rows rows = Costs();
  const Frontier frontier = MakeFrontier(rows);
  for (int64_t steps = frontier.least_steps; steps < static_cast<int64_t>(frontier.cost.size());
       ++steps) {
    if (frontier.cost[steps] <= max_kl) return Describe(rows, frontier.Trace(rows, steps));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("max-kl: %.3g, the best plan of these codecs has %.3g: add raw to the codecs",
                      max_kl, frontier.cost.back()));
}

absl::StatusOr<Recommendation> CostTable::Uniform(const CodecPair& pair) const {
  const Rows rows = Costs();
  std::vector<uint8_t> chosen(rows.size());
  for (size_t row = 0; row < rows.size(); ++row) {
    const Role role = row % 2 == 0 ? Role::kKey : Role::kValue;
    const auto found = std::find_if(rows[row].begin(), rows[row].end(),
                                    [&](const CodecCost& c) { return c.codec == pair.of(role); });
    if (found == rows[row].end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("codec ", CodecPairName(pair), " was not measured"));
    }
    chosen[row] = static_cast<uint8_t>(found - rows[row].begin());
  }
  return Describe(rows, chosen);
}

absl::StatusOr<Recommendation> CostTable::BestUniform(double bits_per_value) const {
  absl::StatusOr<Recommendation> best = absl::NotFoundError("no uniform pair is so small");
  for (const CodecId k : options_.k_codecs) {
    for (const CodecId v : options_.v_codecs) {
      KVSTOW_ASSIGN_OR_RETURN(Recommendation pair, Uniform({k, v}));
      if (pair.bits_per_value > bits_per_value) continue;
      if (!best.ok() || pair.cost < best->cost) best = std::move(pair);
    }
  }
  return best;
}

std::string PlanFileText(const ModelSpec& spec, const Recommendation& recommendation) {
  std::string text = absl::StrFormat(
      "# kvstow recommend for %s, fingerprint %s\n"
      "# %.4f bits per value, attention KL %.4g, with the values' share %.4g\n",
      spec.name, spec.Fingerprint().ToHex(), recommendation.bits_per_value,
      recommendation.attention_kl, recommendation.cost);
  for (const absl::string_view item : absl::StrSplit(recommendation.plan.Text(), ',')) {
    absl::StrAppend(&text, item, "\n");
  }
  return text;
}

}  // namespace kvstow
