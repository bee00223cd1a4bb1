// Every backend of every codec gives the bytes of the scalar reference, in both directions; none
// leaves its buffers; none encodes what is not finite.
#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/device_codec.h"
#include "kernels/codec/kivi.h"
#include "kernels/codec/simd.h"
#include "kernels/codec/tq_mixed.h"
#include "kernels/codec/tqm.h"
#include "tests/kernels/plane_rows.h"
#include "tests/kernels/rotation_for.h"
#include "tests/testing/sanitizer.h"

namespace kvstow {
namespace {

using testing::Describe;
using testing::MakeRows;

constexpr std::byte kGuard{0xa5};
constexpr size_t kGuardBytes = 64;

// `num_bytes` at an odd address, with guards around.
class GuardedBytes {
 public:
  explicit GuardedBytes(int64_t num_bytes)
      : size_(num_bytes), bytes_(num_bytes + 2 * kGuardBytes + 1, kGuard) {}
  std::byte* data() { return bytes_.data() + kGuardBytes + 1; }
  std::vector<std::byte> contents() { return {data(), data() + size_}; }
  bool guards_are_whole() {
    const auto is_guard = [](std::byte b) { return b == kGuard; };
    return std::all_of(bytes_.data(), data(), is_guard) &&
           std::all_of(data() + size_, bytes_.data() + bytes_.size(), is_guard);
  }

