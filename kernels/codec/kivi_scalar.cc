// Scalar backend of kivi: the definition of kivi.h over a whole plane.
#include <limits>
#include <vector>

#include "kernels/codec/kivi.h"

namespace kvstow {

EncodeResult EncodeKiviScalar(const KiviFormat& format, const PlaneShape& shape,
                              const std::byte* rows, std::byte* plane) {
  std::memset(plane, 0, format.plane_bytes());
  std::vector<float> min(format.num_groups(), std::numeric_limits<float>::max());
  std::vector<float> max(format.num_groups(), std::numeric_limits<float>::lowest());
  for (int64_t t = 0; t < format.num_tokens; ++t) {
    for (int64_t j = 0; j < format.dim; ++j) {
      const float x = LoadValue(shape.dtype, rows, t * format.dim + j);
      if (!std::isfinite(x)) return EncodeResult::kKeepRaw;
      const int64_t group = format.group_of(t, j);
      min[group] = std::min(min[group], x);
      max[group] = std::max(max[group], x);
    }
  }
  for (int64_t group = 0; group < format.num_groups(); ++group) {
    const uint16_t stored_min = KiviMin(min[group]);
    const uint16_t scale = KiviScale(max[group], F16ToFloat(stored_min), format.max_code());
    if (!KiviFits(stored_min, scale)) return EncodeResult::kKeepRaw;
    StoreU16(plane + 2 * group, scale);
    StoreU16(plane + format.mins_at() + 2 * group, stored_min);
  }
  for (int64_t t = 0; t < format.num_tokens; ++t) {
    std::byte* codes = plane + format.codes_at() + t * format.row_code_bytes();
    for (int64_t j = 0; j < format.dim; ++j) {
      const int64_t group = format.group_of(t, j);
      const float scale = F16ToFloat(LoadU16(plane + 2 * group));
      const float stored_min = F16ToFloat(LoadU16(plane + format.mins_at() + 2 * group));
      const float x = LoadValue(shape.dtype, rows, t * format.dim + j);
      const int code = KiviCode(x, stored_min, scale, format.max_code());
      codes[j * format.bits / 8] |= static_cast<std::byte>(code << (j * format.bits % 8));
    }
  }
  return EncodeResult::kEncoded;
}

void DecodeKiviScalar(const KiviFormat& format, const PlaneShape& shape, const std::byte* plane,
                      std::byte* rows) {
  for (int64_t t = 0; t < format.num_tokens; ++t) {
    const std::byte* codes = plane + format.codes_at() + t * format.row_code_bytes();
    for (int64_t j = 0; j < format.dim; ++j) {
      const int64_t group = format.group_of(t, j);
      const float scale = F16ToFloat(LoadU16(plane + 2 * group));
      const float stored_min = F16ToFloat(LoadU16(plane + format.mins_at() + 2 * group));
      const int byte = std::to_integer<int>(codes[j * format.bits / 8]);
      const int code = (byte >> (j * format.bits % 8)) & format.max_code();
      StoreValue(shape.dtype, rows, t * format.dim + j, KiviValue(code, stored_min, scale));
    }
  }
}

}  // namespace kvstow
