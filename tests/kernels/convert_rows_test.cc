// Rows between float dtypes: every 16-bit pattern, against the definition of each format.
#include "kernels/layout/convert_rows.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"

namespace kvstow {
namespace {

std::vector<std::byte> BytesOf(const std::vector<uint16_t>& bits) {
  std::vector<std::byte> bytes(2 * bits.size());
  std::memcpy(bytes.data(), bits.data(), bytes.size());
  return bytes;
}

uint16_t BitsAt(const std::vector<std::byte>& bytes, int64_t i) {
  uint16_t bits;
  std::memcpy(&bits, bytes.data() + 2 * i, sizeof(bits));
  return bits;
}

// The value of a format with `fraction_bits` and this bias, in double.
double ValueOf(uint16_t bits, int fraction_bits, int bias) {
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int exponent = (bits & 0x7fff) >> fraction_bits;
  const int all_ones = (0x7fff >> fraction_bits);
  double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                    : std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
  if (exponent == all_ones) magnitude = fraction == 0 ? HUGE_VAL : std::nan("");
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

double F16(uint16_t bits) { return ValueOf(bits, 10, 15); }
double Bf16(uint16_t bits) { return ValueOf(bits, 7, 127); }

// True where `got` is the neighbour nearest to `value`, the even one of two as near.
bool IsNearest(double value, uint16_t got, double (*value_of)(uint16_t)) {
  const double error = std::fabs(value_of(got) - value);
  for (const int step : {-1, 1}) {
    if ((got & 0x7fff) == 0 && step < 0) continue;  // below 0 the other sign begins
    const double other = std::fabs(value_of(static_cast<uint16_t>(got + step)) - value);
    if (other < error || (other == error && (got & 1) != 0)) return false;
  }
  return true;
}

TEST(ConvertRows, EveryF16ValueBecomesTheNearestBf16) {
  std::vector<uint16_t> patterns;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) patterns.push_back(static_cast<uint16_t>(bits));
  const std::vector<std::byte> in = BytesOf(patterns);
  std::vector<std::byte> out(in.size());
  ASSERT_TRUE(ConvertRows(DType::kF16, DType::kBf16, 0x10000, in.data(), out.data()).ok());
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double value = F16(static_cast<uint16_t>(bits));
    const uint16_t got = BitsAt(out, bits);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Bf16(got))) << bits;
    } else if (std::isinf(value)) {
      EXPECT_EQ(Bf16(got), value) << bits;
    } else {
      EXPECT_TRUE(IsNearest(value, got, Bf16)) << bits;
      EXPECT_EQ(std::signbit(Bf16(got)), std::signbit(value)) << bits;
    }
  }
}

TEST(ConvertRows, EveryBf16ValueBecomesTheNearestF16OrIsReported) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const std::vector<std::byte> in = BytesOf({static_cast<uint16_t>(bits)});
    std::vector<std::byte> out(2);
    const absl::Status status = ConvertRows(DType::kBf16, DType::kF16, 1, in.data(), out.data());
    const double value = Bf16(static_cast<uint16_t>(bits));
    const uint16_t got = BitsAt(out, 0);
    if (std::isfinite(value) && std::fabs(value) > 65504) {
      EXPECT_TRUE(absl::IsOutOfRange(status)) << bits;
      continue;
    }
    EXPECT_TRUE(status.ok()) << bits << ": " << status;
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(F16(got))) << bits;
    } else if (std::isinf(value)) {
      EXPECT_EQ(F16(got), value) << bits;
    } else {
      EXPECT_TRUE(IsNearest(value, got, F16)) << bits;
      EXPECT_EQ(std::signbit(F16(got)), std::signbit(value)) << bits;
      const bool is_exact = F16(got) == value;
      EXPECT_TRUE(is_exact || std::fabs(value) < 0x1p-17) << bits;
    }
  }
}

TEST(ConvertRows, OverflowNamesTheValueAndTheDType) {
  const std::vector<std::byte> in =
      BytesOf({FloatToBf16(1.0f), FloatToBf16(65280.0f), FloatToBf16(-65536.0f)});
  std::vector<std::byte> out(in.size());
  const absl::Status status = ConvertRows(DType::kBf16, DType::kF16, 3, in.data(), out.data());
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(), "convert rows: value 2 is -65536, which does not fit f16");
}

TEST(ConvertRows, MemoryOfItsOwnOrTheSameAndNoAlignment) {
  const std::vector<uint16_t> values = {FloatToF16(0.5f), FloatToF16(-3.0f), FloatToF16(1000.0f)};
  std::vector<std::byte> memory(7);
  std::memcpy(memory.data() + 1, values.data(), 6);
  std::byte* const rows = memory.data() + 1;
  ASSERT_TRUE(ConvertRows(DType::kF16, DType::kBf16, 3, rows, rows).ok());
  std::vector<std::byte> back(7);
  ASSERT_TRUE(ConvertRows(DType::kBf16, DType::kF16, 3, rows, back.data() + 1).ok());
  EXPECT_EQ(std::memcmp(back.data() + 1, values.data(), 6), 0);
  std::vector<std::byte> wide(12);
  ASSERT_TRUE(ConvertRows(DType::kBf16, DType::kF32, 3, rows, wide.data()).ok());
  float last;
  std::memcpy(&last, wide.data() + 8, sizeof(last));
  EXPECT_EQ(last, 1000.0f);
}

TEST(ConvertRows, WhatIsQuantizedAlreadyIsRefused) {
  const std::byte in[2] = {};
  std::byte out[2];
  EXPECT_EQ(ConvertRows(DType::kF8E4M3, DType::kBf16, 1, in, out).message(),
            "convert rows: dtype is f8_e4m3, want bf16, f16 or f32");
  EXPECT_EQ(ConvertRows(DType::kBf16, DType::kInt8, 1, in, out).message(),
            "convert rows: dtype is int8, want bf16, f16 or f32");
}

}  // namespace
}  // namespace kvstow
