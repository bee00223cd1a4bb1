// recommend: a codec for each layer's keys and values, from samples of the user's own KV.
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/cli/commands.h"
#include "client/cli/connect.h"
#include "client/cli/recommend.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kRawBits = 32;

constexpr Option kRecommendOptions[] = {
    {"probe", "FILE,...", "queries to judge with, one file for each FILE: as for kvstow eval"},
    {"budget", "BITS", "bits per value, of the units: 3.2 or 3.2bpv"},
    {"max-kl", "KL", "in place of --budget: the smallest plan of at most this KL, in nats"},
    {"max-ppl", "PERCENT", "needs the model: says which command takes it"},
    {"k-codecs", "LIST", "codecs to choose from for keys", "raw,int8,tqm4,tqm3,tqm2,tq4"},
    {"v-codecs", "LIST", "codecs to choose from for values", "raw,int8,tq4,tq3,tq2"},
    {"out", "FILE", "write the plan, for kvstow plan --set and kvstow put --plan", {}, 'o'},
    kModelOption,
    kWeightsOption,
    kRopeOption,
    kTokenizerOption,
    kTokensPerBlockOption,
};

// What is asked for: one of the two.
struct Goal {
  double budget = 0;   // bits per value; 0: none
  double max_kl = -1;  // negative: none
};

absl::StatusOr<double> ReadNumber(const Args& args, std::string_view name, double least,
                                  double most) {
  const std::string text = args.Text(name);
  absl::string_view digits = text;
  if (name == "budget") absl::ConsumeSuffix(&digits, "bpv");
  double value = 0;
  if (!absl::SimpleAtod(digits, &value) || !(value >= least && value <= most)) {
    return UsageError(absl::StrFormat("--%s is \"%s\", want a number of %g to %g",
                                      std::string(name), text, least, most));
  }
  return value;
}

absl::StatusOr<Goal> ReadGoal(const Args& args) {
  if (args.Has("max-ppl")) {
    return UsageError(
        absl::StrCat("perplexity needs the model: python3 -m kvstow.eval.recommend MODEL --docs "
                     "FILES --max-ppl ",
                     args.Text("max-ppl"), " finds a plan that keeps it"));
  }
  if (args.Has("budget") == args.Has("max-kl")) {
    return UsageError("want --budget BITS or --max-kl KL, one of them");
  }
  Goal goal;
  if (args.Has("budget")) {
    KVSTOW_ASSIGN_OR_RETURN(goal.budget, ReadNumber(args, "budget", 0.5, kRawBits));
  } else {
    KVSTOW_ASSIGN_OR_RETURN(goal.max_kl, ReadNumber(args, "max-kl", 0, 100));
  }
  return goal;
}

absl::StatusOr<std::vector<CodecId>> ReadCodecs(const Args& args, std::string_view name,
                                                Role role) {
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<std::string> words, args.List(name));
  std::vector<CodecId> codecs;
  for (const std::string& word : words) {
    const absl::StatusOr<CodecChoice> choice = ParseCodecChoice(
        role == Role::kKey ? absl::StrCat("k=", word, ",v=raw") : absl::StrCat("k=raw,v=", word));
    if (!choice.ok()) {
      return UsageError(absl::StrCat("--", ToAbsl(name), ": ", choice.status().message()));
    }
    const CodecId codec = choice->pair.of(role);
    if (FindCodec(codec)->needs_rotation) {
      return UsageError(absl::StrCat("--", ToAbsl(name), ": ", word, " needs a calibration"));
    }
    codecs.push_back(codec);
  }
  return codecs;
}

struct Sample {
  KvFile file;
  Probe probe;
};

absl::StatusOr<std::vector<Sample>> OpenSamples(const Args& args) {
  if (!args.Has("probe")) return UsageError("--probe FILE is missing: the queries to judge with");
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<std::string> probes, args.List("probe"));
  if (probes.size() != args.positionals().size()) {
    return UsageError(absl::StrCat("--probe: ", probes.size(), " files for ",
                                   args.positionals().size(), " of KV, want one for each"));
  }
  KVSTOW_ASSIGN_OR_RETURN(const KvFileOverrides overrides, ReadOverrides(args));
  std::vector<Sample> samples;
  for (size_t i = 0; i < probes.size(); ++i) {
    KVSTOW_ASSIGN_OR_RETURN(KvFile file, KvFile::Open(args.positionals()[i], overrides));
    KVSTOW_ASSIGN_OR_RETURN(Probe probe, Probe::Open(probes[i], file.spec()));
    samples.push_back({std::move(file), std::move(probe)});
  }
  return samples;
}

absl::StatusOr<Recommendation> Choose(const CostTable& table, const Goal& goal) {
  return goal.max_kl < 0 ? table.ForBudget(goal.budget) : table.ForKl(goal.max_kl);
}

std::string NameOf(CodecId codec) { return std::string(FindCodec(codec)->name); }

