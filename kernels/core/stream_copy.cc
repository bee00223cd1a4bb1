#include "kernels/core/stream_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels/core/checksum.h"

namespace kvstow {
namespace {

constexpr size_t kLineBytes = 64;
// Below this the odd ends are a good part of the copy.
constexpr size_t kStreamBytesMin = 2048;
// Fits the second-level cache beside what is read.
constexpr size_t kHotBytes = size_t{256} << 10;

// `to` starts a line; whole lines. Every x86-64 has these stores, and wider ones gain nothing;
// other machines copy as usual.
void StreamLines(const std::byte* from, std::byte* to, size_t bytes) {
#if defined(__SSE2__)
  for (size_t i = 0; i < bytes; i += kLineBytes) {
    const auto* const in = reinterpret_cast<const __m128i*>(from + i);
    auto* const out = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(in);
    const __m128i b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2);
    const __m128i d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
#else
  std::memcpy(to, from, bytes);
#endif
}

// Streaming stores pass other writes; after this they do not.
void FlushStream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Leaves the last writes to be flushed.
void CopyUnflushed(absl::Span<const std::byte> from, std::byte* to) {
  const size_t head = (kLineBytes - reinterpret_cast<uintptr_t>(to) % kLineBytes) % kLineBytes;
  if (from.size() < kStreamBytesMin) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
    return;
  }
  const size_t lines = (from.size() - head) / kLineBytes * kLineBytes;
  const size_t tail = from.size() - head - lines;
  std::memcpy(to, from.data(), head);
  StreamLines(from.data() + head, to + head, lines);
  std::memcpy(to + head + lines, from.data() + head + lines, tail);
}

}  // namespace

void StreamCopy(absl::Span<const std::byte> from, std::byte* to) {
  CopyUnflushed(from, to);
  FlushStream();
}

uint64_t CopyHashed(absl::Span<const std::byte> from, std::byte* to) {
  if (from.size() <= kHotBytes) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
    return Xxh3({to, from.size()});
  }
  Xxh3Stream hash;
  for (size_t at = 0; at < from.size(); at += kHotBytes) {
    const size_t bytes = std::min(kHotBytes, from.size() - at);
    std::memcpy(to + at, from.data() + at, bytes);
    hash.Add({to + at, bytes});
  }
  return hash.Value();
}

}  // namespace kvstow
