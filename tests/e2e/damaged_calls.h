// DamagedCalls: bytes that change on their way between a client and its window or its frames. The
// linker puts these functions in front of the library's own (--wrap in CMakeLists.txt), so the
// library that is tested has no place made for it.
//
//   DamageEvery(3);  // every third frame that leaves or arrives has one bit changed
//
// What leaves is damaged after it has its checksums, what arrives before they are looked at.
#pragma once

#include <cstdint>

namespace kvstow::testing {

// 0: never. For all clients of this process.
void DamageEvery(int num_frames);

}  // namespace kvstow::testing
