#include "storage/policy/return_model.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvstow::policy {
namespace {

// Where each feature's weights begin.
constexpr int kBinAt = 0;                      // 24
constexpr int kTurnAt = kBinAt + 24;           // 8
constexpr int kOutputAt = kTurnAt + 8;         // 12
constexpr int kShareAt = kOutputAt + 12;       // 6
constexpr int kBinOutputAt = kShareAt + 6;     // 6 x 12
constexpr int kInputAt = kBinOutputAt + 72;    // 24
constexpr int kFreshAt = kInputAt + 24;        // 32
constexpr int kFollowInputAt = kFreshAt + 32;  // 2 x 24
constexpr int kSeenAt = kFollowInputAt + 48;   // 4
static_assert(kSeenAt + 4 == ReturnModel::kWeights);

constexpr double kStep = 0.1;
constexpr double kFirstGradient = 0.01;

int Log2(int64_t x) { return std::bit_width(static_cast<uint64_t>(std::max<int64_t>(1, x))) - 1; }

int HalfOctaves(double x) { return static_cast<int>(std::floor(2 * std::log2(x))); }

int BinOutput(const ReturnFeatures& features, int bin) {
  return kBinOutputAt + bin / 4 * 12 + features.output_log2;
}

double Logit(double p) { return std::log(p / (1 - p)); }

double Smoothed(double returns, double exposures) { return (returns + 0.3) / (exposures + 10); }

}  // namespace

ReturnModel::ReturnModel() {
  double edge = 5;
  for (size_t k = 1; k < edges_s_.size(); ++k, edge *= 1.35) edges_s_[k] = edge;
  offset_.fill(Logit(Smoothed(0, 0)));
  gradients_.fill(kFirstGradient);
}

ReturnFeatures ReturnModel::FeaturesOf(const Request& request) {
  const bool follows = request.continues;
  const int seen = request.seen_blocks >= 2 ? 1 : 0;
  const int turn = std::clamp(request.turn, 1, 8) - 1;
  const int output = std::min(11, Log2(request.output_tokens + 1));
  const int share =
      follows ? 2 + std::min(3, Log2(request.num_blocks - request.seen_blocks + 1)) : seen;
  const int input = std::min(23, HalfOctaves(static_cast<double>(request.input_tokens) / 64 + 1));
  const auto fresh_tokens =
      static_cast<double>(std::max<int64_t>(0, request.input_tokens - request.parent_tokens));
  const int fresh = follows ? 1 + std::min(29, HalfOctaves(fresh_tokens + 1)) : 0;
  ReturnFeatures features;
  features.output_log2 = static_cast<uint8_t>(output);
  const int weights[7] = {kTurnAt + turn,
                          kOutputAt + output,
                          kShareAt + share,
                          kInputAt + input,
                          kFreshAt + fresh,
                          kFollowInputAt + (follows ? 24 : 0) + input,
                          kSeenAt + 2 * seen + (follows ? 0 : 1)};
  for (size_t i = 0; i < 7; ++i) features.weight[i] = static_cast<uint8_t>(weights[i]);
  return features;
}

double ReturnModel::BaseSum(const ReturnFeatures& features) const {
  double sum = 0;
  for (const uint8_t weight : features.weight) sum += weights_[weight];
  return sum;
}

double ReturnModel::HazardFrom(double base_sum, const ReturnFeatures& features, int bin) const {
  const double logit = offset_[static_cast<size_t>(bin)] + base_sum +
                       weights_[static_cast<size_t>(kBinAt + bin)] +
                       weights_[static_cast<size_t>(BinOutput(features, bin))];
  return 1 / (1 + std::exp(-logit));
}

double ReturnModel::Hazard(const ReturnFeatures& features, int bin) const {
  return HazardFrom(BaseSum(features), features, bin);
}

void ReturnModel::Learn(const ReturnFeatures& features, int bin, bool is_return) {
  const double error = (is_return ? 1.0 : 0.0) - Hazard(features, bin);
  const auto step = [&](size_t weight) {
    gradients_[weight] += error * error;
    weights_[weight] += kStep * error / std::sqrt(gradients_[weight]);
  };
  for (const uint8_t weight : features.weight) step(weight);
  step(static_cast<size_t>(kBinAt + bin));
  step(static_cast<size_t>(BinOutput(features, bin)));
  const auto b = static_cast<size_t>(bin);
  exposures_[b] += 1;
  returns_[b] += is_return ? 1 : 0;
  offset_[b] = Logit(Smoothed(returns_[b], exposures_[b]));
}

std::array<double, ReturnModel::kLearned> ReturnModel::Learned() const {
  std::array<double, kLearned> learned;
  auto out = std::copy(returns_.begin(), returns_.end(), learned.begin());
  out = std::copy(exposures_.begin(), exposures_.end(), out);
  out = std::copy(weights_.begin(), weights_.end(), out);
  std::copy(gradients_.begin(), gradients_.end(), out);
  return learned;
}

bool ReturnModel::Restore(const std::array<double, kLearned>& learned) {
  // A weight moves by at most kStep / sqrt(n) in its n-th step; counts beyond 2^53 do not grow.
  constexpr double kWeightMax = 1e6;
  constexpr double kCountMax = 0x1p53;
  const double* const returns = learned.data();
  const double* const exposures = returns + kBins;
  const double* const weights = exposures + kBins;
  const double* const gradients = weights + kWeights;
  // Written so that NaN fails.
  for (int b = 0; b < kBins; ++b) {
    if (!(returns[b] >= 0 && returns[b] <= exposures[b] && exposures[b] <= kCountMax)) return false;
  }
  for (int w = 0; w < kWeights; ++w) {
    if (!(std::abs(weights[w]) <= kWeightMax)) return false;
    if (!(gradients[w] >= kFirstGradient && gradients[w] <= kCountMax)) return false;
  }
  std::copy_n(returns, kBins, returns_.begin());
  std::copy_n(exposures, kBins, exposures_.begin());
  std::copy_n(weights, kWeights, weights_.begin());
  std::copy_n(gradients, kWeights, gradients_.begin());
  for (size_t b = 0; b < kBins; ++b) offset_[b] = Logit(Smoothed(returns_[b], exposures_[b]));
  return true;
}

double ReturnModel::Index(const ReturnFeatures& features, int bin) const {
  const int first = std::min(bin, kBins - 1);
  const double base_sum = BaseSum(features);
  std::array<double, kBins> hazards;
  for (int b = first; b < kBins; ++b) {
    hazards[static_cast<size_t>(b)] = HazardFrom(base_sum, features, b);
  }
  const auto ratio_from = [&](int from) {
    double best = 0;
    double held_s = 0;
    double stays = 1;
    for (int b = from; b < kBins; ++b) {
      const auto i = static_cast<size_t>(b);
      const double next = stays * (1 - hazards[i]);
      held_s += (edges_s_[i + 1] - edges_s_[i]) * (stays + next) / 2;
      stays = next;
      best = std::max(best, (1 - stays) / held_s);
    }
    return best;
  };
  const double here = ratio_from(first);
  if (bin >= kBins) return here / 2;
  const double next = bin + 1 < kBins ? ratio_from(bin + 1) : here / 2;
  return (here + next) / 2;
}

}  // namespace kvstow::policy
