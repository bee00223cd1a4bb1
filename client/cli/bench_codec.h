// Codec benchmark: encode and decode of bf16 rows in memory, as a share of memcpy of those bytes.
//
//   const auto print = [](const CodecBenchLine& line) { Print(line); };
//   KVSTOW_RETURN_IF_ERROR(RunCodecBench({.codecs = {"tq4", "tqm4"}}, print));
//
// Each case first checks its bytes (every backend's encode equals the scalar one's, decodes agree)
// and is not reported where they differ. memcpy is measured with the same number of threads,
// interleaved with the codec in every round; a line holds the medians. The scalar reference, which
// is slow, runs on a part of the rows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace kvstow {

struct CodecBenchOptions {
  std::vector<std::string> codecs;
  std::vector<int> dims = {64, 128};
  // Bytes of bf16 rows. More than the caches hold, or the comparison flatters the codec.
  int64_t input_bytes = int64_t{64} << 20;
  std::vector<int> threads = {1, 2};
};

struct CodecBenchLine {
  std::string case_name;  // "encode/tq4/highway/d128/t1"
  double gb_per_s = 0;    // of bf16 rows, all threads together
  std::string ceiling;    // "memcpy"
  double ratio = 0;       // gb_per_s as a share of the ceiling's
  double cpu_s_per_gb = 0;
  double bits_per_value = 0;  // stored, scales and padding included
};

// kInvalidArgument names an option that cannot be run; kInternal a case whose bytes were wrong.
absl::Status RunCodecBench(const CodecBenchOptions& options,
                           const std::function<void(const CodecBenchLine&)>& emit);

}  // namespace kvstow
