// Highway backend of oscar2.
#include "kernels/codec/oscar.h"

#include <algorithm>
#include <bit>

#include "kernels/codec/rotate_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/oscar.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

// Dims are multiples of 8.
using D32 = hn::CappedTag<int32_t, 8>;
using DF = hn::RebindToFloat<D32>;
using V32 = hn::Vec<D32>;
constexpr int kLanes = hn::MaxLanes(D32());

// The value with `rank` smaller or equal ones before it among the |y|, bit by bit: the largest
// bound with at most `rank` values below it.
int32_t RankedMagnitude(const int32_t* y, int dim, int rank, int32_t max) {
  const D32 d;
  int32_t bound = 0;
  for (int32_t bit = static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(max))); bit != 0;
       bit >>= 1) {
    const V32 candidate = hn::Set(d, bound | bit);
    size_t num_below = 0;
    for (int j = 0; j < dim; j += kLanes) {
      num_below += hn::CountTrue(d, hn::Lt(hn::Abs(hn::LoadU(d, y + j)), candidate));
    }
    if (num_below <= static_cast<size_t>(rank)) bound |= bit;
  }
  return bound;
}

OscarRange RangeImpl(const int32_t* y, int dim, int rank, int exponent) {
  const D32 d;
  V32 min = hn::Zero(d);
  V32 max = hn::Zero(d);
  for (int j = 0; j < dim; j += kLanes) {
    const V32 v = hn::LoadU(d, y + j);
    min = hn::Min(min, v);
    max = hn::Max(max, v);
  }
  const int32_t lo = hn::GetLane(hn::MinOfLanes(d, min));
  const int32_t hi = hn::GetLane(hn::MaxOfLanes(d, max));
  const int32_t clip = RankedMagnitude(y, dim, rank, std::max(-lo, hi));
  return OscarRangeOf(std::max(lo, -clip), std::min(hi, clip), exponent);
}

// One code a byte.
void CodesImpl(const OscarRange& range, const int32_t* y, int dim, uint8_t* index) {
  const D32 d;
  const DF df;
  const hn::Rebind<uint8_t, D32> d8;
  for (int j = 0; j < dim; j += kLanes) {
    const V32 v = hn::Min(hn::Max(hn::LoadU(d, y + j), hn::Set(d, range.lo)), hn::Set(d, range.hi));
    const auto quotient = hn::Div(hn::ConvertTo(df, v), hn::Set(df, range.step));
    const auto place =
        hn::Add(hn::Add(quotient, hn::Set(df, range.zero_value())), hn::Set(df, 0.5f));
    const V32 code = hn::Min(hn::Max(hn::ConvertTo(d, place), hn::Zero(d)), hn::Set(d, 3));
    hn::StoreU(hn::DemoteTo(d8, code), d8, index + j);
  }
}

#else
OscarRange RangeImpl(const int32_t*, int, int, int) { return {}; }
void CodesImpl(const OscarRange&, const int32_t*, int, uint8_t*) {}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(RangeImpl);
HWY_EXPORT(CodesImpl);

EncodeResult EncodeOscarHighway(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  const OscarFormat format{shape};
  const int dim = shape.dim;
  const int quarter = dim / 4;
  std::fill(plane + 4 * int64_t{shape.num_tokens}, plane + format.codes_at(), std::byte{0});
  std::fill(plane + format.codes_at() + shape.num_tokens * format.row_code_bytes(),
            plane + format.plane_bytes(), std::byte{0});
  RotatedBatch batch(shape);
  std::vector<uint8_t> index(dim);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    const int64_t r = t % kRotatedRows;
    if (r == 0 && !batch.Load(rows, t, std::min<int64_t>(kRotatedRows, shape.num_tokens - t))) {
      return EncodeResult::kKeepRaw;
    }
    OscarRange range;
    if (!batch.range(r).is_zero) {
      range = HWY_DYNAMIC_DISPATCH(RangeImpl)(batch.y(r), dim, format.clip_rank(),
                                              batch.range(r).exponent);
    }
    if (range.scale == kF16Infinity) return EncodeResult::kKeepRaw;
    StoreU16(plane + 4 * t, range.scale);
    StoreU16(plane + 4 * t + 2, range.scale == 0 ? uint16_t{0} : FloatToF16(range.zero_value()));
    std::byte* codes = plane + format.codes_at() + t * format.row_code_bytes();
    if (range.scale == 0) {
      std::fill_n(codes, quarter, std::byte{0});
      continue;
    }
    HWY_DYNAMIC_DISPATCH(CodesImpl)(range, batch.y(r), dim, index.data());
    const uint8_t* i0 = index.data();
    for (int i = 0; i < quarter; ++i) {
      codes[i] = static_cast<std::byte>(i0[i] | i0[i + quarter] << 2 | i0[i + 2 * quarter] << 4 |
                                        i0[i + 3 * quarter] << 6);
    }
  }
  return EncodeResult::kEncoded;
}

void DecodeOscarHighway(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  const OscarFormat format{shape};
  const int dim = shape.dim;
  const int quarter = dim / 4;
  const int64_t row_bytes = DTypeBytes(shape.dtype, dim);
  std::vector<int16_t> u(kRotatedRows * dim);
  std::vector<int32_t> v(kRotatedRows * dim);
  for (int64_t first = 0; first < shape.num_tokens; first += kRotatedRows) {
    const int64_t count = std::min<int64_t>(kRotatedRows, shape.num_tokens - first);
    for (int64_t r = 0; r < count; ++r) {
      const std::byte* head = plane + 4 * (first + r);
      const std::byte* codes = plane + format.codes_at() + (first + r) * format.row_code_bytes();
      const bool is_zero = LoadU16(head) == 0;
      const int unit = is_zero ? 0 : kOscarZeroUnits;
      const int zero = is_zero ? 0 : OscarZero(LoadU16(head + 2));
      int16_t* to = u.data() + r * dim;
      for (int j = 0; j < dim; j += quarter) {
        for (int i = 0; i < quarter; ++i) {
          const int code = (std::to_integer<int>(codes[i]) >> (2 * j / quarter)) & 3;
          to[j + i] = static_cast<int16_t>(unit * code - zero);
        }
      }
    }
    RotateRows(shape.rotation->inverse_pairs(), dim, u.data(), v.data());
    for (int64_t r = 0; r < count; ++r) {
      const float step =
          std::ldexp(F16ToFloat(LoadU16(plane + 4 * (first + r))), -(Rotation::kLog2One + 8));
      ScaleRow(shape.dtype, v.data() + r * dim, dim, step, rows + (first + r) * row_bytes);
    }
  }
}

}  // namespace kvstow
#endif  // HWY_ONCE