 private:
  int64_t size_;
  std::vector<std::byte> bytes_;
};

struct Coded {
  EncodeResult result = EncodeResult::kKeepRaw;
  std::vector<std::byte> plane;
  std::vector<std::byte> rows;
};

// Encodes `rows` and decodes what came out, at odd addresses.
Coded RoundTrip(const Codec& codec, const CodecBackend& backend, const PlaneShape& shape,
                const std::vector<std::byte>& rows) {
  GuardedBytes input(static_cast<int64_t>(rows.size()));
  std::memcpy(input.data(), rows.data(), rows.size());
  GuardedBytes plane(codec.plane_bytes(shape));
  GuardedBytes output(static_cast<int64_t>(rows.size()));
  Coded coded;
  coded.result = backend.encode(shape, input.data(), plane.data());
  EXPECT_TRUE(plane.guards_are_whole()) << codec.name << " " << backend.name << " encode";
  if (coded.result != EncodeResult::kEncoded) return coded;
  coded.plane = plane.contents();
  backend.decode(shape, plane.data(), output.data());
  EXPECT_TRUE(output.guards_are_whole()) << codec.name << " " << backend.name << " decode";
  coded.rows = output.contents();
  return coded;
}

// Only the dense rotations have code of their own for the newest instructions.
bool IsTheSameAsAvx3(const Codec& codec, std::string_view target) {
  return target == "AVX3_DL" && !codec.needs_rotation;
}

// Compares all backends, on all instruction sets, with the scalar one. True where it encoded.
bool CheckPlane(const Codec& codec, const PlaneShape& shape, const std::vector<std::byte>& rows,
                const std::string& what) {
  const Coded want = RoundTrip(codec, codec.host[0], shape, rows);
  for (const CodecBackend& backend : codec.host.subspan(1)) {
    if (!backend.supported()) continue;
    for (std::string_view target : SimdTargets()) {
      if (IsTheSameAsAvx3(codec, target)) continue;
      ForceSimdTarget(target);
      const Coded got = RoundTrip(codec, backend, shape, rows);
      EXPECT_EQ(got.result, want.result) << codec.name << " " << target << " " << what;
      EXPECT_TRUE(got.plane == want.plane) << codec.name << " " << target << " encode " << what;
      EXPECT_TRUE(got.rows == want.rows) << codec.name << " " << target << " decode " << what;
    }
    ForceSimdTarget("");
  }
  for (const CodecBackend& backend : DeviceBackends(codec.id)) {
    if (!backend.supported()) continue;  // no GPU: the emulated kernels are compared in tests/simt
    const Coded got = RoundTrip(codec, backend, shape, rows);
    EXPECT_EQ(got.result, want.result) << codec.name << " " << backend.name << " " << what;
    EXPECT_TRUE(got.plane == want.plane) << codec.name << " " << backend.name << " encode " << what;
    EXPECT_TRUE(got.rows == want.rows) << codec.name << " " << backend.name << " decode " << what;
  }
  return want.result == EncodeResult::kEncoded;
}

std::vector<PlaneShape> ShapesOf(const Codec& codec, int dim, int num_tokens) {
  std::vector<PlaneShape> shapes;
  for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    for (Role role : {Role::kKey, Role::kValue}) {
      PlaneShape shape{.num_tokens = num_tokens, .dim = dim, .role = role, .dtype = dtype};
      if (codec.needs_rotation) shape.rotation = testing::RotationFor(dim, role);
      if (codec.accepts(shape)) shapes.push_back(shape);
    }
  }
  return shapes;
}

// Large planes of slow scalar code: dense matrices, and references that no other backend stands
// beside. Shorter planes say the same.
bool IsTooSlow(const Codec& codec, int dim, int num_tokens) {
  // Sanitizers look at accesses, which the shape decides; the other build compares all values.
  if (testing::kIsSanitized && dim * num_tokens > 1 << 12) return true;
  if (codec.needs_rotation) return int64_t{dim} * dim * num_tokens > 1 << 21;
  const bool is_reference = codec.id != CodecId::kRaw && codec.host.size() == 1;
  return is_reference && dim * num_tokens > 1 << 12;
}

// Counts what was compared and what was encoded, so that a test of nothing cannot pass.
struct Counts {
  int planes = 0;
  int encoded = 0;
};

Counts CheckAll(absl::Span<const int> dims, absl::Span<const int> num_tokens,
                absl::Span<const std::string_view> generators) {
  Counts counts;
  uint64_t seed = 20261130;
  for (const Codec& codec : AllCodecs()) {
    for (int dim : dims) {
      for (int tokens : num_tokens) {
        if (IsTooSlow(codec, dim, tokens)) continue;
        for (std::string_view generator : generators) {
          for (const PlaneShape& shape : ShapesOf(codec, dim, tokens)) {
            ++seed;
            const std::vector<std::byte> rows = MakeRows(generator, shape, seed);
            ++counts.planes;
            counts.encoded +=
                CheckPlane(codec, shape, rows, Describe(shape, generator, seed)) ? 1 : 0;
            if (::testing::Test::HasFailure()) return counts;
          }
        }
      }
    }
  }
  return counts;
}

// Which planes a codec serves, said once more: a codec that accepts too little shows in the counts.
bool Serves(const Codec& codec, Role role, int dim, int num_tokens) {
  if (codec.name.substr(0, 3) == "tqm") return role == Role::kKey;
  if (codec.name.substr(0, 4) == "kivi" || codec.name == "gear") {
    return role == Role::kValue || num_tokens % 32 == 0;
  }
  if (codec.name == "tq3.5" || codec.name == "tq2.5") {
    const std::set<int> dims = {64, 80, 96, 112, 128, 160, 192, 256, 320, 576};
    return dims.contains(dim);
  }
  return !codec.needs_rotation || dim <= 1024;
}

int NumPlanes(absl::Span<const int> dims, absl::Span<const int> num_tokens) {
  int num_planes = 0;
  for (const Codec& codec : AllCodecs()) {
    for (int dim : dims) {
      for (int tokens : num_tokens) {
        for (Role role : {Role::kKey, Role::kValue}) {
          if (IsTooSlow(codec, dim, tokens)) continue;
          if (Serves(codec, role, dim, tokens)) num_planes += 3;
        }
      }
    }
  }
  return num_planes;
}

TEST(CodecExactness, AllBackendsGiveTheBytesOfTheReference) {
  ASSERT_FALSE(SimdTargets().empty());
  const std::vector<int> dims = {64, 80, 96, 112, 128, 192, 256, 576};
  const std::vector<int> num_tokens = {1, 2, 3, 7, 64};
  absl::Span<const std::string_view> generators = testing::kGenerators;
  if (testing::kIsSanitized) generators = generators.subspan(0, 2);
  const Counts counts = CheckAll(dims, num_tokens, generators);
  const int num_generators = static_cast<int>(generators.size());
  EXPECT_EQ(counts.planes, num_generators * NumPlanes(dims, num_tokens));
  EXPECT_GT(counts.encoded, counts.planes * 9 / 10);
}

TEST(CodecExactness, AllBackendsAgreeOnLongPlanes) {
  if (testing::kIsSanitized)
    GTEST_SKIP() << "too slow with a sanitizer; the shapes are those above";
  const std::vector<int> dims = {64, 80, 96, 112, 128, 192, 256, 576};
  const std::vector<std::string_view> generators = {"near_tie"};
  const Counts counts = CheckAll(dims, {992}, generators);
  EXPECT_EQ(counts.planes, NumPlanes(dims, {992}));
  EXPECT_EQ(counts.encoded, counts.planes);
}

TEST(CodecExactness, AllBackendsAgreeAtTheEndsOfTheDims) {
  const std::vector<int> dims = {16, 32, 160, 320, 512, 1024, 2048, 4096};
  const std::vector<std::string_view> generators = {"gaussian", "near_tie", "corner", "flat"};
  const Counts counts = CheckAll(dims, {1, 13, 32}, generators);
  EXPECT_EQ(counts.planes, 4 * NumPlanes(dims, {1, 13, 32}));
}

TEST(CodecExactness, TqBackendsAgreeAtDim8) {
  for (const Codec& codec : AllCodecs()) {
    if (codec.name.substr(0, 2) != "tq") continue;
    for (const PlaneShape& shape : ShapesOf(codec, 8, 13)) {
      for (std::string_view generator : {"gaussian", "near_tie", "corner", "flat"}) {
        CheckPlane(codec, shape, MakeRows(generator, shape, 8), Describe(shape, generator, 8));
      }
    }
  }
}

// Odd dims exist for int8, int4 and raw only.
TEST(CodecExactness, AbsmaxBackendsAgreeOnAnyDim) {
  for (int dim : {1, 2, 7, 15, 17, 33, 63, 100}) {
    for (CodecId id : {CodecId::kInt8, CodecId::kInt4, CodecId::kRaw}) {
      const Codec& codec = *FindCodec(id);
      for (const PlaneShape& shape : ShapesOf(codec, dim, 5)) {
        for (std::string_view generator : {"int8_tie", "int4_tie"}) {
          const auto rows = MakeRows(generator, shape, dim);
          EXPECT_TRUE(CheckPlane(codec, shape, rows, Describe(shape, generator, dim)));
        }
      }
    }
  }
}

// Every third value of K at 1.99 with the keys' signs: 16-bit sums overflow in the last stages,
// where a wrong value could come back into range.
TEST(CodecExactness, RowsThatOverflow16BitsAgree) {
  testing::Rng rng(7);
  for (std::string_view name : {"tq4", "tq3", "tq2", "tqm4", "tqm3", "tqm2"}) {
    const Codec& codec = *FindCodec(name);
    const PlaneShape shape{
        .num_tokens = 200, .dim = 128, .role = Role::kKey, .dtype = DType::kBf16};
    std::vector<std::byte> rows(2 * 200 * 128);
    for (int t = 0; t < 200; ++t) {
      for (int i = 0; i < 128; ++i) {
        const bool aligned = static_cast<int>(rng.Below(200)) < t;
        const bool minus = aligned ? IsMinusSign(Role::kKey, i) : rng.Below(2) == 0;
        StoreValue(shape.dtype, rows.data(), t * 128 + i, minus ? -1.99f : 1.99f);
      }
    }
    EXPECT_TRUE(CheckPlane(codec, shape, rows, "overflow"));
  }
}

// Where plane and row go opposite ways, p - mean needs 17 bits.
TEST(CodecExactness, ResidualsBeyond16BitsAgree) {
  const PlaneShape shape{.num_tokens = 64, .dim = 64, .role = Role::kKey, .dtype = DType::kBf16};
  std::vector<std::byte> rows(2 * 64 * 64);
  for (int t = 0; t < 64; ++t) {
    for (int i = 0; i < 64; ++i)
      StoreValue(shape.dtype, rows.data(), t * 64 + i, t == 5 ? -1.99f : 1.99f);
  }
  for (std::string_view name : {"tqm4", "tqm3", "tqm2"}) {
    EXPECT_TRUE(CheckPlane(*FindCodec(name), shape, rows, "residuals"));
  }
}

TEST(CodecExactness, PlanesWithValuesThatAreNotFiniteStayRaw) {
  const float bad_values[] = {
      std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
      std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()};
  for (const Codec& codec : AllCodecs().subspan(1)) {
    for (int dim : {64, 96, 128}) {
      for (const PlaneShape& shape : ShapesOf(codec, dim, 32)) {
        const auto good = MakeRows("gaussian", shape, 1);
        for (const float bad : bad_values) {
          for (const int64_t at : {0, dim - 1, 2 * dim + 3, 32 * dim - 1}) {
            std::vector<std::byte> rows = good;
            StoreValue(shape.dtype, rows.data(), at, bad);
            EXPECT_FALSE(CheckPlane(codec, shape, rows, Describe(shape, "not finite", at)))
                << codec.name << " encoded " << bad << " at value " << at;
          }
        }
      }
    }
  }
}

TEST(CodecExactness, PlanesWhoseScaleDoesNotFitStayRaw) {
  for (const Codec& codec : AllCodecs().subspan(1)) {
    for (DType dtype : {DType::kBf16, DType::kF32}) {
      for (float huge : {3.0e38f, 1.0e30f, 1.0e7f}) {
        for (int dim : {64, 80}) {
          PlaneShape shape{.num_tokens = 32, .dim = dim, .role = Role::kKey, .dtype = dtype};
          if (codec.needs_rotation) shape.rotation = testing::RotationFor(dim, Role::kKey);
          std::vector<std::byte> rows(DTypeBytes(dtype, 32 * dim));
          for (int i = 0; i < dim; ++i)
            StoreValue(dtype, rows.data(), dim + i, i % 3 == 0 ? huge : -huge);
          EXPECT_FALSE(CheckPlane(codec, shape, rows, "huge")) << codec.name << " " << huge;
        }
      }
    }
  }
}

TEST(CodecExactness, RawReturnsEveryByteOfEveryDType) {
  const Codec& raw = *FindCodec(CodecId::kRaw);
  for (int number = 1; IsKnownDType(number); ++number) {
    const PlaneShape shape{
        .num_tokens = 3, .dim = 7, .role = Role::kValue, .dtype = static_cast<DType>(number)};
    ASSERT_TRUE(raw.accepts(shape));
    std::vector<std::byte> rows(DTypeBytes(shape.dtype, 21));
    for (size_t i = 0; i < rows.size(); ++i)
      rows[i] = static_cast<std::byte>(255 - i);  // NaN included
    ASSERT_EQ(raw.plane_bytes(shape), static_cast<int64_t>(rows.size()));
    const Coded coded = RoundTrip(raw, raw.host[0], shape, rows);
    EXPECT_EQ(coded.plane, rows);
    EXPECT_EQ(coded.rows, rows);
  }
}

// Makes every fp16 number of a random plane one in [0, 2).
void TameScales(const Codec& codec, const PlaneShape& shape, std::vector<std::byte>& plane) {
  int64_t num_scales = shape.num_tokens + 1;  // the mean's too
  if (codec.id == CodecId::kKivi4) num_scales = 2 * KiviFormatOf(4, shape).num_groups();
  if (codec.id == CodecId::kKivi2) num_scales = 2 * KiviFormatOf(2, shape).num_groups();
  if (codec.id == CodecId::kOscar2 || codec.name.substr(0, 7) == "tq_prod") {
    num_scales = 2 * shape.num_tokens;
  }
  if (codec.id == CodecId::kRaw) num_scales = 0;
  for (int64_t i = 0; i < num_scales; ++i) plane[2 * i + 1] &= std::byte{0x3f};
  if (codec.id != CodecId::kTq3Mixed && codec.id != CodecId::kTq2Mixed) return;
  const TqMixedFormat format{.bits = codec.id == CodecId::kTq3Mixed ? 3 : 2, .shape = shape};
  for (int64_t i = 0; i < shape.num_tokens; ++i) {
    plane[format.others_at() + 2 * i + 1] &= std::byte{0x3f};
  }
}

// Every backend stays inside its buffers (asan watches the heap's ends) and, where `must_agree`,
// gives the reference's rows.
void CheckDecode(const Codec& codec, const PlaneShape& shape, const std::vector<std::byte>& plane,
                 bool must_agree) {
  std::vector<std::byte> want(DTypeBytes(shape.dtype, int64_t{shape.num_tokens} * shape.dim));
  codec.host[0].decode(shape, plane.data(), want.data());
  for (const CodecBackend& backend : codec.host.subspan(1)) {
    for (std::string_view target : SimdTargets()) {
      if (IsTheSameAsAvx3(codec, target)) continue;
      ForceSimdTarget(target);
      std::vector<std::byte> got(want.size());
      backend.decode(shape, plane.data(), got.data());
      EXPECT_TRUE(!must_agree || got == want)
          << codec.name << " " << target << " " << Describe(shape, "random bytes", 99);
    }
    ForceSimdTarget("");
  }
}

// Bytes that no encoder wrote: while the scales are numbers, all backends agree.
TEST(CodecExactness, RandomBytesDecodeAlikeAndWithinBounds) {
  testing::Rng rng(99);
  for (const Codec& codec : AllCodecs()) {
    for (int dim : {8, 64, 80, 128, 256, 576}) {
      for (int num_tokens : {7, 32}) {
        if (IsTooSlow(codec, dim, num_tokens)) continue;
        for (const PlaneShape& shape : ShapesOf(codec, dim, num_tokens)) {
          std::vector<std::byte> plane(codec.plane_bytes(shape));
          for (std::byte& b : plane) b = static_cast<std::byte>(rng.Next());
          CheckDecode(codec, shape, plane, /*must_agree=*/false);
          TameScales(codec, shape, plane);
          CheckDecode(codec, shape, plane, /*must_agree=*/true);
        }
      }
    }
  }
}

// A third writing of the encoder: dense H entry by entry, all sums in shuffled orders. Integer sums
// do not see the order.
class ShuffledEncoder {
 public:
  ShuffledEncoder(const TqFormat& format, uint64_t seed) : format_(format), rng_(seed) {}

