// Copies past the caches: for bytes that this core will not read again soon.
//
//   const uint64_t xxh3 = StreamCopyHashed(window, record);  // of what `record` holds now
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

// The same; returns the XXH3 of the bytes written. `from` is read once, so that what is checked is
// what was kept, even where another process may change `from` meanwhile.
uint64_t StreamCopyHashed(absl::Span<const std::byte> from, std::byte* to);

}  // namespace kvstow
