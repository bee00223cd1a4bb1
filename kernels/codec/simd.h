// Instruction sets of the Highway backends on this machine.
#pragma once

#include <string_view>
#include <vector>

namespace kvstow {

// False where Highway has only its one-lane fallback: the scalar reference serves there.
bool SimdSupported();

// Those this machine has, the best last: "SSE4", "AVX2", "AVX3" (AVX-512), "NEON".
std::vector<std::string_view> SimdTargets();

// For tests and benchmarks: from now on the Highway backends run on `target`, one of SimdTargets(),
// or on the best one again where it is "". Must not run beside a codec.
void ForceSimdTarget(std::string_view target);

}  // namespace kvstow
