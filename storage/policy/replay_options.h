// ReplayOptions: the command line of kvstow-replay.
//
// Private to the program and its tests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace kvstow::policy {

struct ReplayOptions {
  std::string trace_path;
  std::vector<std::string> policies;  // in table order
  std::vector<int64_t> blocks{2000, 5000, 10000, 20000, 40000};
  std::vector<int64_t> tiers{800, 4096, 12288};  // empty: no run with tiers
  double session_over = 0;                       // share of sessions that announce their end
  int64_t block_tokens = 512;
  double warmup = 0.2;
  double alpha = 0.1;
  int64_t seed = 1;
  int64_t repeat = 1;
  std::string html_path;  // empty: no page
  bool is_json = false;
  bool is_help = false;
};

// `words`: the command line without the program's name. kInvalidArgument says which option, what
// was given and what is allowed.
absl::StatusOr<ReplayOptions> ParseReplayOptions(const std::vector<std::string>& words);

std::string ReplayHelp();

}  // namespace kvstow::policy
