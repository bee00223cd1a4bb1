// KV of a model whose keys have a large bias in some layers, as those of Qwen2 have; and queries
// that such a model could ask with. Bias before RoPE, a few channel pairs, norm 600 to 900 where
// the keys of other layers have a norm of about 22.
//
//   const BiasedKv kv({.num_layers = 8, .biased_layers = {0, 7}});
//   const BiasedKv clean({.num_layers = 8});           // the same data without the bias
//   kv.PlaneRows(layer_idx, Role::kKey, head_idx, first_token, 64)
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/core/block_layout.h"
#include "kernels/core/dtype.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {

struct BiasedKvOptions {
  int num_layers = 8;
  int num_heads = 2;
  int dim = 64;
  int num_tokens = 128;
  std::vector<int> biased_layers;
  uint64_t seed = 1;
};

class BiasedKv {
 public:
  explicit BiasedKv(const BiasedKvOptions& options) : options_(options) {
    for (int layer = 0; layer < options.num_layers; ++layer) {
      for (int head = 0; head < options.num_heads; ++head) MakeHead(layer, head);
    }
  }

  const BiasedKvOptions& options() const { return options_; }

  // bf16 rows [num_rows, dim], contiguous.
  std::vector<std::byte> PlaneRows(int layer, Role role, int head, int first_token,
                                   int num_rows) const {
    const std::vector<float>& rows = (role == Role::kKey ? k_ : v_)[HeadIdx(layer, head)];
    std::vector<std::byte> bytes(int64_t{2} * num_rows * options_.dim);
    for (int64_t i = 0; i < int64_t{num_rows} * options_.dim; ++i) {
      const uint16_t bits = FloatToBf16(rows[int64_t{first_token} * options_.dim + i]);
      std::memcpy(&bytes[2 * i], &bits, sizeof(bits));
    }
    return bytes;
  }
  // Queries after RoPE, at positions after the last token: kNumQueries rows of `dim`.
  static constexpr int kNumQueries = 16;
  const std::vector<float>& Queries(int layer, int head) const { return q_[HeadIdx(layer, head)]; }

 private:
  int HeadIdx(int layer, int head) const { return layer * options_.num_heads + head; }
  bool IsBiased(int layer) const {
    for (const int biased : options_.biased_layers) {
      if (biased == layer) return true;
    }
    return false;
  }

  // Half layout, base 10,000.
  void Rotate(float* row, int position) const {
    const int half = options_.dim / 2;
    for (int i = 0; i < half; ++i) {
      const double angle = position * std::pow(10000.0, -static_cast<double>(i) / half);
      const double a = row[i], b = row[i + half];
      row[i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
      row[i + half] = static_cast<float>(a * std::sin(angle) + b * std::cos(angle));
    }
  }

  void MakeHead(int layer, int head) {
    const int dim = options_.dim, half = dim / 2;
    Rng rng(options_.seed * 1'000'003 + static_cast<uint64_t>(HeadIdx(layer, head)));
    std::vector<double> bias(dim), weight(dim, 1.0), mean(dim);
    for (double& m : mean) m = 15.0 / std::sqrt(dim) * rng.Gaussian();
    const double norm = 600.0 + 300.0 * rng.Uniform();
    for (const int pair : {1, half / 8, half / 4, half / 2}) {
      const double angle = 6.283185307179586 * rng.Uniform();
      bias[pair] = norm / 2 * std::cos(angle);
      bias[pair + half] = norm / 2 * std::sin(angle);
      // The model's queries hardly look there: else nothing but the bias would be attended to.
      weight[pair] = weight[pair + half] = 22.0 / norm;
    }
    std::vector<float> k, v, q;
    for (int t = 0; t < options_.num_tokens; ++t) {
      std::vector<float> row(dim);
      for (int i = 0; i < dim; ++i) {
        row[i] = static_cast<float>(mean[i] + 16.0 / std::sqrt(dim) * rng.Gaussian() +
                                    (IsBiased(layer) ? bias[i] : 0.0));
      }
      Rotate(row.data(), t);
      k.insert(k.end(), row.begin(), row.end());
      for (int i = 0; i < dim; ++i) v.push_back(static_cast<float>(rng.Gaussian()));
    }
    for (int t = 0; t < kNumQueries; ++t) {
      std::vector<float> row(dim);
      for (int i = 0; i < dim; ++i) row[i] = static_cast<float>(0.6 * weight[i] * rng.Gaussian());
      Rotate(row.data(), options_.num_tokens + t);
      q.insert(q.end(), row.begin(), row.end());
    }
    k_.push_back(std::move(k));
    v_.push_back(std::move(v));
    q_.push_back(std::move(q));
  }

  const BiasedKvOptions options_;
  std::vector<std::vector<float>> k_, v_, q_;  // [layer and head][token, dim]
};

}  // namespace kvstow::testing
