// Scalar backend of int4: the definition of int4.h over a whole plane.
#include "kernels/codec/int4.h"

namespace kvstow {

EncodeResult EncodeInt4Scalar(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  const int64_t dim = shape.dim;
  const Int4Layout layout(shape.num_tokens, dim);
  std::memset(plane, 0, layout.plane_bytes);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const float max = MaxMagnitude(shape.dtype, rows, t * dim, dim);
    if (std::isnan(max)) return EncodeResult::kKeepRaw;
    const uint16_t scale = Int4Scale(max);
    if (scale == kF16Infinity) return EncodeResult::kKeepRaw;
    if (scale == 0) continue;
    StoreU16(plane + 2 * t, scale);
    std::byte* codes = plane + layout.codes_at + t * layout.row_code_bytes;
    for (int64_t i = 0; i < dim; ++i) {
      const float x = LoadValue(shape.dtype, rows, t * dim + i);
      StoreInt4Code(codes, i, Int4Code(x, F16ToFloat(scale)));
    }
  }
  return EncodeResult::kEncoded;
}

void DecodeInt4Scalar(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  const int64_t dim = shape.dim;
  const Int4Layout layout(shape.num_tokens, dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const float scale = F16ToFloat(LoadU16(plane + 2 * t));
    const std::byte* codes = plane + layout.codes_at + t * layout.row_code_bytes;
    for (int64_t i = 0; i < dim; ++i) {
      const float value = static_cast<float>(Int4CodeAt(codes, i)) * scale;
      StoreValue(shape.dtype, rows, t * dim + i, value);
    }
  }
}

}  // namespace kvstow
