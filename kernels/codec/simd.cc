#include "kernels/codec/simd.h"

#include <array>

#include "hwy/targets.h"
#include "kernels/core/check.h"

namespace kvstow {
namespace {

// Weakest first; the numbers of better targets are lower.
constexpr std::array<int64_t, 5> kTargets = {HWY_NEON, HWY_SSE4, HWY_AVX2, HWY_AVX3, HWY_AVX3_DL};

bool IsSupported(int64_t target) {
  // Once: Highway asks the processor anew each time, and virtual machines answer that slowly.
  static const int64_t kSupported = hwy::SupportedTargets() & HWY_TARGETS;
  return (kSupported & target) != 0;
}

}  // namespace

bool SimdSupported() {
  for (const int64_t target : kTargets) {
    if (IsSupported(target)) return true;
  }
  return false;
}

std::vector<std::string_view> SimdTargets() {
  std::vector<std::string_view> names;
  for (const int64_t target : kTargets) {
    if (IsSupported(target)) names.push_back(hwy::TargetName(target));
  }
  return names;
}

void ForceSimdTarget(std::string_view target) {
  int64_t forced = 0;  // none
  for (const int64_t known : kTargets) {
    if (IsSupported(known) && target == hwy::TargetName(known)) forced = known;
  }
  KVSTOW_CHECK(target.empty() || forced != 0);
  // Most sources have no code of their own for it: they take their best.
  if (forced == HWY_AVX3_DL) forced |= HWY_AVX3;
  hwy::SetSupportedTargetsForTest(forced);
  hwy::GetChosenTarget().DeInit();  // the next call chooses anew
}

}  // namespace kvstow
