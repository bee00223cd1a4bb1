// Rows from one float dtype to another, for engines that keep their KV in unlike ones.
//
//   KVSTOW_RETURN_IF_ERROR(ConvertRows(DType::kBf16, DType::kF16, num_tokens * dim, rows, out));
//
// Each value is rounded once, to the nearest, ties to even; subnormals are kept; infinities and
// NaNs stay what they are. What is exact: to fp32 all; bf16 to fp16 what is 0 or from 2^-17 (the
// eight bits of bf16 then end at 2^-24, the last of fp16) to 65280 in magnitude; fp16 to bf16 only
// values of eight significant bits. fp16 to bf16 always fits: 65504 becomes 65536.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/core/dtype.h"

namespace kvstow {

// `num_values` values of `from` at `in` to values of `to` at `out`; no alignment is assumed. The
// two do not overlap, but may be the same memory where a value has the same size in both.
//   kInvalidArgument  a dtype that is not bf16, f16 or f32
//   kOutOfRange       a finite value does not fit: which one. `out` holds nothing of use then, and
//                     the rows cannot be had in this dtype
absl::Status ConvertRows(DType from, DType to, int64_t num_values, const std::byte* in,
                         std::byte* out);

}  // namespace kvstow
