// eval: what the codecs did to a real model's KV, fetched back through the service.
#include <unistd.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/compare.h"
#include "client/cli/connect.h"
#include "client/cli/eval_bounds.h"
#include "client/cli/eval_math.h"
#include "client/cli/eval_page.h"
#include "client/cli/eval_report.h"
#include "client/cli/kv_file.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

constexpr Option kEvalOptions[] = {
    {"probe", "FILE", "queries to judge with: q.{layer}, [tokens, q_heads, head_dim]"},
    {"codecs", "LIST", "codecs, presets and pairs (k=A,v=B) with commas", "raw,int8,safe"},
    {"tenant-prefix", "TEXT", "the tenant of a codec's blocks is this text and the codec's name"},
    {"put", "", "put what is not there yet"},
    {"check", "",
     "exit status 1 when a byte of raw differs or a bound (for the bundled KV) is broken"},
    {"by-head", "", "print the figures of each layer and KV head, too"},
    {"csv", "FILE", "write them to FILE"},
    {"html", "FILE", "write a page: rate against distortion, and maps of layers and heads"},
    kCalibrationOption,
    {"rounds", "N", "puts and gets that are timed, of which the median counts", "5"},
    kModelOption,
    kWeightsOption,
    kRopeOption,
    kTokenizerOption,
    kTokensPerBlockOption,
};

// One row of the table.
struct Verdict {
  JudgedCodec judged;
  int64_t record_bytes = 0;  // whole records
  int64_t logical_bytes = 0;
  int64_t num_different_bytes = 0;
  double memcpy_gb_per_s = 0;
  double put_gb_per_s = 0;
  double get_gb_per_s = 0;
  std::vector<std::string> broken;

  const std::string& codec() const { return judged.codec; }
  const Quality& quality() const { return judged.quality.total; }
};

struct EvalPlan {
  const KvFile& file;
  const Probe& probe;
  const Service& service;
  const Model& model;
  std::string tenant_prefix;
  bool put_missing = false;
  int64_t rounds = 0;
  Digest calibration_id;

  int64_t num_tokens() const { return file.num_full_blocks() * file.spec().tokens_per_block; }
  int64_t kv_bytes() const { return file.num_full_blocks() * model.layout->block_bytes(); }
  KeyContext ContextOf(const std::string& tenant) const {
    return {.fingerprint = model.fingerprint, .tenant = tenant};
  }
};

double GbPerSecond(int64_t bytes, absl::Duration time) {
  return static_cast<double>(bytes) / std::max(absl::ToDoubleSeconds(time), 1e-9) / 1e9;
}

absl::StatusOr<PutSummary> PutAs(const EvalPlan& plan, const std::string& codec,
                                 const std::string& tenant) {
  KVSTOW_ASSIGN_OR_RETURN(const LayeredText words, SplitLayers(codec));
  KVSTOW_ASSIGN_OR_RETURN(const CodecChoice choice, ParseCodecChoice(words.choice));
  absl::StatusOr<PutSummary> put =
      plan.service.kv->Put(plan.model, {.context = plan.ContextOf(tenant),
                                        .tokens = plan.file.tokens(),
                                        .layers = plan.file.layers(),
                                        .codec = choice,
                                        .layer_codecs = words.layers,
                                        .calibration_id = plan.calibration_id});
  if (!put.ok()) return plan.service.Explain(put.status());
  if (put->num_refused > 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("codec ", codec, ": ", put->num_refused,
                     " blocks were refused: ", put->first_refusal.message()));
  }
  return put;
}

