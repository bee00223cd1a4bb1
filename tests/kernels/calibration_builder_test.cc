// Rotations from samples: what they do to the samples' moments, and which samples are refused.
#include "kernels/codec/calibration_builder.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/codec/hadamard.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr double kOne = 16384.0;

// Samples that own their memory: rows whose channels have falling energy, mixed pairwise.
class Samples {
 public:
  Samples(int64_t num_tokens, int num_layers, int dim, bool has_queries = true) : dim_(dim) {
    samples_.num_tokens = num_tokens;
    for (int layer = 0; layer < num_layers; ++layer) {
      LayerSamples rows;
      if (has_queries) rows.q = Make(4, 3 * layer);
      rows.k = Make(2, 3 * layer + 1);
      rows.v = Make(2, 3 * layer + 2);
      samples_.layers.push_back(rows);
    }
  }
  CalibrationSamples& get() { return samples_; }
  float& at(const SampleRows& rows, int64_t token, int head, int i) {
    return const_cast<float*>(
        reinterpret_cast<const float*>(rows.data))[(token * rows.num_heads + head) * dim_ + i];
  }
  int dim() const { return dim_; }

 private:
  SampleRows Make(int num_heads, uint64_t seed) {
    testing::Rng rng(seed);
    auto& rows = memory_.emplace_back(samples_.num_tokens * num_heads * dim_);
    for (size_t row = 0; row < rows.size(); row += dim_) {
      for (int i = 0; i < dim_; ++i) {
        rows[row + i] = static_cast<float>(rng.Gaussian() * std::exp2(-0.1 * i));
      }
      for (int i = 0; i + 1 < dim_; ++i) rows[row + i + 1] += 0.5f * rows[row + i];
    }
    return {.dtype = DType::kF32,
            .num_heads = num_heads,
            .dim = dim_,
            .data = reinterpret_cast<const std::byte*>(rows.data())};
  }

  const int dim_;
  CalibrationSamples samples_;
  std::vector<std::vector<float>> memory_;
};

using Moment = std::vector<double>;  // [dim, dim]

// The second moment of heads [first, first + count), each row with a weight.
Moment MomentOf(Samples& samples, const SampleRows& rows, int first, int count,
                const std::vector<double>& weights = {}) {
  const int dim = samples.dim();
  Moment moment(static_cast<size_t>(dim) * dim);
  for (int64_t token = 0; token < samples.get().num_tokens; ++token) {
    const double weight = weights.empty() ? 1.0 : weights[token];
    for (int head = first; head < first + count; ++head) {
      for (int i = 0; i < dim; ++i) {
        for (int j = 0; j < dim; ++j) {
          moment[i * dim + j] += weight * samples.at(rows, token, head, i) *
                                 static_cast<double>(samples.at(rows, token, head, j));
        }
      }
    }
  }
  return moment;
}

// k^T M k of each token.
std::vector<double> Weights(Samples& samples, const SampleRows& keys, int head,
                            const Moment& moment) {
  const int dim = samples.dim();
  std::vector<double> weights;
  for (int64_t token = 0; token < samples.get().num_tokens; ++token) {
    double weight = 0;
    for (int i = 0; i < dim; ++i) {
      for (int j = 0; j < dim; ++j) {
        weight += samples.at(keys, token, head, i) * moment[i * dim + j] *
                  static_cast<double>(samples.at(keys, token, head, j));
      }
    }
    weights.push_back(weight);
  }
  return weights;
}

// U^T: the rotation without H and signs.
Moment EigenvectorRows(const Rotation& rotation, Role role) {
  const int dim = rotation.dim();
  Moment rows(static_cast<size_t>(dim) * dim);
  std::vector<double> column(dim);
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) column[j] = rotation.at(j, i) / kOne;
    HadamardTransform(column.data(), dim, Transposed::kYes);
    for (int j = 0; j < dim; ++j) {
      rows[j * dim + i] = column[j] / std::sqrt(dim) * (IsMinusSign(role, j) ? -1 : 1);
    }
  }
  return rows;
}

