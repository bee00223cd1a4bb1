// Any bytes may reach a decoder, and any numbers an encoder: they stay within their buffers, which
// end where the heap block ends (the address sanitizer watches), and finite rows never come back
// as something that no bytes stand for. Bundles of rotations are parsed from any bytes.
//
// KVSTOW_FUZZ_SECONDS=N: each decoder takes noise, and then mutated planes, for N seconds instead
// of 60 times each (tests/nightly.sh).
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/codec/calibration.h"
#include "kernels/codec/codec.h"
#include "tests/kernels/plane_rows.h"
#include "tests/kernels/rotation_for.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::Rng;

constexpr uint64_t kSeed = 20261201;

// Exactly `size` bytes of the heap.
struct Block {
  explicit Block(int64_t num_bytes)
      : size(num_bytes), bytes(std::make_unique<std::byte[]>(num_bytes)) {}
  int64_t size;
  std::unique_ptr<std::byte[]> bytes;
  std::byte* data() { return bytes.get(); }
};

// How often one thing is tried on one codec: `for (Tries tries(60); tries.More();)`.
class Tries {
 public:
  explicit Tries(int at_least) : left_(at_least) {
    if (const char* seconds = std::getenv("KVSTOW_FUZZ_SECONDS")) {
      until_ = Clock::now() + std::chrono::seconds(std::atoi(seconds));
    }
  }
  bool More() { return left_-- > 0 || Clock::now() < until_; }

 private:
  using Clock = std::chrono::steady_clock;
  int64_t left_;
  Clock::time_point until_{};
};

PlaneShape RandomShape(Rng& rng, const Codec& codec) {
  const int dims[] = {8, 16, 24, 64, 80, 96, 112, 128, 192};
  const DType dtypes[] = {DType::kBf16, DType::kF16, DType::kF32};
  for (;;) {
    PlaneShape shape{.num_tokens = static_cast<int>(rng.Below(2) == 0 ? 1 + rng.Below(9) : 32),
                     .dim = dims[rng.Below(9)],
                     .role = rng.Below(2) == 0 ? Role::kKey : Role::kValue,
                     .dtype = dtypes[rng.Below(3)]};
    if (codec.needs_rotation) shape.rotation = testing::RotationFor(shape.dim, shape.role);
    if (codec.accepts(shape)) return shape;
  }
}

int64_t RowsBytes(const PlaneShape& shape) {
  return DTypeBytes(shape.dtype, int64_t{shape.num_tokens} * shape.dim);
}

void DecodeAll(const Codec& codec, const PlaneShape& shape, Block& plane) {
  for (const CodecBackend& backend : codec.host) {
    if (!backend.supported()) continue;
    Block rows(RowsBytes(shape));
    backend.decode(shape, plane.data(), rows.data());
  }
}

TEST(CodecFuzz, DecodersTakeNoise) {
  Rng rng(kSeed);
  for (const Codec& codec : AllCodecs()) {
    for (Tries tries(60); tries.More();) {
      const PlaneShape shape = RandomShape(rng, codec);
      Block plane(codec.plane_bytes(shape));
      const auto fill = static_cast<std::byte>(rng.Next());
      const bool is_noise = rng.Below(4) != 0;
      for (int64_t k = 0; k < plane.size; ++k) {
        plane.data()[k] = is_noise ? static_cast<std::byte>(rng.Next()) : fill;
      }
      DecodeAll(codec, shape, plane);
    }
  }
}

TEST(CodecFuzz, DecodersTakeMutatedPlanes) {
  Rng rng(kSeed + 1);
  for (const Codec& codec : AllCodecs()) {
    for (Tries tries(60); tries.More();) {
      const PlaneShape shape = RandomShape(rng, codec);
      const std::vector<std::byte> rows = testing::MakeRows("heavy", shape, rng.Next());
      Block plane(codec.plane_bytes(shape));
      if (BestBackend(codec).encode(shape, rows.data(), plane.data()) == EncodeResult::kKeepRaw) {
        continue;
      }
      for (int k = 0; k < 8; ++k) {
        plane.data()[rng.Below(plane.size)] ^= static_cast<std::byte>(1 << rng.Below(8));
      }
      DecodeAll(codec, shape, plane);
    }
  }
}

