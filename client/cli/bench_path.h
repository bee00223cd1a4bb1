// RunPathBench: Put and Get of resident blocks through the service, by each path and preset,
// against what a plain socket and memcpy do on this machine in the same minutes.
//
//   KVSTOW_RETURN_IF_ERROR(RunPathBench({.paths = {PathKind::kShm}}, [](const PathBenchLine& line)
//   {
//     ... }));
//
// One round copies, sends and receives the same pool once each way; rounds are interleaved and
// medians reported, so a slow minute hits every case alike. After each round, outside of the timed
// sections, the bytes that came back are compared with the source (lossless), or with what its
// codecs make of the source; a difference ends the benchmark without a number.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "transport/transport.h"

namespace kvstow {

struct PathBenchOptions {
  std::string target;  // empty: start a daemon of our own, memory tier only
  std::vector<PathKind> paths = {PathKind::kGrpc};
  std::vector<std::string> presets = {"lossless"};
  int64_t block_bytes = int64_t{1} << 20;  // of the row form; a multiple of 64 KiB
  int64_t total_bytes = 0;                 // a round; 0: more than the cache, at least 256 MiB
  int32_t blocks_per_call = 0;             // 0: 32 MiB of blocks, at least 1
  int32_t rounds = 5;                      // after one that warms up and does not count
  // Not 0: the wire is held to this rate, each way, by a process between the two ends (gRPC over
  // unix sockets only). Then Put encodes at the worker, each call's blocks stand behind another one
  // (so that presets, which keep a prompt's first block raw, quantize all of them), and presets
  // after the first are compared with the first.
  double wire_bytes_per_s = 0;
  // Each Get a second time, layer by layer; of layers with 8 KV heads: 256 KiB a block.
  bool layerwise = false;
  absl::Duration timeout = absl::Seconds(60);
  std::function<void(int num_done, int num_rounds)> progress;  // after each round; may be empty

  absl::Status Validate() const;
};

struct PathBenchLine {
  std::string case_name;  // "shm/get", "shm/safe/get"
  int64_t block_bytes = 0;
  double gb_per_s = 0;  // median over rounds; GB = 10^9 bytes of unquantized KV
  std::string ceiling;  // the case it is compared with; empty for none
  double ratio = 0;     // to the ceiling: median of the ratios within a round
  // Of both processes. Absent where the other process is on another machine.
  std::optional<double> cpu_s_per_gb;
  std::optional<double> p50_ms;  // of one call
  std::optional<double> p99_ms;
  // Layer by layer: when the first one was there, in shares of a layer of the whole time; the
  // median over calls.
  std::optional<double> first_layer_shares;
};

// Starts processes: call it before this process has threads.
//   kDataLoss            bytes differ from the source: nothing is reported
//   kFailedPrecondition  a path cannot be had; the text says why
absl::Status RunPathBench(const PathBenchOptions& options,
                          const std::function<void(const PathBenchLine&)>& emit);

// The pool of a round when none is asked for: a quarter more than the last-level cache, at least
// 256 MiB, at most a sixteenth of the memory (four pools live at once), a multiple of 64 MiB.
int64_t DefaultPoolBytes();

}  // namespace kvstow
