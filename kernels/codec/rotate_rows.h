// Dense rotations of a few rows at a time, with Highway: the engine of the calibrated codecs.
// Nothing outside this folder includes it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/codec/int_rows.h"

namespace kvstow {

inline constexpr int kRotatedRows = 4;  // one pass over the matrix serves so many

// out[r][i] = sum over p of pairs[p][i][0] * in[r][2p] + pairs[p][i][1] * in[r][2p + 1], modulo
// 2^32: `pairs` is one of Rotation's two orders, `in` and `out` are [kRotatedRows, dim].
void RotateRows(const int16_t* pairs, int dim, const int16_t* in, int32_t* out);

// Rows of a plane as integers, x = q * 2^(exponent - 10), and rotated.
class RotatedBatch {
 public:
  explicit RotatedBatch(const PlaneShape& shape)
      : shape_(shape), q_(kRotatedRows * shape.dim), y_(kRotatedRows * shape.dim) {}

  // Up to kRotatedRows rows from `first` on. False where one is not finite.
  bool Load(const std::byte* rows, int64_t first, int64_t count);

  const ValueRange& range(int64_t row) const { return range_[row]; }
  const int16_t* q(int64_t row) const { return q_.data() + row * shape_.dim; }
  const int32_t* y(int64_t row) const { return y_.data() + row * shape_.dim; }

 private:
  const PlaneShape& shape_;
  ValueRange range_[kRotatedRows];
  std::vector<int16_t> q_;
  std::vector<int32_t> y_;
};

// values[i] = (float)v[i] * step, rounded to `dtype`. `dim` is a multiple of 8.
void ScaleRow(DType dtype, const int32_t* v, int dim, float step, std::byte* values);

}  // namespace kvstow
