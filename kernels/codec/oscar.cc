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

// Dims are multiples of 16.
using D32 = hn::CappedTag<int32_t, 16>;
using DF = hn::RebindToFloat<D32>;
using V32 = hn::Vec<D32>;
constexpr int kLanes = hn::MaxLanes(D32());

// The value with `rank` smaller or equal ones before it, and how many are smaller. Bit by bit: the
// largest bound with at most `rank` values below it.
struct Ranked {
  int value;
  int num_below;
};

Ranked RankedValue(const int16_t* values, int dim, int rank, int lowest, int num_bits) {
  const hn::CappedTag<int16_t, 16> d;
  Ranked found{lowest, 0};
  for (int bit = 1 << (num_bits - 1); bit != 0; bit >>= 1) {
    const auto candidate = hn::Set(d, static_cast<int16_t>(found.value + bit));
    size_t num_below = 0;
    for (int j = 0; j < dim; j += static_cast<int>(hn::Lanes(d))) {
      num_below += hn::CountTrue(d, hn::Lt(hn::LoadU(d, values + j), candidate));
    }
    if (num_below <= static_cast<size_t>(rank)) {
      found = {found.value + bit, static_cast<int>(num_below)};
    }
  }
  return found;
}

// The same of |y|, in two halves of 16 bits: first their high halves, then the low halves of those
// that share the one found.
int32_t RankedMagnitude(const int32_t* y, int dim, int rank, int32_t max) {
  const D32 d;
  const hn::Rebind<int16_t, D32> d16;
  int16_t high[Rotation::kMaxDim];
  int16_t low[Rotation::kMaxDim];
  for (int j = 0; j < dim; j += kLanes) {
    const V32 magnitude = hn::Abs(hn::LoadU(d, y + j));
    hn::StoreU(hn::DemoteTo(d16, hn::ShiftRight<16>(magnitude)), d16, high + j);
  }
  const int num_bits = std::bit_width(static_cast<uint32_t>(max) >> 16);
  Ranked found{0, 0};
  if (num_bits > 0) found = RankedValue(high, dim, rank, 0, num_bits);
  // Most often no other value shares that half.
  const hn::CappedTag<int16_t, 16> d_half;
  size_t num_equal = 0;
  int32_t last_equal = 0;
  for (int j = 0; j < dim; j += static_cast<int>(hn::Lanes(d_half))) {
    const auto equal =
        hn::Eq(hn::LoadU(d_half, high + j), hn::Set(d_half, static_cast<int16_t>(found.value)));
    const intptr_t at = hn::FindFirstTrue(d_half, equal);
    if (at >= 0) last_equal = std::abs(y[j + at]);
    num_equal += hn::CountTrue(d_half, equal);
  }
  if (num_equal == 1) return last_equal;
  for (int j = 0; j < dim; j += kLanes) {
    const V32 magnitude = hn::Abs(hn::LoadU(d, y + j));
    const V32 rest = hn::Sub(magnitude, hn::Set(d, found.value << 16));
    const V32 half = hn::Sub(rest, hn::Set(d, 32768));  // below: below all; above: above all
    hn::StoreU(hn::DemoteTo(d16, half), d16, low + j);
  }
  return (found.value << 16) + 32768 + RankedValue(low, dim, rank, -32768, 16).value;
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