// Rates of memcpy, put (under a tenant of its own that is deleted again) and get, interleaved.
absl::Status MeasureRates(const EvalPlan& plan, absl::Span<const BlockKey> keys, Verdict& verdict) {
  KvBuffer buffer(plan.file.spec(), plan.num_tokens());
  const KvBuffer source(plan.file.spec(), plan.num_tokens());
  std::vector<double> copies;
  std::vector<double> puts;
  std::vector<double> gets;
  for (int64_t round = 0; round < plan.rounds; ++round) {
    absl::Time start = absl::Now();
    for (size_t i = 0; i < buffer.layers().size(); ++i) {
      for (Role role : {Role::kKey, Role::kValue}) {
        const int32_t layer_idx = static_cast<int32_t>(i);
        const auto to =
            RowBytes(buffer.spec(), buffer.layers()[i], layer_idx, role, plan.num_tokens());
        const auto from =
            RowBytes(source.spec(), plan.file.layers()[i], layer_idx, role, plan.num_tokens());
        if (!to.empty()) std::memcpy(const_cast<std::byte*>(to.data()), from.data(), to.size());
      }
    }
    copies.push_back(GbPerSecond(plan.kv_bytes(), absl::Now() - start));
    const std::string tenant = absl::StrCat("eval-", getpid(), "-", round, "-", verdict.codec());
    start = absl::Now();
    KVSTOW_ASSIGN_OR_RETURN(const PutSummary put, PutAs(plan, verdict.codec(), tenant));
    puts.push_back(GbPerSecond(plan.kv_bytes(), absl::Now() - start));
    const absl::StatusOr<int64_t> num_deleted = plan.service.kv->Delete(put.keys);
    if (!num_deleted.ok()) return plan.service.Explain(num_deleted.status());
    start = absl::Now();
    const absl::StatusOr<GetSummary> got = plan.service.kv->Get(plan.model, keys, buffer.layers());
    gets.push_back(GbPerSecond(plan.kv_bytes(), absl::Now() - start));
    if (!got.ok()) return plan.service.Explain(got.status());
    if (got->num_leading != static_cast<int32_t>(keys.size())) {
      return absl::NotFoundError(absl::StrCat("codec ", verdict.codec(), ": ", got->num_leading,
                                              " of ", keys.size(), " blocks came back"));
    }
  }
  verdict.memcpy_gb_per_s = MedianOf(copies);
  verdict.put_gb_per_s = MedianOf(puts);
  verdict.get_gb_per_s = MedianOf(gets);
  return absl::OkStatus();
}

// Bits per value of the units: of all, and of each layer and KV head.
void CountBits(const EvalPlan& plan, absl::Span<const EncodedBlock> blocks, JudgedCodec& judged) {
  const BlockLayout& layout = *plan.model.layout;
  const LayerGroup& group = plan.file.spec().groups[0];
  const size_t num_cells = static_cast<size_t>(layout.num_layers()) * group.num_kv_heads;
  judged.k_bits.assign(num_cells, 0);
  judged.v_bits.assign(num_cells, 0);
  double total_bits = 0;
  for (const EncodedBlock& block : blocks) {
    for (int32_t i = 0; i < layout.num_planes(); ++i) {
      const PlaneInfo& plane = layout.plane(i);
      const double bits = 8.0 * static_cast<double>(block.units[i].bytes.size());
      std::vector<double>& cells = plane.role == Role::kKey ? judged.k_bits : judged.v_bits;
      cells[plane.layer_idx * group.num_kv_heads + plane.head_idx] +=
          bits / static_cast<double>(plan.num_tokens() * plane.dim);
      total_bits += bits;
    }
  }
  const int64_t num_values = plan.kv_bytes() / DTypeBytes(plan.file.spec().kv_dtype, 1);
  judged.bits_per_value = total_bits / static_cast<double>(num_values);
}

