// Rows to integers: the first steps of the tq families' Highway backends, for any dtype and dim.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/core/dtype.h"

namespace kvstow {

struct ValueRange {
  bool is_finite = true;
  bool is_zero = false;  // every magnitude is below 2^-40
  int exponent = 0;      // floor(log2) of the largest magnitude, where neither of the above
};

// `count` values of a float dtype; a multiple of 8.
ValueRange RangeOfValues(DType dtype, const std::byte* values, int64_t count);

// ints[i] = rint(x[i] * 2^log2), ties to even. The results fit 16 bits; `count` is a multiple of 8.
void ValuesToInts(DType dtype, const std::byte* values, int64_t count, int log2, int16_t* ints);

}  // namespace kvstow
