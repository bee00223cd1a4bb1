// int8: per-row absmax with an fp16 scale, the plain baseline. 8.125 bits per value at dim 128.
//
// This header is the definition; any float dtype, any dim. Plane: num_tokens fp16 scales, zeros to
// a multiple of 16, num_tokens rows of dim int8, zeros to a multiple of 64. Source: textbook
// symmetric quantization; the scale's precision is ours.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/codec/codec.h"
#include "kernels/codec/rows.h"

namespace kvstow {

struct Int8Layout {
  Int8Layout(int64_t num_tokens, int64_t dim)
      : codes_at(AlignUp(2 * num_tokens, 16)),
        plane_bytes(AlignUp(codes_at + num_tokens * dim, 64)) {}

  int64_t codes_at;
  int64_t plane_bytes;
};

// fp16 of the fp32 quotient. 0 makes a zero row; kF16Infinity does not fit.
inline uint16_t Int8Scale(float max_magnitude) { return FloatToF16(max_magnitude / 127.0f); }

// Divides by the stored scale: a product with its rounded reciprocal would move values on a tie.
// The clamp acts where the fp16 scale was rounded down.
inline int8_t Int8Code(float x, float scale) {
  return static_cast<int8_t>(std::min(std::max(std::rint(x / scale), -127.0f), 127.0f));
}

EncodeResult EncodeInt8Scalar(const PlaneShape& shape, const std::byte* rows, std::byte* plane);
void DecodeInt8Scalar(const PlaneShape& shape, const std::byte* plane, std::byte* rows);

EncodeResult EncodeInt8Highway(const PlaneShape& shape, const std::byte* rows, std::byte* plane);
void DecodeInt8Highway(const PlaneShape& shape, const std::byte* plane, std::byte* rows);

}  // namespace kvstow
