// put, get, key, delete: KV between files and the service.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/compare.h"
#include "client/cli/connect.h"
#include "client/cli/kv_file.h"
#include "client/cli/plan_file.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

constexpr Option kPutOptions[] = {
    {"codec", "CODEC",
     "raw, int8, a preset (safe, tiny, ...), or k=CODEC,v=CODEC; then layers: ,layer0=raw", "safe"},
    {"plan", "FILE", "codecs of layers, as kvstow recommend prints them"},
    kTenantOption,
    kLoraOption,
    {"compress-at", "WHERE", "service or worker: where the quantizer runs", "service"},
    {"durable", "", "return when the blocks would survive kill -9 (needs a disk tier)"},
    kCalibrationOption,
    kModelOption,
    kWeightsOption,
    kRopeOption,
    kTokenizerOption,
    kTokensPerBlockOption,
};
constexpr Option kGetOptions[] = {
    {"out", "FILE", "write what was found as safetensors", {}, 'o'},
    {"compare", "FILE", "compare with this file byte for byte; exit status 1 on a difference"},
    {"keys", "HEX,...", "fetch these keys instead of the tokens of a file"},
    {"tokens-from", "FILE", "take the tokens (and the model) from this file"},
    {"fingerprint", "HEX", "with --keys: the model, when the service knows more than one"},
    {"allow-missing", "", "blocks that are not there are no failure"},
    kTenantOption,
    kLoraOption,
    kModelOption,
    kWeightsOption,
    kRopeOption,
    kTokenizerOption,
    kTokensPerBlockOption,
};
constexpr Option kKeyOptions[] = {
    kTenantOption, kLoraOption,      kModelOption,          kWeightsOption,
    kRopeOption,   kTokenizerOption, kTokensPerBlockOption,
};

double GbPerSecond(int64_t bytes, absl::Duration time) {
  return static_cast<double>(bytes) / std::max(absl::ToDoubleSeconds(time), 1e-9) / 1e9;
}

std::string SpecLine(const ModelSpec& spec) {
  const LayerGroup& group = spec.groups[0];
  std::string shape = absl::StrCat(group.num_kv_heads, " KV heads of ", group.k_dim);
  if (spec.groups.size() > 1) shape = absl::StrCat(spec.groups.size(), " layer groups");
  return absl::StrCat("model    ", spec.name, ": ", ToAbsl(DTypeName(spec.kv_dtype)), ", ",
                      spec.num_layers(), " layers, ", shape, ", fingerprint ",
                      spec.Fingerprint().ToHex().substr(0, 16));
}

// --- put ---

struct StoredSize {
  int64_t num_found = 0;
  int64_t record_bytes = 0;
  int64_t logical_bytes = 0;
  double bits_per_value = 0;  // of the blocks found; records whole, header and table included
};

StoredSize SizeOf(absl::Span<const ListedBlock> blocks, DType dtype) {
  StoredSize size;
  for (const ListedBlock& block : blocks) {
    ++size.num_found;
    size.record_bytes += static_cast<int64_t>(block.record_bytes);
    size.logical_bytes += static_cast<int64_t>(block.logical_bytes);
  }
  if (size.logical_bytes > 0) {
    size.bits_per_value = 8.0 * static_cast<double>(DTypeBytes(dtype, 1)) *
                          static_cast<double>(size.record_bytes) /
                          static_cast<double>(size.logical_bytes);
  }
  return size;
}

