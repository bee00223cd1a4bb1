// KVSTOW_CHECK and KVSTOW_DCHECK: stop the process when an invariant of our own is broken.
//
// User input, bytes from disk and peers never reach one: those are absl::Status. KVSTOW_DCHECK is
// for checks that cost too much in a release build.
#pragma once

#include <cstdio>
#include <cstdlib>

#define KVSTOW_CHECK(condition)                                                          \
  do {                                                                                   \
    if (!(condition)) [[unlikely]] {                                                     \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

#ifdef NDEBUG
#define KVSTOW_DCHECK(condition) \
  do {                           \
  } while (false && (condition))
#else
#define KVSTOW_DCHECK(condition) KVSTOW_CHECK(condition)
#endif
