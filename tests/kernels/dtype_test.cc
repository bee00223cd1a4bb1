// Conversions between fp32 and the 16-bit formats: every bit pattern, every kind of tie.
#include "kernels/core/dtype.h"

#include <bit>
#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

// An fp16 number from the definition of binary16, in double.
double F16ByDefinition(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int fraction = bits & 0x3ff;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(DType, EveryF16PatternIsReadExactlyAndWrittenBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = F16ToFloat(half);
    const uint16_t magnitude = half & 0x7fff;
    if (magnitude > 0x7c00) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      EXPECT_TRUE(std::isnan(F16ToFloat(FloatToF16(value)))) << bits;
      continue;
    }
    if (magnitude == 0x7c00) {
      EXPECT_TRUE(std::isinf(value)) << bits;
    } else {
      EXPECT_EQ(static_cast<double>(value), F16ByDefinition(half)) << bits;
    }
    EXPECT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    EXPECT_EQ(FloatToF16(value), half) << bits;
  }
}

TEST(DType, EveryBf16PatternIsReadExactlyAndWrittenBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = Bf16ToFloat(half);
    EXPECT_EQ(std::bit_cast<uint32_t>(value), bits << 16);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(value)))) << bits;
    } else {
      EXPECT_EQ(FloatToBf16(value), half) << bits;
    }
  }
}

// Between neighbours: just below the middle, the middle (to even), just above.
TEST(DType, F16RoundsToNearestTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const auto low = static_cast<uint16_t>(bits);
    const auto high = static_cast<uint16_t>(bits + 1);
    const auto middle = static_cast<float>((F16ByDefinition(low) + F16ByDefinition(high)) / 2);
    const uint16_t even = (low & 1) == 0 ? low : high;
    EXPECT_EQ(FloatToF16(middle), even) << bits;
    EXPECT_EQ(FloatToF16(std::nextafter(middle, 0.0f)), low) << bits;
    EXPECT_EQ(FloatToF16(std::nextafter(middle, 1e9f)), high) << bits;
    EXPECT_EQ(FloatToF16(-middle), even | 0x8000) << bits;
  }
}

TEST(DType, F16OverflowsFrom65520) {
  EXPECT_EQ(FloatToF16(65519.996f), 0x7bff);
  EXPECT_EQ(FloatToF16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToF16(-65520.0f), 0xfc00);
  EXPECT_EQ(FloatToF16(3e38f), 0x7c00);
  EXPECT_EQ(FloatToF16(0x1p-25f), 0);  // the tie with 0
  EXPECT_EQ(FloatToF16(0x1.000002p-25f), 1);
  EXPECT_EQ(FloatToF16(1e-40f), 0);
}

TEST(DType, Bf16RoundsToNearestTiesToEven) {
  for (uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const uint32_t middle = (bits << 16) | 0x8000u;
    const uint32_t even = (bits & 1) == 0 ? bits : bits + 1;
    EXPECT_EQ(FloatToBf16(std::bit_cast<float>(middle)), even) << bits;
    EXPECT_EQ(FloatToBf16(std::bit_cast<float>(middle - 1)), bits) << bits;
    EXPECT_EQ(FloatToBf16(std::bit_cast<float>(middle + 1)), bits + 1) << bits;
  }
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x7f7fffffu)), 0x7f80);  // to infinity
}

TEST(DType, NamesAreReadBackAndEnginesSpellingsAreKnown) {
  for (int number = 1; IsKnownDType(number); ++number) {
    const auto dtype = static_cast<DType>(number);
    const auto parsed = DTypeFromName(DTypeName(dtype));
    ASSERT_TRUE(parsed.ok()) << number;
    EXPECT_EQ(*parsed, dtype);
  }
  EXPECT_EQ(*DTypeFromName("bfloat16"), DType::kBf16);
  EXPECT_EQ(*DTypeFromName("half"), DType::kF16);
  EXPECT_EQ(*DTypeFromName("float32"), DType::kF32);
  EXPECT_EQ(*DTypeFromName("fp8_e5m2"), DType::kF8E5M2);
  EXPECT_EQ(DTypeFromName("auto").status().message(),
            "dtype is \"auto\", want one of bf16, f16, f32, f8_e4m3, f8_e5m2, int8, nvfp4, opaque");
}

TEST(DType, KnownNumbersAreOneToEight) {
  for (int number : {-1, 0, 9, 255, 256}) EXPECT_FALSE(IsKnownDType(number)) << number;
  for (int number = 1; number <= 8; ++number) EXPECT_TRUE(IsKnownDType(number)) << number;
  for (int number = 1; number <= 8; ++number) {
    EXPECT_EQ(IsFloatDType(static_cast<DType>(number)), number <= 3) << number;
  }
}

TEST(DType, BytesOfManyValuesDoNotOverflow) {
  EXPECT_EQ(DTypeBytes(DType::kBf16, 3), 6);
  EXPECT_EQ(DTypeBytes(DType::kF32, int64_t{1} << 31), int64_t{1} << 33);
  EXPECT_EQ(DTypeBytes(DType::kF8E4M3, 7), 7);
  EXPECT_EQ(DTypeBytes(DType::kOpaque, 7), 7);
}

}  // namespace
}  // namespace kvstow
