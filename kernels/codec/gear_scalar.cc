// The backend of gear: the definition of gear.h over a whole plane.
#include <numeric>
#include <vector>

#include "kernels/codec/gear.h"
#include "kernels/codec/hadamard.h"

namespace kvstow {
namespace {

// [rows, kGearRank].
using Factor = std::vector<double>;

// Stores the outliers of vector `v` and puts the mean of the others in their place. Marks them in
// `is_outlier`. False where one does not fit.
bool TakeOutliers(const GearFormat& format, int64_t v, std::vector<float>& x,
                  std::vector<bool>& is_outlier, std::byte* plane) {
  const int64_t length = format.vector_length();
  const int64_t count = format.outliers_per_side();
  std::vector<int64_t> order(length);
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int64_t i) { return x[format.place(v, i)]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return value(a) > value(b); });
  std::stable_sort(order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
    return value(a) != value(b) ? value(a) < value(b) : a < b;
  });
  std::byte* to = plane + format.outliers_at() + v * 2 * count * 4;
  for (int64_t k = 0; k < 2 * count; ++k) {
    const uint16_t stored = FloatToF16(value(order[k]));
    if ((stored & 0x7fff) == kF16Infinity) return false;
    StoreU16(to + 4 * k, static_cast<uint16_t>(order[k]));
    StoreU16(to + 4 * k + 2, stored);
    is_outlier[format.place(v, order[k])] = true;
  }
  double sum = 0;
  for (int64_t i = 0; i < length; ++i) {
    if (!is_outlier[format.place(v, i)]) sum += value(i);
  }
  const int64_t num_others = length - 2 * count;
  const auto mean = num_others > 0 ? static_cast<float>(sum / static_cast<double>(num_others)) : 0;
  for (int64_t k = 0; k < 2 * count; ++k) x[format.place(v, order[k])] = mean;
  return true;
}

// Makes the columns orthonormal; a column that vanishes stays 0.
void Orthonormalize(Factor& a, int64_t num_rows) {
  for (int k = 0; k < kGearRank; ++k) {
    for (int before = 0; before < k; ++before) {
      double dot = 0;
      for (int64_t t = 0; t < num_rows; ++t)
        dot += a[t * kGearRank + before] * a[t * kGearRank + k];
      for (int64_t t = 0; t < num_rows; ++t) {
        a[t * kGearRank + k] = a[t * kGearRank + k] - dot * a[t * kGearRank + before];
      }
    }
    double energy = 0;
    for (int64_t t = 0; t < num_rows; ++t) energy += a[t * kGearRank + k] * a[t * kGearRank + k];
    const double norm = std::sqrt(energy);
    for (int64_t t = 0; t < num_rows && norm > 0; ++t) {
      a[t * kGearRank + k] = a[t * kGearRank + k] / norm;
    }
  }
}

// E ~ A B^T.
void PowerIteration(const PlaneShape& shape, const std::vector<double>& error, Factor& a,
                    Factor& b) {
  const int64_t num_tokens = shape.num_tokens;
  const int64_t dim = shape.dim;
  for (int64_t j = 0; j < dim; ++j) {
    for (int k = 0; k < kGearRank; ++k) {
      const uint64_t word = SplitMix64At(46 + static_cast<uint64_t>(k), static_cast<int>(j / 64));
      b[j * kGearRank + k] = ((word >> (j % 64)) & 1) != 0 ? -1 : 1;
    }
  }
  for (int round = 0; round < kGearRounds; ++round) {
    for (int k = 0; k < kGearRank; ++k) {
      for (int64_t t = 0; t < num_tokens; ++t) {
        double sum = 0;
        for (int64_t j = 0; j < dim; ++j) sum += error[t * dim + j] * b[j * kGearRank + k];
        a[t * kGearRank + k] = sum;
      }
    }
    Orthonormalize(a, num_tokens);
    for (int k = 0; k < kGearRank; ++k) {
      for (int64_t j = 0; j < dim; ++j) {
        double sum = 0;
        for (int64_t t = 0; t < num_tokens; ++t) sum += error[t * dim + j] * a[t * kGearRank + k];
        b[j * kGearRank + k] = sum;
      }
    }
  }
}

