// Rows that codecs find hard, for tests: near ties of thresholds, corner rows, ordinary ones.
#pragma once

#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/codec/hadamard.h"
#include "kernels/codec/rows.h"
#include "kernels/codec/tq.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {

inline std::vector<float> GaussianRow(Rng& rng, int dim, double scale) {
  std::vector<float> row(dim);
  for (float& x : row) x = static_cast<float>(scale * rng.Gaussian());
  return row;
}

// Gaussian over uniform: outliers of any size.
inline std::vector<float> HeavyTailedRow(Rng& rng, int dim) {
  std::vector<float> row(dim);
  for (float& x : row) x = static_cast<float>(rng.Gaussian() / (0.01 + rng.Uniform()));
  return row;
}

// Flat rows: large sums after the rotation, beyond 16 bits at dim 128.
inline std::vector<float> FlatRow(Rng& rng, int dim) {
  std::vector<float> row(dim);
  for (float& x : row) x = static_cast<float>(2.0 * rng.Uniform() - 1.0);
  return row;
}

// Three values that add up, in one of their four sign patterns, to within 2 of a threshold. They
// are exact in bf16, the largest is at least 1024: they are the codec's integers q.
inline std::vector<float> NearTieRow(Rng& rng, int dim) {
  const auto integer = [&](int limit) {  // at most 8 significant bits
    const int value = static_cast<int>(rng.Below(limit));
    const int drop = std::max(0, FloorLog2(value | 1) - 7);
    return value >> drop << drop;
  };
  std::vector<float> row(dim, 0.0f);
  for (int attempt = 0; attempt < 300; ++attempt) {
    const int a = 1024 + integer(1016) / 8 * 8, b = integer(1024), c = integer(512);
    const float rms = std::sqrt(static_cast<float>(a * a + b * b + c * c));
    bool is_near = false;
    for (const TqTable& table : kTqTables) {
      for (int i = 0; i + 1 < table.num_magnitudes; ++i) {
        for (const int y : {a + b + c, a + b - c, a - b + c, a - b - c}) {
          is_near |= std::fabs(static_cast<float>(std::abs(y)) - table.threshold[i] * rms) < 2.0f;
        }
      }
    }
    if (!is_near && attempt < 299) continue;
    row[rng.Below(dim)] = static_cast<float>(a);
    row[rng.Below(dim)] = static_cast<float>(rng.Below(2) == 0 ? b : -b);
    row[rng.Below(dim)] = static_cast<float>(rng.Below(2) == 0 ? c : -c);
    break;
  }
  return row;
}

// Values on and beside (k + 1/2) * amax / limit, limit 127 or 7: where an absmax code turns. Every
// other scale is a power of two, so that ties survive the rounding to bf16.
inline std::vector<float> AbsmaxTieRow(Rng& rng, int dim, int limit) {
  std::vector<float> row(dim);
  const float scale = rng.Below(2) == 0
                          ? std::ldexp(1.0f, static_cast<int>(rng.Below(8)) - 6)
                          : F16ToFloat(FloatToF16(static_cast<float>(0.001 + rng.Uniform())));
  for (float& x : row) {
    x = scale * (static_cast<float>(rng.Below(2 * limit)) - (static_cast<float>(limit) - 0.5f));
    const int ulps = static_cast<int>(rng.Below(3)) - 1;
    if (ulps != 0) x = std::nextafter(x, ulps > 0 ? 1e9f : -1e9f);
  }
  row[0] = static_cast<float>(limit) * scale;
  return row;
}

// Values on and beside min + (k + 1/2) * scale, with both ends of the range in every group of 32
// neighbours and of 32 tokens: where a kivi code turns, for 15 steps or 3.
inline std::vector<float> KiviTieRow(Rng& rng, int dim, int64_t t) {
  std::vector<float> row(dim);
  for (int j = 0; j < dim; ++j) {
    const int steps = j % 64 < 32 ? 15 : 3;
    const float min = -0.5f * static_cast<float>(steps + 1 - j / 64 % 4);
    float x = min + static_cast<float>(rng.Below(steps)) + 0.5f;
    const int ulps = static_cast<int>(rng.Below(3)) - 1;
    if (ulps != 0) x = std::nextafter(x, ulps > 0 ? 1e9f : -1e9f);
    if (t % 32 == 0 || j % 32 == 0) x = min;
    if (t % 32 == 1 || j % 32 == 1) x = min + static_cast<float>(steps);
    row[j] = x;
  }
  return row;
}

inline constexpr int kNumCornerRows = 12;

