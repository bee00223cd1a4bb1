// The backend of tq_prod: the definition of tq_prod.h over a whole plane.
#include "kernels/codec/tq_prod.h"

namespace kvstow {
namespace {

constexpr double kSqrtHalfPi = 1.2533141373155003;

bool IsMinusSecondSign(Role role, int value_idx) {
  const uint64_t seed = 44 + static_cast<uint64_t>(role);
  return ((SplitMix64At(seed, value_idx / 64) >> (value_idx % 64)) & 1) != 0;
}

// The signed level of an index.
int LevelOf(const TqTable& table, int index) {
  return index < table.num_magnitudes ? -table.level[table.num_magnitudes - 1 - index]
                                      : table.level[index - table.num_magnitudes];
}

// The stored size of what the first stage misses; `signs` receives its sketch.
uint16_t EncodeRest(const TqProdFormat& format, const int32_t* q, int exponent, uint16_t scale,
                    std::byte* codes) {
  const int dim = format.shape.dim;
  const TqFormat first = format.first();
  const TqTable& table = TqTableOf(first.bits);
  std::vector<int32_t> y(q, q + dim);
  ApplySigns(first.role, y.data(), dim);
  HadamardTransform(y.data(), dim, Transposed::kNo);
  const double beta = std::ldexp(static_cast<double>(F16ToFloat(scale)),
                                 kTqRowBits - exponent - TqScaleLog2(first.bits, dim)) *
                      dim;
  std::vector<double> rest(dim);
  double energy = 0;
  for (int j = 0; j < dim; ++j) {
    const int level = scale == 0 ? 0 : LevelOf(table, TqCodeAt(first.bits, dim, codes, j));
    rest[j] = static_cast<double>(y[j]) - static_cast<double>(level) * beta;
    energy += rest[j] * rest[j];
  }
  for (int j = 0; j < dim; ++j) {
    if (IsMinusSecondSign(first.role, j)) rest[j] = -rest[j];
  }
  HadamardTransform(rest.data(), dim, Transposed::kNo);
  const uint16_t size =
      FloatToF16(static_cast<float>(std::ldexp(std::sqrt(energy) / dim, exponent - kTqRowBits)));
  for (int j = 0; j < dim && size != 0; ++j) {
    if (rest[j] < 0) codes[format.signs_at() + j / 8] |= static_cast<std::byte>(1 << (j % 8));
  }
  return size;
}

void DecodeRow(const TqProdFormat& format, const std::byte* scales, const std::byte* codes,
               double* z) {
  const int dim = format.shape.dim;
  const TqFormat first = format.first();
  const TqTable& table = TqTableOf(first.bits);
  std::vector<int32_t> v(dim);
  for (int j = 0; j < dim; ++j) {
    const int byte = std::to_integer<int>(codes[format.signs_at() + j / 8]);
    v[j] = ((byte >> (j % 8)) & 1) != 0 ? -1 : 1;
  }
  HadamardTransform(v.data(), dim, Transposed::kYes);
  const double step =
      std::ldexp(static_cast<double>(F16ToFloat(LoadU16(scales))), -TqScaleLog2(first.bits, dim));
  const double rest = kSqrtHalfPi / dim * static_cast<double>(F16ToFloat(LoadU16(scales + 2)));
  for (int j = 0; j < dim; ++j) {
    const int level = LevelOf(table, TqCodeAt(first.bits, dim, codes, j));
    z[j] = step * level + rest * (IsMinusSecondSign(first.role, j) ? -v[j] : v[j]);
  }
  HadamardTransform(z, dim, Transposed::kYes);
}

}  // namespace

EncodeResult EncodeTqProdScalar(const TqProdFormat& format, const std::byte* rows,
                                std::byte* plane) {
  const PlaneShape& shape = format.shape;
  std::memset(plane, 0, format.plane_bytes());
  std::vector<int32_t> q(shape.dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const float max = MaxMagnitude(shape.dtype, rows, t * shape.dim, shape.dim);
    if (std::isnan(max)) return EncodeResult::kKeepRaw;
    if (max < kTqZeroBelow) continue;
    const int exponent = std::ilogb(max);
    for (int i = 0; i < shape.dim; ++i) {
      const float x = LoadValue(shape.dtype, rows, t * shape.dim + i);
      q[i] = ScaledInt(x, kTqRowBits, exponent);
    }
    std::byte* codes = plane + format.codes_at() + t * format.row_code_bytes();
    const uint16_t scale = EncodeTqInts(format.first(), q.data(), exponent, codes);
    if (scale == kF16Infinity) return EncodeResult::kKeepRaw;
    const uint16_t rest = EncodeRest(format, q.data(), exponent, scale, codes);
    if (rest == kF16Infinity) return EncodeResult::kKeepRaw;
    StoreU16(plane + 4 * t, scale);
    StoreU16(plane + 4 * t + 2, rest);
  }
  return EncodeResult::kEncoded;
}

void DecodeTqProdScalar(const TqProdFormat& format, const std::byte* plane, std::byte* rows) {
  const PlaneShape& shape = format.shape;
  std::vector<double> z(shape.dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const std::byte* codes = plane + format.codes_at() + t * format.row_code_bytes();
    DecodeRow(format, plane + 4 * t, codes, z.data());
    for (int j = 0; j < shape.dim; ++j) {
      const bool minus = IsMinusSign(shape.role, j);
      // + 0: -0 becomes +0.
      const float value = static_cast<float>(minus ? -z[j] : z[j]) + 0.0f;
      StoreValue(shape.dtype, rows, t * shape.dim + j, value);
    }
  }
}

}  // namespace kvstow