bool StoreFactor(const Factor& factor, std::byte* to) {
  for (size_t i = 0; i < factor.size(); ++i) {
    const uint16_t stored = FloatToF16(static_cast<float>(factor[i]));
    if ((stored & 0x7fff) == kF16Infinity) return false;
    StoreU16(to + 2 * i, stored == 0x8000 ? uint16_t{0} : stored);
  }
  return true;
}

double FactorAt(const std::byte* factor, int64_t row, int k) {
  return F16ToFloat(LoadU16(factor + 2 * (row * kGearRank + k)));
}

}  // namespace

EncodeResult EncodeGearScalar(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  const GearFormat format{shape};
  std::memset(plane, 0, format.plane_bytes());
  std::vector<float> x(int64_t{shape.num_tokens} * shape.dim);
  float max = 0.0f;
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = LoadValue(shape.dtype, rows, static_cast<int64_t>(i));
    if (!std::isfinite(x[i])) return EncodeResult::kKeepRaw;
    max = std::max(max, std::fabs(x[i]));
  }
  if (max < 0x1p-40f) return EncodeResult::kEncoded;
  std::vector<bool> is_outlier(x.size());
  for (int64_t v = 0; v < format.num_vectors(); ++v) {
    if (!TakeOutliers(format, v, x, is_outlier, plane)) return EncodeResult::kKeepRaw;
  }
  const auto* y = reinterpret_cast<const std::byte*>(x.data());
  const PlaneShape backbone = format.backbone();
  if (EncodeKiviScalar(format.kivi(), backbone, y, plane) == EncodeResult::kKeepRaw) {
    return EncodeResult::kKeepRaw;
  }
  std::vector<float> decoded(x.size());
  DecodeKiviScalar(format.kivi(), backbone, plane, reinterpret_cast<std::byte*>(decoded.data()));
  std::vector<double> error(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    error[i] = is_outlier[i] ? 0.0 : static_cast<double>(x[i]) - static_cast<double>(decoded[i]);
  }
  Factor a(int64_t{shape.num_tokens} * kGearRank);
  Factor b(int64_t{shape.dim} * kGearRank);
  PowerIteration(shape, error, a, b);
  const bool fits = StoreFactor(a, plane + format.a_at()) && StoreFactor(b, plane + format.b_at());
  return fits ? EncodeResult::kEncoded : EncodeResult::kKeepRaw;
}

void DecodeGearScalar(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  const GearFormat format{shape};
  std::vector<float> decoded(int64_t{shape.num_tokens} * shape.dim);
  DecodeKiviScalar(format.kivi(), format.backbone(), plane,
                   reinterpret_cast<std::byte*>(decoded.data()));
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    for (int64_t j = 0; j < shape.dim; ++j) {
      double rest = 0;
      for (int k = 0; k < kGearRank; ++k) {
        rest += FactorAt(plane + format.a_at(), t, k) * FactorAt(plane + format.b_at(), j, k);
      }
      float& value = decoded[t * shape.dim + j];
      value = static_cast<float>(static_cast<double>(value) + rest);
    }
  }
  const int64_t count = 2 * format.outliers_per_side();
  for (int64_t v = 0; v < format.num_vectors(); ++v) {
    for (int64_t k = 0; k < count; ++k) {
      const std::byte* from = plane + format.outliers_at() + (v * count + k) * 4;
      const int64_t i = LoadU16(from) % format.vector_length();
      decoded[format.place(v, i)] = F16ToFloat(LoadU16(from + 2));
    }
  }
  for (size_t i = 0; i < decoded.size(); ++i) {
    StoreValue(shape.dtype, rows, static_cast<int64_t>(i), decoded[i]);
  }
}

}  // namespace kvstow
