// What each codec must reach on a real model's KV: the limits that `kvstow eval --check` holds it
// to.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "client/cli/eval_math.h"

namespace kvstow {

struct QualityBound {
  std::string_view codec;  // as given to --codecs
  double k_error;
  double v_error;
  double attention_kl;
  double output_error;
  std::string_view reason;
};

absl::Span<const QualityBound> QualityBounds();
const QualityBound* FindQualityBound(std::string_view codec);  // nullptr: nothing is promised

// One line per broken bound: which figure, found, allowed. A figure that is not a number is broken.
std::vector<std::string> BrokenBounds(const QualityBound& bound, const Quality& quality);

}  // namespace kvstow
