// Highway backend of tqm: the means of a plane and the rows without them.
#include "kernels/codec/tqm.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/codec/int_rows.h"
#include "kernels/codec/tq_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/tqm.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

// 8 or 4 lanes: dims are multiples of 8.
using D32 = hn::CappedTag<int32_t, 8>;
using DF = hn::RebindToFloat<D32>;
using D16 = hn::Rebind<int16_t, D32>;

// sums[j] = sum over rows of p[t][j]. At most 2^16 rows, so that a lane does not overflow.
void AddColumns(const int16_t* p, int64_t num_rows, int dim, int32_t* sums) {
  const D32 d;
  const D16 d16;
  const int step = static_cast<int>(hn::Lanes(d));
  for (int j = 0; j < dim; j += step) {
    auto sum = hn::Zero(d);
    for (int64_t t = 0; t < num_rows; ++t) {
      sum = hn::Add(sum, hn::PromoteTo(d, hn::LoadU(d16, p + t * dim + j)));
    }
    hn::StoreU(sum, d, sums + j);
  }
}

// Bf16 values to integers p = rint(x * 2^log2), and the sums of their columns. At most 2^16 rows;
// dim is a multiple of a register's 16-bit lanes.
void Bf16IntsAndColumns(const std::byte* rows, int64_t num_rows, int dim, int log2, int16_t* p,
                        int32_t* sums) {
  const hn::ScalableTag<int16_t> d16_full;
  const hn::Repartition<uint32_t, decltype(d16_full)> du32;
  const hn::RebindToSigned<decltype(du32)> d32;
  const hn::RebindToFloat<decltype(du32)> df;
  const auto factor = hn::Set(df, PowerOfTwo(log2));
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits; the product before is exact.
  const auto magic = hn::Set(df, 12582912.0f);
  const uint32_t bias = static_cast<uint32_t>(num_rows) * std::bit_cast<uint32_t>(12582912.0f);
  const int step = static_cast<int>(hn::Lanes(d16_full));
  HWY_ALIGN uint32_t even_sums[hn::MaxLanes(du32)];
  HWY_ALIGN uint32_t odd_sums[hn::MaxLanes(du32)];
  for (int j = 0; j < dim; j += step) {
    auto even_sum = hn::Zero(du32);
    auto odd_sum = hn::Zero(du32);
    for (int64_t t = 0; t < num_rows; ++t) {
      const auto x = hn::LoadU(du32, reinterpret_cast<const uint32_t*>(rows + 2 * (t * dim + j)));
      const auto even =
          hn::BitCast(du32, hn::MulAdd(hn::BitCast(df, hn::ShiftLeft<16>(x)), factor, magic));
      const auto odd = hn::BitCast(
          du32, hn::MulAdd(hn::BitCast(df, hn::And(x, hn::Set(du32, 0xffff0000u))), factor, magic));
      even_sum = hn::Add(even_sum, even);  // modulo 2^32, with the bits of `magic` in each
      odd_sum = hn::Add(odd_sum, odd);
      const auto both = hn::OddEven(hn::BitCast(d16_full, hn::ShiftLeft<16>(hn::BitCast(d32, odd))),
                                    hn::BitCast(d16_full, even));
      hn::StoreU(both, d16_full, p + t * dim + j);
    }
    hn::Store(even_sum, du32, even_sums);
    hn::Store(odd_sum, du32, odd_sums);
    for (int i = 0; i < step / 2; ++i) {
      sums[j + 2 * i] = static_cast<int32_t>(even_sums[i] - bias);
      sums[j + 2 * i + 1] = static_cast<int32_t>(odd_sums[i] - bias);
    }
  }
}

// means[j] = floor((2 sum + rows) / (2 rows)) where rows is 2^log2 <= 2^15.
void ShiftMeans(const int32_t* sums, int dim, int log2, float* means) {
  const D32 d;
  const DF df;
  for (int j = 0; j < dim; j += static_cast<int>(hn::Lanes(d))) {
    const auto sum = hn::LoadU(d, sums + j);
    const auto dividend = hn::Add(hn::Add(sum, sum), hn::Set(d, 1 << log2));
    hn::StoreU(hn::ConvertTo(df, hn::ShiftRightSame(dividend, log2 + 1)), df, means + j);
  }
}

float MaxMagnitude(const float* means, int dim) {
  const DF df;
  auto max = hn::Zero(df);
  for (int j = 0; j < dim; j += static_cast<int>(hn::Lanes(df))) {
    max = hn::Max(max, hn::Abs(hn::LoadU(df, means + j)));
  }
  return hn::GetLane(hn::MaxOfLanes(df, max));
}

