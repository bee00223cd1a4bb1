#include "kernels/codec/guard.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/codec/hadamard.h"
#include "kernels/codec/rows.h"
#include "kernels/core/check.h"

namespace kvstow {
namespace {

// Error energy of 4 bits on Gaussian rows (Lloyd-Max).
constexpr double kTq4Error = 0.0095;
// tqm stores a mean as int8 of the largest: a step of largest / 127, uniform error.
constexpr double kMeanLevels = 127.0;
// Largest finite fp16: beyond it no scale fits, and the plane stays raw.
constexpr float kLargestValue = 65504.0f;

// Rows as doubles, [num_tokens, dim].
std::vector<double> RowsOfPlane(const PlaneShape& shape, const std::byte* rows) {
  std::vector<double> values(static_cast<size_t>(shape.num_tokens) * shape.dim);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = LoadValue(shape.dtype, rows, static_cast<int64_t>(i));
  }
  return values;
}

// Excess kurtosis of one rotated row, by its own energy; empty for a row of zeros.
std::optional<double> RowKurtosis(Role role, const double* row, std::vector<double>& rotated) {
  const int dim = static_cast<int>(rotated.size());
  for (int i = 0; i < dim; ++i) rotated[i] = IsMinusSign(role, i) ? -row[i] : row[i];
  HadamardTransform(rotated.data(), dim, Transposed::kNo);
  double squares = 0;
  double fourths = 0;
  for (const double y : rotated) {
    squares += y * y;
    fourths += y * y * (y * y);
  }
  if (squares == 0) return std::nullopt;
  // A Gaussian row of finite length, scaled by its own energy, has 3 d / (d + 2).
  return fourths * dim / (squares * squares) - 3.0 * dim / (dim + 2.0);
}

double MeanKurtosis(const PlaneShape& shape, const std::vector<double>& values) {
  if (PaleyOrder(shape.dim) == 0) return 0;
  std::vector<double> rotated(shape.dim);
  double sum = 0;
  int64_t count = 0;
  for (int32_t t = 0; t < shape.num_tokens; ++t) {
    const auto kurtosis = RowKurtosis(shape.role, values.data() + int64_t{t} * shape.dim, rotated);
    if (!kurtosis.has_value()) continue;
    sum += *kurtosis;
    ++count;
  }
  return count == 0 ? 0 : sum / static_cast<double>(count);
}

// Takes the mean row out of `values` and fills in what that shows.
void RemoveMean(const PlaneShape& shape, std::vector<double>& values, PlaneStats& stats) {
  const double num_rows = shape.num_tokens;
  std::vector<double> channel_energy(shape.dim);
  for (int32_t i = 0; i < shape.dim; ++i) {
    double sum = 0;
    for (int32_t t = 0; t < shape.num_tokens; ++t) sum += values[int64_t{t} * shape.dim + i];
    const double mean = sum / num_rows;
    stats.largest_mean = std::max(stats.largest_mean, std::fabs(mean));
    for (int32_t t = 0; t < shape.num_tokens; ++t) {
      double& value = values[int64_t{t} * shape.dim + i];
      value -= mean;
      channel_energy[i] += value * value;
    }
    channel_energy[i] /= num_rows;
    stats.residual_energy += channel_energy[i];
  }
  if (stats.residual_energy == 0 || shape.dim < 3) return;
  std::nth_element(channel_energy.begin(), channel_energy.begin() + 1, channel_energy.end(),
                   std::greater<>());
  stats.top_share = (channel_energy[0] + channel_energy[1]) / stats.residual_energy;
}

// A layer's keys or values: the worst of its heads.
struct LayerStats {
  int num_usable = 0;
  double error = 0;   // norm of the error that tqm4 leaves in a row
  double energy = 0;  // of a residual row of keys, a whole row of values; mean of the heads
  double top_share = 0;
  double kurtosis = 0;

