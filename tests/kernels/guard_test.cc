#include "kernels/codec/guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "kernels/codec/hadamard.h"
#include "kernels/codec/rows.h"
#include "tests/testing/biased_kv.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using ::kvstow::testing::BiasedKv;
using ::kvstow::testing::BiasedKvOptions;
using ::kvstow::testing::Rng;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kTokens = 64;

BlockLayout LayoutOf(const BiasedKvOptions& options) {
  ModelSpec spec;
  spec.name = "biased";
  spec.weights = "w";
  spec.groups = {{.first_layer = 0,
                  .num_layers = options.num_layers,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = options.num_heads,
                  .k_dim = options.dim,
                  .v_dim = options.dim}};
  spec.tokens_per_block = kTokens;
  return *BlockLayout::Create(spec);
}

PlaneShape ShapeOf(const BlockLayout& layout, const PlaneInfo& plane) {
  return {.num_tokens = kTokens, .dim = plane.dim, .role = plane.role, .dtype = layout.dtype()};
}

// Statistics of the planes of one block.
std::vector<PlaneStats> Measure(const BiasedKv& kv, int first_token) {
  const BlockLayout layout = LayoutOf(kv.options());
  std::vector<PlaneStats> stats;
  for (const PlaneInfo& plane : layout.planes()) {
    const auto rows =
        kv.PlaneRows(plane.layer_idx, plane.role, plane.head_idx, first_token, kTokens);
    stats.push_back(MeasurePlane(ShapeOf(layout, plane), rows.data()));
  }
  return stats;
}

GuardVerdict Verdict(const BiasedKv& kv, int first_token = 0) {
  return DerivePlan(LayoutOf(kv.options()), Measure(kv, first_token));
}

struct Damage {
  double attention_kl = 0;  // mean over layers, heads and queries
  double key_error = 0;     // squared error over squares
};

// All blocks stored as `asked` under `plan`, and read by the queries.
Damage DamageOf(const BiasedKv& kv, const CodecPair& asked, const CodecPlan& plan) {
  const BiasedKvOptions& options = kv.options();
  const BlockLayout layout = LayoutOf(options);
  Damage damage;
  double error = 0, energy = 0;
  for (const PlaneInfo& plane : layout.planes()) {
    if (plane.role != Role::kKey) continue;
    const PlaneShape shape = ShapeOf(layout, plane);
    const CodecId codec = plan.CodecFor(plane.layer_idx, plane.role, asked.k);
    std::vector<std::byte> exact, decoded;
    for (int first = 0; first < options.num_tokens; first += kTokens) {
      const auto rows = kv.PlaneRows(plane.layer_idx, plane.role, plane.head_idx, first, kTokens);
      std::vector<std::byte> unit(FindCodec(codec)->plane_bytes(shape)), back(rows.size());
      const CodecBackend& backend = BestBackend(*FindCodec(codec));
      EXPECT_EQ(backend.encode(shape, rows.data(), unit.data()), EncodeResult::kEncoded);
      backend.decode(shape, unit.data(), back.data());
      exact.insert(exact.end(), rows.begin(), rows.end());
      decoded.insert(decoded.end(), back.begin(), back.end());
    }
    const std::vector<float>& queries = kv.Queries(plane.layer_idx, plane.head_idx);
    for (int q = 0; q < BiasedKv::kNumQueries; ++q) {
      std::vector<double> a(options.num_tokens), b(options.num_tokens);
      double a_sum = 0, b_sum = 0;
      for (int t = 0; t < options.num_tokens; ++t) {
        for (int i = 0; i < options.dim; ++i) {
          const double query = queries[q * options.dim + i];
          const double x = LoadValue(DType::kBf16, exact.data(), t * options.dim + i);
          const double y = LoadValue(DType::kBf16, decoded.data(), t * options.dim + i);
          a[t] += query * x / std::sqrt(options.dim);
          b[t] += query * y / std::sqrt(options.dim);
          error += (x - y) * (x - y);
          energy += x * x;
        }
        a_sum += std::exp(a[t]);
        b_sum += std::exp(b[t]);
      }
      for (int t = 0; t < options.num_tokens; ++t) {
        const double log_p = a[t] - std::log(a_sum), log_q = b[t] - std::log(b_sum);
        damage.attention_kl += std::exp(log_p) * (log_p - log_q) /
                               (BiasedKv::kNumQueries * options.num_layers * options.num_heads);
      }
    }
  }
  damage.key_error = error / energy;
  return damage;
}

