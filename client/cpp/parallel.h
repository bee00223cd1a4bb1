// Parallel: a few pieces of work at once, one of them on the calling thread. Private to the client
// library.
#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace kvstow {

// Calls work(0) .. work(count - 1), each on a thread of its own but work(0), and returns when all
// have returned. Threads are made for the call: for work of milliseconds and more.
inline void RunParallel(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 1; i < count; ++i) threads.emplace_back([&work, i] { work(i); });
  work(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace kvstow
