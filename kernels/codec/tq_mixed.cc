// Highway backend of tq_mixed: energies with Highway, then tq's backend for each set.
#include "kernels/codec/tq_mixed.h"

#include <algorithm>
#include <memory>

#include "kernels/codec/int_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/tq_mixed.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

// energy[j] = sum over rows of p[t][j]^2, |p| <= 2^11. `dim` is a multiple of 8.
void EnergiesImpl(const int16_t* p, int64_t num_tokens, int64_t dim, int64_t* energy) {
  const hn::CappedTag<int32_t, 8> d;
  const hn::Rebind<int16_t, decltype(d)> d16;
  constexpr int64_t kLanes = hn::MaxLanes(d);
  constexpr int64_t kRowsPerSum = 256;  // 2^8 * 2^22: below 2^31
  HWY_ALIGN int32_t lanes[kLanes];
  for (int64_t j = 0; j < dim; j += kLanes) {
    std::fill_n(energy + j, kLanes, int64_t{0});
    for (int64_t first = 0; first < num_tokens; first += kRowsPerSum) {
      auto sum = hn::Zero(d);
      const int64_t end = std::min(first + kRowsPerSum, num_tokens);
      for (int64_t t = first; t < end; ++t) {
        const auto v = hn::PromoteTo(d, hn::LoadU(d16, p + t * dim + j));
        sum = hn::Add(sum, hn::Mul(v, v));
      }
      hn::Store(sum, d, lanes);
      for (int64_t k = 0; k < kLanes; ++k) energy[j + k] += lanes[k];
    }
  }
}

#else
void EnergiesImpl(const int16_t*, int64_t, int64_t, int64_t*) {}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(EnergiesImpl);

namespace {

// Moves values of `Value` between the columns `order` of rows of `dim` and packed rows.
template <class Value>
struct Columns {
  const int32_t* order;
  int64_t count;
  int64_t dim;
  int64_t num_tokens;

  void Gather(const std::byte* rows, std::byte* packed) const {
    for (int64_t t = 0; t < num_tokens; ++t) {
      const std::byte* from = rows + t * dim * static_cast<int64_t>(sizeof(Value));
      std::byte* to = packed + t * count * static_cast<int64_t>(sizeof(Value));
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(to + i * sizeof(Value), from + order[i] * sizeof(Value), sizeof(Value));
      }
    }
  }
  void Scatter(const std::byte* packed, std::byte* rows) const {
    for (int64_t t = 0; t < num_tokens; ++t) {
      const std::byte* from = packed + t * count * static_cast<int64_t>(sizeof(Value));
      std::byte* to = rows + t * dim * static_cast<int64_t>(sizeof(Value));
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(to + order[i] * sizeof(Value), from + i * sizeof(Value), sizeof(Value));
      }
    }
  }
};

// One set of channels.
struct Part {
  PlaneShape shape;
  TqFormat tq;
  const int32_t* order;

  // Calls `call` with the set's columns, in the plane's value type.
  template <class Call>
  void WithColumns(int64_t dim, const Call& call) const {
    if (shape.dtype == DType::kF32) {
      call(Columns<uint32_t>{order, shape.dim, dim, shape.num_tokens});
    } else {
      call(Columns<uint16_t>{order, shape.dim, dim, shape.num_tokens});
    }
  }
};

Part OutliersOf(const TqMixedFormat& format, const std::vector<int32_t>& order) {
  const PlaneShape shape = format.outliers();
  return {shape, TqFormatOf(format.bits + 1, shape), order.data()};
}

Part OthersOf(const TqMixedFormat& format, const std::vector<int32_t>& order) {
  const PlaneShape shape = format.others();
  return {shape, TqFormatOf(format.bits, shape), order.data() + format.outliers().dim};
}

int64_t RowsBytes(const PlaneShape& shape) {
  return DTypeBytes(shape.dtype, int64_t{shape.num_tokens} * shape.dim);
}

}  // namespace

EncodeResult EncodeTqMixedHighway(const TqMixedFormat& format, const std::byte* rows,
                                  std::byte* plane) {
  const PlaneShape& shape = format.shape;
  const int64_t num_values = int64_t{shape.num_tokens} * shape.dim;
  const ValueRange range = RangeOfValues(shape.dtype, rows, num_values);
  if (!range.is_finite) return EncodeResult::kKeepRaw;
  if (range.is_zero) {
    std::fill_n(plane, format.plane_bytes(), std::byte{0});
    return EncodeResult::kEncoded;
  }
  std::byte* marks = plane + format.marks_at();
  std::fill(marks + shape.dim / 8, plane + format.plane_bytes(), std::byte{0});
  {
    const auto p = std::make_unique_for_overwrite<int16_t[]>(num_values);
    ValuesToInts(shape.dtype, rows, num_values, kTqRowBits - range.exponent, p.get());
    std::vector<int64_t> energy(shape.dim);
    HWY_DYNAMIC_DISPATCH(EnergiesImpl)(p.get(), shape.num_tokens, shape.dim, energy.data());
    MarkTqOutliers(energy, marks);
  }
  const std::vector<int32_t> order = TqMixedOrder(shape.dim, marks);
  const auto packed = std::make_unique_for_overwrite<std::byte[]>(RowsBytes(format.others()));
  const auto encode = [&](const Part& part, std::byte* to) {
    part.WithColumns(shape.dim, [&](const auto& columns) { columns.Gather(rows, packed.get()); });
    return EncodeTqHighway(part.tq, part.shape, packed.get(), to);
  };
  const EncodeResult result = encode(OutliersOf(format, order), plane);
  if (result != EncodeResult::kEncoded) return result;
  return encode(OthersOf(format, order), plane + format.others_at());
}

void DecodeTqMixedHighway(const TqMixedFormat& format, const std::byte* plane, std::byte* rows) {
  const std::vector<int32_t> order = TqMixedOrder(format.shape.dim, plane + format.marks_at());
  const auto packed = std::make_unique_for_overwrite<std::byte[]>(RowsBytes(format.others()));
  const auto decode = [&](const Part& part, const std::byte* from) {
    DecodeTqHighway(part.tq, part.shape, from, packed.get());
    part.WithColumns(format.shape.dim,
                     [&](const auto& columns) { columns.Scatter(packed.get(), rows); });
  };
  decode(OutliersOf(format, order), plane);
  decode(OthersOf(format, order), plane + format.others_at());
}

}  // namespace kvstow
#endif  // HWY_ONCE
