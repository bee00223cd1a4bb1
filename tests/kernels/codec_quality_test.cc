// How far decoded rows are from the encoded ones: the published error energies, the bias of the
// scale, the bound of int8, and what removing a mean brings.
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/int8.h"
#include "kernels/codec/tqm.h"
#include "tests/kernels/plane_rows.h"

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

TEST(CodecQuality, Int8ErrorIsAtMostHalfAStep) {
  for (std::string_view generator : {"gaussian", "heavy", "int8_tie", "flat"}) {
    const PlaneShape shape{.num_tokens = 64, .dim = 96, .role = Role::kValue, .dtype = DType::kF32};
    const std::vector<std::byte> rows = testing::MakeRows(generator, shape, kSeed);
    const Codec& int8 = *FindCodec(CodecId::kInt8);
    std::vector<std::byte> plane(int8.plane_bytes(shape)), decoded(rows.size());
    ASSERT_EQ(BestBackend(int8).encode(shape, rows.data(), plane.data()), EncodeResult::kEncoded);
    BestBackend(int8).decode(shape, plane.data(), decoded.data());
    for (int64_t i = 0; i < 64 * 96; ++i) {
      const float step = F16ToFloat(LoadU16(plane.data() + i / 96 * 2));
      const float x = LoadValue(shape.dtype, rows.data(), i);
      const float error = std::fabs(LoadValue(shape.dtype, decoded.data(), i) - x);
      ASSERT_LE(error, 0.5f * step + std::fabs(x) * 0x1p-22f) << generator << " value " << i;
    }
  }
}

TEST(CodecQuality, ZeroRowsAndTinyRowsDecodeToZeros) {
  for (const Codec& codec : AllCodecs().subspan(1)) {
    const PlaneShape shape{.num_tokens = 3, .dim = 64, .role = Role::kKey, .dtype = DType::kF32};
    std::vector<float> rows(3 * 64, -0.0f);
    for (int i = 0; i < 64; ++i) rows[64 + i] = i % 2 == 0 ? 0x1.8p-41f : -1e-40f;
    std::vector<std::byte> plane(codec.plane_bytes(shape));
    std::vector<float> decoded(rows.size(), 7.0f);
    ASSERT_EQ(BestBackend(codec).encode(shape, reinterpret_cast<const std::byte*>(rows.data()),
                                        plane.data()),
              EncodeResult::kEncoded);
    EXPECT_EQ(plane, std::vector<std::byte>(plane.size(), std::byte{0})) << codec.name;
    BestBackend(codec).decode(shape, plane.data(), reinterpret_cast<std::byte*>(decoded.data()));
    for (float value : decoded) {
      EXPECT_EQ(std::bit_cast<uint32_t>(value), 0u) << codec.name;  // +0, not -0
    }
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
