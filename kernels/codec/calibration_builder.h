// CalibrationBuilder: the rotations of a model, computed from samples of its queries, keys and
// values, and what the samples tell of its heads.
//
//   CalibrationSamples samples{.num_tokens = 20000, .layers = {{.q = ..., .k = ..., .v = ...}}};
//   KVSTOW_ASSIGN_OR_RETURN(BuiltCalibration built,
//                           BuildCalibration(samples, {.fingerprint = f, .source = digest}));
//   for (const std::string& warning : CalibrationWarnings(samples, built.heads)) { ... }
//
// Per layer, role and KV head: R = H D U^T / sqrt(dim), in integers of 14 fraction bits. U are the
// eigenvectors, by falling eigenvalue, of
//   keys    the second moment of the queries that read the head (the error of a logit is q . e), or
//           of the keys themselves where the samples hold no queries;
//   values  the second moment of the values, each with the weight k^T C_Q k of its token (a proxy
//           of the attention it gets), or 1 without queries.
// Of each eigenvector the entry of largest magnitude, the first of equals, is made positive. D are
// the signs of hadamard.h, H its matrix, which spreads the energy of few directions over all
// values; where the dim has none, the orthonormal DCT-II.
//
// The same samples give the same bytes, on any number of threads.
//
// Source: OSCAR (arXiv:2605.17757). We differ: one rotation per KV head, signs before H.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/codec/calibration.h"
#include "kernels/core/digest.h"
#include "kernels/core/dtype.h"

namespace kvstow {

// Rows of one layer, [num_tokens, num_heads, dim], contiguous; borrowed. No data: not sampled.
struct SampleRows {
  DType dtype = DType::kBf16;
  int32_t num_heads = 0;
  int32_t dim = 0;
  const std::byte* data = nullptr;
};

struct LayerSamples {
  SampleRows q;  // query heads, as many for each KV head; may be without data
  SampleRows k;
  SampleRows v;
};

struct CalibrationSamples {
  int64_t num_tokens = 0;
  std::vector<LayerSamples> layers;  // all of the model

  // So many tokens make a rotation of the model, fewer one of the sample.
  static constexpr int64_t kGoodTokens = 5000;
  // Fewer than this many per dim are refused: the moments would not have full rank.
  static constexpr int64_t kMinTokensPerDim = 2;

  //   kInvalidArgument names the layer and the role: no keys or values, heads or dims that do not
  //   fit together, dims that calibrated codecs do not take, values that are not bf16, fp16 or
  //   fp32; or says how many tokens are needed
  absl::Status Validate() const;
};

// Of the rows of one head.
struct HeadStats {
  RotationPlace place;
  double rms_norm = 0;     // sqrt of the mean of |x|^2
  double mean_share = 0;   // of the energy, that of the mean row
  double top_channel = 0;  // of the energy, that of the largest channel
  double kurtosis = 0;     // excess, of the rotated values over their row's rms; Gaussian: 0
};

struct BuildOptions {
  Digest fingerprint;  // of the ModelSpec
  Digest source;       // of the file that the samples came from
  int num_threads = 1;
  // Called on the calling thread, as layers are done. May be empty.
  std::function<void(int64_t num_done, int64_t num_layers)> progress;
};

struct BuiltCalibration {
  Calibration calibration;
  std::vector<HeadStats> heads;  // ascending by place
};

// kInvalidArgument: as Validate, or a value that is not finite or too large (names the place).
absl::StatusOr<BuiltCalibration> BuildCalibration(const CalibrationSamples& samples,
                                                  const BuildOptions& options);

// What speaks against a rotating codec for these heads, one sentence each, the worst head named:
// few tokens, keys that are mostly their mean, keys far larger than in other layers or than the
// values, one channel that dominates, values that are not Gaussian.
std::vector<std::string> CalibrationWarnings(const CalibrationSamples& samples,
                                             absl::Span<const HeadStats> heads);

}  // namespace kvstow
