// The CUDA kernels, emulated, against golden vectors that independent code wrote.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "device_kernels_emu.h"
#include "kernels/codec/device_plan.h"
#include "kernels/core/dtype.h"

namespace kvstow::testing {
namespace {

using nlohmann::json;

std::vector<std::byte> Bytes(const json& hex) {
  const std::string raw = absl::HexStringToBytes(hex.get<std::string>());
  std::vector<std::byte> bytes(raw.size());
  std::memcpy(bytes.data(), raw.data(), raw.size());
  return bytes;
}

// The parts of a case in plane order: scales, mean scale and means, codes.
bool PlaneEquals(const json& c, const DeviceParams& params, const std::vector<std::byte>& plane) {
  const auto matches = [&](const std::vector<std::byte>& want, int32_t offset) {
    return std::memcmp(plane.data() + offset, want.data(), want.size()) == 0;
  };
  bool ok = matches(Bytes(c["scales_fp16"]), 0) && matches(Bytes(c["codes"]), params.code_offset);
  if (params.has_mean) {
    ok &= matches(Bytes(c["mean_scale_fp16"]), params.mean_offset);
    ok &= matches(Bytes(c["means_int8"]), params.mean_offset + 2);
  }
  return ok;
}

bool RunCase(const json& c, const std::vector<std::byte>& rows) {
  DeviceParams params;
  params.num_tokens = c["rows"].get<int>();
  params.dim = c["head_dim"].get<int>();
  params.dtype = static_cast<int32_t>(DType::kBf16);
  const DeviceCodec codec{.bits = c["bits"].get<int>(), .has_mean = c["family"] == "tqm"};
  const Role role = c["role"] == "K" ? Role::kKey : Role::kValue;
  if (!MakeDeviceParams(codec, role, params)) return false;
  params.is_unbiased = c["scale"] == "unbiased" ? 1 : 0;
  std::vector<std::byte> plane(params.plane_bytes);
  if (EmulatedEncode(params, rows.data(), rows.size(), plane.data())) return false;
  if (!PlaneEquals(c, params, plane)) return false;
  std::vector<std::byte> decoded(rows.size());
  EmulatedDecode(params, plane.data(), decoded.data(), decoded.size());
  return decoded == Bytes(c["decoded_bf16"]);
}

int RunAll() {
  std::ifstream file(std::string(KVSTOW_TEST_DATA) + "/golden_integer.json");
  const json golden = json::parse(file);
  std::map<std::pair<int, std::string>, std::vector<std::byte>> inputs;
  int passed = 0, failed = 0;
  for (const json& c : golden["cases"]) {
    if (!c.contains("input")) continue;
    inputs[{c["input"].get<int>(), c["kind"].get<std::string>()}] = Bytes(c["x_bf16"]);
  }
  for (const json& c : golden["cases"]) {
    if (c.contains("input") || (c["family"] != "tq" && c["family"] != "tqm")) continue;
    const std::string kind = c.value("kind", "rows");
    const bool ok = RunCase(c, inputs.at({c["head_dim"].get<int>(), kind}));
    ok ? ++passed : ++failed;
    if (!ok) std::printf("FAIL %s %s\n", kind.c_str(), c["family"].get<std::string>().c_str());
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed == 213 ? 0 : 1;  // 66 of tq and 147 of tqm
}

}  // namespace
}  // namespace kvstow::testing

int main() { return kvstow::testing::RunAll(); }
