// Scalar backend of olm and osu2: the definition of olm.h over a whole plane.
#include <algorithm>

#include "kernels/codec/olm.h"

namespace kvstow {
namespace {

// Magnitudes of a row for the thresholds `threshold`, and their sums.
OlmSums Quantize(const TqTable& table, const float* threshold, const std::vector<int32_t>& y,
                 std::vector<uint8_t>& index) {
  OlmSums sums;
  for (size_t j = 0; j < y.size(); ++j) {
    const float magnitude_of_y = static_cast<float>(std::abs(y[j]));
    int magnitude = 0;
    while (magnitude + 1 < table.num_magnitudes && magnitude_of_y >= threshold[magnitude]) {
      ++magnitude;
    }
    const int level = table.level[magnitude];
    sums.yw += int64_t{std::abs(y[j])} * level;
    sums.ww += level * level;
    index[j] = static_cast<uint8_t>(y[j] < 0 ? table.num_magnitudes - 1 - magnitude
                                             : table.num_magnitudes + magnitude);
  }
  return sums;
}

}  // namespace

uint16_t EncodeOlmInts(const OlmFormat& format, const int32_t* q, int exponent, std::byte* codes) {
  const TqTable& table = OlmTableOf(format.bits);
  const int dim = format.shape.dim;
  const std::vector<int32_t> y = RotateForward(*format.shape.rotation, q);
  int64_t sum_qq = 0;
  for (int i = 0; i < dim; ++i) sum_qq += int64_t{q[i]} * q[i];
  const float rms = OlmRms(sum_qq, dim);

  std::vector<uint8_t> index(dim);
  OlmSums sums;
  if (format.bits == 2) {
    double best_score = -1;
    std::vector<uint8_t> candidate(dim);
    for (const float step : kOsuSteps) {
      const float threshold = step * rms;
      const OlmSums candidate_sums = Quantize(table, &threshold, y, candidate);
      if (OsuScore(candidate_sums) <= best_score) continue;  // the first wins ties
      best_score = OsuScore(candidate_sums);
      sums = candidate_sums;
      index = candidate;
    }
  } else {
    float threshold[7];
    for (int k = 0; k + 1 < table.num_magnitudes; ++k) threshold[k] = table.threshold[k] * rms;
    sums = Quantize(table, threshold, y, index);
  }
  sums.qq = sum_qq;
  const uint16_t scale = OlmScale(format, sums, exponent);
  if (scale == 0) {
    std::memset(codes, 0, dim * format.bits / 8);
  } else {
    PackTqCodes(format.bits, dim, index.data(), codes);
  }
  return scale;
}

EncodeResult EncodeOlmScalar(const OlmFormat& format, const std::byte* rows, std::byte* plane) {
  const PlaneShape& shape = format.shape;
  const TqLayout layout = format.layout();
  std::memset(plane, 0, layout.plane_bytes);
  std::vector<int32_t> q(shape.dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const float max = MaxMagnitude(shape.dtype, rows, t * shape.dim, shape.dim);
    if (std::isnan(max)) return EncodeResult::kKeepRaw;
    if (max < kTqZeroBelow) continue;
    const int exponent = std::ilogb(max);
    for (int64_t i = 0; i < shape.dim; ++i) {
      const float x = LoadValue(shape.dtype, rows, t * shape.dim + i);
      q[i] = ScaledInt(x, kTqRowBits, exponent);
    }
    const uint16_t scale = EncodeOlmInts(format, q.data(), exponent,
                                         plane + layout.codes_at + t * layout.row_code_bytes);
    if (scale == kF16Infinity) return EncodeResult::kKeepRaw;
    StoreU16(plane + 2 * t, scale);
  }
  return EncodeResult::kEncoded;
}

void DecodeOlmScalar(const OlmFormat& format, const std::byte* plane, std::byte* rows) {
  const PlaneShape& shape = format.shape;
  const TqTable& table = OlmTableOf(format.bits);
  const TqLayout layout = format.layout();
  std::vector<int32_t> w(shape.dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const std::byte* codes = plane + layout.codes_at + t * layout.row_code_bytes;
    const uint16_t scale = LoadU16(plane + 2 * t);
    for (int j = 0; j < shape.dim; ++j) {
      const int index = TqCodeAt(format.bits, shape.dim, codes, j);
      const int level = index < table.num_magnitudes
                            ? -table.level[table.num_magnitudes - 1 - index]
                            : table.level[index - table.num_magnitudes];
      w[j] = scale == 0 ? 0 : level;
    }
    const std::vector<int32_t> v = RotateBack(*shape.rotation, w.data());
    const float step = std::ldexp(F16ToFloat(scale), -OlmScaleLog2(format.bits));
    for (int i = 0; i < shape.dim; ++i) {
      StoreValue(shape.dtype, rows, t * shape.dim + i, static_cast<float>(v[i]) * step);
    }
  }
}

}  // namespace kvstow