const CodecPair kSafe = {.k = CodecId::kTqm4, .v = CodecId::kTq4};

TEST(Guard, KeepsBiasedLayersRawAndNoOthers) {
  for (const int dim : {64, 128}) {
    const BiasedKv kv({.dim = dim, .biased_layers = {0, 7}});
    const GuardVerdict verdict = Verdict(kv);
    EXPECT_EQ(verdict.plan.Text(), "layer0.k=raw,layer7.k=raw") << dim;
    EXPECT_THAT(verdict.reasons, ElementsAre(HasSubstr("layer 0 keys: 4 bits would leave"),
                                             HasSubstr("layer 7 keys: 4 bits would leave")));
  }
}

TEST(Guard, KeepsNothingRawOfKeysWithoutBias) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    EXPECT_EQ(Verdict(BiasedKv({.seed = seed})).plan.Text(), "") << "seed " << seed;
  }
}

// The reason for all of it. Without the guard the check of the first expectation fails.
TEST(Guard, AttentionOfSafeIsAsGoodAsWithoutTheBias) {
  const BiasedKv biased({.biased_layers = {0, 7}});
  const BiasedKv clean({});
  const Damage of_clean = DamageOf(clean, kSafe, Verdict(clean).plan);
  const Damage guarded = DamageOf(biased, kSafe, Verdict(biased).plan);
  EXPECT_LE(guarded.attention_kl, 2 * of_clean.attention_kl);
  const Damage unguarded = DamageOf(biased, kSafe, CodecPlan());
  EXPECT_GT(unguarded.attention_kl, 50 * of_clean.attention_kl);
  RecordProperty("kl_clean", std::to_string(of_clean.attention_kl));
  RecordProperty("kl_guarded", std::to_string(guarded.attention_kl));
  RecordProperty("kl_unguarded", std::to_string(unguarded.attention_kl));
  RecordProperty("key_error_clean", std::to_string(of_clean.key_error));
  RecordProperty("key_error_unguarded", std::to_string(unguarded.key_error));
  // What a check of the reconstruction would have said.
  EXPECT_LE(unguarded.key_error, 2 * of_clean.key_error);
}

TEST(Guard, BlocksOfAModelAgree) {
  const BiasedKv kv({.biased_layers = {0, 7}});
  EXPECT_EQ(Verdict(kv, 0).plan, Verdict(kv, 64).plan);
  // Planes may come from different blocks.
  std::vector<PlaneStats> mixed = Measure(kv, 0);
  const std::vector<PlaneStats> other = Measure(kv, 64);
  for (size_t i = 0; i < mixed.size(); i += 3) mixed[i] = other[i];
  EXPECT_EQ(DerivePlan(LayoutOf(kv.options()), mixed).plan, Verdict(kv).plan);
}

TEST(Guard, OneOfTwoLayersCanStandOut) {
  EXPECT_EQ(Verdict(BiasedKv({.num_layers = 2, .biased_layers = {1}})).plan.Text(), "layer1.k=raw");
}

class GuardRule : public ::testing::Test {
 protected:
  GuardRule() : layout_(LayoutOf(kv_.options())), stats_(Measure(kv_, 0)) {}
  PlaneStats& at(int layer, Role role) { return stats_[layout_.plane_idx(layer, role, 1)]; }
  GuardVerdict verdict() const { return DerivePlan(layout_, stats_); }

  const BiasedKv kv_{{}};
  const BlockLayout layout_;
  std::vector<PlaneStats> stats_;
};

TEST_F(GuardRule, MeansThatInt8StoresBadlyStandOut) {
  at(3, Role::kKey).largest_mean = 900;
  EXPECT_EQ(verdict().plan.Text(), "layer3.k=raw");
}

TEST_F(GuardRule, TwoChannelsWithMostOfTheEnergyStandOut) {
  at(2, Role::kKey).top_share = 0.97;
  EXPECT_EQ(verdict().plan.Text(), "layer2.k=raw");
  EXPECT_THAT(verdict().reasons, ElementsAre(HasSubstr("two channels have 97.0 %")));
}

