#include "client/cli/eval_bounds.h"

#include <array>

#include "absl/strings/str_format.h"

namespace kvstow {
namespace {

// For the bundled KV (256 tokens of a small model, four blocks). K and V from theory with 5 % on
// top: the error energy of Gaussian rows is 0.00951 at 4 bits and 0.0345 at 3 (Lloyd-Max), an
// unbiased scale costs 1 / (1 - D), the key mean takes at least half of the energy of these keys
// out of what is quantized, and presets leave one block of four raw, tiny two. Attention figures
// have no theory: a quarter above what was measured, which stays the same everywhere, since encoded
// bytes do.
constexpr std::array<QualityBound, 9> kBounds = {{
    {"raw", 0, 0, 0, 0, "bytes come back as they were"},
    {"lossless", 0, 0, 0, 0, "raw under another name"},
    // A row's step is amax / 127 and its energy at least amax^2: d / (12 * 127^2), d = 64.
    {"int8", 3.4e-4, 3.4e-4, 4.8e-4, 6.0e-4, "uniform error of a step of amax / 127"},
    {"tq4", 1.00e-2, 1.01e-2, 2.8e-2, 3.4e-2, "4-bit Lloyd-Max, keys least squares"},
    {"k=tqm4,v=tq4", 5.0e-3, 1.01e-2, 1.6e-2, 2.3e-2, "4-bit Lloyd-Max after the key mean"},
    {"k=int8,v=tq4", 3.4e-4, 1.01e-2, 4.8e-4, 7.4e-3, "int8 keys, 4-bit Lloyd-Max values"},
    {"safe", 3.8e-3, 7.6e-3, 8.3e-3, 1.0e-2, "k=tqm4,v=tq4, the first block of four raw"},
    {"small", 3.8e-3, 2.82e-2, 8.3e-3, 2.1e-2, "k=tqm4,v=tq3, the first block of four raw"},
    {"tiny", 9.4e-3, 7.0e-2, 1.1e-2, 1.2e-2,
     "k=tqm3,v=tq2, the first and the last block of four raw"},
}};

}  // namespace

absl::Span<const QualityBound> QualityBounds() { return kBounds; }

const QualityBound* FindQualityBound(std::string_view codec) {
  for (const QualityBound& bound : kBounds) {
    if (bound.codec == codec) return &bound;
  }
  return nullptr;
}

std::vector<std::string> BrokenBounds(const QualityBound& bound, const Quality& quality) {
  struct Figure {
    const char* name;
    double found;
    double allowed;
  };
  const std::array<Figure, 4> figures = {{
      {"error of K", quality.k_error, bound.k_error},
      {"error of V", quality.v_error, bound.v_error},
      {"attention KL", quality.attention_kl, bound.attention_kl},
      {"attention output error", quality.output_error, bound.output_error},
  }};
  std::vector<std::string> broken;
  for (const Figure& figure : figures) {
    if (figure.found <= figure.allowed) continue;
    broken.push_back(absl::StrFormat("%s: %s is %.3g, allowed %.3g (%s)", std::string(bound.codec),
                                     figure.name, figure.found, figure.allowed,
                                     std::string(bound.reason)));
  }
  return broken;
}

}  // namespace kvstow
