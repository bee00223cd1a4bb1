#include "kernels/codec/calibration_builder.h"

#include <Eigen/Core>
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numbers>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/codec/hadamard.h"
#include "kernels/codec/rows.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

using Matrix = Eigen::MatrixXd;
using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Rows whose products are added in fp32 before they join the sum in fp64.
constexpr int64_t kChunkRows = 256;
// Kurtosis is measured on at most so many rows.
constexpr int64_t kKurtosisRows = 4096;

absl::Status Bad(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("calibration samples: ", what));
}

std::string PlaceName(int32_t layer_idx, std::string_view what, int32_t head_idx) {
  return absl::StrCat("layer ", layer_idx, ", ", std::string(what), " of head ", head_idx);
}

// The rows of one head in fp32. kInvalidArgument: one is not finite.
absl::StatusOr<Rows> HeadRows(const SampleRows& from, int64_t num_tokens, int32_t head_idx,
                              const std::string& name) {
  Rows rows(num_tokens, from.dim);
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t first = (token * from.num_heads + head_idx) * from.dim;
    float* row = rows.row(token).data();
    for (int32_t i = 0; i < from.dim; ++i) row[i] = LoadValue(from.dtype, from.data, first + i);
    if (!rows.row(token).allFinite()) {
      return Bad(absl::StrCat(name, ": token ", token, " has a value that is not finite"));
    }
  }
  return rows;
}

// Adds rows^T rows, the lower triangle.
void AddMoment(const Rows& rows, Matrix& moment) {
  const Eigen::Index dim = rows.cols();
  Eigen::MatrixXf part(dim, dim);
  for (Eigen::Index first = 0; first < rows.rows(); first += kChunkRows) {
    const Eigen::Index count = std::min<Eigen::Index>(kChunkRows, rows.rows() - first);
    part.setZero();
    part.selfadjointView<Eigen::Lower>().rankUpdate(rows.middleRows(first, count).transpose());
    moment.triangularView<Eigen::Lower>() += part.cast<double>();
  }
}

// Eigenvectors of a symmetric matrix (its lower triangle) as columns, by falling eigenvalue.
absl::StatusOr<Matrix> Eigenvectors(const Matrix& moment, const std::string& name) {
  if (!moment.allFinite()) return Bad(absl::StrCat(name, ": values too large to be squared"));
  const Eigen::SelfAdjointEigenSolver<Matrix> solver(moment);
  if (solver.info() != Eigen::Success) {
    return Bad(absl::StrCat(name, ": no eigenvectors were found"));
  }
  Matrix vectors = solver.eigenvectors().rowwise().reverse();
  for (Eigen::Index j = 0; j < vectors.cols(); ++j) {
    Eigen::Index largest = 0;
    for (Eigen::Index i = 1; i < vectors.rows(); ++i) {
      if (std::fabs(vectors(i, j)) > std::fabs(vectors(largest, j))) largest = i;
    }
    if (vectors(largest, j) < 0) vectors.col(j) = -vectors.col(j);
  }
  return vectors;
}

// column = M column for an orthonormal M without zeros: energy of one value goes to all of them.
void Spread(double* column, int dim) {
  if (PaleyOrder(dim) != 0) {
    HadamardTransform(column, dim, Transposed::kNo);
    for (int i = 0; i < dim; ++i) column[i] /= std::sqrt(static_cast<double>(dim));
    return;
  }
  const std::vector<double> in(column, column + dim);
  for (int j = 0; j < dim; ++j) {
    double sum = 0;
    for (int i = 0; i < dim; ++i) {
      sum += in[i] * std::cos(std::numbers::pi * (2 * i + 1) * j / (2.0 * dim));
    }
    column[j] = sum * std::sqrt((j == 0 ? 1.0 : 2.0) / dim);
  }
}

// R = H D U^T / sqrt(dim).
absl::StatusOr<Rotation> RotationOf(const Matrix& vectors, Role role) {
  const int dim = static_cast<int>(vectors.cols());
  Matrix rotation = vectors.transpose();
  for (int i = 0; i < dim; ++i) {
    if (IsMinusSign(role, i)) rotation.row(i) = -rotation.row(i);
  }
  for (int i = 0; i < dim; ++i) Spread(rotation.col(i).data(), dim);
  std::vector<int16_t> matrix(static_cast<size_t>(dim) * dim);
  for (int j = 0; j < dim; ++j) {
    for (int i = 0; i < dim; ++i) {
      matrix[static_cast<size_t>(j) * dim + i] =
          static_cast<int16_t>(std::rint(std::ldexp(rotation(j, i), Rotation::kLog2One)));
    }
  }
  return Rotation::Create(dim, matrix);
}

