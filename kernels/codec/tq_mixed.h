// tq3.5, tq2.5: tq where the channels of most energy get a bit more.
//
// The channels of a plane fall in two sets, each a tq plane of its own with its own rotation and
// scales: the outliers, about a quarter, at 4 (3) bits, the others at 3 (2). At dim 128 that is 32
// channels of 3 bits, 96 of 2 bits and two scales: 2.5 bits per value. Which channels are outliers
// is chosen per plane and stored as one bit a channel.
//
// This header is the definition; the arithmetic of a set is tq.h's. The number of outliers follows
// from the dim (TqMixedOutliers). With e = floor(log2(m)), m the plane's largest magnitude, the
// energy of a channel is the sum over tokens of rint(x * 2^(10 - e))^2, an integer; outliers are
// the channels of largest energy, of equal ones the first. A plane with m < 2^-40 is all zero
// bytes.
//
// Plane: the outliers' tq plane, the others' tq plane, dim bits (bit j of byte j / 8: channel j is
// an outlier), zeros to a multiple of 64. A decoder takes the marked channels, then the others, in
// ascending order; the first TqMixedOutliers(dim) of these are the outliers, whatever the bits say.
//
// Source: the split and the two independent instances are TurboQuant's (Zandieh et al.,
// arXiv:2504.19874), which leaves open how the channels are chosen: that is ours.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/codec/tq.h"

namespace kvstow {

// The largest number up to a quarter of the channels that leaves both sets with a Hadamard matrix;
// 0 where there is none.
constexpr int TqMixedOutliers(int dim) {
  for (int count = dim / 4; count >= kMinHadamardDim; --count) {
    if (PaleyOrder(count) != 0 && PaleyOrder(dim - count) != 0) return count;
  }
  return 0;
}

struct TqMixedFormat {
  int bits = 2;  // of the others: 3 or 2
  PlaneShape shape;

  PlaneShape outliers() const { return WithDim(TqMixedOutliers(shape.dim)); }
  PlaneShape others() const { return WithDim(shape.dim - TqMixedOutliers(shape.dim)); }
  int64_t others_at() const { return PlaneBytes(bits + 1, outliers()); }
  int64_t marks_at() const { return others_at() + PlaneBytes(bits, others()); }
  int64_t plane_bytes() const { return AlignUp(marks_at() + shape.dim / 8, 64); }

 private:
  PlaneShape WithDim(int dim) const {
    PlaneShape part = shape;
    part.dim = dim;
    return part;
  }
  static int64_t PlaneBytes(int bits, const PlaneShape& part) {
    return TqLayout(bits, /*has_means=*/false, part.num_tokens, part.dim).plane_bytes;
  }
};

inline bool TqMixedAccepts(const PlaneShape& shape) {
  return IsFloatDType(shape.dtype) && shape.num_tokens >= 1 && shape.dim % 16 == 0 &&
         TqMixedOutliers(shape.dim) != 0;
}

// Marks the outliers of a plane, given the energy of each channel and the least one of an outlier:
// all that have more, and of those that have as much the first. `marks` is dim / 8 bytes.
void MarkTqOutliers(const std::vector<int64_t>& energy, int64_t least, std::byte* marks);

// All channels, the outliers first.
std::vector<int32_t> TqMixedOrder(int dim, const std::byte* marks);

EncodeResult EncodeTqMixedScalar(const TqMixedFormat& format, const std::byte* rows,
                                 std::byte* plane);
void DecodeTqMixedScalar(const TqMixedFormat& format, const std::byte* plane, std::byte* rows);

EncodeResult EncodeTqMixedHighway(const TqMixedFormat& format, const std::byte* rows,
                                  std::byte* plane);
void DecodeTqMixedHighway(const TqMixedFormat& format, const std::byte* plane, std::byte* rows);

}  // namespace kvstow
