#include "kernels/layout/convert_rows.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/float_values.h"

namespace kvstow {

absl::Status ConvertRows(DType from, DType to, int64_t num_values, const std::byte* in,
                         std::byte* out) {
  for (const DType dtype : {from, to}) {
    if (IsFloatDType(dtype)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "convert rows: dtype is ", std::string(DTypeName(dtype)), ", want bf16, f16 or f32"));
  }
  for (int64_t i = 0; i < num_values; ++i) {
    const float value = LoadValue(from, in, i);
    StoreValue(to, out, i, value);
    if (std::isfinite(value) && !std::isfinite(LoadValue(to, out, i))) {
      return absl::OutOfRangeError(absl::StrCat("convert rows: value ", i, " is ", value,
                                                ", which does not fit ",
                                                std::string(DTypeName(to))));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvstow
