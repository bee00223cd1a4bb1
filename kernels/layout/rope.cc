#include "kernels/layout/rope.h"

#include <cmath>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/float_values.h"

namespace kvstow {

absl::StatusOr<RopeTurn> RopeTurn::Create(const RopeParams& params, int32_t dim, int32_t delta) {
  if (!std::isfinite(params.theta) || params.theta <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: theta is ", params.theta, ", want a number above 0"));
  }
  const int32_t rotary_dim = params.rotary_dim == 0 ? dim : params.rotary_dim;
  if (rotary_dim < 2 || rotary_dim > dim || rotary_dim % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rope: rotary_dim is ", rotary_dim, ", want an even number from 2 to the dim, ", dim));
  }
  RopeTurn turn;
  turn.dim_ = dim;
  turn.delta_ = delta;
  turn.pairs_ = params.pairs;
  for (int32_t i = 0; i < rotary_dim / 2; ++i) {
    const double angle = delta * std::pow(params.theta, -2.0 * i / rotary_dim);
    turn.cos_.push_back(static_cast<float>(std::cos(angle)));
    turn.sin_.push_back(static_cast<float>(std::sin(angle)));
  }
  return turn;
}

absl::Status RopeTurn::Apply(DType dtype, int64_t num_rows, const std::byte* in,
                             std::byte* out) const {
  if (!IsFloatDType(dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: dtype is ", std::string(DTypeName(dtype)), ", want bf16, f16 or f32"));
  }
  if (in != out) std::memcpy(out, in, DTypeBytes(dtype, num_rows * dim_));
  if (delta_ == 0) return absl::OkStatus();
  const auto num_pairs = static_cast<int32_t>(cos_.size());
  const bool is_half = pairs_ == RopePairs::kHalf;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int32_t i = 0; i < num_pairs; ++i) {
      const int64_t at[2] = {row * dim_ + (is_half ? i : 2 * i),
                             row * dim_ + (is_half ? i + num_pairs : 2 * i + 1)};
      const float x = LoadValue(dtype, out, at[0]);
      const float y = LoadValue(dtype, out, at[1]);
      StoreValue(dtype, out, at[0], x * cos_[i] - y * sin_[i]);
      StoreValue(dtype, out, at[1], x * sin_[i] + y * cos_[i]);
      for (const int64_t each : at) {
        if (std::isfinite(LoadValue(dtype, out, each))) continue;
        return absl::OutOfRangeError(absl::StrCat(
            "rope: value ", each - row * dim_, " of row ", row, " turned by ", delta_,
            " is not a finite ", std::string(DTypeName(dtype)), ": its pair is ", x, ", ", y));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace kvstow
