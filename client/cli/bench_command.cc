// bench: rates, as a share of what this machine can do in the same minutes.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cli/bench_codec.h"
#include "client/cli/bench_grpc.h"
#include "client/cli/commands.h"
#include "client/cli/output.h"
#include "kernels/codec/codec.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

constexpr int32_t kThreadsMax = 256;

constexpr Option kBenchOptions[] = {
    {"codec", "LIST", "encode and decode of these codecs (tq4,tqm4,int8,raw or all)"},
    {"path", "NAME", "transfers through the service: grpc"},
    {"dims", "LIST", "with --codec: head_dim", "64,128"},
    {"threads", "LIST", "with --codec: numbers of threads", "1,2"},
    {"input", "SIZE", "with --codec: bytes of rows", "64MiB"},
    {"size", "SIZE", "with --path: bytes of a block, a multiple of 256KiB", "1MiB"},
    {"total", "SIZE", "with --path: bytes of a round; more than the cache when not given"},
    {"blocks-per-call", "N", "with --path: blocks of one Put or Get", "32"},
    {"rounds", "N", "with --path: rounds, of which the median counts", "5"},
};

// "-" where a figure does not apply.
std::string Cell(double value, int digits) {
  return value == 0 ? "-" : FormatNumber(value, digits);
}

absl::StatusOr<std::vector<int32_t>> ReadNumbers(const Args& args, std::string_view name,
                                                 int32_t max) {
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<std::string> words, args.List(name));
  std::vector<int32_t> numbers;
  for (const std::string& word : words) {
    int32_t number = 0;
    if (!absl::SimpleAtoi(word, &number) || number < 1 || number > max) {
      return UsageError(absl::StrCat("--", ToAbsl(name), " holds \"", word,
                                     "\", want whole numbers, 1 to ", max));
    }
    numbers.push_back(number);
  }
  return numbers;
}

// --- codecs ---

