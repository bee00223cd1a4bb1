// Outputs lie in lanes, so that no sum crosses lanes: a vector of factor pairs times one pair of
// inputs, broadcast.
#include "kernels/codec/rotate_rows.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/codec/rotate_rows.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "kernels/codec/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvstow {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET != HWY_SCALAR

// Sums that are kept in registers for each row: of so many vectors at once, where there are 32.
constexpr int kMaxVectors = HWY_TARGET <= HWY_AVX3 ? 4 : 2;  // numbers of better targets are lower

struct Job {
  const int16_t* pairs;
  int dim;
  const int16_t* in;
  int32_t* out;
};

// Outputs [first, first + kVectors * Lanes(d)) of all rows.
template <int kVectors, class D>
HWY_INLINE void RotateColumns(D d, const Job& job, int first) {
  const hn::Repartition<int16_t, D> d16;
  using V32 = hn::Vec<D>;
  const int num_lanes = static_cast<int>(hn::Lanes(d));
  V32 sum[kRotatedRows][kVectors];
  HWY_UNROLL(8)
  for (int r = 0; r < kRotatedRows; ++r) {
    HWY_UNROLL(4)
    for (int k = 0; k < kVectors; ++k) sum[r][k] = hn::Zero(d);
  }
  for (int p = 0; p < job.dim / 2; ++p) {
    const int16_t* factors = job.pairs + 2 * (static_cast<int64_t>(p) * job.dim + first);
    hn::Vec<decltype(d16)> factor[kVectors];
    HWY_UNROLL(4)
    for (int k = 0; k < kVectors; ++k) factor[k] = hn::LoadU(d16, factors + 2 * k * num_lanes);
    HWY_UNROLL(8)
    for (int r = 0; r < kRotatedRows; ++r) {
      int32_t pair;
      std::memcpy(&pair, job.in + r * job.dim + 2 * p, sizeof(pair));
      const auto input = hn::BitCast(d16, hn::Set(d, pair));
      HWY_UNROLL(4)
      for (int k = 0; k < kVectors; ++k) sum[r][k] = MulAddPairs(d, factor[k], input, sum[r][k]);
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < kRotatedRows; ++r) {
    HWY_UNROLL(4)
    for (int k = 0; k < kVectors; ++k) {
      hn::StoreU(sum[r][k], d, job.out + r * job.dim + first + k * num_lanes);
    }
  }
}

void RotateImpl(const int16_t* pairs, int dim, const int16_t* in, int32_t* out) {
  const Job job{pairs, dim, in, out};
  const hn::ScalableTag<int32_t> d;
  const hn::CappedTag<int32_t, 4> d4;
  const int num_lanes = static_cast<int>(hn::Lanes(d));
  int i = 0;
  for (; i + kMaxVectors * num_lanes <= dim; i += kMaxVectors * num_lanes) {
    RotateColumns<kMaxVectors>(d, job, i);
  }
  for (; i + 2 * num_lanes <= dim; i += 2 * num_lanes) RotateColumns<2>(d, job, i);
  for (; i + num_lanes <= dim; i += num_lanes) RotateColumns<1>(d, job, i);
  for (; i < dim; i += 4) RotateColumns<1>(d4, job, i);
}

void ScaleImpl(DType dtype, const int32_t* v, int dim, float step, std::byte* row) {
  const hn::CappedTag<int32_t, 8> d;
  const hn::RebindToFloat<decltype(d)> df;
  constexpr int kLanes = hn::MaxLanes(d);
  WithDType(dtype, [&]<DType kDType>() HWY_ATTR {
    constexpr int kValueBytes = kDType == DType::kF32 ? 4 : 2;
    for (int i = 0; i < dim; i += kLanes) {
      const auto value = hn::Mul(hn::ConvertTo(df, hn::LoadU(d, v + i)), hn::Set(df, step));
      StoreFloats<kDType>(df, value, row + i * kValueBytes);
    }
  });
}

#else
void ScaleImpl(DType, const int32_t*, int, float, std::byte*) {}
void RotateImpl(const int16_t*, int, const int16_t*, int32_t*) {}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvstow
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvstow {

HWY_EXPORT(RotateImpl);
HWY_EXPORT(ScaleImpl);

void RotateRows(const int16_t* pairs, int dim, const int16_t* in, int32_t* out) {
  HWY_DYNAMIC_DISPATCH(RotateImpl)(pairs, dim, in, out);
}

void ScaleRow(DType dtype, const int32_t* v, int dim, float step, std::byte* values) {
  HWY_DYNAMIC_DISPATCH(ScaleImpl)(dtype, v, dim, step, values);
}

}  // namespace kvstow
#endif  // HWY_ONCE