// U^T M U is diagonal and falls; H spreads it evenly.
void ExpectDiagonalizes(const Rotation& rotation, Role role, const Moment& moment) {
  const int dim = rotation.dim();
  const Moment u = EigenvectorRows(rotation, role);
  double trace = 0;
  for (int i = 0; i < dim; ++i) trace += moment[i * dim + i];
  const auto product = [&](const auto& rows, int a, int b) {
    double sum = 0;
    for (int i = 0; i < dim; ++i) {
      for (int j = 0; j < dim; ++j) {
        sum += rows(a, i) * moment[i * dim + j] * rows(b, j);
      }
    }
    return sum / trace;
  };
  const auto eigenvector = [&](int j, int i) { return u[j * dim + i]; };
  const auto rotated = [&](int j, int i) { return rotation.at(j, i) / kOne; };
  double last = 1;
  for (int j = 0; j < dim; ++j) {
    const double energy = product(eigenvector, j, j);
    EXPECT_LT(energy, last + 1e-4) << j;
    last = energy;
    EXPECT_NEAR(product(eigenvector, j, (j + 1) % dim), 0, 2e-4) << j;
    EXPECT_NEAR(product(rotated, j, j), 1.0 / dim, 2e-4) << j;
    int largest = 0;
    for (int i = 1; i < dim; ++i) {
      if (std::fabs(u[j * dim + i]) > std::fabs(u[j * dim + largest])) largest = i;
    }
    EXPECT_GT(u[j * dim + largest], 0) << j;
  }
}

BuiltCalibration Build(Samples& samples, int num_threads = 1) {
  absl::StatusOr<BuiltCalibration> built = BuildCalibration(
      samples.get(),
      {.fingerprint = Sha256("m"), .source = Sha256("s"), .num_threads = num_threads});
  EXPECT_TRUE(built.ok()) << built.status();
  return *std::move(built);
}

const Rotation& RotationAt(const BuiltCalibration& built, Role role, int head) {
  return *built.calibration.Find({.layer_idx = 0, .role = role, .head_idx = head});
}

TEST(CalibrationBuilder, KeysAreRotatedByTheMomentOfTheQueriesThatReadThem) {
  Samples samples(300, 1, 32);
  const BuiltCalibration built = Build(samples);
  for (int head : {0, 1}) {
    SCOPED_TRACE(head);
    ExpectDiagonalizes(RotationAt(built, Role::kKey, head), Role::kKey,
                       MomentOf(samples, samples.get().layers[0].q, 2 * head, 2));
  }
}

TEST(CalibrationBuilder, ValuesAreWeightedByTheirKeysUnderThatMoment) {
  Samples samples(300, 1, 32);
  const LayerSamples& layer = samples.get().layers[0];
  const BuiltCalibration built = Build(samples);
  const Moment queries = MomentOf(samples, layer.q, 2, 2);
  ExpectDiagonalizes(RotationAt(built, Role::kValue, 1), Role::kValue,
                     MomentOf(samples, layer.v, 1, 1, Weights(samples, layer.k, 1, queries)));
}

TEST(CalibrationBuilder, WithoutQueriesEachRoleHasItsOwnMoment) {
  Samples samples(300, 1, 32, /*has_queries=*/false);
  const LayerSamples& layer = samples.get().layers[0];
  const BuiltCalibration built = Build(samples);
  ExpectDiagonalizes(RotationAt(built, Role::kKey, 1), Role::kKey,
                     MomentOf(samples, layer.k, 1, 1));
  ExpectDiagonalizes(RotationAt(built, Role::kValue, 0), Role::kValue,
                     MomentOf(samples, layer.v, 0, 1));
}

TEST(CalibrationBuilder, TheSameSamplesGiveTheSameBytesOnAnyNumberOfThreads) {
  Samples samples(200, 5, 16);
  const std::string bytes = Build(samples).calibration.Serialize();
  EXPECT_EQ(Build(samples).calibration.Serialize(), bytes);
  for (int num_threads : {2, 3, 16}) {
    EXPECT_EQ(Build(samples, num_threads).calibration.Serialize(), bytes) << num_threads;
  }
}

TEST(CalibrationBuilder, DimsWithoutAHadamardMatrixHaveRotationsToo) {
  Samples samples(400, 1, 144);
  EXPECT_EQ(RotationAt(Build(samples), Role::kKey, 0).dim(), 144);
}

TEST(CalibrationBuilder, ZeroRowsGiveARotation) {
  Samples samples(64, 1, 16);
  for (int64_t token = 0; token < 64; ++token) {
    for (int i = 0; i < 16; ++i) {
      samples.at(samples.get().layers[0].v, token, 0, i) = 0;
      samples.at(samples.get().layers[0].k, token, 1, i) = 0;
    }
  }
  const BuiltCalibration built = Build(samples);
  EXPECT_THAT(built.heads, SizeIs(4));
  EXPECT_EQ(built.heads[1].rms_norm, 0);
}