// Bits from the units, stored bytes from the list.
absl::Status MeasureSize(const EvalPlan& plan, absl::Span<const BlockKey> keys, Verdict& verdict) {
  const absl::StatusOr<std::vector<EncodedBlock>> encoded =
      plan.service.kv->GetEncoded(plan.model, keys);
  if (!encoded.ok()) return plan.service.Explain(encoded.status());
  for (const EncodedBlock& block : *encoded) KVSTOW_RETURN_IF_ERROR(block.status);
  CountBits(plan, *encoded, verdict.judged);
  const absl::StatusOr<std::vector<ListedBlock>> blocks =
      FindBlocks(*plan.service.admin, plan.model.fingerprint, keys);
  if (!blocks.ok()) return plan.service.Explain(blocks.status());
  for (const ListedBlock& block : *blocks) {
    verdict.record_bytes += static_cast<int64_t>(block.record_bytes);
    verdict.logical_bytes += static_cast<int64_t>(block.logical_bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<Verdict> Judge(const EvalPlan& plan, const std::string& codec) {
  Verdict verdict{.judged = {.codec = codec}};
  const std::string tenant = absl::StrCat(plan.tenant_prefix, codec);
  if (plan.put_missing) KVSTOW_RETURN_IF_ERROR(PutAs(plan, codec, tenant).status());
  const std::vector<BlockKey> keys =
      ChainKeys(plan.ContextOf(tenant), plan.file.tokens(), plan.file.spec().tokens_per_block);
  KvBuffer buffer(plan.file.spec(), plan.num_tokens());
  const absl::StatusOr<GetSummary> got = plan.service.kv->Get(plan.model, keys, buffer.layers());
  if (!got.ok()) return plan.service.Explain(got.status());
  if (got->num_leading != static_cast<int32_t>(keys.size())) {
    return absl::NotFoundError(absl::StrCat("codec ", codec, ": ", got->num_leading, " of ",
                                            keys.size(), " blocks are there; first: kvstow put ",
                                            plan.file.path(), " --codec ", codec, " --tenant ",
                                            tenant, " (or give --put)"));
  }
  KVSTOW_ASSIGN_OR_RETURN(const KvDifference difference,
                          CompareBlocks(buffer, plan.file, got->blocks));
  verdict.num_different_bytes = difference.num_different_bytes;
  verdict.judged.quality = JudgeQuality({plan.file.spec(), plan.file.layers(), plan.num_tokens()},
                                        buffer.layers(), plan.probe);
  KVSTOW_RETURN_IF_ERROR(MeasureSize(plan, keys, verdict));
  KVSTOW_RETURN_IF_ERROR(MeasureRates(plan, keys, verdict));
  const QualityBound* bound = FindQualityBound(codec);
  if (bound != nullptr) verdict.broken = BrokenBounds(*bound, verdict.quality());
  // Errors of 0 could hide a difference between +0 and -0, or in a NaN: bytes decide.
  if (bound != nullptr && bound->k_error == 0 && verdict.num_different_bytes > 0) {
    verdict.broken.push_back(absl::StrCat(codec, ": ", verdict.num_different_bytes,
                                          " bytes differ, the first in ", difference.first));
  }
  return verdict;
}

Json VerdictJson(const Verdict& verdict) {
  return {{"codec", verdict.codec()},
          {"bits_per_value", verdict.judged.bits_per_value},
          {"stored_bytes", verdict.record_bytes},
          {"logical_bytes", verdict.logical_bytes},
          {"ratio", static_cast<double>(verdict.logical_bytes) /
                        static_cast<double>(std::max<int64_t>(verdict.record_bytes, 1))},
          {"k_error", verdict.quality().k_error},
          {"v_error", verdict.quality().v_error},
          {"attention_kl", verdict.quality().attention_kl},
          {"output_error", verdict.quality().output_error},
          {"different_bytes", verdict.num_different_bytes},
          {"memcpy_gb_per_s", verdict.memcpy_gb_per_s},
          {"put_gb_per_s", verdict.put_gb_per_s},
          {"put_ratio", verdict.put_gb_per_s / verdict.memcpy_gb_per_s},
          {"get_gb_per_s", verdict.get_gb_per_s},
          {"get_ratio", verdict.get_gb_per_s / verdict.memcpy_gb_per_s},
          {"bounds_known", FindQualityBound(verdict.codec()) != nullptr},
          {"broken_bounds", verdict.broken}};
}

void AddVerdictRow(const Verdict& verdict, Table& table) {
  const auto share = [&](double rate) {
    return absl::StrCat(FormatNumber(100 * rate / verdict.memcpy_gb_per_s, 1), " %");
  };
  const double ratio = static_cast<double>(verdict.logical_bytes) /
                       static_cast<double>(std::max<int64_t>(verdict.record_bytes, 1));
  const std::string bound = FindQualityBound(verdict.codec()) == nullptr ? "none"
                            : verdict.broken.empty()                     ? "kept"
                                                                         : "BROKEN";
  table.AddRow({verdict.codec(), FormatNumber(verdict.judged.bits_per_value, 3),
                FormatBytes(verdict.record_bytes), FormatNumber(ratio, 2),
                FormatShort(verdict.quality().k_error), FormatShort(verdict.quality().v_error),
                FormatShort(verdict.quality().attention_kl),
                FormatShort(verdict.quality().output_error), share(verdict.put_gb_per_s),
                share(verdict.get_gb_per_s), bound});
}

absl::Status CheckVerdicts(const std::vector<Verdict>& verdicts, Output& output) {
  size_t num_broken = 0;
  for (const Verdict& verdict : verdicts) {
    for (const std::string& line : verdict.broken) output.Note(absl::StrCat("broken: ", line));
    num_broken += verdict.broken.size();
  }
  if (num_broken == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(num_broken, " bounds are broken"));
}

EvalReport ReportOf(const EvalPlan& plan, const std::vector<Verdict>& verdicts) {
  EvalReport report{.model = plan.file.spec().name,
                    .num_tokens = plan.num_tokens(),
                    .num_queries = plan.probe.num_tokens};
  for (const Verdict& verdict : verdicts) report.codecs.push_back(verdict.judged);
  return report;
}

void PrintHeads(const EvalReport& report, Output& output) {
  Table table(
      {"CODEC", "LAYER", "HEAD", "K BITS", "V BITS", "K ERROR", "V ERROR", "ATTN KL", "OUT ERROR"});
  for (const JudgedCodec& judged : report.codecs) {
    const QualityMap& map = judged.quality;
    for (size_t i = 0; i < map.cells.size(); ++i) {
      const Quality& cell = map.cells[i];
      const int32_t cell_idx = static_cast<int32_t>(i);
      table.AddRow({judged.codec, absl::StrCat(cell_idx / map.num_heads),
                    absl::StrCat(cell_idx % map.num_heads), FormatNumber(judged.k_bits[i], 3),
                    FormatNumber(judged.v_bits[i], 3), FormatShort(cell.k_error),
                    FormatShort(cell.v_error), FormatShort(cell.attention_kl),
                    FormatShort(cell.output_error)});
    }
  }
  output.Line(table.Text());
}

absl::Status WriteReport(const Args& args, const EvalReport& report, Output& output) {
  if (args.Has("by-head")) PrintHeads(report, output);
  if (args.Has("csv")) {
    KVSTOW_RETURN_IF_ERROR(WriteTextFile(args.Text("csv"), EvalCsv(report)));
  }
  if (args.Has("html")) {
    KVSTOW_RETURN_IF_ERROR(WriteTextFile(args.Text("html"), EvalPage(report)));
  }
  return absl::OkStatus();
}

// "raw,k=tqm4,v=tq4,layer0=raw" is raw, and the pair k=tqm4,v=tq4 with a raw layer.
absl::StatusOr<std::vector<std::string>> ReadCodecs(const Args& args) {
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<std::string> words, args.List("codecs"));
  std::vector<std::string> codecs;
  for (const std::string& word : words) {
    const bool ends_pair =
        word.starts_with("v=") && !codecs.empty() && codecs.back().starts_with("k=");
    if (ends_pair || (word.starts_with("layer") && !codecs.empty())) {
      absl::StrAppend(&codecs.back(), ",", word);
    } else {
      codecs.push_back(word);
    }
  }
  for (const std::string& codec : codecs) {
    const absl::StatusOr<LayeredText> words = SplitLayers(codec);
    if (!words.ok()) return UsageError(absl::StrCat("--codecs: ", words.status().message()));
    const absl::StatusOr<CodecChoice> choice = ParseCodecChoice(words->choice);
    if (!choice.ok()) return UsageError(absl::StrCat("--codecs: ", choice.status().message()));
  }
  return codecs;
}

absl::Status RunEval(const Args& args, Output& output) {
  if (!args.Has("probe")) return UsageError("--probe FILE is missing: the queries to judge with");
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<std::string> codecs, ReadCodecs(args));
  KVSTOW_ASSIGN_OR_RETURN(const int64_t rounds, args.Int("rounds", 1, 1000));
  KVSTOW_ASSIGN_OR_RETURN(const KvFileOverrides overrides, ReadOverrides(args));
  KVSTOW_ASSIGN_OR_RETURN(const KvFile file, KvFile::Open(args.positionals()[0], overrides));
  KVSTOW_RETURN_IF_ERROR(file.CheckHasBlocks());
  KVSTOW_ASSIGN_OR_RETURN(const Probe probe, Probe::Open(args.Text("probe"), file.spec()));
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  const absl::StatusOr<Model> model = service.kv->RegisterModel(file.spec());
  if (!model.ok()) return service.Explain(model.status());
  KVSTOW_ASSIGN_OR_RETURN(const Digest calibration_id,
                          ReadCalibration(args, service, model->fingerprint));
  const EvalPlan plan{
      file,   probe,         service, *model, args.Text("tenant-prefix"), args.Has("put"),
      rounds, calibration_id};
  Table table({"CODEC", "BITS/VALUE", "STORED", "RATIO", "K ERROR", "V ERROR", "ATTN KL",
               "OUT ERROR", "PUT/MEMCPY", "GET/MEMCPY", "BOUNDS"});
  std::vector<Verdict> verdicts;
  Progress progress(output, "eval", codecs.size());
  for (const std::string& codec : codecs) {
    KVSTOW_ASSIGN_OR_RETURN(Verdict verdict, Judge(plan, codec));
    output.Json(VerdictJson(verdict));
    AddVerdictRow(verdict, table);
    verdicts.push_back(std::move(verdict));
    progress.Update(verdicts.size());
  }
  output.Line(table.Text());
  KVSTOW_RETURN_IF_ERROR(WriteReport(args, ReportOf(plan, verdicts), output));
  output.Line(absl::StrCat(file.num_full_blocks(), " blocks, ", FormatBytes(plan.kv_bytes()),
                           " of KV; memcpy of the same bytes: ",
                           FormatNumber(verdicts.back().memcpy_gb_per_s, 1), " GB/s"));
  return args.Has("check") ? CheckVerdicts(verdicts, output) : absl::OkStatus();
}

constexpr Command kJudgeCommands[] = {
    {{.name = "eval",
      .summary = "judge codecs on a real model's KV, fetched through the service",
      .details =
          "For each codec the KV of FILE is fetched from the tenant of the codec's name and "
          "compared "
          "with FILE.\nK ERROR, V ERROR: squared error over squares. ATTN KL: nats, exact against "
          "decoded, mean over the\nprobe's queries, heads and layers. OUT ERROR: of the attention "
          "outputs. PUT, GET: rate as a share\nof a memcpy of the same bytes, medians.",
      .positionals = "FILE",
      .num_positionals_min = 1,
      .num_positionals_max = 1,
      .options = kEvalOptions,
      .example = "kvstow eval tests/data/smollm2_kv.safetensors --probe "
                 "tests/data/smollm2_kv_probe.safetensors --put --check"},
     &RunEval},
};

}  // namespace

absl::Span<const Command> JudgeCommands() { return kJudgeCommands; }

}  // namespace kvstow
