// calibrate, calibration: rotations of a model from samples of its KV; bundles to and from a
// service.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/connect.h"
#include "client/cli/kv_file.h"
#include "kernels/codec/calibration_builder.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kShortHexDigits = 16;

constexpr Option kCalibrateOptions[] = {
    {"out", "FILE", "write the bundle here", {}, 'o'},
    {"upload", "", "register the model and give the bundle to the service"},
    {"threads", "N", "0: one for each core", "0"},
    kModelOption,
    kWeightsOption,
    kRopeOption,
    kTokenizerOption,
    kTokensPerBlockOption,
};
constexpr Option kCalibrationOptions[] = {
    {"out", "FILE", "with get: where to", {}, 'o'},
};

absl::StatusOr<DType> FloatDType(const KvFile& file, const Tensor& tensor) {
  const std::optional<DType> dtype = KvDTypeOf(tensor.type);
  if (dtype.has_value() && IsFloatDType(*dtype)) return *dtype;
  return absl::InvalidArgumentError(absl::StrCat(file.path(), ": tensor \"", tensor.name, "\" is ",
                                                 tensor.ShapeText(), ", want BF16, F16 or F32"));
}

// q.{layer}, or nothing where the file has none.
absl::StatusOr<SampleRows> QueriesOf(const KvFile& file, int32_t layer_idx) {
  const Tensor* tensor = file.safetensors().Find(absl::StrCat("q.", layer_idx));
  if (tensor == nullptr) return SampleRows();
  KVSTOW_ASSIGN_OR_RETURN(const DType dtype, FloatDType(file, *tensor));
  const auto num_tokens = static_cast<int64_t>(file.tokens().size());
  const std::vector<int64_t>& shape = tensor->shape;
  if (shape.size() != 3 || shape[0] != num_tokens || shape[1] < 1 ||
      shape[1] > ModelSpec::kMaxKvHeads * 64 || shape[2] < 1 || shape[2] > ModelSpec::kMaxDim) {
    return absl::InvalidArgumentError(absl::StrCat(file.path(), ": tensor \"", tensor->name,
                                                   "\" is ", tensor->ShapeText(), ", want [",
                                                   num_tokens, ", q_heads, head_dim]"));
  }
  return SampleRows{.dtype = dtype,
                    .num_heads = static_cast<int32_t>(shape[1]),
                    .dim = static_cast<int32_t>(shape[2]),
                    .data = file.safetensors().bytes(*tensor).data()};
}

absl::StatusOr<CalibrationSamples> SamplesOf(const KvFile& file) {
  CalibrationSamples samples{.num_tokens = static_cast<int64_t>(file.tokens().size())};
  for (const LayerGroup& group : file.spec().groups) {
    for (int32_t i = 0; i < group.num_layers; ++i) {
      const int32_t layer_idx = group.first_layer + i;
      const LayerRows& rows = file.layers()[static_cast<size_t>(layer_idx)];
      const SampleRows common{.dtype = file.spec().kv_dtype, .num_heads = group.num_kv_heads};
      LayerSamples layer{.k = common, .v = common};
      layer.k.dim = group.k_dim;
      layer.k.data = rows.k.data;
      layer.v.dim = group.v_dim;
      layer.v.data = rows.v.data;
      KVSTOW_ASSIGN_OR_RETURN(layer.q, QueriesOf(file, layer_idx));
      samples.layers.push_back(layer);
    }
  }
  return samples;
}

absl::Status WriteBundle(const std::string& path, const std::string& bundle) {
  const std::string temp = path + ".tmp";
  std::ofstream out(temp, std::ios::binary | std::ios::trunc);
  out << bundle;
  out.close();
  if (out.good() && std::rename(temp.c_str(), path.c_str()) == 0) return absl::OkStatus();
  std::remove(temp.c_str());
  return absl::UnavailableError(absl::StrCat(path, ": cannot be written"));
}

absl::StatusOr<std::string> ReadBundle(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream bytes;
  bytes << in.rdbuf();
  if (!in.good() || bytes.str().empty()) {
    return absl::NotFoundError(absl::StrCat(path, ": cannot be read, or is empty"));
  }
  return bytes.str();
}

// The heads of a layer and role in one row: the mean norm, the worst of the rest.
void AddHeadRows(absl::Span<const HeadStats> heads, Table& table) {
  std::map<std::pair<int32_t, Role>, std::vector<const HeadStats*>> groups;
  for (const HeadStats& head : heads) {
    groups[{head.place.layer_idx, head.place.role}].push_back(&head);
  }
  for (const auto& [place, group] : groups) {
    double norm = 0, mean = 0, channel = 0, least = group[0]->kurtosis, most = least;
    for (const HeadStats* head : group) {
      norm += head->rms_norm / static_cast<double>(group.size());
      mean = std::max(mean, head->mean_share);
      channel = std::max(channel, head->top_channel);
      least = std::min(least, head->kurtosis);
      most = std::max(most, head->kurtosis);
    }
    table.AddRow({absl::StrCat(place.first), place.second == Role::kKey ? "k" : "v",
                  FormatShort(norm), FormatNumber(100 * mean, 0), FormatNumber(100 * channel, 0),
                  FormatNumber(least, 2), FormatNumber(most, 2)});
  }
}

