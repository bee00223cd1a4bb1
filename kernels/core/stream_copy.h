// Copies for bytes that this core will not read again soon, and for bytes that are to be checked.
//
//   StreamCopy(unit, rows);                            // past the caches
//   const uint64_t xxh3 = CopyHashed(window, record);  // of what `record` holds now
//
// An ordinary copy reads the lines that it is about to overwrite, and drives out of the caches what
// the next step needs: for blocks in host memory half as much traffic again. From a few kilobytes
// on; shorter ones, and the odd bytes at both ends, are copied as usual.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace kvstow {

// `to` has as many bytes; the two do not overlap. Other threads see the copy as they see any write.
void StreamCopy(absl::Span<const std::byte> from, std::byte* to);

// An ordinary copy; returns the XXH3 of the bytes written, read while the caches have them: so what
// is checked is what was kept, even where another process may change `from` meanwhile. Cheaper than
// a streaming copy that hashes on its way (by a fifth, for planes of 16 KiB).
uint64_t CopyHashed(absl::Span<const std::byte> from, std::byte* to);

}  // namespace kvstow
