// RopeTurn on a real model's keys. Those of layer 0 depend on token and position alone, so a token
// that comes twice has the same key before RoPE: turning the first must give the second.
#include <algorithm>
#include <cmath>

#include "client/cli/kv_file.h"
#include "gtest/gtest.h"
#include "kernels/core/float_values.h"
#include "kernels/layout/rope.h"

namespace kvstow {
namespace {

constexpr char kFixture[] = KVSTOW_TEST_DATA "/smollm2_kv.safetensors";

// Largest difference of two rows, as a share of the length of the value's pair.
double Distance(const float* a, const float* b, int dim) {
  double worst = 0;
  for (int i = 0; i < dim; ++i) {
    const int other = (i + dim / 2) % dim;
    const double length = std::hypot(b[i], b[other]);
    worst = std::max(worst, std::fabs(a[i] - b[i]) / length);
  }
  return worst;
}

TEST(RopeTurnOnKv, ATokenThatComesTwiceHasOneKeyBeforeRope) {
  const absl::StatusOr<KvFile> file = KvFile::Open(kFixture, {});
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->spec().rope, "base=100000,half");
  const int dim = file->spec().groups[0].k_dim;
  const RowsView& keys = file->layers()[0].k;
  const auto key_of = [&](int64_t token, float* key) {
    for (int i = 0; i < dim; ++i) {
      key[i] = LoadValue(DType::kBf16, keys.data + token * keys.token_stride_bytes, i);
    }
  };
  const auto num_tokens = static_cast<int64_t>(file->tokens().size());
  std::vector<float> first(dim), turned(dim), second(dim);
  int num_pairs = 0;
  double largest_unturned = 0;
  for (int64_t i = 0; i < num_tokens; ++i) {
    for (int64_t j = i + 1; j < num_tokens; ++j) {
      if (file->tokens()[i] != file->tokens()[j]) continue;
      key_of(i, first.data());
      key_of(j, second.data());
      const absl::StatusOr<RopeTurn> turn =
          RopeTurn::Create({.theta = 100000}, dim, static_cast<int32_t>(j - i));
      ASSERT_TRUE(turn.ok()) << turn.status();
      ASSERT_TRUE(turn->Apply(DType::kF32, 1, reinterpret_cast<const std::byte*>(first.data()),
                              reinterpret_cast<std::byte*>(turned.data()))
                      .ok());
      // Both were rounded to bf16 from the model's fp32: 2^-8 each, of the pair at most.
      EXPECT_LE(Distance(turned.data(), second.data(), dim), 2.5 * 0x1p-8)
          << "tokens " << i << " and " << j;
      largest_unturned = std::max(largest_unturned, Distance(first.data(), second.data(), dim));
      ++num_pairs;
    }
  }
  EXPECT_GT(num_pairs, 100);
  EXPECT_GT(largest_unturned, 1.0) << "unturned they are far apart";
}

}  // namespace
}  // namespace kvstow
