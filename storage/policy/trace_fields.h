// TraceFields: one line of a trace file as four fields, before they are checked against each other.
//
// Private to trace.cc and its tests: a reader for flat JSON objects and one for CSV, both strict.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvstow::policy {

struct TraceFields {
  double timestamp_ms = 0;
  int64_t input_length = 0;
  int64_t output_length = 0;
  std::vector<uint64_t> hash_ids;
};

// kInvalidArgument says what is wrong, without the line number: not an object, a missing or twice
// given field, a field of the wrong type. Fields with other names are skipped, whatever they hold.
absl::Status ParseJsonLine(std::string_view line, TraceFields& fields);

// Column numbers of a CSV header, in the order timestamp, input_length, output_length, hash_ids.
struct CsvColumns {
  int index[4] = {-1, -1, -1, -1};
  int count = 0;
};
absl::StatusOr<CsvColumns> ParseCsvHeader(std::string_view line);
absl::Status ParseCsvLine(std::string_view line, const CsvColumns& columns, TraceFields& fields);

}  // namespace kvstow::policy
