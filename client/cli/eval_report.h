// EvalReport: what `kvstow eval` found of each codec, for all layers and for each layer and KV
// head, and how it is written to files.
//
//   report.codecs.push_back({.codec = "safe", .bits_per_value = 4.4, .quality = map, ...});
//   KVSTOW_RETURN_IF_ERROR(WriteTextFile("heads.csv", EvalCsv(report)));
//   KVSTOW_RETURN_IF_ERROR(WriteTextFile("report.html", EvalPage(report)));  // eval_page.h
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/eval_math.h"

namespace kvstow {

struct JudgedCodec {
  std::string codec;
  double bits_per_value = 0;  // units as stored, over values
  QualityMap quality;
  // Bits per value of keys and of values, as stored; one for each cell of `quality`.
  std::vector<double> k_bits;
  std::vector<double> v_bits;
};

struct EvalReport {
  std::string model;
  int64_t num_tokens = 0;
  int32_t num_queries = 0;  // per query head
  std::vector<JudgedCodec> codecs;
};

// A line per codec, layer and KV head, after a line of `all`; the first line names the columns.
std::string EvalCsv(const EvalReport& report);

// kInternal names the file and the reason.
absl::Status WriteTextFile(const std::string& path, std::string_view text);

}  // namespace kvstow
