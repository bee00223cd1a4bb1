// Highway backend of int4.
#include "kernels/codec/int4.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/int4.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/pairs-inl.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

struct RowToEncode {
  const std::byte* values;
  int64_t dim;
  float scale;
  std::byte* codes;
};

struct RowToDecode {
  const std::byte* codes;
  int64_t dim;
  float scale;
  std::byte* values;
};

// The values from `first` on, as far as whole vectors go. Returns the first that is left.
template <DType kDType, class DF>
int64_t EncodeVectors(DF df, const RowToEncode& row, int64_t first) {
  const hn::RebindToSigned<DF> di;
  constexpr int64_t kValueBytes = kDType == DType::kF32 ? 4 : 2;
  const int64_t num_values = 2 * static_cast<int64_t>(hn::Lanes(df));
  const auto step = hn::Set(df, row.scale);
  const auto code_of = [&](hn::Vec<DF> x) HWY_ATTR {
    const auto code = hn::NearestInt(hn::Div(x, step));
    const auto clamped = hn::Min(hn::Max(code, hn::Set(di, -7)), hn::Set(di, 7));
    return hn::And(clamped, hn::Set(di, 15));
  };
  for (; first + num_values <= row.dim; first += num_values) {
    auto even = hn::Zero(df);
    auto odd = hn::Zero(df);
    LoadPairs<kDType>(df, row.values + first * kValueBytes, even, odd);
    StoreCodePairs<4>(df, code_of(even), code_of(odd), row.codes + first / 2);
  }
  return first;
}

template <DType kDType, class DF>
int64_t DecodeVectors(DF df, const RowToDecode& row, int64_t first) {
  const hn::RebindToSigned<DF> di;
  constexpr int64_t kValueBytes = kDType == DType::kF32 ? 4 : 2;
  const int64_t num_values = 2 * static_cast<int64_t>(hn::Lanes(df));
  const auto step = hn::Set(df, row.scale);
  const auto value_of = [&](hn::Vec<decltype(di)> nibble) HWY_ATTR {
    const auto code = hn::ShiftRight<28>(hn::ShiftLeft<28>(nibble));
    return hn::Mul(hn::ConvertTo(df, code), step);
  };
  for (; first + num_values <= row.dim; first += num_values) {
    auto even = hn::Zero(di);
    auto odd = hn::Zero(di);
    LoadCodePairs<4>(di, row.codes + first / 2, even, odd);
    StorePairs<kDType>(df, value_of(even), value_of(odd), row.values + first * kValueBytes);
  }
  return first;
}

template <DType kDType>
void EncodeRow(const RowToEncode& row) {
  const hn::ScalableTag<float> df;
  const hn::CappedTag<float, 4> d4;
  int64_t i = EncodeVectors<kDType>(df, row, 0);
  i = EncodeVectors<kDType>(d4, row, i);
  std::fill(row.codes + i / 2, row.codes + (row.dim + 1) / 2, std::byte{0});
  for (; i < row.dim; ++i) {
    StoreInt4Code(row.codes, i, Int4Code(LoadValue(kDType, row.values, i), row.scale));
  }
}

template <DType kDType>
void DecodeRow(const RowToDecode& row) {
  const hn::ScalableTag<float> df;
  const hn::CappedTag<float, 4> d4;
  int64_t i = DecodeVectors<kDType>(df, row, 0);
  i = DecodeVectors<kDType>(d4, row, i);
  for (; i < row.dim; ++i) {
    const float value = static_cast<float>(Int4CodeAt(row.codes, i)) * row.scale;
    StoreValue(kDType, row.values, i, value);
  }
}

EncodeResult EncodeImpl(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  const int64_t dim = shape.dim;
  const Int4Layout layout(shape.num_tokens, dim);
  const int64_t row_bytes = DTypeBytes(shape.dtype, dim);
  std::fill(plane + 2 * int64_t{shape.num_tokens}, plane + layout.codes_at, std::byte{0});
  std::fill(plane + layout.codes_at + shape.num_tokens * layout.row_code_bytes,
            plane + layout.plane_bytes, std::byte{0});
  return WithDType(shape.dtype, [&]<DType kDType>() HWY_ATTR {
    for (int64_t t = 0; t < shape.num_tokens; ++t) {
      const std::byte* row = rows + t * row_bytes;
      std::byte* codes = plane + layout.codes_at + t * layout.row_code_bytes;
      const uint16_t scale = Int4Scale(RowMax<kDType>(row, dim));
      if (scale == kF16Infinity) return EncodeResult::kKeepRaw;
      StoreU16(plane + 2 * t, scale);
      if (scale == 0) {
        std::fill_n(codes, layout.row_code_bytes, std::byte{0});
      } else {
        EncodeRow<kDType>({row, dim, F16ToFloat(scale), codes});
      }
    }
    return EncodeResult::kEncoded;
  });
}

void DecodeImpl(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  const int64_t dim = shape.dim;
  const Int4Layout layout(shape.num_tokens, dim);
  const int64_t row_bytes = DTypeBytes(shape.dtype, dim);
  WithDType(shape.dtype, [&]<DType kDType>() HWY_ATTR {
    for (int64_t t = 0; t < shape.num_tokens; ++t) {
      const std::byte* codes = plane + layout.codes_at + t * layout.row_code_bytes;
      const float scale = F16ToFloat(LoadU16(plane + 2 * t));
      DecodeRow<kDType>({codes, dim, scale, rows + t * row_bytes});
    }
  });
}

#else
EncodeResult EncodeImpl(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  return EncodeInt4Scalar(shape, rows, plane);
}
void DecodeImpl(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  DecodeInt4Scalar(shape, plane, rows);
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

EncodeResult EncodeInt4Highway(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  return HWY_DYNAMIC_DISPATCH(EncodeImpl)(shape, rows, plane);
}

void DecodeInt4Highway(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  HWY_DYNAMIC_DISPATCH(DecodeImpl)(shape, plane, rows);
}

}  // namespace kvstow
#endif  // HWY_ONCE