std::string Refusal(const CalibrationSamples& samples) {
  const absl::Status status = BuildCalibration(samples, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(CalibrationBuilder, TooFewTokensSaysHowManyAreNeeded) {
  Samples samples(127, 1, 64);
  EXPECT_THAT(Refusal(samples.get()),
              AllOf(HasSubstr("127 tokens, want at least 128 for head dim 64"), HasSubstr("5000")));
  Samples enough(128, 1, 64);
  EXPECT_TRUE(BuildCalibration(enough.get(), {}).ok());
}

TEST(CalibrationBuilder, WhatIsMissingOrDoesNotFitIsNamed) {
  const auto refusal = [](const std::function<void(CalibrationSamples&)>& change) {
    Samples samples(64, 2, 16);
    change(samples.get());
    return Refusal(samples.get());
  };
  EXPECT_THAT(refusal([](auto& s) { s.layers.clear(); }), HasSubstr("no layers"));
  EXPECT_THAT(refusal([](auto& s) { s.layers[1].k.data = nullptr; }),
              HasSubstr("layer 1, keys: there are none"));
  EXPECT_THAT(refusal([](auto& s) { s.layers[1].v.data = nullptr; }),
              HasSubstr("layer 1, values: there are none"));
  EXPECT_THAT(refusal([](auto& s) { s.layers[0].q = {}; }),
              HasSubstr("layer 0, queries: there are none, want rows of every layer"));
  EXPECT_THAT(refusal([](auto& s) { s.layers[1].k.dtype = DType::kInt8; }),
              HasSubstr("layer 1, keys: int8, want bf16, f16 or f32"));
  EXPECT_THAT(refusal([](auto& s) { s.layers[0].v.dim = 24; }),
              HasSubstr("layer 0, values: head dim 24, want a multiple of 16 from 16 to 1024"));
  EXPECT_THAT(refusal([](auto& s) { s.layers[0].v.num_heads = 1; }),
              HasSubstr("layer 0: 2 heads of keys, 1 of values"));
  EXPECT_THAT(refusal([](auto& s) { s.layers[0].q.num_heads = 3; }),
              HasSubstr("layer 0: 3 query heads of dim 16 for 2 KV heads of dim 16"));
}

TEST(CalibrationBuilder, ValuesThatAreNotFiniteOrTooLargeAreNamed) {
  Samples samples(64, 2, 16);
  samples.at(samples.get().layers[1].k, 33, 1, 5) = std::numeric_limits<float>::infinity();
  EXPECT_THAT(Refusal(samples.get()),
              HasSubstr("layer 1, keys of head 1: token 33 has a value that is not finite"));
  samples.at(samples.get().layers[1].k, 33, 1, 5) = 0;
  samples.at(samples.get().layers[0].q, 3, 0, 5) = 1e38f;
  EXPECT_THAT(Refusal(samples.get()), HasSubstr("layer 0, keys of head 0: values too large"));
}

TEST(CalibrationWarnings, NoneForGaussianRowsOfEnoughTokens) {
  Samples samples(CalibrationSamples::kGoodTokens, 2, 16);
  EXPECT_THAT(CalibrationWarnings(samples.get(), Build(samples).heads), IsEmpty());
}

TEST(CalibrationWarnings, NameTheWorstHeadOfEachKind) {
  Samples samples(500, 5, 16);
  for (int64_t token = 0; token < 500; ++token) {
    for (int i = 0; i < 16; ++i) samples.at(samples.get().layers[4].k, token, 1, i) += 90;
    samples.at(samples.get().layers[2].v, token, 0, 7) *= 20;
  }
  const BuiltCalibration built = Build(samples);
  const std::vector<std::string> warnings = CalibrationWarnings(samples.get(), built.heads);
  EXPECT_THAT(warnings, ::testing::Contains(HasSubstr("500 tokens: fewer than 5000")));
  EXPECT_THAT(warnings,
              ::testing::Contains(AllOf(HasSubstr("mostly their mean in 1 head: layer 4, keys of "
                                                  "head 1"),
                                        HasSubstr("tqm"))));
  EXPECT_THAT(warnings, ::testing::Contains(HasSubstr("far larger than in other heads in 1 head")));
  EXPECT_THAT(warnings, ::testing::Contains(HasSubstr("far larger than the values in 1 head")));
  EXPECT_THAT(warnings, ::testing::Contains(HasSubstr("one channel that dominates in 1 head: layer "
                                                      "2, values of head 0")));
}

}  // namespace
}  // namespace kvstow