absl::StatusOr<CodecBenchOptions> ReadCodecOptions(const Args& args) {
  CodecBenchOptions options;
  KVSTOW_ASSIGN_OR_RETURN(std::vector<std::string> names, args.List("codec"));
  std::vector<std::string> known;
  for (const Codec& codec : AllCodecs()) known.emplace_back(codec.name);
  if (names == std::vector<std::string>{"all"}) names = known;
  for (const std::string& name : names) {
    if (FindCodec(name) == nullptr) {
      const std::string nearest = NearestName(name, known);
      return UsageError(
          absl::StrCat("--codec: there is no codec \"", name, "\"",
                       nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?")));
    }
  }
  options.codecs = std::move(names);
  KVSTOW_ASSIGN_OR_RETURN(options.dims, ReadNumbers(args, "dims", ModelSpec::kMaxDim));
  KVSTOW_ASSIGN_OR_RETURN(options.threads, ReadNumbers(args, "threads", kThreadsMax));
  KVSTOW_ASSIGN_OR_RETURN(options.input_bytes, args.Bytes("input"));
  return options;
}

// Encode and decode of each backend.
uint64_t NumCases(const CodecBenchOptions& options) {
  uint64_t num_backends = 0;
  for (const std::string& name : options.codecs) num_backends += FindCodec(name)->host.size();
  return 2 * num_backends * options.dims.size() * options.threads.size();
}

absl::Status BenchCodecs(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const CodecBenchOptions options, ReadCodecOptions(args));
  Table table({"CASE", "GB/S", "CEILING", "RATIO", "CPU S/GB", "BITS/VALUE"});
  Progress progress(output, "bench", NumCases(options));
  uint64_t num_done = 0;
  KVSTOW_RETURN_IF_ERROR(RunCodecBench(options, [&](const CodecBenchLine& line) {
    progress.Update(++num_done);
    Json json = {{"case", line.case_name}, {"gb_per_s", line.gb_per_s}};
    if (!line.ceiling.empty()) {
      json["ceiling"] = line.ceiling;
      json["ratio"] = line.ratio;
    }
    json["cpu_s_per_gb"] = line.cpu_s_per_gb;
    if (line.bits_per_value > 0) json["bits_per_value"] = line.bits_per_value;
    output.Json(json);
    table.AddRow({line.case_name, FormatNumber(line.gb_per_s, 2),
                  line.ceiling.empty() ? "-" : line.ceiling, Cell(line.ratio, 2),
                  Cell(line.cpu_s_per_gb, 2), Cell(line.bits_per_value, 3)});
  }));
  output.Line(table.Text());
  return absl::OkStatus();
}

// --- paths ---

absl::StatusOr<GrpcBenchOptions> ReadGrpcOptions(const Args& args) {
  GrpcBenchOptions options;
  if (args.Has("target")) options.target = args.Text("target");
  KVSTOW_ASSIGN_OR_RETURN(options.block_bytes, args.Bytes("size"));
  if (args.Has("total")) {
    KVSTOW_ASSIGN_OR_RETURN(options.total_bytes, args.Bytes("total"));
  }
  KVSTOW_ASSIGN_OR_RETURN(const int64_t blocks, args.Int("blocks-per-call", 1, 4096));
  KVSTOW_ASSIGN_OR_RETURN(const int64_t rounds, args.Int("rounds", 1, 100));
  KVSTOW_ASSIGN_OR_RETURN(options.timeout, args.Duration("timeout"));
  options.blocks_per_call = static_cast<int32_t>(blocks);
  options.rounds = static_cast<int32_t>(rounds);
  if (const absl::Status status = options.Validate(); !status.ok()) {
    return UsageError(std::string(status.message()));
  }
  return options;
}

absl::Status BenchGrpc(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(GrpcBenchOptions options, ReadGrpcOptions(args));
  Progress progress(output, "bench", options.rounds + 1);
  options.progress = [&](int num_done, int) { progress.Update(num_done); };
  Table table({"CASE", "GB/S", "CEILING", "RATIO", "CPU S/GB", "P50 MS", "P99 MS"});
  KVSTOW_RETURN_IF_ERROR(RunGrpcBench(options, [&](const PathBenchLine& line) {
    Json json = {{"case", line.case_name}, {"gb_per_s", line.gb_per_s}};
    if (!line.ceiling.empty()) {
      json["ceiling"] = line.ceiling;
      json["ratio"] = line.ratio;
    }
    if (line.cpu_s_per_gb.has_value()) json["cpu_s_per_gb"] = *line.cpu_s_per_gb;
    if (line.p50_ms.has_value()) json["p50_ms"] = *line.p50_ms;
    if (line.p99_ms.has_value()) json["p99_ms"] = *line.p99_ms;
    output.Json(json);
    table.AddRow({line.case_name, FormatNumber(line.gb_per_s, 2),
                  line.ceiling.empty() ? "-" : line.ceiling, Cell(line.ratio, 2),
                  Cell(line.cpu_s_per_gb.value_or(0), 2), Cell(line.p50_ms.value_or(0), 2),
                  Cell(line.p99_ms.value_or(0), 2)});
  }));
  output.Line(table.Text());
  return absl::OkStatus();
}

absl::Status RunBench(const Args& args, Output& output) {
  if (args.Has("codec") == args.Has("path")) {
    return UsageError("what to measure: --codec LIST or --path grpc?");
  }
  if (args.Has("codec")) return BenchCodecs(args, output);
  KVSTOW_RETURN_IF_ERROR(args.OneOf("path", {"grpc"}).status());
  return BenchGrpc(args, output);
}

constexpr Command kBenchCommands[] = {
    {{.name = "bench",
      .summary = "measure codecs or transfers against this machine's own limits",
      .details = "Bytes are verified before anything is reported. GB are 10^9 bytes of unquantized "
                 "KV. RATIO is to the\nceiling, measured in the same run. With --path grpc and no "
                 "--target a daemon of its own is started.\nCPU S/GB: of both processes.",
      .options = kBenchOptions,
      .example = "kvstow bench --path grpc --json"},
     &RunBench},
};

}  // namespace

absl::Span<const Command> BenchCommands() { return kBenchCommands; }

}  // namespace kvstow