  // The stored scale; `index` receives the stored indexes.
  uint16_t Encode(const std::vector<int32_t>& q, int exponent, std::vector<int>& index) {
    const int dim = format_.dim;
    const TqTable& table = TqTableOf(format_.bits);
    std::vector<int64_t> y(dim, 0);
    int64_t sum_qq = 0;
    for (int i : Shuffled(dim)) sum_qq += int64_t{q[i]} * q[i];
    for (int j : Shuffled(dim)) {
      for (int i : Shuffled(dim))
        y[j] += Entry(j, i) * (IsMinusSign(format_.role, i) ? -q[i] : q[i]);
    }
    const float rms = std::sqrt(static_cast<float>(sum_qq));
    int64_t sum_yw = 0, sum_ww = 0;
    index.resize(dim);
    for (int j : Shuffled(dim)) {
      int magnitude = 0;
      for (int i = 0; i + 1 < table.num_magnitudes; ++i) {
        magnitude += static_cast<float>(std::abs(y[j])) >= table.threshold[i] * rms ? 1 : 0;
      }
      const int w = y[j] < 0 ? -table.level[magnitude] : table.level[magnitude];
      sum_yw += y[j] * w;
      sum_ww += w * w;
      index[j] = y[j] < 0 ? table.num_magnitudes - 1 - magnitude : table.num_magnitudes + magnitude;
    }
    float alpha =
        static_cast<float>(sum_yw) / (static_cast<float>(sum_ww) * static_cast<float>(dim));
    if (format_.scale == TqScale::kUnbiased) {
      alpha =
          std::min(static_cast<float>(sum_qq) / static_cast<float>(sum_yw), table.clamp * alpha);
    }
    const int log2 = exponent - 10 + table.scale_log2 + FloorLog2(dim) / 2;
    return FloatToF16(alpha * std::ldexp(1.0f, log2));
  }

