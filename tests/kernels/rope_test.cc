// Keys at another position: against complex numbers, and what is exact of it.
#include "kernels/layout/rope.h"

#include <cmath>
#include <complex>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/float_values.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

constexpr int kNumRows = 5;

struct Shape {
  RopeParams params;
  int32_t dim;
};

std::vector<Shape> Shapes() {
  std::vector<Shape> shapes;
  for (const RopePairs pairs : {RopePairs::kHalf, RopePairs::kInterleaved}) {
    shapes.push_back({{.pairs = pairs}, 64});
    shapes.push_back({{.pairs = pairs, .theta = 500000}, 128});
    shapes.push_back({{.pairs = pairs, .theta = 1e6, .rotary_dim = 64}, 256});
    shapes.push_back({{.pairs = pairs, .rotary_dim = 2}, 80});
  }
  return shapes;
}

int RotaryDim(const Shape& shape) {
  return shape.params.rotary_dim == 0 ? shape.dim : shape.params.rotary_dim;
}

// Index of both values of pair i.
std::pair<int, int> PairAt(const Shape& shape, int i) {
  if (shape.params.pairs == RopePairs::kInterleaved) return {2 * i, 2 * i + 1};
  return {i, RotaryDim(shape) / 2 + i};
}

// Rounding of one value, as a share of the length of its pair.
double Rounding(DType dtype) {
  return dtype == DType::kBf16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-22;
}

std::vector<std::byte> RowsOf(DType dtype, int dim, uint64_t seed) {
  testing::Rng rng(seed);
  std::vector<std::byte> rows(DTypeBytes(dtype, int64_t{kNumRows} * dim));
  for (int64_t i = 0; i < int64_t{kNumRows} * dim; ++i) {
    StoreValue(dtype, rows.data(), i, static_cast<float>(20 * rng.Gaussian()));
  }
  return rows;
}

std::vector<std::byte> Turned(const Shape& shape, DType dtype, int delta,
                              const std::vector<std::byte>& rows) {
  const absl::StatusOr<RopeTurn> turn = RopeTurn::Create(shape.params, shape.dim, delta);
  EXPECT_TRUE(turn.ok()) << turn.status();
  std::vector<std::byte> out(rows.size());
  EXPECT_TRUE(turn.ok() && turn->Apply(dtype, kNumRows, rows.data(), out.data()).ok());
  return out;
}

// Largest error of `got` against pairs of `rows` times `factor(i)`, in roundings of the pair.
template <class Factor>
double WorstError(const Shape& shape, DType dtype, const std::vector<std::byte>& rows,
                  const std::vector<std::byte>& got, const Factor& factor) {
  double worst = 0;
  for (int row = 0; row < kNumRows; ++row) {
    const int64_t at = int64_t{row} * shape.dim;
    for (int i = 0; i < RotaryDim(shape) / 2; ++i) {
      const auto [a, b] = PairAt(shape, i);
      const std::complex<double> from(LoadValue(dtype, rows.data(), at + a),
                                      LoadValue(dtype, rows.data(), at + b));
      const std::complex<double> error =
          std::complex<double>(LoadValue(dtype, got.data(), at + a),
                               LoadValue(dtype, got.data(), at + b)) -
          from * factor(i);
      const double largest = std::max(std::fabs(error.real()), std::fabs(error.imag()));
      worst = std::max(worst, largest / std::abs(from) / Rounding(dtype));
    }
  }
  return worst;
}

TEST(RopeTurn, IsAProductOfComplexNumbersWithinOneRounding) {
  for (const Shape& shape : Shapes()) {
    for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
      for (const int delta : {1, -1, 64, 4096, -131072, 1000003}) {
        const std::vector<std::byte> rows = RowsOf(dtype, shape.dim, 7);
        // e^(i * delta * theta^(-2k/r)) by powers of the first angle's logarithm.
        const double log_theta = std::log(shape.params.theta);
        const double worst =
            WorstError(shape, dtype, rows, Turned(shape, dtype, delta, rows), [&](int k) {
              return std::exp(std::complex<double>(
                  0, delta * std::exp(-2.0 * k * log_theta / RotaryDim(shape))));
            });
        EXPECT_LE(worst, 1.0) << "dim " << shape.dim << ", delta " << delta;
        EXPECT_GT(worst, 0.0) << "a test that cannot fail";
      }
    }
  }
}

