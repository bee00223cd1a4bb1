// RopeTurn: key rows that were rotated for one position, turned to another, so that a block can be
// used again where its tokens stand elsewhere in the prompt.
//
//   KVSTOW_ASSIGN_OR_RETURN(RopeTurn turn, RopeTurn::Create({.theta = 1e5}, /*dim=*/64, delta));
//   KVSTOW_RETURN_IF_ERROR(turn.Apply(DType::kBf16, num_tokens, rows, rows));
//
// RoPE (Su et al., arXiv:2104.09864) rotates pair i of a row at position p by the angle
// p * theta^(-2i / rotary_dim); here p is `delta`. Angle, cosine and sine are taken in double; the
// pair is turned in fp32, each operation rounded once, then rounded to the dtype. Scaled forms
// (YaRN, "llama3", NTK by length) have other angles: this is not for them.
//
// Exact: delta 0 gives every byte back, and values from rotary_dim on are never touched. Else each
// value is off by at most the rounding of its dtype, of the pair's length: 2^-8 of it for bf16,
// 2^-11 for fp16 (2^-25 where they are subnormal), 2^-22 for fp32. Turning by d and then by -d is
// off by twice that. What a position does to keys beyond RoPE (they saw other tokens before them)
// no turn can undo: that is the caller's to judge.
//
// Thread safety: immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/dtype.h"

namespace kvstow {

enum class RopePairs : uint8_t {
  kHalf,         // GPT-NeoX, Llama in transformers: values i and i + rotary_dim / 2
  kInterleaved,  // GPT-J: values 2i and 2i + 1
};

struct RopeParams {
  RopePairs pairs = RopePairs::kHalf;
  double theta = 10000;    // the base, above 0
  int32_t rotary_dim = 0;  // how many leading values of a row are rotated, even; 0: all
};

class RopeTurn {
 public:
  // By `delta` positions, of either sign, for rows of `dim` values. kInvalidArgument: a theta that
  // is not finite and positive, a rotary_dim that is odd, negative or larger than dim.
  static absl::StatusOr<RopeTurn> Create(const RopeParams& params, int32_t dim, int32_t delta);

  // Turns [num_rows, dim] of `in` to `out`: the same memory, or such that does not overlap; no
  // alignment is assumed.
  //   kInvalidArgument  a dtype that is not bf16, f16 or f32
  //   kOutOfRange       a turned value is not finite: which one, in which row. `out` holds nothing
  //                     of use then; turn to other memory where the rows are still needed
  absl::Status Apply(DType dtype, int64_t num_rows, const std::byte* in, std::byte* out) const;

 private:
  RopeTurn() = default;

  int32_t dim_ = 0;
  int32_t delta_ = 0;
  RopePairs pairs_ = RopePairs::kHalf;
  std::vector<float> cos_;  // [rotary_dim / 2]
  std::vector<float> sin_;
};

}  // namespace kvstow
