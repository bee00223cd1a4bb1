#include "kernels/codec/device_plan.h"

#include <cstring>

#include "kernels/core/dtype.h"

namespace kvstow {
namespace {

int32_t RoundUp(int32_t value, int32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Legendre symbol of `a` modulo the odd prime `q`, by Euler's criterion.
int LegendreSymbol(int a, int q) {
  a = ((a % q) + q) % q;
  if (a == 0) return 0;
  int64_t power = 1;
  for (int i = 0; i < (q - 1) / 2; ++i) power = power * a % q;
  return power == 1 ? 1 : -1;
}

// Entry (i, j) of the Paley matrix of the given order. Paley I for 12 and 20, Paley II for 28, 36.
int PaleyEntry(int order, int i, int j) {
  if (order == 12 || order == 20) {
    if (i == 0) return 1;
    if (j == 0) return -1;
    return i == j ? 1 : LegendreSymbol(i - j, order - 1);
  }
  const int q = order / 2 - 1;
  const int a = i / 2, b = j / 2, u = i % 2, v = j % 2;
  if (a == b) return u == 0 && v == 0 ? 1 : -1;  // I (x) [[1,-1],[-1,-1]]
  const int s = (a == 0 || b == 0) ? 1 : LegendreSymbol(a - b, q);
  return u == 1 && v == 1 ? -s : s;  // S (x) [[1,1],[1,-1]]
}

// The orders that are used, largest power of two last. 0 where there is none.
int PaleyOrderOf(int dim) {
  if ((dim & (dim - 1)) == 0) return 1;
  for (int order : {12, 20, 28, 36}) {
    if (dim % order != 0) continue;
    const int rest = dim / order;
    if ((rest & (rest - 1)) == 0) return order;
  }
  return 0;
}

void SetLevels(DeviceParams& params) {
  struct Table {
    int32_t g;
    float kappa;
    int32_t level[8];
    float threshold[7];
  };
  static constexpr Table kTables[3] = {
      {3, 1.2464333f, {3, 10}, {0.98159882f}},
      {5, 1.1393624f, {10, 31, 55, 88}, {0.50054973f, 1.04995728f, 1.74792749f}},
      {5,
       1.1105514f,
       {5, 15, 25, 36, 48, 62, 79, 104},
       {0.25822166f, 0.52240370f, 0.79954979f, 1.09928583f, 1.43713879f, 1.84353181f, 2.40080340f}},
  };
  const Table& table = kTables[params.bits - 2];
  params.num_levels = 1 << (params.bits - 1);
  params.kappa = table.kappa;
  std::memcpy(params.level, table.level, sizeof(table.level));
  std::memcpy(params.threshold, table.threshold, sizeof(table.threshold));
  int log2_dim = 0;
  while ((2 << log2_dim) <= params.dim) ++log2_dim;
  params.scale_shift = table.g + log2_dim / 2;
}

void SetRotation(int role, DeviceParams& params) {
  uint64_t state = 42 + static_cast<uint64_t>(role);
  for (int32_t word = 0; word < kDeviceMaxDim / 64; ++word) {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);  // SplitMix64
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    params.sign_minus[2 * word] = static_cast<uint32_t>(z);
    params.sign_minus[2 * word + 1] = static_cast<uint32_t>(z >> 32);
  }
  for (int i = 0; i < params.paley_order && params.paley_order > 1; ++i) {
    for (int j = 0; j < params.paley_order; ++j) {
      if (PaleyEntry(params.paley_order, i, j) < 0) params.paley_minus[i] |= uint64_t{1} << j;
    }
  }
}

}  // namespace

bool DeviceCodecOf(CodecId id, DeviceCodec& codec) {
  switch (id) {
    case CodecId::kInt8:
      codec = {DeviceFamily::kAbsmax, 8};
      return true;
    case CodecId::kInt4:
      codec = {DeviceFamily::kAbsmax, 4};
      return true;
    case CodecId::kKivi4:
      codec = {DeviceFamily::kKivi, 4};
      return true;
    case CodecId::kKivi2:
      codec = {DeviceFamily::kKivi, 2};
      return true;
    case CodecId::kTq4:
    case CodecId::kTq3:
    case CodecId::kTq2:
      codec = {DeviceFamily::kHadamard,
               4 - (static_cast<int>(id) - static_cast<int>(CodecId::kTq4))};
      return true;
    case CodecId::kTqm4:
    case CodecId::kTqm3:
    case CodecId::kTqm2:
      codec = {DeviceFamily::kHadamard,
               4 - (static_cast<int>(id) - static_cast<int>(CodecId::kTqm4)), /*has_mean=*/true};
      return true;
    default:
      return false;
  }
}

bool MakeDeviceParams(const DeviceCodec& codec, Role role, DeviceParams& params) {
  if (!IsFloatDType(static_cast<DType>(params.dtype))) return false;
  if (params.num_tokens < 1 || params.dim < 8 || params.dim % 8 != 0) return false;
  if (params.dim > kDeviceMaxDim) return false;
  const bool is_key = role == Role::kKey;
  params.family = codec.family;
  params.bits = codec.bits;
  params.is_key = is_key ? 1 : 0;
  params.has_mean = codec.has_mean ? 1 : 0;
  params.is_unbiased = codec.has_mean || !is_key ? 1 : 0;
  int32_t head_bytes = 2 * params.num_tokens + (codec.has_mean ? 2 + params.dim : 0);
  params.mean_offset = 2 * params.num_tokens;
  if (codec.family == DeviceFamily::kHadamard) {
    params.paley_order = PaleyOrderOf(params.dim);
    if (params.paley_order == 0) return false;
    params.sylvester_order = params.dim / params.paley_order;
    SetLevels(params);
    SetRotation(static_cast<int>(role), params);
  } else if (codec.family == DeviceFamily::kKivi) {
    if (params.dim % 16 != 0 || (is_key && params.num_tokens % 32 != 0)) return false;
    const int32_t num_groups =
        is_key ? params.num_tokens / 32 * params.dim : params.num_tokens * ((params.dim + 31) / 32);
    params.mean_offset = 2 * num_groups;
    head_bytes = 4 * num_groups;
  }
  params.code_offset = RoundUp(head_bytes, 16);
  params.code_row_bytes = params.dim * codec.bits / 8;
  params.plane_bytes = RoundUp(params.code_offset + params.num_tokens * params.code_row_bytes, 64);
  return true;
}

}  // namespace kvstow