void PrintHeads(absl::Span<const HeadStats> heads, Output& output) {
  for (const HeadStats& head : heads) {
    output.Json({{"layer", head.place.layer_idx},
                 {"role", head.place.role == Role::kKey ? "k" : "v"},
                 {"head", head.place.head_idx},
                 {"rms_norm", head.rms_norm},
                 {"mean_share", head.mean_share},
                 {"top_channel", head.top_channel},
                 {"kurtosis", head.kurtosis}});
  }
  Table table({"LAYER", "ROLE", "NORM", "MEAN %", "CHANNEL %", "KURTOSIS", "TO"});
  AddHeadRows(heads, table);
  output.Line(table.Text());
}

absl::StatusOr<BuiltCalibration> Build(const Args& args, const KvFile& file,
                                       const CalibrationSamples& samples, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const int64_t threads, args.Int("threads", 0, 256));
  const absl::Span<const std::byte> bytes = file.safetensors().file_bytes();
  Progress progress(output, "calibrate", samples.layers.size());
  BuildOptions options{
      .fingerprint = file.spec().Fingerprint(),
      .source = Sha256({reinterpret_cast<const char*>(bytes.data()), bytes.size()}),
      .num_threads = static_cast<int>(threads)};
  if (threads == 0) {
    options.num_threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  }
  options.progress = [&](int64_t num_done, int64_t) { progress.Update(num_done); };
  absl::StatusOr<BuiltCalibration> built = BuildCalibration(samples, options);
  if (built.ok()) return built;
  return absl::Status(built.status().code(),
                      absl::StrCat(file.path(), ": ", built.status().message()));
}

absl::Status Upload(const Args& args, const ModelSpec& spec, const std::string& bundle) {
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  const absl::StatusOr<Model> model = service.kv->RegisterModel(spec);
  if (!model.ok()) return service.Explain(model.status());
  return service.Explain(service.admin->PutCalibration(bundle).status());
}

absl::Status RunCalibrate(const Args& args, Output& output) {
  if (!args.Has("out") && !args.Has("upload")) {
    return UsageError("where to: --out FILE, --upload, or both");
  }
  KVSTOW_ASSIGN_OR_RETURN(const KvFileOverrides overrides, ReadOverrides(args));
  KVSTOW_ASSIGN_OR_RETURN(const KvFile file, KvFile::Open(args.positionals()[0], overrides));
  KVSTOW_ASSIGN_OR_RETURN(const CalibrationSamples samples, SamplesOf(file));
  const absl::Time start = absl::Now();
  KVSTOW_ASSIGN_OR_RETURN(const BuiltCalibration built, Build(args, file, samples, output));
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const std::string bundle = built.calibration.Serialize();
  const std::vector<std::string> warnings = CalibrationWarnings(samples, built.heads);
  PrintHeads(built.heads, output);
  for (const std::string& warning : warnings) output.Note(absl::StrCat("warning: ", warning));
  if (args.Has("out")) KVSTOW_RETURN_IF_ERROR(WriteBundle(args.Text("out"), bundle));
  if (args.Has("upload")) KVSTOW_RETURN_IF_ERROR(Upload(args, file.spec(), bundle));
  output.Json({{"file", file.path()},
               {"id", built.calibration.id().ToHex()},
               {"fingerprint", built.calibration.fingerprint().ToHex()},
               {"source", built.calibration.source().ToHex()},
               {"tokens", samples.num_tokens},
               {"queries", samples.layers[0].q.data != nullptr},
               {"rotations", built.calibration.num_rotations()},
               {"bundle_bytes", bundle.size()},
               {"seconds", seconds},
               {"uploaded", args.Has("upload")},
               {"warnings", warnings}});
  output.Line(absl::StrFormat("calibration %s: %d rotations from %d tokens, %s, %.1f s",
                              built.calibration.id().ToHex(), built.calibration.num_rotations(),
                              samples.num_tokens, FormatBytes(static_cast<int64_t>(bundle.size())),
                              seconds));
  return absl::OkStatus();
}

// --- calibration ---

Json ListedJson(const ListedCalibration& listed) {
  return {{"id", listed.id.ToHex()},
          {"fingerprint", listed.fingerprint.ToHex()},
          {"source", listed.source.ToHex()},
          {"rotations", listed.num_rotations},
          {"bundle_bytes", listed.bundle_bytes}};
}

