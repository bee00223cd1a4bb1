// The CUDA kernels, emulated, against the scalar reference: equal bytes under shuffled schedules.
//
//   device_kernels_test [number of random schedules]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "device_kernels_emu.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/device_plan.h"
#include "simt.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {
namespace {

constexpr uint64_t kSeed = 20261130;
int passed = 0, failed = 0;

void Check(bool ok, const char* what, const Codec& codec, const PlaneShape& shape, int generator) {
  ok ? ++passed : ++failed;
  if (!ok) {
    std::printf("FAIL %s: %s dim=%d tokens=%d dtype=%d generator=%d seed=%llu\n", what,
                std::string(codec.name).c_str(), shape.dim, shape.num_tokens,
                static_cast<int>(shape.dtype), generator, static_cast<unsigned long long>(kSeed));
  }
}

void Store(const PlaneShape& shape, std::vector<std::byte>& rows, int64_t idx, float value) {
  if (shape.dtype == DType::kF32) {
    std::memcpy(rows.data() + 4 * idx, &value, 4);
    return;
  }
  const uint16_t bits = shape.dtype == DType::kBf16 ? FloatToBf16(value) : FloatToF16(value);
  std::memcpy(rows.data() + 2 * idx, &bits, 2);
}

constexpr int kNumGenerators = 7;

// Rows that have broken such kernels: zero and tiny rows, one dominating value, equal rows, a key
// mean far above the rest, the largest values, a value that is not finite.
std::vector<std::byte> MakeRows(const PlaneShape& shape, int generator) {
  const int64_t num_values = int64_t{shape.num_tokens} * shape.dim;
  std::vector<std::byte> rows(DTypeBytes(shape.dtype, num_values));
  Rng rng(kSeed + 1000003u * generator + 31u * shape.dim + shape.num_tokens);
  for (int64_t i = 0; i < num_values; ++i) {
    const int64_t t = i / shape.dim, j = i % shape.dim;
    double x = rng.Gaussian();
    if (generator == 1) x = t % 3 == 0 ? 0.0 : t % 3 == 1 ? x * 1e-13 : x * 1e-3;
    if (generator == 2 && j == t % shape.dim) x *= 1000;
    if (generator == 3) x = static_cast<double>(j % 5) - 2;
    if (generator == 4) x += 40 * ((j * 7) % 3 - 1);
    if (generator == 5) x = (j + t) % 2 == 0 ? 60000 : -60000;
    if (generator == 6 && i == num_values / 2) x = std::numeric_limits<double>::infinity();
    Store(shape, rows, i, static_cast<float>(x));
  }
  return rows;
}

void Compare(const Codec& codec, const PlaneShape& shape, int generator, int schedules) {
  DeviceParams params;
  params.num_tokens = shape.num_tokens;
  params.dim = shape.dim;
  params.dtype = static_cast<int32_t>(shape.dtype);
  DeviceCodec device;
  const bool has_kernel =
      DeviceCodecOf(codec.id, device) && MakeDeviceParams(device, shape.role, params);
  Check(has_kernel, "has a kernel", codec, shape, generator);
  if (!has_kernel) return;
  Check(params.plane_bytes == codec.plane_bytes(shape), "plane size", codec, shape, generator);
  const std::vector<std::byte> rows = MakeRows(shape, generator);
  std::vector<std::byte> want(params.plane_bytes);
  const EncodeResult result = codec.host[0].encode(shape, rows.data(), want.data());
  std::vector<std::byte> want_rows(rows.size());
  if (result == EncodeResult::kEncoded) {
    codec.host[0].decode(shape, want.data(), want_rows.data());
  }
  simt::for_each_schedule(schedules, [&](const simt::Options&) {
    std::vector<std::byte> got(params.plane_bytes, std::byte{0xcc});
    const bool keep_raw = EmulatedEncode(params, rows.data(), rows.size(), got.data());
    Check(keep_raw == (result == EncodeResult::kKeepRaw), "keep raw", codec, shape, generator);
    if (keep_raw || result == EncodeResult::kKeepRaw) return;
    Check(got == want, "encode", codec, shape, generator);
    std::vector<std::byte> got_rows(rows.size(), std::byte{0xcc});
    EmulatedDecode(params, want.data(), got_rows.data(), got_rows.size());
    Check(got_rows == want_rows, "decode", codec, shape, generator);
  });
}

void CompareShapes(const Codec& codec, int schedules) {
  for (int dim : {64, 80, 96, 112, 128, 192, 256, 576}) {
    for (int num_tokens : {1, 6, 32}) {
      for (int generator = 0; generator < kNumGenerators; ++generator) {
        const DType dtype = generator % 3 == 0   ? DType::kBf16
                            : generator % 3 == 1 ? DType::kF32
                                                 : DType::kF16;
        for (Role role : {Role::kKey, Role::kValue}) {
          const PlaneShape shape{
              .num_tokens = num_tokens, .dim = dim, .role = role, .dtype = dtype};
          // Planes of many rows only where a codec has no others: emulated threads are slow.
          const PlaneShape few{.num_tokens = 6, .dim = dim, .role = role, .dtype = dtype};
          if (!codec.accepts(shape) || (num_tokens == 32 && codec.accepts(few))) continue;
          Compare(codec, shape, generator, schedules);
        }
      }
    }
  }
}

void CompareAll(int schedules) {
  for (const Codec& codec : AllCodecs()) {
    DeviceCodec device;
    const int before = passed;
    if (!DeviceCodecOf(codec.id, device)) continue;
    CompareShapes(codec, schedules);
    std::printf("%s: %d checks\n", std::string(codec.name).c_str(), passed - before);
  }
}

}  // namespace
}  // namespace kvstow::testing

int main(int argc, char** argv) {
  kvstow::testing::CompareAll(argc > 1 ? std::atoi(argv[1]) : 2);
  std::printf("%d passed, %d failed\n", kvstow::testing::passed, kvstow::testing::failed);
  return kvstow::testing::failed == 0 && kvstow::testing::passed > 0 ? 0 : 1;
}
