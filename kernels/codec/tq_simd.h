// How the Highway backends of tq and tqm are put together. Nothing outside this folder includes it.
//
// Three engines do the work of a row; each is written for Highway once and compiled per instruction
// set.
//
// Lanes: one row per SIMD lane, 32-bit integers; any dim, dtype and width. Butterflies never cross
// lanes, and Paley matrices are as easy as Sylvester's.
//
// Columns: one row per lane as well, of 16 bits; bf16 at dims to 256 that are powers of two or 3
// times one, several times faster. A plane is turned to columns once, so that sets of its channels
// cost no more than all of them. Rows that may overflow 16 bits are handed to the lanes.
//
// Blocks: one row per 128-bit block of a register, 16-bit integers; bf16 at dims 64 and 128 (decode
// also 256), faster still. Rows that overflow 16 bits are handed to the lanes.
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

// Rows of a float dtype, one row per lane, to their places of a plane.
struct TqValueRow {
  int64_t row_idx;
  const std::byte* values;  // [dim] of `dtype`
};

EncodeResult EncodeTqValueRows(const TqPlane& plane, DType dtype, absl::Span<const TqValueRow> rows,
                               std::byte* bytes);

// Columns.
inline constexpr int kMaxTqColumns = 256;

constexpr bool CanUseTqColumns(DType dtype, int dim) {
  return dtype == DType::kBf16 && dim <= kMaxTqColumns &&
         (PaleyOrder(dim) == 1 || PaleyOrder(dim) == 12);
}

// Some channels of rows, as a tq plane of their own.
struct TqChannelSet {
  TqPlane plane;
  const int32_t* channels;  // [plane.format.dim], of the rows
};

// `rows` is [num_tokens, dim] of bf16, dim a multiple of 8 and at most kMaxTqColumns. Encodes set i
// to bytes[i]. Rows that may overflow are appended to left[i]; what is written for them is of no
// use. False where a value is not finite or a scale infinite: the plane stays raw.
bool EncodeTqColumns(absl::Span<const TqChannelSet> sets, int64_t dim, const std::byte* rows,
                     absl::Span<std::byte* const> bytes, absl::Span<std::vector<int32_t>> left);

// To bf16. Together the sets have every channel.
void DecodeTqColumns(absl::Span<const TqChannelSet> sets, int64_t dim,
                     absl::Span<const std::byte* const> bytes, std::byte* rows);

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