void PrintPut(const KvFile& file, const PutSummary& put, const StoredSize& size,
              absl::Duration elapsed, Output& output) {
  const int64_t num_blocks = static_cast<int64_t>(put.keys.size());
  const int64_t kv_bytes =
      num_blocks == 0 ? 0 : BlockLayout::Create(file.spec())->block_bytes() * num_blocks;
  const double rate = GbPerSecond(kv_bytes, elapsed);
  output.Json({{"file", file.path()},
               {"fingerprint", file.spec().Fingerprint().ToHex()},
               {"blocks", num_blocks},
               {"stored", put.num_stored},
               {"existing", put.num_existing},
               {"refused", put.num_refused},
               {"first_refusal", std::string(put.first_refusal.message())},
               {"leftover_tokens", put.num_leftover_tokens},
               {"kv_bytes", kv_bytes},
               {"sent_bytes", put.sent_bytes},
               {"record_bytes", size.record_bytes},
               {"bits_per_value", size.bits_per_value},
               {"seconds", absl::ToDoubleSeconds(elapsed)},
               {"gb_per_s", rate}});
  output.Line(SpecLine(file.spec()));
  output.Line(absl::StrFormat("blocks   %d of %d tokens: %d stored, %d there before, %d refused",
                              num_blocks, file.spec().tokens_per_block, put.num_stored,
                              put.num_existing, put.num_refused));
  std::string bytes = absl::StrCat("bytes    ", FormatBytes(kv_bytes), " of KV, ",
                                   FormatBytes(put.sent_bytes), " sent");
  if (size.num_found > 0) {
    absl::StrAppend(&bytes, ", ", FormatBytes(size.record_bytes),
                    " stored: ", FormatNumber(size.bits_per_value, 2), " bits per value");
  }
  output.Line(bytes);
  if (put.num_stored > 0) {
    output.Line(absl::StrFormat("rate     %.2f GB/s of KV (%.1f ms)", rate,
                                absl::ToDoubleMilliseconds(elapsed)));
  }
  if (put.num_leftover_tokens > 0) {
    output.Line(absl::StrFormat("left     the last %d tokens fill no block and are not stored",
                                put.num_leftover_tokens));
  }
}

absl::StatusOr<PutRequest> ReadPutRequest(const Args& args, const KvFile& file) {
  PutRequest request{.tokens = file.tokens(), .layers = file.layers()};
  KVSTOW_ASSIGN_OR_RETURN(request.context, ReadContext(args, file.spec()));
  const absl::StatusOr<LayeredText> words = SplitLayers(args.Text("codec"));
  if (!words.ok()) return UsageError(absl::StrCat("--codec: ", words.status().message()));
  absl::StatusOr<CodecChoice> codec = ParseCodecChoice(words->choice);
  if (!codec.ok()) {
    return UsageError(absl::StrCat("--codec: ", codec.status().message()));
  }
  request.codec = *codec;
  request.layer_codecs = words->layers;
  if (args.Has("plan")) {
    KVSTOW_ASSIGN_OR_RETURN(const CodecPlan plan, ReadPlanFile(args.Text("plan")));
    request.layer_codecs = request.layer_codecs.Over(plan);
  }
  KVSTOW_ASSIGN_OR_RETURN(const std::string where,
                          args.OneOf("compress-at", {"service", "worker"}));
  request.compress_at = where == "worker" ? CompressAt::kWorker : CompressAt::kService;
  request.durable = args.Has("durable");
  return request;
}

absl::StatusOr<PutSummary> PutWithProgress(const Service& service, const Model& model,
                                           PutRequest request, absl::Duration& elapsed,
                                           Output& output) {
  Progress progress(output, "put", 0);
  request.progress = [&](int64_t num_done, int64_t num_blocks) {
    progress.SetTotal(num_blocks);
    progress.Update(num_done);
  };
  const absl::Time start = absl::Now();
  absl::StatusOr<PutSummary> put = service.kv->Put(model, request);
  elapsed = absl::Now() - start;
  if (!put.ok()) return service.Explain(put.status());
  return put;
}

