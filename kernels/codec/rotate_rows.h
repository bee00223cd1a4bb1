// Dense rotations of a few rows at a time, with Highway: what the decoders of the calibrated codecs
// end with; their encoders begin with rotate_lanes-inl.h.
// Nothing outside this folder includes it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/core/dtype.h"

namespace kvstow {

inline constexpr int kRotatedRows = 4;  // one pass over the matrix serves so many

// out[r][i] = sum over p of pairs[p][i][0] * in[r][2p] + pairs[p][i][1] * in[r][2p + 1], modulo
// 2^32: `pairs` is one of Rotation's two orders, `in` and `out` are [kRotatedRows, dim].
void RotateRows(const int16_t* pairs, int dim, const int16_t* in, int32_t* out);

// values[i] = (float)v[i] * step, rounded to `dtype`. `dim` is a multiple of 8.
void ScaleRow(DType dtype, const int32_t* v, int dim, float step, std::byte* values);

}  // namespace kvstow