// Bits of any kind as rows: an encoder says kKeepRaw, or what it wrote decodes to finite rows.
// Rows near the end of fp16 are left out: an error of theirs may reach infinity.
TEST(CodecFuzz, EncodersTakeAnyBits) {
  Rng rng(kSeed + 2);
  int num_encoded = 0;
  for (const Codec& codec : AllCodecs().subspan(1)) {
    for (int i = 0; i < 60; ++i) {
      const PlaneShape shape = RandomShape(rng, codec);
      Block rows(RowsBytes(shape));
      for (int64_t k = 0; k < rows.size; ++k) rows.data()[k] = static_cast<std::byte>(rng.Next());
      const int64_t num_values = int64_t{shape.num_tokens} * shape.dim;
      bool is_finite = true;
      for (int64_t k = 0; k < num_values; ++k) {
        float x = LoadValue(shape.dtype, rows.data(), k);
        if (rng.Below(2) == 0 || std::fabs(x) > 10000.0f) x = std::isfinite(x) ? 1.5f : x;
        if (i % 2 == 0 && !std::isfinite(x)) x = -2.5f;
        StoreValue(shape.dtype, rows.data(), k, x);
        is_finite = is_finite && std::isfinite(x);
      }
      for (const CodecBackend& backend : codec.host) {
        if (!backend.supported()) continue;
        Block plane(codec.plane_bytes(shape));
        const EncodeResult result = backend.encode(shape, rows.data(), plane.data());
        if (!is_finite) {
          ASSERT_EQ(result, EncodeResult::kKeepRaw) << codec.name << " " << backend.name;
        }
        if (result == EncodeResult::kKeepRaw) continue;
        ++num_encoded;
        Block decoded(RowsBytes(shape));
        backend.decode(shape, plane.data(), decoded.data());
        for (int64_t k = 0; k < num_values; ++k) {
          ASSERT_TRUE(std::isfinite(LoadValue(shape.dtype, decoded.data(), k)))
              << codec.name << " " << backend.name << " value " << k;
        }
      }
    }
  }
  EXPECT_GT(num_encoded, 500);
}

TEST(CodecFuzz, MutatedBundlesAreNeverGoodUnlessTheyAreEqual) {
  Rng rng(kSeed + 3);
  const Digest model = Sha256("a model");
  std::vector<Calibration::Entry> entries;
  for (int layer = 0; layer < 3; ++layer) {
    entries.push_back({{.layer_idx = layer}, Rotation::Reflection(8, layer).value()});
  }
  const std::string good =
      Calibration::Create(model, Sha256("samples"), std::move(entries))->Serialize();
  ASSERT_TRUE(Calibration::Parse(good, model).ok());
  for (int i = 0; i < 20000; ++i) {
    std::string bad = good;
    for (uint64_t k = 1 + rng.Below(3); k > 0; --k) {
      const size_t at = rng.Below(4) == 0 ? rng.Below(bad.size()) : rng.Below(96 + 3 * 32);
      const uint64_t values[] = {0, 1, UINT64_MAX, bad.size(), uint64_t{1} << 31, rng.Next()};
      const uint64_t value = values[rng.Below(6)];
      std::memcpy(bad.data() + at, &value, std::min<size_t>(bad.size() - at, 1u << rng.Below(4)));
    }
    if (rng.Below(8) == 0) bad.resize(rng.Below(bad.size()));
    if (bad.size() > 32 && rng.Below(2) == 0) {  // reach the checks behind the hash
      bad.resize(bad.size() - 32);
      bad.append(Sha256(bad).AsStringView());
    }
    const absl::StatusOr<Calibration> parsed = Calibration::Parse(bad, model);
    if (parsed.ok()) {
      EXPECT_EQ(parsed->Serialize(), bad) << i;
    }
  }
}

}  // namespace
}  // namespace kvstow