absl::Status ListCalibrations(const Service& service, Output& output) {
  const absl::StatusOr<std::vector<ListedCalibration>> list =
      service.admin->ListCalibrations(Digest());
  if (!list.ok()) return service.Explain(list.status());
  Table table({"ID", "MODEL", "SOURCE", "ROTATIONS", "SIZE"});
  for (const ListedCalibration& listed : *list) {
    output.Json(ListedJson(listed));
    table.AddRow({listed.id.ToHex().substr(0, kShortHexDigits),
                  listed.fingerprint.ToHex().substr(0, kShortHexDigits),
                  listed.source.ToHex().substr(0, kShortHexDigits),
                  absl::StrCat(listed.num_rotations),
                  FormatBytes(static_cast<int64_t>(listed.bundle_bytes))});
  }
  output.Line(table.Text());
  return absl::OkStatus();
}

absl::Status UploadFile(const Service& service, const std::string& path, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string bundle, ReadBundle(path));
  const absl::StatusOr<ListedCalibration> listed = service.admin->PutCalibration(bundle);
  if (!listed.ok()) {
    return service.Explain(
        absl::Status(listed.status().code(), absl::StrCat(path, ": ", listed.status().message())));
  }
  output.Json(ListedJson(*listed));
  output.Line(absl::StrCat("calibration ", listed->id.ToHex(), " is at the service"));
  return absl::OkStatus();
}

absl::Status FetchOrDelete(const Args& args, const Service& service, Output& output) {
  const absl::StatusOr<std::vector<ListedCalibration>> list =
      service.admin->ListCalibrations(Digest());
  if (!list.ok()) return service.Explain(list.status());
  KVSTOW_ASSIGN_OR_RETURN(const Digest id, FindCalibration(*list, args.positionals()[1]));
  if (args.positionals()[0] == "rm") {
    KVSTOW_RETURN_IF_ERROR(service.Explain(service.admin->DeleteCalibration(id)));
    output.Json({{"id", id.ToHex()}, {"deleted", true}});
    output.Line(absl::StrCat("calibration ", id.ToHex(),
                             " is gone; blocks that need it are misses from now on"));
    return absl::OkStatus();
  }
  if (!args.Has("out")) return UsageError("calibration get wants --out FILE");
  const absl::StatusOr<std::string> bundle = service.admin->GetCalibration(id);
  if (!bundle.ok()) return service.Explain(bundle.status());
  KVSTOW_ASSIGN_OR_RETURN(const Digest fingerprint, Calibration::ModelOf(*bundle));
  KVSTOW_RETURN_IF_ERROR(Calibration::Parse(*bundle, fingerprint).status());
  KVSTOW_RETURN_IF_ERROR(WriteBundle(args.Text("out"), *bundle));
  output.Json({{"id", id.ToHex()}, {"file", args.Text("out")}, {"bundle_bytes", bundle->size()}});
  output.Line(absl::StrCat("calibration ", id.ToHex(), " is in ", args.Text("out")));
  return absl::OkStatus();
}

absl::Status RunCalibration(const Args& args, Output& output) {
  const std::vector<std::string>& words = args.positionals();
  const std::string& action = words[0];
  if (action != "ls" && action != "put" && action != "get" && action != "rm") {
    return UsageError(absl::StrCat("calibration \"", action, "\"? want ls, put, get or rm"));
  }
  if (words.size() != (action == "ls" ? 1u : 2u)) {
    return UsageError(absl::StrCat("calibration ", action, " wants ",
                                   action == "ls"    ? "no more words"
                                   : action == "put" ? "the bundle's file"
                                                     : "an id, or its beginning"));
  }
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  if (action == "ls") return ListCalibrations(service, output);
  if (action == "put") return UploadFile(service, words[1], output);
  return FetchOrDelete(args, service, output);
}

constexpr Command kCalibrateCommands[] = {
    {{.name = "calibrate",
      .summary = "compute the rotations that calibrated codecs (olm, osu2, oscar2) need",
      .details =
          "FILE holds k.{layer} and v.{layer} as for put, and should hold q.{layer}, "
          "[tokens, q_heads, head_dim],\nall after RoPE: 5,000 tokens and more of unlike "
          "texts. The same file gives the same bundle.\nNORM: root of the mean squared row "
          "norm, mean over heads. MEAN, CHANNEL: share of the energy in the\nmean row and in "
          "the largest channel, worst head. KURTOSIS: excess, of rotated values, over heads.",
      .positionals = "FILE",
      .num_positionals_min = 1,
      .num_positionals_max = 1,
      .options = kCalibrateOptions,
      .example = "kvstow calibrate tests/data/smollm2_calibration.safetensors -o smollm2.kvc"},
     &RunCalibrate},
    {{.name = "calibration",
      .summary = "list, upload, fetch or remove the calibrations of the service",
      .details = "ls | put FILE | get ID --out FILE | rm ID. An id may be cut short. Blocks whose "
                 "calibration is removed\nare misses.",
      .positionals = "ACTION [FILE|ID]",
      .num_positionals_min = 1,
      .num_positionals_max = 2,
      .options = kCalibrationOptions,
      .example = "kvstow calibration ls"},
     &RunCalibration},
};

}  // namespace

absl::Span<const Command> CalibrateCommands() { return kCalibrateCommands; }

}  // namespace kvstow
