// Highway backend of tq_mixed: energies with Highway, then both sets by the columns, or each packed
// by tq's backend.
#include "kernels/codec/tq_mixed.h"

#include <algorithm>
#include <bit>
#include <memory>

#include "kernels/codec/int_rows.h"
#include "kernels/codec/tq_simd.h"

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

// energy[j] = sum over rows of rint(x[t][j] * 2^log2)^2, |rint| <= 2^11. Dims are multiples of 16.
void EnergiesImpl(const PlaneShape& shape, const std::byte* rows, int log2, int64_t* energy) {
  const hn::CappedTag<float, 16> df;
  const hn::RebindToSigned<decltype(df)> d;
  constexpr int64_t kLanes = hn::MaxLanes(d);
  constexpr int64_t kRowsPerSum = 256;  // 2^8 * 2^22: below 2^31
  HWY_ALIGN int32_t lanes[kLanes];
  const auto factor = hn::Set(df, PowerOfTwo(log2));
  WithDType(shape.dtype, [&]<DType kDType>() HWY_ATTR {
    const int64_t value_bytes = kDType == DType::kF32 ? 4 : 2;
    for (int64_t j = 0; j < shape.dim; j += kLanes) {
      std::fill_n(energy + j, kLanes, int64_t{0});
      for (int64_t first = 0; first < shape.num_tokens; first += kRowsPerSum) {
        auto sum = hn::Zero(d);
        const int64_t end = std::min<int64_t>(first + kRowsPerSum, shape.num_tokens);
        for (int64_t t = first; t < end; ++t) {
          const auto x = LoadFloats<kDType>(df, rows + (t * shape.dim + j) * value_bytes);
          const auto p = hn::NearestInt(hn::Mul(x, factor));
          sum = hn::Add(sum, hn::Mul(p, p));
        }
        hn::Store(sum, d, lanes);
        for (int64_t k = 0; k < kLanes; ++k) energy[j + k] += lanes[k];
      }
    }
  });
}

// The largest number that `count` of the energies reach, bit by bit.
int64_t ReachedByImpl(const int64_t* energy, int64_t dim, int count) {
  const hn::CappedTag<int64_t, 8> d;
  int64_t max = 0;
  for (int64_t j = 0; j < dim; ++j) max = std::max(max, energy[j]);
  int64_t reached = 0;
  for (int64_t bit = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(max))); bit != 0;
       bit >>= 1) {
    const auto below = hn::Set(d, reached + bit - 1);
    size_t num_reached = 0;
    for (int64_t j = 0; j < dim; j += static_cast<int64_t>(hn::Lanes(d))) {
      num_reached += hn::CountTrue(d, hn::Gt(hn::LoadU(d, energy + j), below));
    }
    if (num_reached >= static_cast<size_t>(count)) reached += bit;
  }
  return reached;
}

