// Rotation: an orthogonal matrix in 16-bit integers, for the codecs that need a calibration.
//
//   KVSTOW_ASSIGN_OR_RETURN(Rotation rotation, Rotation::Create(64, matrix));
//
// R = rint(2^14 * U) of an orthogonal U, row-major: row j gives coordinate j of a rotated row,
// y = R q. Sums are integer sums: partial ones may wrap, the whole fits 32 bits for the rows that
// codecs rotate (|q| <= 2^11 and dim <= 1024, Cauchy-Schwarz).
//
// Thread safety: immutable.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvstow {

class Rotation {
 public:
  static constexpr int kMinDim = 8;
  static constexpr int kMaxDim = 1024;
  static constexpr int kLog2One = 14;  // R = 2^14 * U
  // Largest deviation of an entry of R R^T from 2^28 I: 1/256 of its diagonal.
  static constexpr int64_t kMaxDeviation = int64_t{1} << 20;

  // kInvalidArgument: a dim that is no multiple of 8 or outside [kMinDim, kMaxDim], a matrix of
  // another size, or one that is not orthogonal (names the rows).
  static absl::StatusOr<Rotation> Create(int dim, absl::Span<const int16_t> matrix);

  // A rotation that needs no data, for tests and benchmarks: the reflection I - 2 v v^T / v.v of
  // small integers v, rounded half up. Refuses what Create refuses.
  static absl::StatusOr<Rotation> Reflection(int dim, uint64_t seed);

  int dim() const { return dim_; }
  absl::Span<const int16_t> matrix() const { return matrix_; }
  int at(int row, int column) const { return matrix_[row * dim_ + column]; }

  // The same numbers in the order in which SIMD code reads them: [dim / 2, dim, 2], for input pair
  // p and output i the two factors of inputs 2p and 2p + 1. For y = R q and for v = R^T w.
  const int16_t* forward_pairs() const { return forward_pairs_.data(); }
  const int16_t* inverse_pairs() const { return inverse_pairs_.data(); }

 private:
  Rotation() = default;

  int dim_ = 0;
  std::vector<int16_t> matrix_;
  std::vector<int16_t> forward_pairs_;
  std::vector<int16_t> inverse_pairs_;
};

}  // namespace kvstow
