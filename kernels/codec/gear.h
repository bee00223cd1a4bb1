// gear: kivi2, a low-rank form of its error, and the outliers apart. A reference, for comparison
// tables: tq has less error at fewer bits.
//
// This header and gear_scalar.cc are the definition. Vectors are the channels of keys (num_tokens
// long) and the rows of values (dim long). With n = max(1, length / 100):
//  1. Of each vector the n largest values, then of the rest the n smallest are its outliers (of
//     equal ones the first). They are kept in fp16; in their place comes the mean of the others
//     (fp64 sum in order, one division, rounded to fp32). |x| beyond fp16: the plane stays raw.
//  2. What results, y, in fp32, is encoded by kivi2 to d.
//  3. E = y - d in fp64, 0 at outliers. Rank 2 by power iteration: B_jk = +-1 from SplitMix64 (seed
//     46 + k, bit j, 1 = minus); three times A = E B, Gram-Schmidt of A's columns, B = E^T A; all
//     fp64, sums in ascending order. A and B are stored in fp16.
// Decoding: x'_tj = fp32(fp64(d_tj) + (A_t0 B_j0 + A_t1 B_j1)), then outliers over it. A plane
// whose magnitudes are below 2^-40 is all zero bytes. Scalar backend only.
//
// Plane: the kivi2 plane, A [num_tokens, 2], B [dim, 2], per vector its 2 n outliers as index and
// value (fp16), largest first, zeros to a multiple of 64. A decoder takes indexes modulo the
// length.
//
// Source: GEAR (Kang et al., arXiv:2403.05527), from its mathematics: its published code differs
// from them. We differ: factors and outliers are per block; start of the iteration.
#pragma once

#include "kernels/codec/kivi.h"

namespace kvstow {

inline constexpr int kGearRank = 2;
inline constexpr int kGearRounds = 3;

struct GearFormat {
  PlaneShape shape;

  bool is_key() const { return shape.role == Role::kKey; }
  int64_t num_vectors() const { return is_key() ? shape.dim : shape.num_tokens; }
  int64_t vector_length() const { return is_key() ? shape.num_tokens : shape.dim; }
  // Value `i` of vector `v` in the plane's rows.
  int64_t place(int64_t v, int64_t i) const {
    return is_key() ? i * shape.dim + v : v * shape.dim + i;
  }
  int64_t outliers_per_side() const { return std::max<int64_t>(1, vector_length() / 100); }

  PlaneShape backbone() const {
    PlaneShape part = shape;
    part.dtype = DType::kF32;
    return part;
  }
  KiviFormat kivi() const { return KiviFormatOf(2, shape); }
  int64_t a_at() const { return kivi().plane_bytes(); }
  int64_t b_at() const { return a_at() + int64_t{2} * kGearRank * shape.num_tokens; }
  int64_t outliers_at() const { return b_at() + int64_t{2} * kGearRank * shape.dim; }
  int64_t plane_bytes() const {
    return AlignUp(outliers_at() + num_vectors() * 2 * outliers_per_side() * 4, 64);
  }
};

inline bool GearAccepts(const PlaneShape& shape) {
  return KiviAccepts(shape) && (shape.role == Role::kValue || shape.num_tokens <= 65536) &&
         shape.dim <= 65536;
}

EncodeResult EncodeGearScalar(const PlaneShape& shape, const std::byte* rows, std::byte* plane);
void DecodeGearScalar(const PlaneShape& shape, const std::byte* plane, std::byte* rows);

}  // namespace kvstow