 private:
  std::vector<int> Shuffled(int n) {
    std::vector<int> order(n);
    for (int i = 0; i < n; ++i) order[i] = i;
    for (int i = n - 1; i > 0; --i) std::swap(order[i], order[rng_.Below(i + 1)]);
    return order;
  }
  int Entry(int row, int column) const {
    const int order = PaleyOrder(format_.dim);
    const int sylvester = format_.dim / order;
    const int sign = __builtin_parity((row % sylvester) & (column % sylvester)) != 0 ? -1 : 1;
    return order == 1 ? sign
                      : sign * PaleyMatrix(order)[row / sylvester * order + column / sylvester];
  }

  TqFormat format_;
  testing::Rng rng_;
};

TEST(CodecExactness, OrderOfSummationDoesNotMatter) {
  testing::Rng rng(5);
  for (int dim : {64, 80, 96, 112, 128, 576}) {
    for (int bits : {2, 3, 4}) {
      for (Role role : {Role::kKey, Role::kValue}) {
        for (TqScale scale : {TqScale::kLeastSquares, TqScale::kUnbiased}) {
          const TqFormat format{.bits = bits, .dim = dim, .role = role, .scale = scale};
          std::vector<int32_t> q(dim);
          for (int32_t& value : q) value = static_cast<int32_t>(rng.Gaussian() * 600) % 2048;
          std::vector<std::byte> codes(dim * bits / 8);
          const uint16_t want = EncodeTqInts(format, q.data(), 1, codes.data());
          for (uint64_t seed = 1; seed <= 3; ++seed) {
            std::vector<int> index;
            ASSERT_EQ(ShuffledEncoder(format, seed).Encode(q, 1, index), want)
                << dim << " " << bits;
            for (int i = 0; i < dim; ++i) {
              ASSERT_EQ(TqCodeAt(bits, dim, codes.data(), i), index[i])
                  << dim << " " << bits << " " << i;
            }
          }
        }
      }
    }
  }
}

TEST(Hadamard, SignsAndPaleyRowsAreThoseOfTheDefinition) {
  const auto signs = [](Role role) {
    std::string text;
    for (int i = 0; i < 16; ++i) text += IsMinusSign(role, i) ? '-' : '+';
    return text;
  };
  EXPECT_EQ(signs(Role::kKey), "-+-+-++-+---+--+");
  EXPECT_EQ(signs(Role::kValue), "+++-+++-----+---");
  std::string row;
  for (int j = 0; j < 12; ++j) row += PaleyMatrix(12)[12 + j] < 0 ? '-' : '+';
  EXPECT_EQ(row, "-+-+---+++-+");
}

TEST(Hadamard, EveryPaleyMatrixIsOrthogonalAndTheTransformsAreInverse) {
  for (int order : {12, 20, 28, 36}) {
    const int8_t* p = PaleyMatrix(order);
    for (int i = 0; i < order; ++i) {
      for (int k = 0; k < order; ++k) {
        int dot = 0;
        for (int j = 0; j < order; ++j) dot += p[i * order + j] * p[k * order + j];
        EXPECT_EQ(dot, i == k ? order : 0) << order << " rows " << i << " " << k;
      }
    }
  }
  testing::Rng rng(3);
  for (int dim = 1; dim <= 5000; ++dim) {
    if (PaleyOrder(dim) == 0) continue;
    std::vector<int32_t> x(dim), y;
    for (int32_t& value : x) value = static_cast<int32_t>(rng.Below(127)) - 63;
    y = x;
    HadamardTransform(y.data(), dim, Transposed::kNo);
    HadamardTransform(y.data(), dim, Transposed::kYes);
    for (int i = 0; i < dim; ++i) ASSERT_EQ(y[i], dim * x[i]) << dim;
  }
}

TEST(Hadamard, DimsAreThePowersOfTwoAndThePaleyOnes) {
  std::set<int> dims;
  for (int dim = -1; dim <= 10000; ++dim) {
    if (PaleyOrder(dim) != 0) dims.insert(dim);
  }
  EXPECT_EQ(dims, (std::set<int>{8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576,
                                 1024, 2048, 4096}));
}

}  // namespace
}  // namespace kvstow
