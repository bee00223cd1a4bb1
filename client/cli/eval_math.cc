#include "client/cli/eval_math.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/cli/kv_file.h"
#include "client/cpp/safetensors.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

// Squared errors and squares of a set of values.
struct ErrorSums {
  double error = 0;
  double energy = 0;
  void Add(double exact, double decoded) {
    const double difference = decoded - exact;
    error += difference * difference;
    energy += exact * exact;
  }
  // No energy and no error is no error; error without energy is as bad as it gets.
  void Add(const ErrorSums& other) {
    error += other.error;
    energy += other.energy;
  }
  double Relative() const {
    if (energy > 0) return error / energy;
    return error > 0 ? INFINITY : 0;
  }
};

struct LayerFloats {
  std::vector<float> k;  // [num_tokens, kv_heads, dim]
  std::vector<float> v;
};

LayerFloats FloatsOf(const KvRows& kv, const LayerRows& rows, int32_t layer_idx) {
  LayerFloats floats;
  for (Role role : {Role::kKey, Role::kValue}) {
    const absl::Span<const std::byte> bytes =
        RowBytes(kv.spec, rows, layer_idx, role, kv.num_tokens);
    std::vector<float>& out = role == Role::kKey ? floats.k : floats.v;
    out.resize(bytes.size() / DTypeBytes(kv.spec.kv_dtype, 1));
    ToFloats(kv.spec.kv_dtype, bytes.data(), static_cast<int64_t>(out.size()), out.data());
  }
  return floats;
}

// One query against one KV head: logits, and the output for their softmax.
struct HeadView {
  const LayerFloats& floats;
  int64_t num_tokens;
  int32_t num_heads;
  int32_t head_idx;
  int32_t dim;

  const float* row(const std::vector<float>& rows, int64_t token) const {
    return rows.data() + (token * num_heads + head_idx) * dim;
  }
  void Logits(const float* query, absl::Span<double> logits) const {
    const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
    for (int64_t t = 0; t < num_tokens; ++t) {
      const float* key = row(floats.k, t);
      double sum = 0;
      for (int32_t i = 0; i < dim; ++i) sum += static_cast<double>(query[i]) * key[i];
      logits[t] = sum * scale;
    }
  }
  void AddErrors(const std::vector<float>& exact, const std::vector<float>& decoded,
                 ErrorSums& sums) const {
    for (int64_t t = 0; t < num_tokens; ++t) {
      const float* a = row(exact, t);
      const float* b = row(decoded, t);
      for (int32_t i = 0; i < dim; ++i) {
        if (!std::isfinite(a[i]) && std::memcmp(&a[i], &b[i], sizeof(float)) == 0) continue;
        sums.Add(a[i], b[i]);
      }
    }
  }
  void AttentionOutput(absl::Span<const double> weights, absl::Span<double> out) const {
    std::fill(out.begin(), out.end(), 0.0);
    for (int64_t t = 0; t < num_tokens; ++t) {
      const float* value = row(floats.v, t);
      for (int32_t i = 0; i < dim; ++i) out[i] += weights[t] * value[i];
    }
  }
};

// Of one layer and KV head, or of several.
struct QualitySums {
  ErrorSums k;
  ErrorSums v;
  double kl = 0;
  int64_t num_queries = 0;
  ErrorSums output;

  void Add(const QualitySums& other) {
    k.Add(other.k);
    v.Add(other.v);
    kl += other.kl;
    num_queries += other.num_queries;
    output.Add(other.output);
  }
  Quality Means() const {
    return {.k_error = k.Relative(),
            .v_error = v.Relative(),
            .attention_kl = num_queries == 0 ? 0 : kl / static_cast<double>(num_queries),
            .output_error = output.Relative()};
  }
};

void JudgeQuery(const HeadView& exact, const HeadView& decoded, const float* query,
                QualitySums& sums) {
  std::vector<double> exact_logits(exact.num_tokens);
  std::vector<double> decoded_logits(exact.num_tokens);
  exact.Logits(query, absl::MakeSpan(exact_logits));
  decoded.Logits(query, absl::MakeSpan(decoded_logits));
  sums.kl += KlOfLogits(exact_logits, decoded_logits);
  ++sums.num_queries;
  Softmax(absl::MakeSpan(exact_logits));
  Softmax(absl::MakeSpan(decoded_logits));
  std::vector<double> exact_output(exact.dim);
  std::vector<double> decoded_output(exact.dim);
  exact.AttentionOutput(exact_logits, absl::MakeSpan(exact_output));
  decoded.AttentionOutput(decoded_logits, absl::MakeSpan(decoded_output));
  for (int32_t i = 0; i < exact.dim; ++i) sums.output.Add(exact_output[i], decoded_output[i]);
}

double LogSumExp(absl::Span<const double> logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double logit : logits) sum += std::exp(logit - max);
  return max + std::log(sum);
}

}  // namespace

