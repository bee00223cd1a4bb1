// How much a codec changed a KV cache, as the model would feel it.
//
//   KVSTOW_ASSIGN_OR_RETURN(Probe probe, Probe::Open("probe.safetensors", spec));
//   QualityMap map = JudgeQuality({spec, exact_layers, num_tokens}, decoded_layers, probe);
//   map.total.attention_kl; map.at(layer_idx, head_idx).k_error;
//
// Thread safety: plain functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/kv_client.h"
#include "kernels/core/model_spec.h"

namespace kvstow {

// Queries that a decoder really asks of the cache: rows after RoPE, for positions after the last
// cached token, so every query sees every key.
struct Probe {
  int32_t num_tokens = 0;
  int32_t num_q_heads = 0;
  int32_t head_dim = 0;
  std::vector<std::vector<float>> layers;  // [num_tokens, num_q_heads, head_dim] each

  const float* query(int32_t layer_idx, int32_t token, int32_t q_head) const {
    return layers[layer_idx].data() + (int64_t{token} * num_q_heads + q_head) * head_dim;
  }

  // Reads q.{layer}. kInvalidArgument: layers, head_dim or the number of query heads do not fit
  // `spec` (a multiple of the KV heads; one layer group with keys and values).
  static absl::StatusOr<Probe> Open(const std::string& path, const ModelSpec& spec);
};

// KV of one prompt in the layout of a file: [tokens, kv_heads, head_dim], contiguous.
struct KvRows {
  const ModelSpec& spec;
  absl::Span<const LayerRows> layers;
  int64_t num_tokens = 0;
};

// Of a whole cache, or of one layer and KV head.
struct Quality {
  // Sum of squared errors over sum of squares, all rows together. Values that are not finite on
  // both sides and equal bit for bit count as exact.
  double k_error = 0;
  double v_error = 0;
  // KL(exact || decoded), in nats, of softmax(q k / sqrt(head_dim)): the mean over queries, query
  // heads and layers. Query head h reads KV head h / (q_heads / kv_heads).
  double attention_kl = 0;
  // Of the attention outputs (the values weighted with that softmax): squared error over squares.
  double output_error = 0;
};

struct QualityMap {
  int32_t num_layers = 0;
  int32_t num_heads = 0;       // KV heads
  std::vector<Quality> cells;  // [num_layers, num_heads]
  Quality total;

  const Quality& at(int32_t layer_idx, int32_t head_idx) const {
    return cells[layer_idx * num_heads + head_idx];
  }
};

QualityMap JudgeQuality(const KvRows& exact, absl::Span<const LayerRows> decoded,
                        const Probe& probe);

// Softmax of `logits`, in place; exact to rounding for any finite logits.
void Softmax(absl::Span<double> logits);

// KL divergence, in nats, of two distributions given as logits. 0 for equal ones, never negative
// beyond rounding. Equal lengths, at least 1.
double KlOfLogits(absl::Span<const double> exact, absl::Span<const double> other);

// `num_values` values of `dtype` as fp32 (float dtypes only).
void ToFloats(DType dtype, const std::byte* from, int64_t num_values, float* to);

}  // namespace kvstow
