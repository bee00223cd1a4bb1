#include "kernels/codec/rotation.h"

#include "absl/strings/str_cat.h"
#include "kernels/codec/hadamard.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

absl::Status CheckOrthogonal(int dim, absl::Span<const int16_t> matrix) {
  for (int i = 0; i < dim; ++i) {
    for (int j = i; j < dim; ++j) {
      int64_t dot = 0;
      for (int k = 0; k < dim; ++k) dot += int64_t{matrix[i * dim + k]} * matrix[j * dim + k];
      const int64_t want = i == j ? int64_t{1} << (2 * Rotation::kLog2One) : 0;
      if (dot - want <= Rotation::kMaxDeviation && want - dot <= Rotation::kMaxDeviation) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("rotation of dim ", dim, " is not orthogonal: the product of rows ", i,
                       " and ", j, " is ", dot, ", want ", want, " +- ", Rotation::kMaxDeviation));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Rotation> Rotation::Create(int dim, absl::Span<const int16_t> matrix) {
  if (dim < kMinDim || dim > kMaxDim || dim % 8 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rotation: dim is ", dim, ", want a multiple of 8 from ", kMinDim, " to ", kMaxDim));
  }
  if (matrix.size() != static_cast<size_t>(dim) * dim) {
    return absl::InvalidArgumentError(
        absl::StrCat("rotation of dim ", dim, ": ", matrix.size(), " numbers, want ", dim * dim));
  }
  KVSTOW_RETURN_IF_ERROR(CheckOrthogonal(dim, matrix));
  Rotation rotation;
  rotation.dim_ = dim;
  rotation.matrix_.assign(matrix.begin(), matrix.end());
  rotation.forward_pairs_.resize(matrix.size());
  rotation.inverse_pairs_.resize(matrix.size());
  for (int p = 0; p < dim / 2; ++p) {
    for (int i = 0; i < dim; ++i) {
      for (int k = 0; k < 2; ++k) {
        const size_t to = (static_cast<size_t>(p) * dim + i) * 2 + k;
        rotation.forward_pairs_[to] = matrix[i * dim + 2 * p + k];
        rotation.inverse_pairs_[to] = matrix[(2 * p + k) * dim + i];
      }
    }
  }
  return rotation;
}

absl::StatusOr<Rotation> Rotation::Reflection(int dim, uint64_t seed) {
  if (dim < kMinDim || dim > kMaxDim) return Create(dim, {});
  std::vector<int64_t> v(dim);
  int64_t norm = 0;
  for (int i = 0; i < dim; ++i) {
    v[i] = static_cast<int64_t>(SplitMix64At(seed, i) % 15) - 7;
    norm += v[i] * v[i];
  }
  if (norm == 0) return Create(dim, {});
  std::vector<int16_t> matrix(static_cast<size_t>(dim) * dim);
  for (int j = 0; j < dim; ++j) {
    for (int i = 0; i < dim; ++i) {
      const int64_t entry = ((i == j ? norm : 0) - 2 * v[j] * v[i]) << (kLog2One + 1);
      const int64_t dividend = entry + norm;
      const int64_t divisor = 2 * norm;
      const int64_t floor = dividend / divisor - (dividend % divisor < 0 ? 1 : 0);
      matrix[j * dim + i] = static_cast<int16_t>(floor);
    }
  }
  return Create(dim, matrix);
}

}  // namespace kvstow
