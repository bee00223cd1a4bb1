// Highway backend of oscar2.
#include "kernels/codec/oscar.h"

#include <algorithm>

#include "kernels/codec/rotate_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/oscar.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/rotate_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

// The magnitude with `place` larger or equal ones before it, place < kTop.
template <int kTop>
HWY_INLINE LaneV32 OneOfLargest(const LaneRows& rows, int dim, int place) {
  const LaneD32 d;
  LaneV32 top[kTop];
  HWY_UNROLL(12)
  for (int k = 0; k < kTop; ++k) top[k] = hn::Zero(d);
  for (int j = 0; j < dim; ++j) {
    LaneV32 v = hn::Abs(hn::Load(d, rows.y(j)));
    HWY_UNROLL(12)
    for (int k = 0; k < kTop; ++k) {
      const LaneV32 larger = hn::Max(top[k], v);
      v = hn::Min(top[k], v);
      top[k] = larger;
    }
  }
  LaneV32 found = top[0];
  HWY_UNROLL(12)
  for (int k = 1; k < kTop; ++k) {
    if (k == place) found = top[k];
  }
  return found;
}

// The |y| with `rank` smaller or equal ones before it, bit by bit: the largest bound with at most
// `rank` values below it.
LaneV32 RankedByBits(const LaneRows& rows, int dim, int rank) {
  const LaneD32 d;
  LaneV32 found = hn::Zero(d);
  for (int32_t bit = 1 << 30; bit != 0; bit >>= 1) {
    const LaneV32 candidate = hn::Add(found, hn::Set(d, bit));
    LaneV32 num_below = hn::Zero(d);
    for (int j = 0; j < dim; ++j) {
      const auto is_below = hn::Lt(hn::Abs(hn::Load(d, rows.y(j))), candidate);
      num_below = hn::Sub(num_below, hn::VecFromMask(d, is_below));
    }
    found = hn::IfThenElse(hn::Gt(num_below, hn::Set(d, rank)), found, candidate);
  }
  return found;
}

LaneV32 RankedMagnitude(const LaneRows& rows, int dim, int rank) {
  const int place = dim - 1 - rank;  // from the largest
  if (place < 6) return OneOfLargest<6>(rows, dim, place);
  if (place < 12) return OneOfLargest<12>(rows, dim, place);
  return RankedByBits(rows, dim, rank);
}

// What the rows' codes are made of, one lane each.
struct LaneRanges {
  OscarRange of_row[kLaneRows];
  HWY_ALIGN int32_t lo[kLaneRows];
  HWY_ALIGN int32_t hi[kLaneRows];
  HWY_ALIGN float step[kLaneRows];
  HWY_ALIGN float zero[kLaneRows];
};

void FindRanges(const LaneRows& rows, int dim, int rank, LaneRanges& ranges) {
  const LaneD32 d;
  LaneV32 min = hn::Zero(d), max = hn::Zero(d);
  for (int j = 0; j < dim; ++j) {
    const LaneV32 v = hn::Load(d, rows.y(j));
    min = hn::Min(min, v);
    max = hn::Max(max, v);
  }
  const LaneV32 clip = RankedMagnitude(rows, dim, rank);
  hn::Store(hn::Max(min, hn::Neg(clip)), d, ranges.lo);
  hn::Store(hn::Min(max, clip), d, ranges.hi);
  for (int64_t r = 0; r < kLaneRows; ++r) {
    OscarRange range;
    if (!rows.range(r).is_zero) {
      range = OscarRangeOf(ranges.lo[r], ranges.hi[r], rows.range(r).exponent);
    }
    ranges.step[r] = range.step > 0 ? range.step : 1.0f;  // no codes are kept of other rows
    ranges.zero[r] = range.zero_value();
    ranges.of_row[r] = range;
  }
}

void WriteCodes(const LaneRows& rows, int dim, const LaneRanges& ranges, const LaneCodes& out) {
  const LaneD32 d;
  const LaneDF df;
  const LaneV32 lo = hn::Load(d, ranges.lo), hi = hn::Load(d, ranges.hi);
  const LaneVF step = hn::Load(df, ranges.step), zero = hn::Load(df, ranges.zero);
  const auto code_of = [&](int j) HWY_ATTR {
    const LaneV32 v = hn::Min(hn::Max(hn::Load(d, rows.y(j)), lo), hi);
    const LaneVF quotient = hn::Div(hn::ConvertTo(df, v), step);
    const LaneVF place = hn::Add(hn::Add(quotient, zero), hn::Set(df, 0.5f));
    return hn::Min(hn::Max(hn::ConvertTo(d, place), hn::Zero(d)), hn::Set(d, 3));
  };
  const int quarter = dim / 4;
  for (int i = 0; i < quarter; i += 4) {
    LaneV32 word = hn::Zero(d);
    for (int k = 3; k >= 0; --k) {
      for (int q = 3; q >= 0; --q) {
        word = hn::Or(hn::ShiftLeft<2>(word), code_of(i + k + q * quarter));
      }
    }
    ScatterWords<4>(word, i, out);
  }
}

bool EncodeImpl(const OscarFormat& format, const std::byte* rows, std::byte* plane) {
  const PlaneShape& shape = format.shape;
  LaneRows lanes(shape);
  LaneRanges ranges;
  for (int64_t first = 0; first < shape.num_tokens; first += kLaneRows) {
    const int64_t count = std::min(kLaneRows, shape.num_tokens - first);
    if (!lanes.Load(rows, first, count)) return false;
    FindRanges(lanes, shape.dim, format.clip_rank(), ranges);
    const LaneCodes out{plane + format.codes_at() + first * format.row_code_bytes(),
                        format.row_code_bytes(), count};
    WriteCodes(lanes, shape.dim, ranges, out);
    for (int64_t r = 0; r < count; ++r) {
      const OscarRange& range = ranges.of_row[r];
      if (range.scale == kF16Infinity) return false;
      std::byte* const head = plane + 4 * (first + r);
      StoreU16(head, range.scale);
      StoreU16(head + 2, range.scale == 0 ? uint16_t{0} : FloatToF16(range.zero_value()));
      if (range.scale == 0) std::fill_n(out.codes + r * out.stride, out.stride, std::byte{0});
    }
  }
  return true;
}

#else
bool EncodeImpl(const OscarFormat&, const std::byte*, std::byte*) { return false; }
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(EncodeImpl);

EncodeResult EncodeOscarHighway(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  const OscarFormat format{shape};
  std::fill(plane + 4 * int64_t{shape.num_tokens}, plane + format.codes_at(), std::byte{0});
  std::fill(plane + format.codes_at() + shape.num_tokens * format.row_code_bytes(),
            plane + format.plane_bytes(), std::byte{0});
  return HWY_DYNAMIC_DISPATCH(EncodeImpl)(format, rows, plane) ? EncodeResult::kEncoded
                                                               : EncodeResult::kKeepRaw;
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