absl::Status RunPut(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const KvFileOverrides overrides, ReadOverrides(args));
  KVSTOW_ASSIGN_OR_RETURN(const KvFile file, KvFile::Open(args.positionals()[0], overrides));
  KVSTOW_ASSIGN_OR_RETURN(PutRequest request, ReadPutRequest(args, file));
  KVSTOW_RETURN_IF_ERROR(file.CheckHasBlocks());
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  const absl::StatusOr<Model> model = service.kv->RegisterModel(file.spec());
  if (!model.ok()) return service.Explain(model.status());
  KVSTOW_ASSIGN_OR_RETURN(request.calibration_id,
                          ReadCalibration(args, service, model->fingerprint));
  absl::Duration elapsed;
  KVSTOW_ASSIGN_OR_RETURN(const PutSummary put,
                          PutWithProgress(service, *model, request, elapsed, output));
  const absl::StatusOr<std::vector<ListedBlock>> blocks =
      FindBlocks(*service.admin, model->fingerprint, put.keys);
  if (!blocks.ok()) return service.Explain(blocks.status());
  PrintPut(file, put, SizeOf(*blocks, file.spec().kv_dtype), elapsed, output);
  if (put.num_refused > 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat(put.num_refused, " blocks were refused: ", put.first_refusal.message(),
                     "; free room (kvstow delete) or put again later"));
  }
  return absl::OkStatus();
}

// --- get ---

// What to fetch and what it belongs to.
struct GetPlan {
  std::optional<KvFile> file;  // where the tokens come from; none with --keys
  Model model;
  std::vector<BlockKey> keys;
};

absl::StatusOr<std::vector<BlockKey>> ParseKeys(const std::vector<std::string>& words) {
  std::vector<BlockKey> keys;
  for (const std::string& word : words) {
    const absl::StatusOr<BlockKey> key = BlockKey::FromHex(word);
    if (!key.ok()) {
      return UsageError(absl::StrCat("\"", word,
                                     "\" is no key: want 64 hexadecimal digits, as "
                                     "kvstow ls --long shows them"));
    }
    keys.push_back(*key);
  }
  return keys;
}

absl::StatusOr<Model> ModelForKeys(const Args& args, const Service& service) {
  if (args.Has("fingerprint")) {
    const absl::StatusOr<Digest> fingerprint = Digest::FromHex(args.Text("fingerprint"));
    if (!fingerprint.ok()) return UsageError("--fingerprint wants 64 hexadecimal digits");
    absl::StatusOr<Model> model = service.kv->GetModel(*fingerprint);
    if (!model.ok()) return service.Explain(model.status());
    return model;
  }
  const absl::StatusOr<std::vector<ModelSpec>> specs = service.admin->ListModels();
  if (!specs.ok()) return service.Explain(specs.status());
  if (specs->size() != 1) {
    return UsageError(absl::StrCat("the service knows ", specs->size(),
                                   " models; say which with --fingerprint HEX (kvstow ls --long)"));
  }
  absl::StatusOr<Model> model = service.kv->GetModel(specs->front().Fingerprint());
  if (!model.ok()) return service.Explain(model.status());
  return model;
}

absl::StatusOr<GetPlan> PlanGet(const Args& args, const Service& service) {
  GetPlan plan;
  if (args.Has("keys")) {
    if (!args.positionals().empty()) return UsageError("give FILE or --keys, not both");
    KVSTOW_ASSIGN_OR_RETURN(const std::vector<std::string> words, args.List("keys"));
    KVSTOW_ASSIGN_OR_RETURN(plan.keys, ParseKeys(words));
    KVSTOW_ASSIGN_OR_RETURN(plan.model, ModelForKeys(args, service));
    return plan;
  }
  std::string path = args.Text("tokens-from");
  if (!path.empty() && !args.positionals().empty()) {
    return UsageError("give FILE or --tokens-from FILE, not both");
  }
  if (path.empty()) {
    if (args.positionals().empty())
      return UsageError("what to get: FILE, --tokens-from or --keys?");
    path = args.positionals()[0];
  }
  KVSTOW_ASSIGN_OR_RETURN(const KvFileOverrides overrides, ReadOverrides(args));
  KVSTOW_ASSIGN_OR_RETURN(plan.file, KvFile::Open(path, overrides));
  const ModelSpec& spec = plan.file->spec();
  KVSTOW_RETURN_IF_ERROR(plan.file->CheckHasBlocks());
  KVSTOW_ASSIGN_OR_RETURN(const KeyContext context, ReadContext(args, spec));
  plan.keys = ChainKeys(context, plan.file->tokens(), spec.tokens_per_block);
  plan.model.spec = spec;
  plan.model.fingerprint = context.fingerprint;
  KVSTOW_ASSIGN_OR_RETURN(BlockLayout layout, BlockLayout::Create(spec));
  plan.model.layout = std::make_shared<const BlockLayout>(std::move(layout));
  return plan;
}

