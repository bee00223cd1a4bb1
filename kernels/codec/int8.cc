// Highway backend of int8.
#include "kernels/codec/int8.h"

#include "kernels/codec/int_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/int8.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

using DF = hn::ScalableTag<float>;
using D8 = hn::Rebind<int8_t, DF>;

template <DType kDType>
void EncodeRow(const std::byte* row, int64_t dim, float scale, int8_t* codes) {
  const DF df;
  const D8 d8;
  const hn::RebindToSigned<DF> di;
  constexpr int64_t kValueBytes = kDType == DType::kF32 ? 4 : 2;
  const int64_t num_lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto step = hn::Set(df, scale);
  const auto min_code = hn::Set(di, -127);
  const auto max_code = hn::Set(di, 127);
  int64_t i = 0;
  for (; i + num_lanes <= dim; i += num_lanes) {
    const auto quotient = hn::Div(LoadFloats<kDType>(df, row + i * kValueBytes), step);
    const auto code = hn::Min(hn::Max(hn::NearestInt(quotient), min_code), max_code);
    hn::StoreU(hn::DemoteTo(d8, code), d8, codes + i);
  }
  for (; i < dim; ++i) codes[i] = Int8Code(LoadValue(kDType, row, i), scale);
}

template <DType kDType>
void DecodeRow(const int8_t* codes, int64_t dim, float scale, std::byte* row) {
  const DF df;
  const D8 d8;
  const hn::RebindToSigned<DF> di;
  constexpr int64_t kValueBytes = kDType == DType::kF32 ? 4 : 2;
  const int64_t num_lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto step = hn::Set(df, scale);
  int64_t i = 0;
  for (; i + num_lanes <= dim; i += num_lanes) {
    const auto code = hn::ConvertTo(df, hn::PromoteTo(di, hn::LoadU(d8, codes + i)));
    StoreFloats<kDType>(df, hn::Mul(code, step), row + i * kValueBytes);
  }
  for (; i < dim; ++i) StoreValue(kDType, row, i, static_cast<float>(codes[i]) * scale);
}

EncodeResult EncodeImpl(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  const int64_t dim = shape.dim;
  const Int8Layout layout(shape.num_tokens, dim);
  const int64_t row_bytes = DTypeBytes(shape.dtype, dim);
  std::fill(plane + 2 * int64_t{shape.num_tokens}, plane + layout.codes_at, std::byte{0});
  std::fill(plane + layout.codes_at + shape.num_tokens * dim, plane + layout.plane_bytes,
            std::byte{0});
  return WithDType(shape.dtype, [&]<DType kDType>() HWY_ATTR {
    for (int64_t t = 0; t < shape.num_tokens; ++t) {
      const std::byte* row = rows + t * row_bytes;
      auto* codes = reinterpret_cast<int8_t*>(plane + layout.codes_at + t * dim);
      const uint16_t scale = Int8Scale(RowMax<kDType>(row, dim));
      if (scale == kF16Infinity) return EncodeResult::kKeepRaw;
      StoreU16(plane + 2 * t, scale);
      if (scale == 0) {
        std::fill_n(codes, dim, int8_t{0});
      } else {
        EncodeRow<kDType>(row, dim, F16ToFloat(scale), codes);
      }
    }
    return EncodeResult::kEncoded;
  });
}

void DecodeImpl(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  const int64_t dim = shape.dim;
  const Int8Layout layout(shape.num_tokens, dim);
  const int64_t row_bytes = DTypeBytes(shape.dtype, dim);
  WithDType(shape.dtype, [&]<DType kDType>() HWY_ATTR {
    for (int64_t t = 0; t < shape.num_tokens; ++t) {
      const auto* codes = reinterpret_cast<const int8_t*>(plane + layout.codes_at + t * dim);
      DecodeRow<kDType>(codes, dim, F16ToFloat(LoadU16(plane + 2 * t)), rows + t * row_bytes);
    }
  });
}

#else
EncodeResult EncodeImpl(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  return EncodeInt8Scalar(shape, rows, plane);
}
void DecodeImpl(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  DecodeInt8Scalar(shape, plane, rows);
}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(EncodeImpl);
HWY_EXPORT(DecodeImpl);

EncodeResult EncodeInt8Highway(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  return HWY_DYNAMIC_DISPATCH(EncodeImpl)(shape, rows, plane);
}

void DecodeInt8Highway(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  HWY_DYNAMIC_DISPATCH(DecodeImpl)(shape, plane, rows);
}

}  // namespace kvstow
#endif  // HWY_ONCE