  void Add(const PlaneInfo& plane, const PlaneStats& stats) {
    if (!stats.is_usable) return;
    const double step = stats.largest_mean / kMeanLevels;
    const double mean_error = plane.dim * step * step / 12;
    error = std::max(error, std::sqrt(kTq4Error * stats.residual_energy + mean_error));
    const double row_energy = plane.role == Role::kKey ? stats.residual_energy : stats.energy;
    energy = (energy * num_usable + row_energy) / (num_usable + 1);
    top_share = std::max(top_share, stats.top_share);
    kurtosis = std::max(kurtosis, stats.kurtosis);
    ++num_usable;
  }
};

struct RoleStats {
  LayerStats k;
  LayerStats v;
};

// The lower median: of two layers the smaller, so that one of them can stand out.
double MedianError(const std::vector<RoleStats>& layers) {
  std::vector<double> errors;
  for (const RoleStats& layer : layers) {
    if (layer.k.num_usable > 0) errors.push_back(layer.k.error);
  }
  if (errors.empty()) return 0;
  const auto middle = errors.begin() + static_cast<int64_t>((errors.size() - 1) / 2);
  std::nth_element(errors.begin(), middle, errors.end());
  return *middle;
}

// Why keys stand out; empty where they do not.
std::string KeyReason(const RoleStats& layer, double median_error, const GuardLimits& limits) {
  const LayerStats& k = layer.k;
  if (k.num_usable == 0) return "";
  if (k.error > limits.error_ratio * median_error) {
    return absl::StrFormat("4 bits would leave an error of %.3g a row, %.3g x the median %.3g",
                           k.error, k.error / median_error, median_error);
  }
  if (k.top_share > limits.top_share) {
    return absl::StrFormat("two channels have %.1f %% of the energy", 100 * k.top_share);
  }
  if (layer.v.num_usable > 0 && k.energy > limits.norm_ratio * limits.norm_ratio * layer.v.energy) {
    return absl::StrFormat("rows without their mean are %.3g x as long as those of the values",
                           std::sqrt(k.energy / layer.v.energy));
  }
  if (k.kurtosis > limits.kurtosis) {
    return absl::StrFormat("rotated rows have an excess kurtosis of %.3g", k.kurtosis);
  }
  return "";
}

std::string ValueReason(const RoleStats& layer, const GuardLimits& limits) {
  if (layer.v.num_usable == 0 || layer.v.kurtosis <= limits.kurtosis) return "";
  return absl::StrFormat("rotated rows have an excess kurtosis of %.3g", layer.v.kurtosis);
}

}  // namespace

PlaneStats MeasurePlane(const PlaneShape& shape, const std::byte* rows) {
  PlaneStats stats;
  if (!IsFloatDType(shape.dtype) || shape.num_tokens < 2) return stats;
  const int64_t num_values = int64_t{shape.num_tokens} * shape.dim;
  const float largest = MaxMagnitude(shape.dtype, rows, 0, num_values);
  if (!(largest <= kLargestValue) || largest == 0) return stats;
  std::vector<double> values = RowsOfPlane(shape, rows);
  for (const double value : values) stats.energy += value * value;
  stats.energy /= shape.num_tokens;
  if (shape.role == Role::kValue) stats.kurtosis = MeanKurtosis(shape, values);
  RemoveMean(shape, values, stats);
  if (stats.residual_energy == 0) return {};
  if (shape.role == Role::kKey) stats.kurtosis = MeanKurtosis(shape, values);
  stats.is_usable = true;
  return stats;
}

GuardVerdict DerivePlan(const BlockLayout& layout, absl::Span<const PlaneStats> stats,
                        const GuardLimits& limits) {
  KVSTOW_CHECK(static_cast<int32_t>(stats.size()) == layout.num_planes());
  std::vector<RoleStats> layers(layout.num_layers());
  for (int32_t i = 0; i < layout.num_planes(); ++i) {
    const PlaneInfo& plane = layout.plane(i);
    RoleStats& layer = layers[plane.layer_idx];
    (plane.role == Role::kKey ? layer.k : layer.v).Add(plane, stats[i]);
  }
  const double median_error = MedianError(layers);
  GuardVerdict verdict;
  for (int32_t i = 0; i < layout.num_layers(); ++i) {
    const auto keep_raw = [&](Role role, const std::string& reason) {
      if (reason.empty()) return;
      verdict.plan.Set(i, role, CodecId::kRaw);
      verdict.reasons.push_back(
          absl::StrCat("layer ", i, role == Role::kKey ? " keys: " : " values: ", reason));
    };
    keep_raw(Role::kKey, KeyReason(layers[i], median_error, limits));
    keep_raw(Role::kValue, ValueReason(layers[i], limits));
  }
  return verdict;
}

}  // namespace kvstow