HeadStats StatsOf(const RotationPlace& place, const Rows& rows, const Rotation& rotation) {
  HeadStats stats{.place = place};
  const Eigen::VectorXd channel_energy =
      rows.cast<double>().colwise().squaredNorm().transpose() / static_cast<double>(rows.rows());
  const double energy = channel_energy.sum();
  stats.rms_norm = std::sqrt(energy);
  if (energy == 0) return stats;
  stats.mean_share = rows.cast<double>().colwise().mean().squaredNorm() / energy;
  stats.top_channel = channel_energy.maxCoeff() / energy;
  const int dim = rotation.dim();
  const Eigen::Map<const Eigen::Matrix<int16_t, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>
      matrix(rotation.matrix().data(), dim, dim);
  const Eigen::MatrixXf factors = matrix.cast<float>();
  const Eigen::Index step = (rows.rows() + kKurtosisRows - 1) / kKurtosisRows;
  double sum = 0;
  int64_t num_rows = 0;
  for (Eigen::Index i = 0; i < rows.rows(); i += step) {
    const double norm = rows.row(i).cast<double>().squaredNorm();
    if (norm == 0) continue;
    const Eigen::ArrayXd y = (factors * rows.row(i).transpose()).cast<double>().array();
    const double mean_square = y.square().mean();
    sum += y.square().square().mean() / (mean_square * mean_square);
    ++num_rows;
  }
  if (num_rows > 0) stats.kurtosis = sum / static_cast<double>(num_rows) - 3.0;
  return stats;
}

// One layer's part of the result.
struct LayerResult {
  absl::Status status;
  std::vector<Calibration::Entry> entries;
  std::vector<HeadStats> heads;
};

// Both roles of one KV head.
class HeadCalibrator {
 public:
  HeadCalibrator(const CalibrationSamples& samples, int32_t layer_idx, int32_t head_idx)
      : num_tokens_(samples.num_tokens),
        layer_(samples.layers[static_cast<size_t>(layer_idx)]),
        layer_idx_(layer_idx),
        head_idx_(head_idx) {}

  absl::Status Run(LayerResult& result) const {
    const std::string keys_name = PlaceName(layer_idx_, "keys", head_idx_);
    KVSTOW_ASSIGN_OR_RETURN(const Rows keys, HeadRows(layer_.k, num_tokens_, head_idx_, keys_name));
    Matrix key_moment = Matrix::Zero(layer_.k.dim, layer_.k.dim);
    if (layer_.q.data == nullptr) AddMoment(keys, key_moment);
    KVSTOW_RETURN_IF_ERROR(AddQueries(key_moment));
    KVSTOW_RETURN_IF_ERROR(Add(Role::kKey, keys, key_moment, keys_name, result));

    const std::string values_name = PlaceName(layer_idx_, "values", head_idx_);
    KVSTOW_ASSIGN_OR_RETURN(const Rows values,
                            HeadRows(layer_.v, num_tokens_, head_idx_, values_name));
    Matrix value_moment = Matrix::Zero(layer_.v.dim, layer_.v.dim);
    if (layer_.q.data == nullptr) {
      AddMoment(values, value_moment);
    } else {
      AddMoment(Weighted(values, keys, key_moment), value_moment);
    }
    return Add(Role::kValue, values, value_moment, values_name, result);
  }

 private:
  absl::Status AddQueries(Matrix& moment) const {
    if (layer_.q.data == nullptr) return absl::OkStatus();
    const int32_t group = layer_.q.num_heads / layer_.k.num_heads;
    for (int32_t q_head = head_idx_ * group; q_head < (head_idx_ + 1) * group; ++q_head) {
      KVSTOW_ASSIGN_OR_RETURN(
          const Rows queries,
          HeadRows(layer_.q, num_tokens_, q_head, PlaceName(layer_idx_, "queries", q_head)));
      AddMoment(queries, moment);
    }
    return absl::OkStatus();
  }

  // Rows times the root of k^T C k over its mean.
  static Rows Weighted(const Rows& values, const Rows& keys, const Matrix& moment) {
    const Matrix whole = moment.selfadjointView<Eigen::Lower>();
    const double trace = std::max(whole.trace(), 1e-300);
    const Eigen::MatrixXf scaled = (whole / trace).cast<float>();  // its size plays no part
    Eigen::VectorXd weights =
        (keys * scaled).cwiseProduct(keys).rowwise().sum().cast<double>().cwiseMax(0.0);
    const double mean = weights.mean();
    if (mean <= 0 || !std::isfinite(mean)) return values;
    const Eigen::VectorXf roots = (weights / mean).cwiseSqrt().cast<float>();
    return roots.asDiagonal() * values;
  }

