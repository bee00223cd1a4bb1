#include "storage/policy/trace.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "storage/policy/trace_fields.h"

namespace kvstow::policy {
namespace {

// Turns the fields of each line into requests and checks them against the lines before.
class TraceBuilder {
 public:
  explicit TraceBuilder(int64_t block_tokens) { trace_.block_tokens = block_tokens; }

  absl::Status Add(const TraceFields& fields, int64_t line) {
    KVSTOW_RETURN_IF_ERROR(CheckNumbers(fields));
    TraceRequest request;
    request.time_s = fields.timestamp_ms / 1000.0;
    request.input_tokens = fields.input_length;
    request.output_tokens = fields.output_length;
    request.first_block = trace_.blocks.size();
    request.num_blocks = static_cast<int32_t>(fields.hash_ids.size());
    BlockNumber previous = kNone;
    for (const uint64_t id : fields.hash_ids) {
      KVSTOW_ASSIGN_OR_RETURN(previous, Intern(id, previous, line));
      trace_.blocks.push_back(previous);
    }
    trace_.requests.push_back(request);
    last_ms_ = fields.timestamp_ms;
    return absl::OkStatus();
  }

  bool empty() const { return trace_.requests.empty(); }

  Trace Finish() && {
    trace_.num_distinct = static_cast<BlockNumber>(known_.size());
    return std::move(trace_);
  }

 private:
  struct Known {
    BlockNumber previous = kNone;
    uint64_t id = 0;
    int64_t line = 0;
  };

  absl::Status CheckNumbers(const TraceFields& fields) const {
    if (fields.timestamp_ms < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("timestamp is ", fields.timestamp_ms, " ms, must not be negative"));
    }
    if (!trace_.requests.empty() && fields.timestamp_ms < last_ms_) {
      return absl::InvalidArgumentError(
          absl::StrCat("timestamp is ", fields.timestamp_ms, " ms, before the ", last_ms_,
                       " ms of the request above: sort the trace by time"));
    }
    if (fields.input_length < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("input_length is ", fields.input_length, " tokens, must be at least 1"));
    }
    if (fields.output_length < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("output_length is ", fields.output_length, " tokens, must not be negative"));
    }
    const int64_t blocks = (fields.input_length - 1) / trace_.block_tokens + 1;
    if (static_cast<int64_t>(fields.hash_ids.size()) != blocks) {
      return absl::InvalidArgumentError(
          absl::StrCat("hash_ids holds ", fields.hash_ids.size(), " ids, but ", fields.input_length,
                       " tokens are ", blocks, " blocks of ", trace_.block_tokens));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<BlockNumber> Intern(uint64_t id, BlockNumber previous, int64_t line) {
    const auto [it, is_new] =
        number_of_id_.try_emplace(id, static_cast<BlockNumber>(known_.size()));
    if (is_new) {
      known_.push_back({previous, id, line});
      return it->second;
    }
    const Known& known = known_[it->second];
    if (known.previous == previous) return it->second;
    return absl::InvalidArgumentError(absl::StrCat(
        "hash_ids: ", id, " follows ", NameOf(previous), ", but followed ", NameOf(known.previous),
        " on line ", known.line, ": an id must stand for a block and all blocks before it"));
  }

  std::string NameOf(BlockNumber block) const {
    return block == kNone ? "nothing" : absl::StrCat(known_[block].id);
  }

  Trace trace_;
  double last_ms_ = 0;
  absl::flat_hash_map<uint64_t, BlockNumber> number_of_id_;
  std::vector<Known> known_;  // by block number
};

std::string_view TakeLine(std::string_view& text) {
  const size_t end = text.find('\n');
  std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

absl::Status AtLine(int64_t line, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("line ", line, ": ", status.message()));
}

bool IsBlankLine(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

}  // namespace

absl::StatusOr<Trace> ParseTrace(std::string_view text, TraceFormat format,
                                 const TraceOptions& options) {
  if (options.block_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_tokens is ", options.block_tokens, ", must be at least 1"));
  }
  TraceBuilder builder(options.block_tokens);
  TraceFields fields;
  CsvColumns columns;
  bool has_header = format != TraceFormat::kCsv;
  for (int64_t line_number = 1; !text.empty(); ++line_number) {
    const std::string_view line = TakeLine(text);
    if (IsBlankLine(line)) continue;
    if (!has_header) {
      absl::StatusOr<CsvColumns> header = ParseCsvHeader(line);
      if (!header.ok()) return AtLine(line_number, header.status());
      columns = *header;
      has_header = true;
      continue;
    }
    absl::Status status = format == TraceFormat::kCsv ? ParseCsvLine(line, columns, fields)
                                                      : ParseJsonLine(line, fields);
    if (status.ok()) status = builder.Add(fields, line_number);
    if (!status.ok()) return AtLine(line_number, status);
  }
  if (builder.empty()) return absl::InvalidArgumentError("the trace holds no request");
  return std::move(builder).Finish();
}

absl::StatusOr<Trace> ReadTrace(const std::string& path, const TraceOptions& options) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             &std::fclose);
  if (file == nullptr) {
    return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  std::string text;
  std::vector<char> buffer(size_t{1} << 20);
  for (size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), file.get())) > 0;) {
    text.append(buffer.data(), n);
  }
  if (std::ferror(file.get()) != 0) {
    return absl::UnavailableError(
        absl::StrCat(path, ": reading stopped after ", text.size(), " bytes"));
  }
  const bool is_csv = path.size() >= 4 && path.compare(path.size() - 4, 4, ".csv") == 0;
  absl::StatusOr<Trace> trace =
      ParseTrace(text, is_csv ? TraceFormat::kCsv : TraceFormat::kMooncake, options);
  if (trace.ok()) return trace;
  return absl::Status(trace.status().code(), absl::StrCat(path, ": ", trace.status().message()));
}

absl::StatusOr<Trace> RepeatTrace(const Trace& trace, int64_t times) {
  const int64_t most = (int64_t{1} << 32) - 2;
  if (times < 1 || times > most / std::max<int64_t>(1, trace.num_distinct)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "repeat is ", times, ", must be 1 to ", most / std::max<int64_t>(1, trace.num_distinct),
        " for a trace of ", trace.num_distinct, " different blocks"));
  }
  Trace out;
  out.block_tokens = trace.block_tokens;
  out.num_distinct = static_cast<BlockNumber>(trace.num_distinct * times);
  out.requests.reserve(trace.requests.size() * static_cast<size_t>(times));
  out.blocks.reserve(trace.blocks.size() * static_cast<size_t>(times));
  const double round_s = trace.requests.back().time_s + 1;
  for (int64_t round = 0; round < times; ++round) {
    const auto shift = static_cast<BlockNumber>(round * trace.num_distinct);
    const uint64_t first = out.blocks.size();
    for (TraceRequest request : trace.requests) {
      request.time_s += static_cast<double>(round) * round_s;
      request.first_block += first;
      out.requests.push_back(request);
    }
    for (const BlockNumber block : trace.blocks) out.blocks.push_back(block + shift);
  }
  return out;
}

}  // namespace kvstow::policy