#else
int64_t ReachedByImpl(const int64_t*, int64_t, int) { return 0; }
void EnergiesImpl(const PlaneShape&, const std::byte*, int, int64_t*) {}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(EnergiesImpl);
HWY_EXPORT(ReachedByImpl);

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
  void WithColumns(int64_t dim, int64_t num_tokens, const Call& call) const {
    if (shape.dtype == DType::kF32) {
      call(Columns<uint32_t>{order, shape.dim, dim, num_tokens});
    } else {
      call(Columns<uint16_t>{order, shape.dim, dim, num_tokens});
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

TqChannelSet ChannelsOf(const Part& part) {
  const TqPlane plane{.format = part.tq, .has_means = false, .num_tokens = part.shape.num_tokens};
  return {plane, part.order};
}

bool CanUseColumns(const TqMixedFormat& format) {
  return CanUseTqColumns(format.shape.dtype, format.outliers().dim) &&
         CanUseTqColumns(format.shape.dtype, format.others().dim) &&
         format.shape.dim <= kMaxTqColumns;
}

// The channels of single rows, one row per lane.
EncodeResult EncodeLeft(const Part& part, int64_t dim, const std::byte* rows,
                        const std::vector<int32_t>& left, std::byte* bytes) {
  const int64_t row_bytes = DTypeBytes(part.shape.dtype, part.shape.dim);
  std::vector<std::byte> packed(left.size() * row_bytes);
  std::vector<TqValueRow> value_rows;
  for (const int64_t t : left) {
    std::byte* const values = packed.data() + value_rows.size() * row_bytes;
    part.WithColumns(dim, /*num_tokens=*/1, [&](const auto& columns) {
      columns.Gather(rows + t * DTypeBytes(part.shape.dtype, dim), values);
    });
    value_rows.push_back({t, values});
  }
  return EncodeTqValueRows(ChannelsOf(part).plane, part.shape.dtype, value_rows, bytes);
}

EncodeResult EncodeByColumns(const Part (&parts)[2], int64_t dim, const std::byte* rows,
                             std::byte* const (&bytes)[2]) {
  const TqChannelSet sets[2] = {ChannelsOf(parts[0]), ChannelsOf(parts[1])};
  for (int i = 0; i < 2; ++i) ClearTqPadding(sets[i].plane, bytes[i]);
  std::vector<int32_t> left[2];
  if (!EncodeTqColumns(sets, dim, rows, bytes, absl::MakeSpan(left))) return EncodeResult::kKeepRaw;
  for (int i = 0; i < 2; ++i) {
    const EncodeResult result = EncodeLeft(parts[i], dim, rows, left[i], bytes[i]);
    if (result != EncodeResult::kEncoded) return result;
  }
  return EncodeResult::kEncoded;
}

EncodeResult EncodePacked(const Part& part, int64_t dim, const std::byte* rows, std::byte* bytes) {
  const auto packed = std::make_unique_for_overwrite<std::byte[]>(RowsBytes(part.shape));
  part.WithColumns(dim, part.shape.num_tokens,
                   [&](const auto& columns) { columns.Gather(rows, packed.get()); });
  return EncodeTqHighway(part.tq, part.shape, packed.get(), bytes);
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
  std::vector<int64_t> energy(shape.dim);
  HWY_DYNAMIC_DISPATCH(EnergiesImpl)(shape, rows, kTqRowBits - range.exponent, energy.data());
  const int64_t least =
      HWY_DYNAMIC_DISPATCH(ReachedByImpl)(energy.data(), shape.dim, TqMixedOutliers(shape.dim));
  MarkTqOutliers(energy, least, marks);
  const std::vector<int32_t> order = TqMixedOrder(shape.dim, marks);
  const Part parts[2] = {OutliersOf(format, order), OthersOf(format, order)};
  std::byte* const bytes[2] = {plane, plane + format.others_at()};
  if (CanUseColumns(format)) return EncodeByColumns(parts, shape.dim, rows, bytes);
  const EncodeResult result = EncodePacked(parts[0], shape.dim, rows, bytes[0]);
  if (result != EncodeResult::kEncoded) return result;
  return EncodePacked(parts[1], shape.dim, rows, bytes[1]);
}

void DecodeTqMixedHighway(const TqMixedFormat& format, const std::byte* plane, std::byte* rows) {
  const int64_t dim = format.shape.dim;
  const std::vector<int32_t> order = TqMixedOrder(format.shape.dim, plane + format.marks_at());
  const Part parts[2] = {OutliersOf(format, order), OthersOf(format, order)};
  const std::byte* const bytes[2] = {plane, plane + format.others_at()};
  if (CanUseColumns(format)) {
    const TqChannelSet sets[2] = {ChannelsOf(parts[0]), ChannelsOf(parts[1])};
    DecodeTqColumns(sets, dim, bytes, rows);
    return;
  }
  const auto packed = std::make_unique_for_overwrite<std::byte[]>(RowsBytes(format.others()));
  for (int i = 0; i < 2; ++i) {
    const PlaneShape& shape = parts[i].shape;
    DecodeTqHighway(parts[i].tq, shape, bytes[i], packed.get());
    parts[i].WithColumns(dim, shape.num_tokens,
                         [&](const auto& columns) { columns.Scatter(packed.get(), rows); });
  }
}

}  // namespace kvstow
#endif  // HWY_ONCE