  absl::Status Add(Role role, const Rows& rows, const Matrix& moment, const std::string& name,
                   LayerResult& result) const {
    const RotationPlace place{.layer_idx = layer_idx_, .role = role, .head_idx = head_idx_};
    KVSTOW_ASSIGN_OR_RETURN(const Matrix vectors, Eigenvectors(moment, name));
    KVSTOW_ASSIGN_OR_RETURN(Rotation rotation, RotationOf(vectors, role));
    result.heads.push_back(StatsOf(place, rows, rotation));
    result.entries.push_back({place, std::move(rotation)});
    return absl::OkStatus();
  }

  const int64_t num_tokens_;
  const LayerSamples& layer_;
  const int32_t layer_idx_;
  const int32_t head_idx_;
};

LayerResult CalibrateLayer(const CalibrationSamples& samples, int32_t layer_idx) {
  LayerResult result;
  const int32_t num_heads = samples.layers[static_cast<size_t>(layer_idx)].k.num_heads;
  for (int32_t head_idx = 0; head_idx < num_heads && result.status.ok(); ++head_idx) {
    result.status = HeadCalibrator(samples, layer_idx, head_idx).Run(result);
  }
  return result;
}

absl::Status CheckRows(int32_t layer_idx, std::string_view role, const SampleRows& rows) {
  const std::string name = absl::StrCat("layer ", layer_idx, ", ", std::string(role), ": ");
  if (rows.data == nullptr || rows.num_heads < 1) {
    return Bad(absl::StrCat(name, "there are none, want rows of every layer"));
  }
  if (!IsFloatDType(rows.dtype)) {
    return Bad(absl::StrCat(name, std::string(DTypeName(rows.dtype)), ", want bf16, f16 or f32"));
  }
  if (rows.dim % 16 != 0 || rows.dim < 16 || rows.dim > Rotation::kMaxDim) {
    return Bad(absl::StrCat(name, "head dim ", rows.dim, ", want a multiple of 16 from 16 to ",
                            Rotation::kMaxDim));
  }
  return absl::OkStatus();
}

absl::Status CheckLayer(int32_t layer_idx, const LayerSamples& layer, bool has_queries) {
  KVSTOW_RETURN_IF_ERROR(CheckRows(layer_idx, "keys", layer.k));
  KVSTOW_RETURN_IF_ERROR(CheckRows(layer_idx, "values", layer.v));
  if (layer.v.num_heads != layer.k.num_heads) {
    return Bad(absl::StrCat("layer ", layer_idx, ": ", layer.k.num_heads, " heads of keys, ",
                            layer.v.num_heads, " of values, want as many"));
  }
  if (!has_queries) return absl::OkStatus();
  KVSTOW_RETURN_IF_ERROR(CheckRows(layer_idx, "queries", layer.q));
  if (layer.q.dim != layer.k.dim || layer.q.num_heads % layer.k.num_heads != 0) {
    return Bad(absl::StrCat("layer ", layer_idx, ": ", layer.q.num_heads, " query heads of dim ",
                            layer.q.dim, " for ", layer.k.num_heads, " KV heads of dim ",
                            layer.k.dim, ", want a multiple of the heads and the same dim"));
  }
  return absl::OkStatus();
}

// The worst head of a kind, and how many there are.
class Finding {
 public:
  void Add(const HeadStats& head, double value) {
    ++count_;
    if (worst_ != nullptr && value <= value_) return;
    worst_ = &head;
    value_ = value;
  }
  // "3 heads, worst layer 0, keys of head 2: 12.3"; nothing without a head.
  void Report(const std::string& what, const std::string& unit, const std::string& advice,
              std::vector<std::string>& warnings) const {
    if (worst_ == nullptr) return;
    warnings.push_back(absl::StrCat(
        what, " in ", count_, count_ == 1 ? " head: " : " heads, the worst: ",
        PlaceName(worst_->place.layer_idx, worst_->place.role == Role::kKey ? "keys" : "values",
                  worst_->place.head_idx),
        ", ", std::round(value_ * 100) / 100, unit, "; ", advice));
  }

 private:
  int count_ = 0;
  double value_ = 0;
  const HeadStats* worst_ = nullptr;
};

double MedianKeyNorm(absl::Span<const HeadStats> heads) {
  std::vector<double> norms;
  for (const HeadStats& head : heads) {
    if (head.place.role == Role::kKey) norms.push_back(head.rms_norm);
  }
  if (norms.empty()) return 0;
  std::nth_element(norms.begin(), norms.begin() + norms.size() / 2, norms.end());
  return norms[norms.size() / 2];
}

}  // namespace