// Blocks of a set of keys that came back whole. With a prefix only the leading ones are of use.
struct Fetched {
  std::vector<absl::Status> blocks;  // per key
  absl::Duration elapsed;
  int64_t received_bytes = 0;
  int64_t num_ok = 0;
  int64_t num_leading = 0;
  std::string first_fault;  // of a block that did not come, other than NOT_FOUND
};

void Count(const absl::Status& status, Fetched& fetched) {
  if (status.ok()) {
    ++fetched.num_ok;
    if (fetched.num_leading == static_cast<int64_t>(fetched.blocks.size())) ++fetched.num_leading;
  } else if (!absl::IsNotFound(status) && fetched.first_fault.empty()) {
    fetched.first_fault = std::string(status.message());
  }
  fetched.blocks.push_back(status);
}

// Fetches in parts, so that long work shows its progress and any number of keys will do.
absl::StatusOr<Fetched> Fetch(const Service& service, const GetPlan& plan, const KvBuffer& buffer,
                              Output& output) {
  constexpr int64_t kPartBytes = int64_t{64} << 20;
  const int64_t part_blocks =
      std::clamp<int64_t>(kPartBytes / plan.model.layout->block_bytes(), 1, 4096);
  const int64_t num_keys = static_cast<int64_t>(plan.keys.size());
  Fetched fetched;
  Progress progress(output, "get", num_keys);
  const absl::Time start = absl::Now();
  for (int64_t first = 0; first < num_keys; first += part_blocks) {
    const auto keys = absl::MakeConstSpan(plan.keys).subspan(first, part_blocks);
    const absl::StatusOr<GetSummary> part = service.kv->Get(
        plan.model, keys, buffer.layers(), first * plan.model.spec.tokens_per_block);
    if (!part.ok()) return service.Explain(part.status());
    fetched.received_bytes += part->received_bytes;
    for (const absl::Status& status : part->blocks) Count(status, fetched);
    progress.Update(fetched.blocks.size());
  }
  fetched.elapsed = absl::Now() - start;
  return fetched;
}

void PrintGet(const GetPlan& plan, const Fetched& fetched, int64_t num_leftover, Output& output) {
  const int64_t block_bytes = plan.model.layout->block_bytes();
  const double rate = GbPerSecond(block_bytes * fetched.num_ok, fetched.elapsed);
  output.Json({{"blocks", plan.keys.size()},
               {"found", fetched.num_ok},
               {"leading", fetched.num_leading},
               {"received_bytes", fetched.received_bytes},
               {"kv_bytes", block_bytes * fetched.num_ok},
               {"leftover_tokens", num_leftover},
               {"seconds", absl::ToDoubleSeconds(fetched.elapsed)},
               {"gb_per_s", rate},
               {"first_fault", fetched.first_fault}});
  output.Line(SpecLine(plan.model.spec));
  output.Line(absl::StrFormat("blocks   %d of %d found, the first %d without a gap", fetched.num_ok,
                              plan.keys.size(), fetched.num_leading));
  output.Line(absl::StrFormat("bytes    %s received for %s of KV, %.2f GB/s (%.1f ms)",
                              FormatBytes(fetched.received_bytes),
                              FormatBytes(block_bytes * fetched.num_ok), rate,
                              absl::ToDoubleMilliseconds(fetched.elapsed)));
  if (num_leftover > 0) {
    output.Line(
        absl::StrFormat("left     the last %d tokens fill no block: they are not in the "
                        "service and not in the result",
                        num_leftover));
  }
}