Json ResultJson(const ModelSpec& spec, const Recommendation& best,
                const absl::StatusOr<Recommendation>& uniform) {
  Json layers = Json::array();
  for (const LayerChoice& layer : best.layers) {
    layers.push_back({{"layer", layer.layer_idx},
                      {"k", NameOf(layer.k.codec)},
                      {"v", NameOf(layer.v.codec)},
                      {"attention_kl", layer.k.kl},
                      {"output_error", layer.k.output_error + layer.v.output_error}});
  }
  Json result = {{"model", spec.name},
                 {"fingerprint", spec.Fingerprint().ToHex()},
                 {"plan", best.plan.Text()},
                 {"bits_per_value", best.bits_per_value},
                 {"attention_kl", best.attention_kl},
                 {"cost", best.cost},
                 {"output_error", best.output_error},
                 {"layers", layers}};
  if (uniform.ok()) {
    const LayerChoice& layer = uniform->layers[0];
    result["best_uniform"] = {{"codec", CodecPairName({layer.k.codec, layer.v.codec})},
                              {"bits_per_value", uniform->bits_per_value},
                              {"attention_kl", uniform->attention_kl},
                              {"cost", uniform->cost},
                              {"output_error", uniform->output_error}};
  }
  return result;
}

void ShowResult(const Recommendation& best, const absl::StatusOr<Recommendation>& uniform,
                Output& output) {
  Table table({"LAYER", "K", "V", "ATTN KL", "OUT ERROR"});
  for (const LayerChoice& layer : best.layers) {
    table.AddRow({absl::StrCat(layer.layer_idx), NameOf(layer.k.codec), NameOf(layer.v.codec),
                  FormatShort(layer.k.kl),
                  FormatShort(layer.k.output_error + layer.v.output_error)});
  }
  output.Line(absl::StrCat(table.Text(), "\n"));
  Table sums({"", "BITS/VALUE", "ATTN KL", "WITH VALUES", "OUT ERROR"});
  const auto add = [&](const std::string& name, const Recommendation& result) {
    sums.AddRow({name, FormatNumber(result.bits_per_value, 3), FormatShort(result.attention_kl),
                 FormatShort(result.cost), FormatShort(result.output_error)});
  };
  add("this plan", best);
  if (uniform.ok()) {
    const LayerChoice& layer = uniform->layers[0];
    add(absl::StrCat("best pair: ", CodecPairName({layer.k.codec, layer.v.codec})), *uniform);
  }
  output.Line(sums.Text());
  output.Line(absl::StrCat("plan     ", best.plan.Text()));
}

absl::Status RunRecommend(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const Goal goal, ReadGoal(args));
  RecommendOptions options;
  KVSTOW_ASSIGN_OR_RETURN(options.k_codecs, ReadCodecs(args, "k-codecs", Role::kKey));
  KVSTOW_ASSIGN_OR_RETURN(options.v_codecs, ReadCodecs(args, "v-codecs", Role::kValue));
  KVSTOW_ASSIGN_OR_RETURN(const std::vector<Sample> samples, OpenSamples(args));
  const ModelSpec& spec = samples[0].file.spec();
  CostTable table(spec, options);
  {
    Progress progress(output, "recommend", samples.size() * spec.num_layers());
    uint64_t num_done = 0;
    for (const Sample& sample : samples) {
      KVSTOW_RETURN_IF_ERROR(
          table.Add(sample.file, sample.probe, [&](int32_t) { progress.Update(++num_done); }));
    }
  }
  KVSTOW_ASSIGN_OR_RETURN(const Recommendation best, Choose(table, goal));
  const absl::StatusOr<Recommendation> uniform =
      table.BestUniform(goal.max_kl < 0 ? goal.budget : best.bits_per_value);
  if (args.Has("out")) {
    std::ofstream file(args.Text("out"), std::ios::binary);
    file << PlanFileText(spec, best);
    file.close();
    if (!file) return absl::UnavailableError(absl::StrCat(args.Text("out"), ": cannot be written"));
  }
  output.Json(ResultJson(spec, best, uniform));
  ShowResult(best, uniform, output);
  return absl::OkStatus();
}

constexpr Command kRecommendCommands[] = {
    {{.name = "recommend",
      .summary = "a codec for each layer, measured on your own KV",
      .details =
          "Measures every codec on every layer of the samples, without a service, and prints the "
          "plan of least\nKL within the budget, or the smallest one within the KL. ATTN KL: nats, "
          "attention weights exact\nagainst decoded, mean over the probe's queries, heads and "
          "layers. WITH VALUES: and what the errors\nof the values are worth in the same unit; "
          "this is what is minimised. It is no perplexity.",
      .positionals = "FILE...",
      .num_positionals_min = 1,
      .num_positionals_max = 64,
      .options = kRecommendOptions,
      .example = "kvstow recommend tests/data/smollm2_kv.safetensors --probe "
                 "tests/data/smollm2_kv_probe.safetensors --budget 3.2bpv -o plan.txt"},
     &RunRecommend},
};

}  // namespace

absl::Span<const Command> RecommendCommands() { return kRecommendCommands; }

}  // namespace kvstow