absl::Status CalibrationSamples::Validate() const {
  if (layers.empty()) return Bad("no layers");
  const bool has_queries = std::any_of(layers.begin(), layers.end(), [](const LayerSamples& layer) {
    return layer.q.data != nullptr;
  });
  int64_t max_dim = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    KVSTOW_RETURN_IF_ERROR(CheckLayer(static_cast<int32_t>(i), layers[i], has_queries));
    max_dim = std::max<int64_t>({max_dim, layers[i].k.dim, layers[i].v.dim});
  }
  const int64_t want = kMinTokensPerDim * max_dim;
  if (num_tokens >= want) return absl::OkStatus();
  return Bad(absl::StrCat(num_tokens, " tokens, want at least ", want, " for head dim ", max_dim,
                          "; ", kGoodTokens,
                          " and more, of unlike texts, make a good calibration"));
}

absl::StatusOr<BuiltCalibration> BuildCalibration(const CalibrationSamples& samples,
                                                  const BuildOptions& options) {
  KVSTOW_RETURN_IF_ERROR(samples.Validate());
  const auto num_layers = static_cast<int32_t>(samples.layers.size());
  std::vector<LayerResult> results(samples.layers.size());
  std::atomic<int32_t> next{0};
  std::atomic<int32_t> num_done{0};
  const auto work = [&](bool is_caller) {
    for (int32_t i = next.fetch_add(1); i < num_layers; i = next.fetch_add(1)) {
      results[static_cast<size_t>(i)] = CalibrateLayer(samples, i);
      num_done.fetch_add(1);
      if (is_caller && options.progress) options.progress(num_done.load(), num_layers);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < std::min(options.num_threads, num_layers); ++i) {
    threads.emplace_back(work, false);
  }
  work(true);
  for (std::thread& thread : threads) thread.join();
  if (options.progress) options.progress(num_layers, num_layers);

  std::vector<Calibration::Entry> entries;
  std::vector<HeadStats> heads;
  for (LayerResult& result : results) {
    KVSTOW_RETURN_IF_ERROR(result.status);
    std::move(result.entries.begin(), result.entries.end(), std::back_inserter(entries));
    heads.insert(heads.end(), result.heads.begin(), result.heads.end());
  }
  std::sort(heads.begin(), heads.end(),
            [](const HeadStats& a, const HeadStats& b) { return a.place < b.place; });
  KVSTOW_ASSIGN_OR_RETURN(
      Calibration calibration,
      Calibration::Create(options.fingerprint, options.source, std::move(entries)));
  return BuiltCalibration{std::move(calibration), std::move(heads)};
}

std::vector<std::string> CalibrationWarnings(const CalibrationSamples& samples,
                                             absl::Span<const HeadStats> heads) {
  constexpr double kBiasedShare = 0.75;
  constexpr double kStandsOut = 4.0;
  constexpr double kNormRatioMax = 30.0;
  constexpr double kTopChannelMax = 0.5;
  constexpr double kKurtosisMin = -1.0;
  constexpr double kKurtosisMax = 3.0;
  Finding biased, large, ratio, channel, flat, peaked;
  const double median = MedianKeyNorm(heads);
  for (const HeadStats& head : heads) {
    if (head.top_channel > kTopChannelMax) channel.Add(head, 100 * head.top_channel);
    if (head.kurtosis < kKurtosisMin) flat.Add(head, -head.kurtosis);
    if (head.kurtosis > kKurtosisMax) peaked.Add(head, head.kurtosis);
    if (head.place.role != Role::kKey) continue;
    if (head.mean_share > kBiasedShare) biased.Add(head, 100 * head.mean_share);
    if (head.rms_norm > kStandsOut * median) large.Add(head, head.rms_norm / median);
    RotationPlace place = head.place;
    place.role = Role::kValue;
    const auto values = std::find_if(heads.begin(), heads.end(),
                                     [&](const HeadStats& other) { return other.place == place; });
    if (values != heads.end() && values->rms_norm > 0 &&
        head.rms_norm > kNormRatioMax * values->rms_norm) {
      ratio.Add(head, head.rms_norm / values->rms_norm);
    }
  }
  std::vector<std::string> warnings;
  if (samples.num_tokens < CalibrationSamples::kGoodTokens) {
    warnings.push_back(absl::StrCat(samples.num_tokens, " tokens: fewer than ",
                                    CalibrationSamples::kGoodTokens,
                                    " fit the sample more than the model"));
  }
  const std::string use_raw = "keep these keys raw, or use a codec that removes their mean (tqm)";
  biased.Report("keys that are mostly their mean", " % of the energy", use_raw, warnings);
  large.Report("keys far larger than in other heads", " times the median", use_raw, warnings);
  ratio.Report("keys far larger than the values", " times", use_raw, warnings);
  channel.Report("one channel that dominates", " % of the energy",
                 "compare with kivi4 or tq3.5 before you rely on a rotation", warnings);
  flat.Report("rotated values flatter than Gaussian", " below its kurtosis",
              "compare with int4 or kivi4", warnings);
  peaked.Report("rotated values with more outliers than Gaussian", " above its kurtosis",
                "compare with kivi4", warnings);
  return warnings;
}

}  // namespace kvstow
