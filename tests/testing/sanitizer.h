// Sanitizer: which one this test is built with, for what cannot be measured under it.
#pragma once

namespace kvstow::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif

}  // namespace kvstow::testing
