// bench: rates, as a share of what this machine can do in the same minutes.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cli/bench_codec.h"
#include "client/cli/bench_path.h"
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
    {"path", "LIST", "transfers through the service: shm, ucx, grpc or all"},
    {"preset", "LIST", "with --path: codecs, as of put --codec", "lossless"},
    {"dims", "LIST", "with --codec: head_dim", "64,128"},
    {"threads", "LIST", "with --codec: numbers of threads", "1,2"},
    {"input", "SIZE", "with --codec: bytes of rows", "64MiB"},
    {"size", "LIST", "with --path: bytes of a block, multiples of 64KiB", "1MiB"},
    {"total", "SIZE", "with --path: bytes of a round; more than the cache when not given"},
    {"blocks-per-call", "N", "with --path: blocks of one Put or Get; 32MiB of them when not given"},
    {"rounds", "N", "with --path: rounds, of which the median counts", "5"},
    {"layerwise", "", "with --path: each Get a second time, layer by layer"},
    {"wire-limit", "RATE", "with --path grpc: hold the wire to 500MB/s, for example"},
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

constexpr PathKind kBenchPaths[] = {PathKind::kShm, PathKind::kUcx, PathKind::kGrpc};

absl::StatusOr<std::vector<PathKind>> ReadPaths(const Args& args) {
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<std::string> names, args.List("path"));
  std::vector<PathKind> paths;
  if (names == std::vector<std::string>{"all"}) {
    paths.assign(std::begin(kBenchPaths), std::end(kBenchPaths));
    return paths;
  }
  for (const std::string& name : names) {
    const auto* const found = std::find_if(std::begin(kBenchPaths), std::end(kBenchPaths),
                                           [&](PathKind path) { return PathName(path) == name; });
    if (found == std::end(kBenchPaths)) {
      return UsageError(absl::StrCat("--path holds \"", name, "\", want shm, ucx, grpc or all"));
    }
    paths.push_back(*found);
  }
  return paths;
}

absl::StatusOr<double> ReadRate(const Args& args, std::string_view name) {
  const std::string text = args.Text(name);
  const absl::StatusOr<int64_t> bytes = absl::EndsWith(text, "/s")
                                            ? ParseBytes(text.substr(0, text.size() - 2))
                                            : absl::InvalidArgumentError("want a size per second");
  if (!bytes.ok() || *bytes < 1) {
    return UsageError(absl::StrCat("--", ToAbsl(name), " is \"", text, "\", want 500MB/s, 1GiB/s"));
  }
  return static_cast<double>(*bytes);
}

// All but the size, of which there may be several.
absl::StatusOr<PathBenchOptions> ReadPathOptions(const Args& args) {
  PathBenchOptions options;
  if (args.Has("target")) options.target = args.Text("target");
  KVSTOW_ASSIGN_OR_RETURN(options.paths, ReadPaths(args));
  KVSTOW_ASSIGN_OR_RETURN(options.presets, args.List("preset"));
  for (const std::string& preset : options.presets) {
    if (const absl::Status status = ParseCodecChoice(preset).status(); !status.ok()) {
      return UsageError(absl::StrCat("--preset: ", status.message()));
    }
  }
  if (args.Has("total")) {
    KVSTOW_ASSIGN_OR_RETURN(options.total_bytes, args.Bytes("total"));
  }
  if (args.Has("blocks-per-call")) {
    KVSTOW_ASSIGN_OR_RETURN(const int64_t blocks, args.Int("blocks-per-call", 1, 4096));
    options.blocks_per_call = static_cast<int32_t>(blocks);
  }
  KVSTOW_ASSIGN_OR_RETURN(const int64_t rounds, args.Int("rounds", 1, 100));
  KVSTOW_ASSIGN_OR_RETURN(options.timeout, args.Duration("timeout"));
  options.layerwise = args.Has("layerwise");
  if (args.Has("wire-limit")) {
    KVSTOW_ASSIGN_OR_RETURN(options.wire_bytes_per_s, ReadRate(args, "wire-limit"));
  }
  options.rounds = static_cast<int32_t>(rounds);
  return options;
}

void ShowPathLine(const PathBenchLine& line, Output& output, Table& table) {
  Json json = {
      {"case", line.case_name}, {"block_bytes", line.block_bytes}, {"gb_per_s", line.gb_per_s}};
  if (!line.ceiling.empty()) {
    json["ceiling"] = line.ceiling;
    json["ratio"] = line.ratio;
  }
  if (line.cpu_s_per_gb.has_value()) json["cpu_s_per_gb"] = *line.cpu_s_per_gb;
  if (line.p50_ms.has_value()) json["p50_ms"] = *line.p50_ms;
  if (line.p99_ms.has_value()) json["p99_ms"] = *line.p99_ms;
  if (line.first_layer_shares.has_value()) json["first_layer_shares"] = *line.first_layer_shares;
  output.Json(json);
  table.AddRow({line.case_name, FormatBytes(line.block_bytes), FormatNumber(line.gb_per_s, 2),
                line.ceiling.empty() ? "-" : line.ceiling, Cell(line.ratio, 2),
                Cell(line.cpu_s_per_gb.value_or(0), 2), Cell(line.p50_ms.value_or(0), 2),
                Cell(line.p99_ms.value_or(0), 2), Cell(line.first_layer_shares.value_or(0), 2)});
}

absl::Status BenchPaths(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(PathBenchOptions options, ReadPathOptions(args));
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<std::string> sizes, args.List("size"));
  std::vector<int64_t> block_bytes;
  for (const std::string& size : sizes) {
    const absl::StatusOr<int64_t> bytes = ParseBytes(size);
    if (!bytes.ok()) return UsageError(absl::StrCat("--size: ", bytes.status().message()));
    options.block_bytes = *bytes;
    if (const absl::Status status = options.Validate(); !status.ok()) {
      return UsageError(std::string(status.message()));
    }
    block_bytes.push_back(*bytes);
  }
  const int num_rounds = (options.rounds + 1) * static_cast<int>(block_bytes.size());
  Progress progress(output, "bench", num_rounds);
  Table table(
      {"CASE", "BLOCK", "GB/S", "CEILING", "RATIO", "CPU S/GB", "P50 MS", "P99 MS", "1ST LAYER"});
  int num_before = 0;
  for (const int64_t bytes : block_bytes) {
    options.block_bytes = bytes;
    options.progress = [&](int num_done, int) { progress.Update(num_before + num_done); };
    KVSTOW_RETURN_IF_ERROR(RunPathBench(
        options, [&](const PathBenchLine& line) { ShowPathLine(line, output, table); }));
    num_before += options.rounds + 1;
  }
  output.Line(table.Text());
  return absl::OkStatus();
}

absl::Status RunBench(const Args& args, Output& output) {
  if (args.Has("codec") == args.Has("path")) {
    return UsageError("what to measure: --codec LIST or --path LIST?");
  }
  return args.Has("codec") ? BenchCodecs(args, output) : BenchPaths(args, output);
}

constexpr Command kBenchCommands[] = {
    {{.name = "bench",
      .summary = "measure codecs or transfers against this machine's own limits",
      .details = "Bytes are verified before anything is reported. GB are 10^9 bytes of unquantized "
                 "KV. RATIO is to the\nceiling, measured in the same run. With --path and no "
                 "--target a daemon of its own is started.\nCPU S/GB: of both processes.",
      .options = kBenchOptions,
      .example = "kvstow bench --path grpc --json"},
     &RunBench},
};

}  // namespace

absl::Span<const Command> BenchCommands() { return kBenchCommands; }

}  // namespace kvstow
