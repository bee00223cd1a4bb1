// tq_prod4, tq_prod3, tq_prod2: the two-stage TurboQuant whose inner products are unbiased. A
// reference, for comparison tables: tq's unbiased scale has less variance at equal bits.
//
// A row is a tq row of one bit less (least-squares scale a), and the signs of a second rotation of
// what that row misses. With y = H (s o q), w, e and g as in tq.h:
//   beta = a * 2^(10 - e - g) * dim      so that y ~ beta * w; the product is exact in fp64
//   rho_j = y_j - w_j * beta             fp64
//   c = fp16(fp32(sqrt(sum_j rho_j^2) / dim * 2^(e - 10)))    the sum in fp64, j ascending
//   sign_j = 1 where (H (s2 o rho))_j < 0, else 0
// The second signs s2 are those of seed 44 + role. Where c rounds to infinity the plane stays raw.
// Decoding: with u_j = +-1 of the signs and v = s2 o (H^T u), integers,
//   z_j = (a * 2^-g) * w_j + (1.2533141373155003 / dim * c) * v_j        fp64: sqrt(pi / 2)
//   x'_j = s_j * (H^T z)_j               rounded to fp32, then to the output type
// fp64 transforms are those of HadamardTransform, in its order. Scalar backend only.
//
// Plane: per row a and c (fp16), zeros to a multiple of 16, per row the tq codes and dim / 8 bytes
// of signs, zeros to a multiple of 64: bits + 32 / dim per value.
//
// Source: TurboQuant (Zandieh et al., arXiv:2504.19874), section on inner products, and QJL. We
// differ: the first stage is scaled by least squares, the sketch is an orthogonal one.
#pragma once

#include "kernels/codec/tq.h"

namespace kvstow {

struct TqProdFormat {
  int bits = 4;  // 2 to 4, the sign included
  PlaneShape shape;

  TqFormat first() const {
    return {
        .bits = bits - 1, .dim = shape.dim, .role = shape.role, .scale = TqScale::kLeastSquares};
  }
  int64_t signs_at() const { return shape.dim * (bits - 1) / 8; }  // in a row
  int64_t row_code_bytes() const { return shape.dim * bits / 8; }
  int64_t codes_at() const { return AlignUp(int64_t{4} * shape.num_tokens, 16); }
  int64_t plane_bytes() const {
    return AlignUp(codes_at() + shape.num_tokens * row_code_bytes(), 64);
  }
};

EncodeResult EncodeTqProdScalar(const TqProdFormat& format, const std::byte* rows,
                                std::byte* plane);
void DecodeTqProdScalar(const TqProdFormat& format, const std::byte* plane, std::byte* rows);

}  // namespace kvstow