// Codes of the exact `means`, and in `decoded` what the decoder will add, in the same units.
void CodeMeans(const float* means, int dim, const MeanScale& at, int8_t* codes, int16_t* decoded) {
  const D32 d;
  const D16 d16;
  const DF df;
  const hn::Rebind<int8_t, D32> d8;
  const auto to_value = hn::Set(df, PowerOfTwo(at.exponent - kTqmPlaneBits));
  const auto to_int = hn::Set(df, PowerOfTwo(kTqmPlaneBits - at.exponent));
  const auto max = hn::Set(df, 127.0f);
  const auto step = hn::Set(df, at.scale);
  for (int j = 0; j < dim; j += static_cast<int>(hn::Lanes(d))) {
    const auto quotient = hn::Div(hn::Mul(hn::LoadU(df, means + j), to_value), step);
    const auto code = hn::Round(hn::Min(hn::Max(quotient, hn::Neg(max)), max));
    hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(d, code)), d8, codes + j);
    const auto back = hn::NearestInt(hn::Mul(hn::Mul(code, step), to_int));
    hn::StoreU(hn::DemoteTo(d16, back), d16, decoded + j);
  }
}

// q = (p - means) without its lowest bits, so that 11 and a sign remain. Returns how many were
// dropped, -1 where all q are 0.
int ShrinkRow(const int16_t* p, const int16_t* means, int dim, int16_t* q) {
  const D32 d;
  const D16 d16;
  const int step = static_cast<int>(hn::Lanes(d));
  const auto difference = [&](int j) HWY_ATTR {
    return hn::Sub(hn::PromoteTo(d, hn::LoadU(d16, p + j)),
                   hn::PromoteTo(d, hn::LoadU(d16, means + j)));
  };
  auto any = hn::Zero(d);  // its bit length is that of the largest magnitude
  for (int j = 0; j < dim; j += step) any = hn::Or(any, hn::Abs(difference(j)));
  HWY_ALIGN int32_t lanes[8];
  hn::Store(any, d, lanes);
  int32_t all = 0;
  for (int i = 0; i < step; ++i) all |= lanes[i];
  if (all == 0) return -1;
  const int shift = std::max(0, FloorLog2(all) - kTqRowBits);
  const auto half = hn::Set(d, shift == 0 ? 0 : 1 << (shift - 1));
  for (int j = 0; j < dim; j += step) {
    const auto rounded = hn::ShiftRightSame(hn::Add(difference(j), half), shift);
    hn::StoreU(hn::DemoteTo(d16, rounded), d16, q + j);
  }
  return shift;
}

#else
void AddColumns(const int16_t*, int64_t, int, int32_t*) {}
void Bf16IntsAndColumns(const std::byte*, int64_t, int, int, int16_t*, int32_t*) {}
void ShiftMeans(const int32_t*, int, int, float*) {}
float MaxMagnitude(const float*, int) { return 0.0f; }
void CodeMeans(const float*, int, const MeanScale&, int8_t*, int16_t*) {}
int ShrinkRow(const int16_t*, const int16_t*, int, int16_t*) { return -1; }
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(AddColumns);
HWY_EXPORT(Bf16IntsAndColumns);
HWY_EXPORT(ShiftMeans);
HWY_EXPORT(MaxMagnitude);
HWY_EXPORT(CodeMeans);
HWY_EXPORT(ShrinkRow);

namespace {

constexpr int64_t kRowsAtOnce = 64;

// Columns of at most this many rows are summed in 32 bits.
constexpr int64_t kRowsPerSum = int64_t{1} << 16;

// p[t][j] = rint(x * 2^log2), and exact means[j] = floor((2 sum of p[.][j] + rows) / (2 rows)).
void IntsAndMeans(const TqPlane& plane, DType dtype, const std::byte* rows, int log2, int16_t* p,
                  std::vector<float>& means) {
  const int dim = plane.format.dim;
  const int64_t num_tokens = plane.num_tokens;
  const bool is_fast = dtype == DType::kBf16 && dim % 64 == 0;
  const int64_t row_bytes = DTypeBytes(dtype, dim);
  std::vector<int64_t> totals(dim);
  std::vector<int32_t> sums(dim);
  for (int64_t first = 0; first < num_tokens; first += kRowsPerSum) {
    const int64_t num_rows = std::min(num_tokens - first, kRowsPerSum);
    const std::byte* from = rows + first * row_bytes;
    int16_t* to = p + first * dim;
    if (is_fast) {
      HWY_DYNAMIC_DISPATCH(Bf16IntsAndColumns)(from, num_rows, dim, log2, to, sums.data());
    } else {
      ValuesToInts(dtype, from, num_rows * dim, log2, to);
      HWY_DYNAMIC_DISPATCH(AddColumns)(to, num_rows, dim, sums.data());
    }
    if (num_tokens <= 1 << 15 && (num_tokens & (num_tokens - 1)) == 0) {
      HWY_DYNAMIC_DISPATCH(ShiftMeans)(sums.data(), dim, FloorLog2(num_tokens), means.data());
      return;
    }
    for (int j = 0; j < dim; ++j) totals[j] += sums[j];
  }
  for (int j = 0; j < dim; ++j) {
    const int64_t dividend = 2 * totals[j] + num_tokens;
    const int64_t divisor = 2 * num_tokens;
    const int64_t floor =
        dividend >= 0 ? dividend / divisor : -((-dividend + divisor - 1) / divisor);
    means[j] = static_cast<float>(floor);
  }
}

// Writes scale and codes of the `exact` means at `head`; `decoded` receives what the decoder will
// add. False where the scale is infinite.
bool EncodeMeans(const std::vector<float>& exact, int exponent, std::byte* head, int16_t* decoded) {
  const int dim = static_cast<int>(exact.size());
  const float max = HWY_DYNAMIC_DISPATCH(MaxMagnitude)(exact.data(), dim);
  const uint16_t scale = FloatToF16(std::ldexp(max, exponent - kTqmPlaneBits) / 127.0f);
  if (scale == kF16Infinity) return false;
  StoreU16(head, scale);
  if (scale == 0) {
    std::fill_n(head + 2, dim, std::byte{0});
    std::fill_n(decoded, dim, int16_t{0});
    return true;
  }
  HWY_DYNAMIC_DISPATCH(CodeMeans)
  (exact.data(), dim, {.scale = F16ToFloat(scale), .exponent = exponent},
   reinterpret_cast<int8_t*>(head + 2), decoded);
  return true;
}

// Encodes the rows named by `row_idx`, one row per lane.
bool EncodeRows(const TqPlane& plane, const TqBlockInput& input, std::byte* bytes,
                absl::Span<const int32_t> row_idx) {
  const int dim = plane.format.dim;
  const auto* p = reinterpret_cast<const int16_t*>(input.rows);
  std::vector<int16_t> shrunk(row_idx.size() * dim);
  std::vector<TqIntRow> int_rows;
  int_rows.reserve(row_idx.size());
  const auto shrink = HWY_DYNAMIC_DISPATCH(ShrinkRow);
  for (size_t i = 0; i < row_idx.size(); ++i) {
    const int64_t t = row_idx[i];
    int16_t* q = shrunk.data() + i * dim;
    const int shift = shrink(p + t * dim, input.means, dim, q);
    if (shift < 0) {
      StoreU16(bytes + 2 * t, 0);
      std::fill_n(plane.codes(bytes, t), plane.layout.row_code_bytes, std::byte{0});
      continue;
    }
    const int exponent = input.exponent - (kTqmPlaneBits - kTqRowBits) + shift;
    int_rows.push_back({q, exponent, plane.codes(bytes, t), bytes + 2 * t});
  }
  return EncodeTqLanes(plane.format, int_rows);
}

}  // namespace

