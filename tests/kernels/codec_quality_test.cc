// How far decoded rows are from the encoded ones: the published error energies, the bias of the
// scale, the bound of int8, and what removing a mean brings.
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/int8.h"
#include "kernels/codec/kivi.h"
#include "kernels/codec/oscar.h"
#include "kernels/codec/tqm.h"
#include "tests/kernels/plane_rows.h"
#include "tests/kernels/rotation_for.h"

namespace kvstow {
namespace {

constexpr uint64_t kSeed = 20261130;

// Rows of fp32, so that no rounding but the codec's is seen.
struct Plane {
  PlaneShape shape;
  std::vector<float> x;
  std::vector<float> decoded;
};

Plane GaussianPlane(int dim, int num_tokens, Role role) {
  Plane plane{.shape = {.num_tokens = num_tokens, .dim = dim, .role = role, .dtype = DType::kF32}};
  testing::Rng rng(kSeed + dim);
  for (int i = 0; i < dim * num_tokens; ++i) plane.x.push_back(static_cast<float>(rng.Gaussian()));
  return plane;
}

void RoundTrip(const Codec& codec, Plane& plane) {
  std::vector<std::byte> encoded(codec.plane_bytes(plane.shape));
  plane.decoded.resize(plane.x.size());
  const CodecBackend& backend = BestBackend(codec);
  ASSERT_EQ(backend.encode(plane.shape, reinterpret_cast<const std::byte*>(plane.x.data()),
                           encoded.data()),
            EncodeResult::kEncoded);
  backend.decode(plane.shape, encoded.data(), reinterpret_cast<std::byte*>(plane.decoded.data()));
}

double Dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

struct Estimate {
  double mean = 0;
  double standard_error = 0;
};

// |x' - x|^2 / |x|^2 over rows.
Estimate ErrorEnergy(const Plane& plane) {
  const int dim = plane.shape.dim;
  const int n = plane.shape.num_tokens;
  double sum = 0, sum_of_squares = 0;
  for (int t = 0; t < n; ++t) {
    const float* x = plane.x.data() + int64_t{t} * dim;
    std::vector<float> error(plane.decoded.begin() + int64_t{t} * dim,
                             plane.decoded.begin() + int64_t{t + 1} * dim);
    for (int i = 0; i < dim; ++i) error[i] -= x[i];
    const double energy = Dot(error.data(), error.data(), dim) / Dot(x, x, dim);
    sum += energy;
    sum_of_squares += energy * energy;
  }
  const double mean = sum / n;
  return {mean, std::sqrt((sum_of_squares / n - mean * mean) / n)};
}

// The limit of long rows: the table of the arithmetic's specification (integer levels, least
// squares).
TEST(CodecQuality, ErrorEnergyOfLongGaussianRowsIsTheLloydMaxOne) {
  const double want[] = {0.1174819, 0.0345489, 0.0095111};
  for (int bits : {2, 3, 4}) {
    Plane plane = GaussianPlane(4096, 512, Role::kKey);
    RoundTrip(*FindCodec("tq" + std::to_string(bits)), plane);
    const Estimate got = ErrorEnergy(plane);
    EXPECT_NEAR(got.mean, want[bits - 2], 4 * got.standard_error)
        << bits << " bits, seed " << kSeed;
    EXPECT_LT(got.standard_error, 0.005 * want[bits - 2]);  // or the line above says nothing
  }
}

// At dim 128 each row is measured by its own rms and scaled by its own fit: a little less than a
// Gaussian table scaled by the row's norm gives.
TEST(CodecQuality, ErrorEnergyAtDim128IsAtMostThePublishedOne) {
  const double published[] = {0.1161, 0.0340, 0.0093};
  for (int bits : {2, 3, 4}) {
    Plane plane = GaussianPlane(128, 4096, Role::kKey);
    RoundTrip(*FindCodec("tq" + std::to_string(bits)), plane);
    const Estimate got = ErrorEnergy(plane);
    EXPECT_LT(got.mean, published[bits - 2] + 4 * got.standard_error) << bits << " bits";
    EXPECT_GT(got.mean, 0.97 * published[bits - 2]) << bits << " bits";
  }
}

// Least squares shrinks by the error energy; the unbiased scale does not, up to the rounding of its
// fp16.
TEST(CodecQuality, ValuesAreUnbiasedAndKeysShrinkByTheirError) {
  for (int bits : {2, 3, 4}) {
    for (int dim : {80, 128}) {
      for (Role role : {Role::kKey, Role::kValue}) {
        Plane plane = GaussianPlane(dim, 4096, role);
        RoundTrip(*FindCodec("tq" + std::to_string(bits)), plane);
        int num_unclamped = 0;
        double sum = 0;
        for (int t = 0; t < 4096; ++t) {
          const float* x = plane.x.data() + t * dim;
          const double gain = Dot(plane.decoded.data() + t * dim, x, dim) / Dot(x, x, dim);
          sum += gain;
          if (std::fabs(gain - 1.0) <= 6e-4) ++num_unclamped;
        }
        if (role == Role::kValue) {
          EXPECT_GE(num_unclamped, 4096 * 97 / 100)
              << bits << " bits, dim " << dim;  // the rest: clamp
          EXPECT_NEAR(sum / 4096, 1.0, 6e-4) << bits << " bits, dim " << dim;
        } else {
          EXPECT_NEAR(sum / 4096, 1.0 - ErrorEnergy(plane).mean, 6e-4)
              << bits << " bits, dim " << dim;
        }
      }
    }
  }
}

// Encoded, and decoded again.
struct Decoded {
  std::vector<std::byte> plane;
  std::vector<std::byte> rows;
};

Decoded RoundTripBytes(const Codec& codec, const PlaneShape& shape,
                       const std::vector<std::byte>& rows) {
  Decoded decoded{std::vector<std::byte>(codec.plane_bytes(shape)),
                  std::vector<std::byte>(rows.size(), std::byte{7})};
  EXPECT_EQ(BestBackend(codec).encode(shape, rows.data(), decoded.plane.data()),
            EncodeResult::kEncoded);
  BestBackend(codec).decode(shape, decoded.plane.data(), decoded.rows.data());
  return decoded;
}

// Half a step, and at the end of the range what the fp16 of the scale was rounded down by.
TEST(CodecQuality, AbsmaxErrorIsAtMostHalfAStep) {
  for (std::string_view name : {"int8", "int4"}) {
    for (std::string_view generator : {"gaussian", "heavy", "int8_tie", "int4_tie", "flat"}) {
      const PlaneShape shape{
          .num_tokens = 64, .dim = 96, .role = Role::kValue, .dtype = DType::kF32};
      const std::vector<std::byte> rows = testing::MakeRows(generator, shape, kSeed);
      const Decoded decoded = RoundTripBytes(*FindCodec(name), shape, rows);
      for (int64_t i = 0; i < 64 * 96; ++i) {
        const float step = F16ToFloat(LoadU16(decoded.plane.data() + i / 96 * 2));
        const float x = LoadValue(shape.dtype, rows.data(), i);
        const float error = std::fabs(LoadValue(shape.dtype, decoded.rows.data(), i) - x);
        ASSERT_LE(error, 0.5f * step + std::fabs(x) * 0x1p-22f)
            << name << " " << generator << " value " << i;
      }
    }
  }
}

// Half a step of the group, and what its minimum's fp16 was rounded by.
TEST(CodecQuality, KiviErrorIsAtMostHalfAStep) {
  for (int bits : {4, 2}) {
    for (Role role : {Role::kKey, Role::kValue}) {
      for (std::string_view generator : {"gaussian", "heavy", "means", "kivi_tie", "flat"}) {
        const PlaneShape shape{.num_tokens = 64, .dim = 80, .role = role, .dtype = DType::kF32};
        const std::vector<std::byte> rows = testing::MakeRows(generator, shape, kSeed);
        const Codec& codec = *FindCodec("kivi" + std::to_string(bits));
        const Decoded decoded = RoundTripBytes(codec, shape, rows);
        const KiviFormat format = KiviFormatOf(bits, shape);
        for (int64_t i = 0; i < 64 * 80; ++i) {
          const std::byte* group = decoded.plane.data() + 2 * format.group_of(i / 80, i % 80);
          const float step = F16ToFloat(LoadU16(group));
          const float min = F16ToFloat(LoadU16(group + format.mins_at()));
          const float x = LoadValue(shape.dtype, rows.data(), i);
          const float error = std::fabs(LoadValue(shape.dtype, decoded.rows.data(), i) - x);
          ASSERT_LE(error, 0.5f * step * (1 + 0x1p-9f) + std::fabs(min) * 0x1p-10f)
              << codec.name << " " << generator << " value " << i;
        }
      }
    }
  }
}

// A group of at most 2^bits equally spaced numbers comes back exactly; so does a constant one.
TEST(CodecQuality, KiviReturnsEquallySpacedGroupsExactly) {
  testing::Rng rng(kSeed);
  for (int bits : {4, 2}) {
    for (Role role : {Role::kKey, Role::kValue}) {
      const PlaneShape shape{.num_tokens = 32, .dim = 64, .role = role, .dtype = DType::kF32};
      std::vector<std::byte> rows(4 * 32 * 64);
      for (int64_t t = 0; t < 32; ++t) {
        for (int64_t j = 0; j < 64; ++j) {
          const int64_t lane = role == Role::kKey ? t : j % 32;
          const int64_t group = role == Role::kKey ? j : t;
          const int64_t code =
              lane < (1 << bits) ? lane : static_cast<int64_t>(rng.Below(1 << bits));
          const float step = group % 5 == 0 ? 0.0f : std::ldexp(1.0f, static_cast<int>(group % 7));
          const float min = static_cast<float>(group % 4) * -3.0f;
          StoreValue(shape.dtype, rows.data(), t * 64 + j, min + step * static_cast<float>(code));
        }
      }
      const Codec& codec = *FindCodec("kivi" + std::to_string(bits));
      EXPECT_EQ(RoundTripBytes(codec, shape, rows).rows, rows) << codec.name;
    }
  }
}

// A uniform step, and the two ends of the range exact: the error of Gaussian rows is that of the
// steps, step^2 / 12. (kivi2's steps are too wide for this.)
TEST(CodecQuality, ErrorEnergyOfUniformCodesIsThatOfTheirSteps) {
  for (std::string_view name : {"int8", "int4", "kivi4"}) {
    Plane plane = GaussianPlane(128, 4096, Role::kValue);
    const Codec& codec = *FindCodec(name);
    std::vector<std::byte> encoded(codec.plane_bytes(plane.shape));
    RoundTrip(codec, plane);
    BestBackend(codec).encode(plane.shape, reinterpret_cast<const std::byte*>(plane.x.data()),
                              encoded.data());
    const int group = name == "kivi4" ? 32 : 128;
    const int num_exact = name == "kivi4" ? 2 : 1;
    std::vector<double> excess;  // of each group, over its steps' error
    double total = 0;
    for (int64_t first = 0; first < int64_t{128} * 4096; first += group) {
      const double step = F16ToFloat(LoadU16(encoded.data() + first / group * 2));
      double energy = 0;
      for (int64_t i = first; i < first + group; ++i) {
        const double error = static_cast<double>(plane.decoded[i]) - plane.x[i];
        energy += error * error;
      }
      excess.push_back(energy - (group - num_exact) * step * step / 12);
      total += energy;
    }
    double mean = 0, square = 0;
    for (double e : excess) mean += e / static_cast<double>(excess.size());
    for (double e : excess) square += e * e / static_cast<double>(excess.size());
    const double standard_error = std::sqrt(square / static_cast<double>(excess.size()));
    EXPECT_LT(std::fabs(mean), 4 * standard_error) << name << " seed " << kSeed;
    EXPECT_LT(standard_error * static_cast<double>(excess.size()), 0.01 * total) << name;
  }
}

// Each set of channels has the error of its bits, whatever its share of the energy.
TEST(CodecQuality, ErrorEnergyOfMixedCodesIsThatOfTheirParts) {
  const double want[] = {0, 0, 0.1161, 0.0340, 0.0093};  // at dim 128; 10 % less at 32
  for (int bits : {2, 3}) {
    Plane plane = GaussianPlane(128, 64 * 32, Role::kKey);
    for (size_t i = 0; i < plane.x.size(); ++i) plane.x[i] *= i % 128 % 4 == 1 ? 3.0f : 1.0f;
    RoundTrip(*FindCodec(bits == 2 ? "tq2.5" : "tq3.5"), plane);
    for (const bool outliers : {false, true}) {
      double error = 0, energy = 0;
      for (size_t i = 0; i < plane.x.size(); ++i) {
        if ((i % 128 % 4 == 1) != outliers) continue;
        const double e = static_cast<double>(plane.decoded[i]) - plane.x[i];
        error += e * e;
        energy += static_cast<double>(plane.x[i]) * plane.x[i];
      }
      const double published = want[bits + (outliers ? 1 : 0)];
      EXPECT_LT(error / energy, 1.02 * published) << bits << " bits, outliers " << outliers;
      EXPECT_GT(error / energy, 0.88 * published) << bits << " bits, outliers " << outliers;
    }
  }
}

// A rotation of Gaussian rows gives Gaussian rows: the table of the arithmetic's specification.
TEST(CodecQuality, ErrorEnergyOfRotatedGaussianRowsIsTheLloydMaxOne) {
  for (int bits : {3, 4}) {
    Plane plane = GaussianPlane(1024, 512, Role::kKey);
    plane.shape.rotation = testing::RotationFor(1024, Role::kKey);
    RoundTrip(*FindCodec("olm" + std::to_string(bits)), plane);
    const Estimate got = ErrorEnergy(plane);
    EXPECT_NEAR(got.mean, bits == 3 ? 0.0345489 : 0.0095111, 4 * got.standard_error) << bits;
    EXPECT_LT(got.standard_error, 0.005 * got.mean);
  }
}

struct TwoBitFamily {
  std::string_view name;
  Role role;
  double error;  // published or computed elsewhere, Gaussian rows of dim 128
};

TEST(CodecQuality, ErrorEnergyOfCalibratedTwoBitCodesIsThePublishedOne) {
  // Step search with a least-squares or an unbiased scale; a clipped range (.96 and .92).
  const TwoBitFamily families[] = {{"osu2", Role::kKey, 0.1158},
                                   {"osu2", Role::kValue, 0.1314},
                                   {"oscar2", Role::kKey, 0.1563},
                                   {"oscar2", Role::kValue, 0.1272}};
  for (const TwoBitFamily& family : families) {
    Plane plane = GaussianPlane(128, 8192, family.role);
    plane.shape.rotation = testing::RotationFor(128, family.role);
    RoundTrip(*FindCodec(family.name), plane);
    EXPECT_NEAR(ErrorEnergy(plane).mean, family.error, 0.02 * family.error)
        << family.name << (family.role == Role::kKey ? " keys" : " values");
  }
}

// The smallest scales are rounded by up to a half: the zero stays within the codes. A decoder takes
// any bits.
TEST(CodecQuality, ZerosOfOscarStayWithinTheCodes) {
  const OscarRange range = OscarRangeOf(-4301, 0, -10);  // a scale of 1.4 * 2^-24
  EXPECT_EQ(range.scale, 1);
  EXPECT_EQ(range.zero, 768);
  EXPECT_EQ(OscarZero(FloatToF16(1.5f)), 384);
  EXPECT_EQ(OscarZero(FloatToF16(5.0f)), 768);
  EXPECT_EQ(OscarZero(FloatToF16(-1.0f)), 0);
  EXPECT_EQ(OscarZero(0x7c00), 768);
  EXPECT_EQ(OscarZero(0xfc00), 0);
  EXPECT_EQ(OscarZero(0x7e00), 0);
}

// Inner products with directions that do not know of the row: no bias, and the variance of an
// orthogonal sketch, (pi / 2 - 1) times the error energy of the bits before it.
TEST(CodecQuality, TwoStageCodesHaveUnbiasedInnerProductsAndTheSketchsVariance) {
  const double error_before[] = {0, 0, 0.36089, 0.11600, 0.03397};  // by all bits, dim 128
  for (int bits : {2, 3, 4}) {
    Plane plane = GaussianPlane(128, 4096, Role::kValue);
    RoundTrip(*FindCodec("tq_prod" + std::to_string(bits)), plane);
    testing::Rng rng(kSeed);
    double sum = 0, sum_of_squares = 0;
    for (int t = 0; t < 4096; ++t) {
      const float* x = plane.x.data() + t * 128;
      const std::vector<float> y = testing::GaussianRow(rng, 128, 1.0);
      const double scale = std::sqrt(Dot(x, x, 128));
      const double error =
          (Dot(plane.decoded.data() + t * 128, y.data(), 128) - Dot(x, y.data(), 128)) / scale;
      sum += error;
      sum_of_squares += error * error;
    }
    const double want = (1.5707963 - 1) * error_before[bits];
    EXPECT_LT(std::fabs(sum / 4096), 4 * std::sqrt(want / 4096)) << bits;
    // The variance of 4096 squares of a Gaussian: 2.2 % of their mean.
    EXPECT_NEAR(sum_of_squares / 4096, want, 4 * 0.0221 * want) << bits;
    double gain = 0;
    for (int t = 0; t < 4096; ++t) {
      const float* x = plane.x.data() + t * 128;
      gain += Dot(plane.decoded.data() + t * 128, x, 128) / Dot(x, x, 128) / 4096;
    }
    EXPECT_NEAR(gain, 1.0, 0.005) << bits;
  }
}

TEST(CodecQuality, ZeroRowsAndTinyRowsDecodeToZeros) {
  for (const Codec& codec : AllCodecs().subspan(1)) {
    PlaneShape shape{.num_tokens = 32, .dim = 64, .role = Role::kKey, .dtype = DType::kF32};
    if (codec.needs_rotation) shape.rotation = testing::RotationFor(64, Role::kKey);
    std::vector<float> values(32 * 64, -0.0f);
    for (int i = 0; i < 64; ++i) values[64 + i] = i % 2 == 0 ? 0x1.8p-41f : -1e-40f;
    const auto* first = reinterpret_cast<const std::byte*>(values.data());
    const Decoded decoded = RoundTripBytes(codec, shape, {first, first + 4 * values.size()});
    EXPECT_EQ(decoded.plane, std::vector<std::byte>(decoded.plane.size(), std::byte{0}))
        << codec.name;
    // +0, not -0
    EXPECT_EQ(decoded.rows, std::vector<std::byte>(decoded.rows.size(), std::byte{0}))
        << codec.name;
  }
}

// Keys of which most energy is a mean over the block: tqm's error falls with the energy that is
// left.
TEST(CodecQuality, RemovingTheMeanOfTheBlockPays) {
  testing::Rng rng(kSeed);
  for (int bits : {2, 3, 4}) {
    Plane plane = GaussianPlane(64, 64, Role::kKey);
    for (int j = 0; j < 64; ++j) {
      const float mean = static_cast<float>(3.0 * rng.Gaussian());
      for (int t = 0; t < 64; ++t) plane.x[t * 64 + j] += mean;
    }
    Plane with_mean = plane;
    RoundTrip(*FindCodec("tq" + std::to_string(bits)), plane);
    RoundTrip(*FindCodec("tqm" + std::to_string(bits)), with_mean);
    // A tenth of the energy is left.
    EXPECT_LT(ErrorEnergy(with_mean).mean, ErrorEnergy(plane).mean / 4) << bits << " bits";
  }
}

}  // namespace
}  // namespace kvstow
