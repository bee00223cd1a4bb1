// Faults while bytes move, over every path: see fault_loop.sh.
//
//   fault_loop LOOPS SEED [FAULT]
//
// A loop is one fault over shm, ucx and grpc at once, each with a daemon and a worker of its own;
// the faults take turns. Exit status: 0 all held, 1 something did not, 2 bad usage.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/e2e/fault_scenario.h"
#include "transport/ucx.h"

namespace kvstow::testing {
namespace {

bool RunLoop(std::string_view fault, uint64_t seed) {
  std::vector<PathKind> paths = {PathKind::kShm, PathKind::kGrpc};
  if (IsUcxBuilt()) paths.push_back(PathKind::kUcx);
  std::vector<std::vector<std::string>> failures(paths.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < paths.size(); ++i) {
    threads.emplace_back([&, i] {
      FaultScenario scenario(paths[i], seed + i);
      failures[i] = scenario.Run(fault);
    });
  }
  for (std::thread& thread : threads) thread.join();
  bool all_held = true;
  for (size_t i = 0; i < paths.size(); ++i) {
    for (const std::string& failure : failures[i]) {
      all_held = false;
      std::printf("%s over %s, seed %llu: %s\n", std::string(fault).c_str(),
                  std::string(PathName(paths[i])).c_str(), static_cast<unsigned long long>(seed),
                  failure.c_str());
    }
  }
  return all_held;
}

int Run(int num_loops, uint64_t seed, std::string_view only) {
  std::vector<std::string_view> faults = FaultScenario::FaultNames();
  if (!only.empty()) faults = {only};
  int num_failed = 0;
  const auto began = std::chrono::steady_clock::now();
  for (int loop = 0; loop < num_loops; ++loop) {
    const std::string_view fault = faults[loop % faults.size()];
    const uint64_t loop_seed = seed + 1000 * static_cast<uint64_t>(loop);
    const auto start = std::chrono::steady_clock::now();
    const bool all_held = RunLoop(fault, loop_seed);
    if (!all_held) ++num_failed;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("loop %3d: %-14s %s, %.1f s\n", loop + 1, std::string(fault).c_str(),
                all_held ? "held" : "DID NOT HOLD", took.count());
    std::fflush(stdout);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::printf("fault_loop: %d loops, %d failed, %.0f s (seed %llu)\n", num_loops, num_failed,
              took.count(), static_cast<unsigned long long>(seed));
  return num_failed > 0 ? 1 : 0;
}

}  // namespace
}  // namespace kvstow::testing

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::fputs("usage: fault_loop LOOPS SEED [FAULT]\n", stderr);
    return 2;
  }
  return kvstow::testing::Run(std::atoi(argv[1]), std::strtoull(argv[2], nullptr, 10),
                              argc > 3 ? argv[3] : "");
}
