// raw: the rows, byte for byte. For what must not change: already quantized dtypes, opaque records,
// planes with values that are not finite, the first block of a prefix. Any dtype, any dim.
//
// The plane is the rows without padding; where it lies in a record is the record's matter.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/codec/codec.h"

namespace kvstow {

inline int64_t RawBytes(const PlaneShape& shape) {
  return DTypeBytes(shape.dtype, int64_t{shape.num_tokens} * shape.dim);
}

inline EncodeResult EncodeRaw(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  std::memcpy(plane, rows, RawBytes(shape));
  return EncodeResult::kEncoded;
}

inline void DecodeRaw(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  std::memcpy(rows, plane, RawBytes(shape));
}

}  // namespace kvstow
