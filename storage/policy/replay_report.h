// ReplayReport: the results of kvstow-replay as a table for people or as JSON for programs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "storage/policy/replay_options.h"
#include "storage/policy/simulator.h"

namespace kvstow::policy {

struct ReplayRow {
  std::string policy;
  double session_over = 0;             // share of sessions whose end the policy was told
  std::vector<SimResult> by_capacity;  // in the order of ReplayOptions::blocks
  SimResult tiers;                     // if ReplayOptions::tiers is not empty
  double seconds = 0;                  // that all runs of the row took
};

struct ReplayReport {
  ReplayOptions options;
  int64_t num_requests = 0;
  int64_t num_follow_ups = 0;
  int64_t num_blocks = 0;  // of all prompts
  int64_t num_distinct = 0;
  double span_s = 0;
  std::vector<ReplayRow> rows;
};

// "rtv, 50 % say over".
std::string RowName(const ReplayRow& row);

std::string FormatTable(const ReplayReport& report);
std::string FormatJson(const ReplayReport& report);

}  // namespace kvstow::policy
