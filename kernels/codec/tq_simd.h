// How the Highway backends of tq and tqm are put together. Nothing outside this folder includes it.
//
// Two engines do the work of a row; each is written for Highway once and compiled per instruction
// set.
//
// Lanes: one row per SIMD lane, 32-bit integers; any dim, dtype and width. Butterflies never cross
// lanes, and Paley matrices are as easy as Sylvester's.
//
// Blocks: one row per 128-bit block of a register, 16-bit integers; bf16 at dims 64 and 128 (decode
// also 256), several times faster. Rows that overflow 16 bits are handed to the lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/codec/tq.h"

namespace kvstow {

// How the means of a plane are coded: the scale of their codes, and the exponent of the plane's
// integers.
struct MeanScale {
  float scale;
  int32_t exponent;
};

struct TqPlane {
  TqFormat format;
  bool has_means;
  int64_t num_tokens;
  TqLayout layout{format.bits, has_means, num_tokens, format.dim};

  std::byte* codes(std::byte* plane, int64_t row_idx) const {
    return plane + layout.codes_at + row_idx * layout.row_code_bytes;
  }
  const std::byte* codes(const std::byte* plane, int64_t row_idx) const {
    return plane + layout.codes_at + row_idx * layout.row_code_bytes;
  }
};

// Zeros what lies between and behind the parts.
void ClearTqPadding(const TqPlane& plane, std::byte* bytes);

// Decodes all rows by the fastest engine. `means` is [dim], added to every row, or nullptr.
void DecodeTqPlane(const TqPlane& plane, DType dtype, const float* means, const std::byte* bytes,
                   std::byte* rows);

// Lanes.
// x = q * 2^(exponent - kTqRowBits), |q| <= 2^11, not all 0.
struct TqIntRow {
  const int16_t* q;  // [dim]
  int32_t exponent;
  std::byte* codes;  // dim * bits / 8 bytes
  std::byte* scale;  // two bytes
};

// Writes the codes and scales of `rows`. False where a scale is infinite: the plane stays raw.
bool EncodeTqLanes(const TqFormat& format, absl::Span<const TqIntRow> rows);

struct TqCodeRow {
  uint16_t scale;
  const std::byte* codes;
  std::byte* values;  // [dim] of the output dtype
};

void DecodeTqLanes(const TqFormat& format, DType dtype, const float* means,
                   absl::Span<const TqCodeRow> rows);

// Blocks.
bool CanEncodeTqBlocks(DType dtype, int dim);
bool CanDecodeTqBlocks(DType dtype, int dim);

// What a plane is encoded from.
struct TqBlockInput {
  // [num_tokens, dim] of 16 bits: bf16; in mean form integers p with
  // x = p * 2^(exponent - kTqmPlaneBits).
  const std::byte* rows;
  // Mean form: [dim], what the decoder will add, in units of p.
  const int16_t* means = nullptr;
  int32_t exponent = 0;
  // What will be read next, as far as one can guess: the memory behind the plane's rows. Fetched
  // ahead, never read; an address that is not there does no harm.
  const std::byte* ahead = nullptr;
};

// Rows that overflow 16 bits are appended to `left`; what is written for them is of no use. False
// where a value is not finite or a scale infinite: the plane stays raw.
bool EncodeTqBlocks(const TqPlane& plane, const TqBlockInput& input, std::byte* bytes,
                    std::vector<int32_t>& left);

// To bf16.
void DecodeTqBlocks(const TqPlane& plane, const float* means, const std::byte* bytes,
                    std::byte* rows);

}  // namespace kvstow