absl::Status WriteFetched(const Args& args, const GetPlan& plan, const KvBuffer& buffer,
                          int64_t num_tokens, Output& output) {
  const std::string path = args.Text("out");
  if (num_tokens == 0) {
    return absl::NotFoundError(absl::StrCat(path, " is not written: the first block is not there"));
  }
  const TensorMetadata metadata = plan.file.has_value() ? DescribeLike(*plan.file, num_tokens)
                                                        : DescribeSpec(plan.model.spec, num_tokens);
  const absl::Span<const int32_t> tokens =
      plan.file.has_value() ? plan.file->tokens() : absl::Span<const int32_t>();
  KVSTOW_RETURN_IF_ERROR(WriteKvFile(path, metadata, buffer, tokens, num_tokens));
  output.Line(absl::StrCat("written  ", path, ": ", num_tokens, " tokens"));
  return absl::OkStatus();
}

absl::Status CompareFetched(const Args& args, const GetPlan& plan, const KvBuffer& buffer,
                            const Fetched& fetched, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const KvFileOverrides overrides, ReadOverrides(args));
  KVSTOW_ASSIGN_OR_RETURN(const KvFile want, KvFile::Open(args.Text("compare"), overrides));
  KVSTOW_ASSIGN_OR_RETURN(const KvDifference difference,
                          CompareBlocks(buffer, want, fetched.blocks));
  output.Json({{"compared_with", want.path()},
               {"compared_bytes", difference.num_compared_bytes},
               {"different_bytes", difference.num_different_bytes},
               {"first_difference", difference.first}});
  if (difference.num_different_bytes == 0) {
    output.Line(absl::StrCat("compare  equal to ", want.path(), ": ",
                             FormatBytes(difference.num_compared_bytes), " in ", fetched.num_ok,
                             " blocks"));
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat(difference.num_different_bytes, " of ", difference.num_compared_bytes,
                   " bytes differ from ", want.path(), ", the first in ", difference.first,
                   "; a codec other than raw changes values: judge it with kvstow eval"));
}

absl::Status RunGet(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  KVSTOW_ASSIGN_OR_RETURN(const GetPlan plan, PlanGet(args, service));
  const int64_t tokens_per_block = plan.model.spec.tokens_per_block;
  const int64_t num_full = static_cast<int64_t>(plan.keys.size()) * tokens_per_block;
  KvBuffer buffer(plan.model.spec, num_full);
  KVSTOW_ASSIGN_OR_RETURN(const Fetched fetched, Fetch(service, plan, buffer, output));
  const int64_t num_leftover =
      plan.file.has_value() ? static_cast<int64_t>(plan.file->tokens().size()) - num_full : 0;
  PrintGet(plan, fetched, num_leftover, output);
  // A difference is told before a miss: it is the worse of the two.
  if (args.Has("compare")) {
    KVSTOW_RETURN_IF_ERROR(CompareFetched(args, plan, buffer, fetched, output));
  }
  if (args.Has("out")) {
    KVSTOW_RETURN_IF_ERROR(
        WriteFetched(args, plan, buffer, fetched.num_leading * tokens_per_block, output));
  }
  const int64_t num_missing = static_cast<int64_t>(plan.keys.size()) - fetched.num_ok;
  if (num_missing > 0 && !args.Has("allow-missing")) {
    return absl::NotFoundError(absl::StrCat(
        num_missing, " of ", plan.keys.size(), " blocks are not there",
        fetched.first_fault.empty() ? "" : absl::StrCat(" (", fetched.first_fault, ")"),
        "; put them with kvstow put, or look with kvstow ls (same --tenant and --lora?)"));
  }
  return absl::OkStatus();
}

// --- key, delete ---

