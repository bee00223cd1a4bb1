// int4: per-row absmax with an fp16 scale, the plain 4-bit baseline. 4.125 bits per value at dim
// 128.
//
// This header is the definition; any float dtype, any dim. Plane: num_tokens fp16 scales, zeros to
// a multiple of 16, num_tokens rows of codes, zeros to a multiple of 64. A code is a signed nibble,
// the first value in the low one; a row of odd dim ends in a zero nibble. Encoders write -7 to 7;
// decoders take -8 too. Source: textbook symmetric quantization; the scale's precision is ours.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/codec/codec.h"
#include "kernels/codec/rows.h"

namespace kvstow {

struct Int4Layout {
  Int4Layout(int64_t num_tokens, int64_t dim)
      : row_code_bytes((dim + 1) / 2),
        codes_at(AlignUp(2 * num_tokens, 16)),
        plane_bytes(AlignUp(codes_at + num_tokens * row_code_bytes, 64)) {}

  int64_t row_code_bytes;
  int64_t codes_at;
  int64_t plane_bytes;
};

// fp16 of the fp32 quotient. 0 makes a zero row; kF16Infinity does not fit.
inline uint16_t Int4Scale(float max_magnitude) { return FloatToF16(max_magnitude / 7.0f); }

// Divides by the stored scale. The clamp acts where the fp16 scale was rounded down.
inline int Int4Code(float x, float scale) {
  return static_cast<int>(std::min(std::max(std::rint(x / scale), -7.0f), 7.0f));
}

// The code of value `i` in its row.
inline int Int4CodeAt(const std::byte* codes, int64_t i) {
  const int nibble = (std::to_integer<int>(codes[i / 2]) >> (4 * (i % 2))) & 15;
  return nibble < 8 ? nibble : nibble - 16;
}

inline void StoreInt4Code(std::byte* codes, int64_t i, int code) {
  codes[i / 2] |= static_cast<std::byte>((code & 15) << (4 * (i % 2)));
}

EncodeResult EncodeInt4Scalar(const PlaneShape& shape, const std::byte* rows, std::byte* plane);
void DecodeInt4Scalar(const PlaneShape& shape, const std::byte* plane, std::byte* rows);

EncodeResult EncodeInt4Highway(const PlaneShape& shape, const std::byte* rows, std::byte* plane);
void DecodeInt4Highway(const PlaneShape& shape, const std::byte* plane, std::byte* rows);

}  // namespace kvstow