// The corner rows of the arithmetic, by number.
inline std::vector<float> CornerRow(Rng& rng, int dim, int kind) {
  std::vector<float> row(dim, 0.0f);
  switch (kind % kNumCornerRows) {
    case 0:  // zero
      break;
    case 1:  // one-hot
      row[rng.Below(dim)] = -3.0f;
      break;
    case 2:  // constant
      row.assign(dim, 0.7f);
      break;
    case 3:  // alternating
      for (int i = 0; i < dim; ++i) row[i] = i % 2 == 0 ? 1.5f : -1.5f;
      break;
    case 4:  // subnormal in fp16, the smallest scales
      for (float& x : row) x = static_cast<float>(rng.Gaussian()) * 0x1p-24f;
      break;
    case 5:  // straddling 2^-40
      for (float& x : row) x = static_cast<float>(rng.Gaussian()) * 0x1p-41f;
      break;
    case 6:  // below 2^-40
      row.assign(dim, 0x1.8p-41f);
      break;
    case 7:  // subnormal in bf16 and fp32
      row.assign(dim, 1e-40f);
      break;
    case 8:  // a single outlier
      row = GaussianRow(rng, dim, 1.0);
      row[rng.Below(dim)] = 1000.0f;
      break;
    case 9:   // all energy in one rotated value: the keys' signs, at the largest integer
    case 10:  // the values' signs
      for (int i = 0; i < dim; ++i) {
        row[i] =
            IsMinusSign(kind % kNumCornerRows == 9 ? Role::kKey : Role::kValue, i) ? -1.99f : 1.99f;
      }
      break;
    case 11:  // negative zeros around small values
      for (int i = 0; i < dim; ++i)
        row[i] = i % 3 == 0 ? -0.0f : static_cast<float>(rng.Gaussian());
      break;
  }
  return row;
}

inline constexpr std::string_view kGenerators[] = {"gaussian", "heavy",  "flat",     "near_tie",
                                                   "int8_tie", "corner", "scales",   "means",
                                                   "equal",    "huge",   "int4_tie", "kivi_tie"};

// [num_tokens, dim] rows of `generator`, in shape.dtype, for shape.role.
inline std::vector<std::byte> MakeRows(std::string_view generator, const PlaneShape& shape,
                                       uint64_t seed) {
  Rng rng(seed);
  const int dim = shape.dim;
  std::vector<std::byte> rows(DTypeBytes(shape.dtype, int64_t{shape.num_tokens} * dim));
  const std::vector<float> channel = GaussianRow(rng, dim, 3.0);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    std::vector<float> row;
    if (generator == "heavy") {
      row = HeavyTailedRow(rng, dim);
    } else if (generator == "flat") {
      row = FlatRow(rng, dim);
    } else if (generator == "near_tie") {
      row = NearTieRow(rng, dim);
    } else if (generator == "int8_tie") {
      row = AbsmaxTieRow(rng, dim, 127);
    } else if (generator == "int4_tie") {
      row = AbsmaxTieRow(rng, dim, 7);
    } else if (generator == "kivi_tie") {
      row = KiviTieRow(rng, dim, t);
    } else if (generator == "corner") {
      row = CornerRow(rng, dim, static_cast<int>(seed % kNumCornerRows + t));
    } else if (generator == "scales") {  // some rows so small that their scale is 0
      row = GaussianRow(rng, dim, std::ldexp(1.0, static_cast<int>(rng.Below(44)) - 32));
    } else if (generator == "means") {
      row = GaussianRow(rng, dim, 0.5);
      for (int i = 0; i < dim; ++i) row[i] += channel[i];
    } else if (generator == "equal") {
      row = channel;
    } else if (generator == "huge") {  // up to the largest fp16
      row = FlatRow(rng, dim);
      for (float& x : row) x *= 20000.0f;
      row[rng.Below(dim)] = 65280.0f;
    } else {
      row = GaussianRow(rng, dim, 1.0);
    }
    for (int i = 0; i < dim; ++i) StoreValue(shape.dtype, rows.data(), t * dim + i, row[i]);
  }
  return rows;
}

inline std::string Describe(const PlaneShape& shape, std::string_view generator, uint64_t seed) {
  return "dim=" + std::to_string(shape.dim) + " num_tokens=" + std::to_string(shape.num_tokens) +
         (shape.role == Role::kKey ? " keys " : " values ") + std::string(DTypeName(shape.dtype)) +
         " generator=" + std::string(generator) + " seed=" + std::to_string(seed);
}

}  // namespace kvstow::testing