void Softmax(absl::Span<double> logits) {
  const double normalizer = LogSumExp(logits);
  for (double& logit : logits) logit = std::exp(logit - normalizer);
}

double KlOfLogits(absl::Span<const double> exact, absl::Span<const double> other) {
  KVSTOW_CHECK(exact.size() == other.size() && !exact.empty());
  const double exact_normalizer = LogSumExp(exact);
  const double other_normalizer = LogSumExp(other);
  double kl = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double log_p = exact[i] - exact_normalizer;
    const double log_q = other[i] - other_normalizer;
    kl += std::exp(log_p) * (log_p - log_q);
  }
  return kl;
}

void ToFloats(DType dtype, const std::byte* from, int64_t num_values, float* to) {
  KVSTOW_CHECK(IsFloatDType(dtype));
  if (dtype == DType::kF32) {
    if (num_values > 0) std::memcpy(to, from, num_values * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < num_values; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, from + 2 * i, sizeof(bits));
    to[i] = dtype == DType::kBf16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
  }
}

absl::StatusOr<Probe> Probe::Open(const std::string& path, const ModelSpec& spec) {
  KVSTOW_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(path));
  const LayerGroup& group = spec.groups[0];
  const Tensor* first = file.Find("q.0");
  if (first == nullptr || first->shape.size() != 3) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": there is no tensor \"q.0\" of shape [tokens, q_heads, head_dim]"));
  }
  if (spec.groups.size() != 1 || group.k_dim != group.v_dim || !IsFloatDType(spec.kv_dtype)) {
    return absl::InvalidArgumentError(
        "eval judges models of one layer group with keys and values of one dim, in bf16, f16 or "
        "f32");
  }
  if (first->shape[2] != group.k_dim || first->shape[1] < 1 || first->shape[0] < 1 ||
      first->shape[1] % group.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": tensor \"q.0\" is ", first->ShapeText(),
                                                   ", want [tokens, a multiple of ",
                                                   group.num_kv_heads, ", ", group.k_dim, "]"));
  }
  DType dtype = DType::kBf16;
  if (first->type == TensorType::kF16) dtype = DType::kF16;
  if (first->type == TensorType::kF32) dtype = DType::kF32;
  if (dtype == DType::kBf16 && first->type != TensorType::kBf16) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": tensor \"q.0\" is ", first->ShapeText(), ", want BF16, F16 or F32"));
  }
  Probe probe{.num_tokens = static_cast<int32_t>(first->shape[0]),
              .num_q_heads = static_cast<int32_t>(first->shape[1]),
              .head_dim = static_cast<int32_t>(first->shape[2])};
  for (int32_t layer_idx = 0; layer_idx < spec.num_layers(); ++layer_idx) {
    KVSTOW_ASSIGN_OR_RETURN(const Tensor* q,
                            file.Expect(absl::StrCat("q.", layer_idx), first->type, first->shape));
    std::vector<float> floats(q->num_bytes / TensorTypeBytes(q->type));
    ToFloats(dtype, file.bytes(*q).data(), static_cast<int64_t>(floats.size()), floats.data());
    probe.layers.push_back(std::move(floats));
  }
  return probe;
}

QualityMap JudgeQuality(const KvRows& exact, absl::Span<const LayerRows> decoded,
                        const Probe& probe) {
  const LayerGroup& group = exact.spec.groups[0];
  const int32_t gqa_group_size = probe.num_q_heads / group.num_kv_heads;
  QualityMap map{.num_layers = exact.spec.num_layers(), .num_heads = group.num_kv_heads};
  QualitySums total;
  for (int32_t layer_idx = 0; layer_idx < map.num_layers; ++layer_idx) {
    const LayerFloats exact_floats = FloatsOf(exact, exact.layers[layer_idx], layer_idx);
    const LayerFloats decoded_floats = FloatsOf(exact, decoded[layer_idx], layer_idx);
    for (int32_t head_idx = 0; head_idx < map.num_heads; ++head_idx) {
      const HeadView exact_head{exact_floats, exact.num_tokens, map.num_heads, head_idx,
                                group.k_dim};
      const HeadView decoded_head{decoded_floats, exact.num_tokens, map.num_heads, head_idx,
                                  group.k_dim};
      QualitySums sums;
      exact_head.AddErrors(exact_floats.k, decoded_floats.k, sums.k);
      exact_head.AddErrors(exact_floats.v, decoded_floats.v, sums.v);
      for (int32_t q = 0; q < gqa_group_size; ++q) {
        for (int32_t token = 0; token < probe.num_tokens; ++token) {
          JudgeQuery(exact_head, decoded_head,
                     probe.query(layer_idx, token, head_idx * gqa_group_size + q), sums);
        }
      }
      map.cells.push_back(sums.Means());
      total.Add(sums);
    }
  }
  map.total = total.Means();
  return map;
}

}  // namespace kvstow