TEST_F(GuardRule, KeysFarLongerThanValuesStandOut) {
  for (int head = 0; head < 2; ++head) {
    stats_[layout_.plane_idx(4, Role::kValue, head)].energy = 0.4 * 0.4;
  }
  EXPECT_EQ(verdict().plan.Text(), "layer4.k=raw");
  EXPECT_THAT(verdict().reasons, ElementsAre(HasSubstr("as long as those of the values")));
}

TEST_F(GuardRule, HeavyTailsStandOutInBothRoles) {
  at(5, Role::kKey).kurtosis = 4;
  at(6, Role::kValue).kurtosis = 4;
  EXPECT_EQ(verdict().plan.Text(), "layer5.k=raw,layer6.v=raw");
}

TEST_F(GuardRule, UnusablePlanesStandOutNowhereAndMoveNoMedian) {
  at(0, Role::kKey) = {.is_usable = false, .largest_mean = 1e9, .top_share = 1, .kurtosis = 99};
  EXPECT_EQ(verdict().plan.Text(), "");
}

TEST(MeasurePlane, FiguresAreThoseOfTheRows) {
  // Channel 0 is 3 everywhere, channel 1 alternates between 2 and -2, the others are 0.
  const PlaneShape shape = {.num_tokens = 32, .dim = 8, .role = Role::kKey, .dtype = DType::kF32};
  std::vector<float> rows(32 * 8);
  for (int t = 0; t < 32; ++t) {
    rows[t * 8] = 3;
    rows[t * 8 + 1] = t % 2 == 0 ? 2 : -2;
  }
  const PlaneStats stats = MeasurePlane(shape, reinterpret_cast<const std::byte*>(rows.data()));
  ASSERT_TRUE(stats.is_usable);
  EXPECT_DOUBLE_EQ(stats.energy, 13);
  EXPECT_DOUBLE_EQ(stats.residual_energy, 4);
  EXPECT_DOUBLE_EQ(stats.largest_mean, 3);
  EXPECT_DOUBLE_EQ(stats.top_share, 1);
  // One channel becomes +-2 in each of the eight: fourth power over square is 1.
  EXPECT_DOUBLE_EQ(stats.kurtosis, 1 - 3.0 * 8 / 10);
}

TEST(MeasurePlane, GaussianRowsHaveNoExcessKurtosisAndHeavyTailsDo) {
  const PlaneShape shape = {
      .num_tokens = 64, .dim = 64, .role = Role::kValue, .dtype = DType::kF32};
  Rng rng(3);
  std::vector<float> rows(64 * 64);
  for (float& x : rows) x = static_cast<float>(rng.Gaussian());
  EXPECT_NEAR(MeasurePlane(shape, reinterpret_cast<const std::byte*>(rows.data())).kurtosis, 0,
              0.3);
  // Rows that are the same pattern of the rotation: one coordinate has it all.
  for (int t = 0; t < 64; ++t) {
    for (int i = 0; i < 64; ++i)
      rows[t * 64 + i] = IsMinusSign(Role::kValue, i) ? -1.f - t : 1.f + t;
  }
  EXPECT_GT(MeasurePlane(shape, reinterpret_cast<const std::byte*>(rows.data())).kurtosis, 50);
}

TEST(MeasurePlane, RowsThatTellNothingAreNotUsable) {
  const PlaneShape shape = {.num_tokens = 4, .dim = 8, .role = Role::kKey, .dtype = DType::kF32};
  const auto is_usable = [&](const std::vector<float>& rows) {
    return MeasurePlane(shape, reinterpret_cast<const std::byte*>(rows.data())).is_usable;
  };
  std::vector<float> rows(32, 0.0f);
  EXPECT_FALSE(is_usable(rows)) << "zeros";
  EXPECT_FALSE(is_usable(std::vector<float>(32, 5.0f))) << "rows that are all equal";
  rows[3] = 1;
  EXPECT_TRUE(is_usable(rows));
  rows[7] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(is_usable(rows)) << "NaN";
  rows[7] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(is_usable(rows)) << "infinity";
  rows[7] = 1e30f;
  EXPECT_FALSE(is_usable(rows)) << "beyond fp16";
  const std::vector<std::byte> bytes(32);
  EXPECT_FALSE(
      MeasurePlane({.num_tokens = 4, .dim = 8, .dtype = DType::kF8E4M3}, bytes.data()).is_usable)
      << "not quantized";
}

}  // namespace
}  // namespace kvstow
