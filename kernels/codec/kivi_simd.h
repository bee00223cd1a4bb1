// What the Highway backend of kivi keeps between its passes over a plane. Nothing outside this
// folder includes it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/codec/kivi.h"

namespace kvstow {

// Two numbers of each group, as fp32. Zeros behind the last: passes work on whole vectors.
struct KiviGroups {
  static constexpr int64_t kRoom = 16;

  explicit KiviGroups(int64_t count)
      : num_groups(count), scales(count + kRoom), mins(count + kRoom) {}

  int64_t num_groups;
  std::vector<float> scales;  // while encoding first the maxima
  std::vector<float> mins;    // while encoding first the exact minima
};

// What a pass over the values of a plane works on.
struct KiviValues {
  const KiviFormat& format;
  const KiviGroups& groups;
};

}  // namespace kvstow
