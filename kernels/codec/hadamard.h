// The signed Hadamard rotation of the tq families: which head dims have one, its signs, and a plain
// transform.
//
// y = H (s o q): `s` are +-1 signs from SplitMix64, `H` is +-1 valued with H H^T = dim * I. Where
// dim is a power of two, H is the Sylvester matrix in natural order; else H = P (x) Sylvester with
// a Paley matrix P of order 12, 20, 28 or 36, which is not symmetric. Integers in, integers out: no
// order of the additions changes a bit. |y| <= dim * max |q|.
//
// Source: J. J. Sylvester 1867; R. E. A. C. Paley, J. Math. Phys. 12 (1933); SplitMix64: Steele,
// Lea, Flood, OOPSLA 2014.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/core/block_layout.h"
#include "kernels/core/check.h"

namespace kvstow {

inline constexpr int kMinHadamardDim = 8;
inline constexpr int kMaxHadamardDim = 4096;  // |y| < 2^24: exact in fp32 too
inline constexpr int kMaxPaleyOrder = 36;

// Order of the Paley factor of H: 1 where `dim` is a power of two, 0 where we have no H.
constexpr int PaleyOrder(int dim) {
  if (dim < kMinHadamardDim || dim > kMaxHadamardDim) return 0;
  if ((dim & (dim - 1)) == 0) return 1;
  switch (dim) {
    case 48:
    case 96:
    case 192:
      return 12;
    case 80:
    case 160:
    case 320:
      return 20;
    case 112:
      return 28;
    case 576:
      return 36;
    default:
      return 0;
  }
}

constexpr int FloorLog2(int64_t value) {
  int log2 = 0;
  while ((value >>= 1) != 0) ++log2;
  return log2;
}

// Output `word_idx` of SplitMix64 from `seed`.
constexpr uint64_t SplitMix64At(uint64_t seed, int word_idx) {
  uint64_t z = seed + (static_cast<uint64_t>(word_idx) + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// True where the sign of value `value_idx` is minus. Seed 42 for keys, 43 for values.
constexpr bool IsMinusSign(Role role, int value_idx) {
  const uint64_t seed = 42 + static_cast<uint64_t>(role);
  return ((SplitMix64At(seed, value_idx / 64) >> (value_idx % 64)) & 1) != 0;
}

namespace internal {

// Quadratic character modulo the prime `q`.
constexpr int Chi(int a, int q) {
  a = ((a % q) + q) % q;
  if (a == 0) return 0;
  for (int i = 1; i < q; ++i) {
    if (i * i % q == a) return 1;
  }
  return -1;
}

template <int kOrder>
using PaleyArray = std::array<int8_t, kOrder * kOrder>;

// Paley's first construction, kOrder = q + 1, q = 3 mod 4.
template <int kOrder>
constexpr PaleyArray<kOrder> MakePaley1() {
  PaleyArray<kOrder> p{};
  for (int i = 0; i < kOrder; ++i) {
    for (int j = 0; j < kOrder; ++j) {
      const int sign = i == 0 || i == j ? 1 : (j == 0 ? -1 : Chi(i - j, kOrder - 1));
      p[i * kOrder + j] = static_cast<int8_t>(sign);
    }
  }
  return p;
}

// Paley's second construction, kOrder = 2 (q + 1), q = 1 mod 4: each entry of a conference matrix
// becomes a 2 x 2 block.
template <int kOrder>
constexpr PaleyArray<kOrder> MakePaley2() {
  constexpr int kQ = kOrder / 2 - 1;
  constexpr int kOff[4] = {1, 1, 1, -1};
  constexpr int kDiagonal[4] = {1, -1, -1, -1};
  PaleyArray<kOrder> p{};
  for (int i = 0; i < kOrder; ++i) {
    for (int j = 0; j < kOrder; ++j) {
      const int row = i / 2, column = j / 2, part = (i % 2) * 2 + j % 2;
      const int s = row == 0 || column == 0 ? 1 : Chi(row - column, kQ);
      p[i * kOrder + j] = static_cast<int8_t>(row == column ? kDiagonal[part] : s * kOff[part]);
    }
  }
  return p;
}

inline constexpr PaleyArray<12> kPaley12 = MakePaley1<12>();
inline constexpr PaleyArray<20> kPaley20 = MakePaley1<20>();
inline constexpr PaleyArray<28> kPaley28 = MakePaley2<28>();
inline constexpr PaleyArray<36> kPaley36 = MakePaley2<36>();

}  // namespace internal

// [order, order] signs of P, row-major. `order` is 12, 20, 28 or 36.
inline const int8_t* PaleyMatrix(int order) {
  switch (order) {
    case 12:
      return internal::kPaley12.data();
    case 20:
      return internal::kPaley20.data();
    case 28:
      return internal::kPaley28.data();
    case 36:
      return internal::kPaley36.data();
    default:
      KVSTOW_CHECK(false);
  }
}

// v = s o v, in place.
inline void ApplySigns(Role role, int32_t* v, int dim) {
  const uint64_t seed = 42 + static_cast<uint64_t>(role);
  for (int first = 0; first < dim; first += 64) {
    const uint64_t minus = SplitMix64At(seed, first / 64);
    for (int i = first; i < dim && i < first + 64; ++i) {
      if (((minus >> (i - first)) & 1) != 0) v[i] = -v[i];
    }
  }
}

enum class Transposed : bool { kNo = false, kYes = true };

// y = H y, or H^T y, in place. PaleyOrder(dim) != 0. `Number` is an integer type, or double where
// this order of additions is part of a format.
template <class Number>
void HadamardTransform(Number* y, int dim, Transposed transposed) {
  const int order = PaleyOrder(dim);
  const int sylvester = dim / order;
  for (int stride = 1; stride < sylvester; stride *= 2) {
    for (int first = 0; first < dim; first += 2 * stride) {
      for (int i = first; i < first + stride; ++i) {
        const Number sum = y[i] + y[i + stride];
        y[i + stride] = y[i] - y[i + stride];
        y[i] = sum;
      }
    }
  }
  if (order == 1) return;
  const int8_t* p = PaleyMatrix(order);
  for (int low = 0; low < sylvester; ++low) {
    Number x[kMaxPaleyOrder];
    for (int j = 0; j < order; ++j) x[j] = y[j * sylvester + low];
    for (int i = 0; i < order; ++i) {
      Number sum = 0;
      for (int j = 0; j < order; ++j) {
        sum += (transposed == Transposed::kYes ? p[j * order + i] : p[i * order + j]) * x[j];
      }
      y[i * sylvester + low] = sum;
    }
  }
}

}  // namespace kvstow