EncodeResult EncodeTqmHighway(const TqFormat& format, const PlaneShape& shape,
                              const std::byte* rows, std::byte* bytes) {
  const int dim = format.dim;
  const TqPlane plane{.format = format, .has_means = true, .num_tokens = shape.num_tokens};
  const int64_t num_values = plane.num_tokens * dim;
  const ValueRange range = RangeOfValues(shape.dtype, rows, num_values);
  if (!range.is_finite) return EncodeResult::kKeepRaw;
  if (range.is_zero) {
    std::fill_n(bytes, plane.layout.plane_bytes, std::byte{0});
    return EncodeResult::kEncoded;
  }
  ClearTqPadding(plane, bytes);
  const auto p = std::make_unique_for_overwrite<int16_t[]>(num_values);
  std::vector<float> exact_means(dim);
  std::vector<int16_t> means(dim);
  IntsAndMeans(plane, shape.dtype, rows, kTqmPlaneBits - range.exponent, p.get(), exact_means);
  if (!EncodeMeans(exact_means, range.exponent, bytes + plane.layout.means_at, means.data())) {
    return EncodeResult::kKeepRaw;
  }
  const TqBlockInput input{.rows = reinterpret_cast<const std::byte*>(p.get()),
                           .means = means.data(),
                           .exponent = range.exponent,
                           .ahead = rows + DTypeBytes(shape.dtype, num_values)};
  std::vector<int32_t> row_idx;
  if (CanEncodeTqBlocks(shape.dtype, dim)) {
    if (!EncodeTqBlocks(plane, input, bytes, row_idx)) return EncodeResult::kKeepRaw;
  } else {
    row_idx.resize(plane.num_tokens);
    std::iota(row_idx.begin(), row_idx.end(), 0);
  }
  const absl::Span<const int32_t> all(row_idx);
  for (size_t first = 0; first < all.size(); first += kRowsAtOnce) {
    if (!EncodeRows(plane, input, bytes, all.subspan(first, kRowsAtOnce)))
      return EncodeResult::kKeepRaw;
  }
  return EncodeResult::kEncoded;
}

void DecodeTqmHighway(const TqFormat& format, const PlaneShape& shape, const std::byte* bytes,
                      std::byte* rows) {
  const TqPlane plane{.format = format, .has_means = true, .num_tokens = shape.num_tokens};
  const float scale = F16ToFloat(LoadU16(bytes + plane.layout.means_at));
  const std::byte* codes = bytes + plane.layout.means_at + 2;
  std::vector<float> means(format.dim);
  for (int j = 0; j < format.dim; ++j) {
    // + 0: a mean of -0 (only from bytes no encoder wrote) would give -0 where +0 is due.
    means[j] = static_cast<float>(std::to_integer<int8_t>(codes[j])) * scale + 0.0f;
  }
  DecodeTqPlane(plane, shape.dtype, means.data(), bytes, rows);
}

}  // namespace kvstow
#endif  // HWY_ONCE
