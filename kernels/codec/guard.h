// Guard: layers whose rows the rotating codecs would spoil, told from the rows of one block.
//
//   std::vector<PlaneStats> stats;  // of every plane of a model, of whichever block
//   stats.push_back(MeasurePlane(shape, rows));
//   const GuardVerdict verdict = DerivePlan(layout, stats);
//   // verdict.plan keeps those layers raw; verdict.reasons says why, a line each
//
// Why: the key biases of some model families (Qwen2, Qwen2.5) have a norm of 600 to 900 in the
// first and the last layers, where the keys of the others have about 22. A codec's error is a share
// of the norm of what it quantizes; the logits of the model live in the small part. The squared
// error over squares looks as good as anywhere: only a comparison of layers shows it.
//
// A plane's figures are computed in the order of its rows, and the verdict in the order of planes:
// equal rows give an equal plan on every machine, in whatever order planes come.
//
// Thread safety: plain functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/codec_plan.h"
#include "kernels/core/block_layout.h"

namespace kvstow {

struct PlaneStats {
  // False where the plane tells nothing: a dtype that is not quantized, a value that is not finite
  // or so large that its plane stays raw in any case, rows that are all equal. The rest is 0 then.
  bool is_usable = false;
  double energy = 0;           // of a row: mean of its squares' sum
  double residual_energy = 0;  // the same without the mean row of the plane
  double largest_mean = 0;     // magnitude, of the mean row's channels
  double top_share = 0;  // of residual_energy, in the two channels that have most (a RoPE pair)
  // Excess kurtosis of what is quantized after the signed Hadamard rotation: of the residual rows
  // of keys, of the rows of values. 0 for Gaussian rows, and for dims without such a rotation.
  double kurtosis = 0;
};

// `rows` as for CodecBackend::encode.
PlaneStats MeasurePlane(const PlaneShape& shape, const std::byte* rows);

// When a layer stands out. Measured: kernels/codec/README.md, "The guard".
struct GuardLimits {
  // Keys: error that tqm4 would leave in a row, in multiples of the median over the layers.
  double error_ratio = 4;
  // Keys: share of two channels in the residual energy.
  double top_share = 0.9;
  // Keys: norm of a row without the mean, in multiples of that of a value row of the layer.
  double norm_ratio = 30;
  // Both roles.
  double kurtosis = 3;
};

struct GuardVerdict {
  CodecPlan plan;                    // what stands out is raw; the rest is as asked for
  std::vector<std::string> reasons;  // one for each layer and role of the plan, in their order
};

// `stats` has one entry per plane of `layout`. Planes that are not usable stand out nowhere and
// count in no median.
GuardVerdict DerivePlan(const BlockLayout& layout, absl::Span<const PlaneStats> stats,
                        const GuardLimits& limits = {});

}  // namespace kvstow
