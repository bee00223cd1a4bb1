// Trace: requests with their times, lengths and prompt blocks, read from a file and checked.
//
//   KVSTOW_ASSIGN_OR_RETURN(Trace trace, ReadTrace("conversation_trace.jsonl", {}));
//   for (size_t i = 0; i < trace.requests.size(); ++i) Use(trace.requests[i], trace.Chain(i));
//
// Two formats. Mooncake JSONL: one object per line with `timestamp` (ms), `input_length` and
// `output_length` (tokens) and `hash_ids` (one per block of the prompt, the partial last one
// included); other fields are skipped. CSV: a header line that names the same four columns in any
// order, `hash_ids` separated by spaces; no quotes. Empty lines are skipped.
//
// An error names the line and the field: missing fields, times that go back, negative or zero
// prompts, a number of ids that does not fit the length, an id that follows two different ids (ids
// are chained: an id stands for a block and all before it).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {

struct TraceRequest {
  double time_s = 0;
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  uint64_t first_block = 0;  // in Trace::blocks
  int32_t num_blocks = 0;
};

struct Trace {
  std::vector<TraceRequest> requests;  // in time order
  std::vector<BlockNumber> blocks;     // the prompts one after another; ids renumbered from 0
  BlockNumber num_distinct = 0;
  int64_t block_tokens = 512;

  absl::Span<const BlockNumber> Chain(size_t request) const {
    const TraceRequest& r = requests[request];
    return absl::MakeConstSpan(blocks).subspan(r.first_block, static_cast<size_t>(r.num_blocks));
  }
};

enum class TraceFormat { kMooncake, kCsv };

struct TraceOptions {
  int64_t block_tokens = 512;  // tokens per id of hash_ids
};

//   kInvalidArgument  a bad line (named), no request at all, or options
absl::StatusOr<Trace> ParseTrace(std::string_view text, TraceFormat format,
                                 const TraceOptions& options);

// The format follows the name: `.csv` or else Mooncake.
//   kNotFound  the file cannot be opened     kInvalidArgument  as above, with the path in front
absl::StatusOr<Trace> ReadTrace(const std::string& path, const TraceOptions& options);

// The trace `times` times in a row, each round with blocks of its own, one second after the last.
// kInvalidArgument: times < 1, or more than 2^32 - 2 blocks in all.
absl::StatusOr<Trace> RepeatTrace(const Trace& trace, int64_t times);

}  // namespace kvstow::policy
