// Scalar backend of int8: the definition of int8.h over a whole plane.
#include "kernels/codec/int8.h"

namespace kvstow {

EncodeResult EncodeInt8Scalar(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  const int64_t dim = shape.dim;
  const Int8Layout layout(shape.num_tokens, dim);
  std::memset(plane, 0, layout.plane_bytes);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const float max = MaxMagnitude(shape.dtype, rows, t * dim, dim);
    if (std::isnan(max)) return EncodeResult::kKeepRaw;
    const uint16_t scale = Int8Scale(max);
    if (scale == kF16Infinity) return EncodeResult::kKeepRaw;
    if (scale == 0) continue;
    StoreU16(plane + 2 * t, scale);
    for (int64_t i = 0; i < dim; ++i) {
      plane[layout.codes_at + t * dim + i] = static_cast<std::byte>(
          Int8Code(LoadValue(shape.dtype, rows, t * dim + i), F16ToFloat(scale)));
    }
  }
  return EncodeResult::kEncoded;
}

void DecodeInt8Scalar(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  const int64_t dim = shape.dim;
  const Int8Layout layout(shape.num_tokens, dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const float scale = F16ToFloat(LoadU16(plane + 2 * t));
    for (int64_t i = 0; i < dim; ++i) {
      const auto code = std::to_integer<int8_t>(plane[layout.codes_at + t * dim + i]);
      StoreValue(shape.dtype, rows, t * dim + i, static_cast<float>(code) * scale);
    }
  }
}

}  // namespace kvstow