TEST(RopeTurn, DeltaZeroGivesEveryByteBack) {
  for (const Shape& shape : Shapes()) {
    std::vector<std::byte> rows = RowsOf(DType::kBf16, shape.dim, 8);
    const uint16_t odd_ones[3] = {0x7fc1, 0xff80, 0x0001};  // NaN, -infinity, subnormal
    std::memcpy(rows.data(), odd_ones, sizeof(odd_ones));
    EXPECT_EQ(Turned(shape, DType::kBf16, 0, rows), rows);
  }
}

TEST(RopeTurn, ValuesFromRotaryDimOnAreNotTouched) {
  for (const Shape& shape : Shapes()) {
    const std::vector<std::byte> rows = RowsOf(DType::kF16, shape.dim, 9);
    const std::vector<std::byte> got = Turned(shape, DType::kF16, 17, rows);
    for (int row = 0; row < kNumRows; ++row) {
      const int64_t rest = 2 * (int64_t{row} * shape.dim + RotaryDim(shape));
      EXPECT_EQ(
          std::memcmp(got.data() + rest, rows.data() + rest, 2 * (shape.dim - RotaryDim(shape))),
          0);
    }
  }
}

TEST(RopeTurn, BackAgainIsOffByTwoRoundings) {
  for (const Shape& shape : Shapes()) {
    for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
      for (const int delta : {1, 77, -5000}) {
        const std::vector<std::byte> rows = RowsOf(dtype, shape.dim, 10);
        const std::vector<std::byte> back =
            Turned(shape, dtype, -delta, Turned(shape, dtype, delta, rows));
        // And a little, for the second rounding is of a pair that the first has made longer.
        EXPECT_LE(WorstError(shape, dtype, rows, back, [](int) { return 1.0; }), 2.02)
            << "dim " << shape.dim << ", delta " << delta;
      }
    }
  }
}

TEST(RopeTurn, TheSameMemoryWillDo) {
  const Shape shape{{.theta = 1e5}, 64};
  std::vector<std::byte> rows = RowsOf(DType::kBf16, 64, 11);
  const std::vector<std::byte> want = Turned(shape, DType::kBf16, 9, rows);
  const absl::StatusOr<RopeTurn> turn = RopeTurn::Create(shape.params, 64, 9);
  ASSERT_TRUE(turn.ok());
  ASSERT_TRUE(turn->Apply(DType::kBf16, kNumRows, rows.data(), rows.data()).ok());
  EXPECT_EQ(rows, want);
}

TEST(RopeTurn, WhatDoesNotFitIsReported) {
  // theta 1: every pair turns by delta radians.
  const absl::StatusOr<RopeTurn> turn =
      RopeTurn::Create({.pairs = RopePairs::kInterleaved, .theta = 1}, 4, 1);
  ASSERT_TRUE(turn.ok());
  std::vector<std::byte> rows(16);
  for (const int at : {6, 7}) StoreValue(DType::kF16, rows.data(), at, 65504.0f);
  std::vector<std::byte> out(16);
  const absl::Status status = turn->Apply(DType::kF16, 2, rows.data(), out.data());
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(),
            "rope: value 3 of row 1 turned by 1 is not a finite f16: its pair is 65504, 65504");
  EXPECT_EQ(turn->Apply(DType::kF8E4M3, 1, rows.data(), out.data()).message(),
            "rope: dtype is f8_e4m3, want bf16, f16 or f32");
}

TEST(RopeTurn, ParametersThatMakeNoPairsAreRefused) {
  const auto message = [](const RopeParams& params) {
    return std::string(RopeTurn::Create(params, 64, 1).status().message());
  };
  EXPECT_EQ(message({.theta = 0}), "rope: theta is 0, want a number above 0");
  EXPECT_EQ(message({.theta = HUGE_VAL}), "rope: theta is inf, want a number above 0");
  EXPECT_EQ(message({.rotary_dim = 33}),
            "rope: rotary_dim is 33, want an even number from 2 to the dim, 64");
  EXPECT_EQ(message({.rotary_dim = 66}),
            "rope: rotary_dim is 66, want an even number from 2 to the dim, 64");
  EXPECT_EQ(message({.rotary_dim = -2}),
            "rope: rotary_dim is -2, want an even number from 2 to the dim, 64");
}

}  // namespace
}  // namespace kvstow
