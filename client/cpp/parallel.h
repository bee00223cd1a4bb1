// Parallel: a few pieces of work at once, one of them on the calling thread; and how a transfer is
// cut into them. Private to the client library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/types/span.h"

namespace kvstow {

// A second stream pays from about twice this on.
inline constexpr int64_t kBytesPerStream = int64_t{8} << 20;

// How many streams, on a channel each, carry `num_items` things of `bytes` in all. At least 1.
inline int NumStreams(int64_t num_items, int64_t bytes, int num_channels) {
  return static_cast<int>(
      std::clamp<int64_t>(std::min(num_items, bytes / kBytesPerStream), 1, num_channels));
}

// Where the i-th of `count` stretches of even size begins; its end is where the next one does.
inline size_t StretchBegin(size_t num_items, int i, int count) { return num_items * i / count; }

template <typename T>
absl::Span<const T> Stretch(absl::Span<const T> items, int i, int count) {
  const size_t begin = StretchBegin(items.size(), i, count);
  return items.subspan(begin, StretchBegin(items.size(), i + 1, count) - begin);
}

// Calls work(0) .. work(count - 1), each on a thread of its own but work(0), and returns when all
// have returned. Threads are made for the call: for work of milliseconds and more.
inline void RunParallel(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 1; i < count; ++i) threads.emplace_back([&work, i] { work(i); });
  work(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace kvstow