absl::Status RunKey(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const KvFileOverrides overrides, ReadOverrides(args));
  KVSTOW_ASSIGN_OR_RETURN(const KvFile file, KvFile::Open(args.positionals()[0], overrides));
  KVSTOW_ASSIGN_OR_RETURN(const KeyContext context, ReadContext(args, file.spec()));
  const std::vector<BlockKey> keys =
      ChainKeys(context, file.tokens(), file.spec().tokens_per_block);
  for (size_t i = 0; i < keys.size(); ++i) {
    const int64_t first_token = static_cast<int64_t>(i) * file.spec().tokens_per_block;
    output.Json({{"block", i}, {"first_token", first_token}, {"key", keys[i].ToHex()}});
    output.Line(keys[i].ToHex());
  }
  return absl::OkStatus();
}

absl::Status RunDelete(const Args& args, Output& output) {
  std::vector<BlockKey> keys;
  for (const std::string& word : args.positionals()) {
    if (const absl::StatusOr<BlockKey> key = BlockKey::FromHex(word); key.ok()) {
      keys.push_back(*key);
      continue;
    }
    KVSTOW_ASSIGN_OR_RETURN(const KvFileOverrides overrides, ReadOverrides(args));
    KVSTOW_ASSIGN_OR_RETURN(const KvFile file, KvFile::Open(word, overrides));
    KVSTOW_RETURN_IF_ERROR(file.CheckHasBlocks());
    KVSTOW_ASSIGN_OR_RETURN(const KeyContext context, ReadContext(args, file.spec()));
    for (const BlockKey& key : ChainKeys(context, file.tokens(), file.spec().tokens_per_block)) {
      keys.push_back(key);
    }
  }
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  const absl::StatusOr<int64_t> num_deleted = service.kv->Delete(keys);
  if (!num_deleted.ok()) return service.Explain(num_deleted.status());
  output.Json({{"keys", keys.size()}, {"deleted", *num_deleted}});
  output.Line(absl::StrCat(
      "deleted ", *num_deleted, " of ", keys.size(), " blocks",
      *num_deleted < static_cast<int64_t>(keys.size()) ? "; the others were not there" : ""));
  return absl::OkStatus();
}

constexpr Command kTransferCommands[] = {
    {{.name = "put",
      .summary = "store the KV cache of a safetensors file",
      .details = "FILE holds k.{layer} and v.{layer}, [tokens, kv_heads, head_dim], and token_ids. "
                 "Full blocks are\nstored; what is there already is not sent again.",
      .positionals = "FILE",
      .num_positionals_min = 1,
      .num_positionals_max = 1,
      .options = kPutOptions,
      .example = "kvstow put tests/data/smollm2_kv.safetensors --codec safe --durable"},
     &RunPut},
    {{.name = "get",
      .summary = "fetch the KV of a file's tokens, write or compare it",
      .details =
          "Looks up the tokens of FILE (its tensors are not sent anywhere) and fetches their "
          "blocks. Exit status 1\nwhen a block is missing or --compare finds a difference.",
      .positionals = "[FILE]",
      .num_positionals_max = 1,
      .options = kGetOptions,
      .example = "kvstow get tests/data/smollm2_kv.safetensors -o /tmp/back.safetensors"},
     &RunGet},
    {{.name = "key",
      .summary = "print the 256-bit keys of a file's blocks; needs no service",
      .positionals = "FILE",
      .num_positionals_min = 1,
      .num_positionals_max = 1,
      .options = kKeyOptions,
      .example = "kvstow key tests/data/smollm2_kv.safetensors --tenant team-a"},
     &RunKey},
    {{.name = "delete",
      .summary = "forget blocks: those of a file's tokens, or by key",
      .positionals = "FILE|KEY...",
      .num_positionals_min = 1,
      .num_positionals_max = 65536,
      .options = kKeyOptions,
      .example = "kvstow delete tests/data/smollm2_kv.safetensors --tenant team-a"},
     &RunDelete},
};

}  // namespace

absl::Span<const Command> TransferCommands() { return kTransferCommands; }

}  // namespace kvstow
