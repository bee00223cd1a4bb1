// ls, stat, verify, ping: what the service holds, and whether it is sound.
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/connect.h"
#include "client/cli/plan_file.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kShortHexDigits = 16;
constexpr int32_t kListPageSize = 1000;
constexpr absl::Duration kPingAgain = absl::Milliseconds(50);

constexpr Option kLsOptions[] = {
    {"long", "", "whole keys and fingerprints, and what is pinned"},
    {"fingerprint", "HEX", "only blocks of this model (64 hexadecimal digits)"},
};
constexpr Option kStatOptions[] = {
    {"counters", "", "all counters, not only those that are not zero"},
};
constexpr Option kPingOptions[] = {
    {"wait", "TIME", "keep trying this long", "0"},
};

std::string TierText(uint32_t locations) {
  std::vector<std::string> tiers;
  if ((locations & kLocationHbm) != 0) tiers.push_back("hbm");
  if ((locations & kLocationDram) != 0) tiers.push_back("dram");
  if ((locations & kLocationNvme) != 0) tiers.push_back("nvme");
  return tiers.empty() ? "-" : absl::StrJoin(tiers, "+");
}

std::string RatioText(uint64_t logical_bytes, uint64_t record_bytes) {
  if (record_bytes == 0) return "-";
  return FormatNumber(static_cast<double>(logical_bytes) / static_cast<double>(record_bytes), 2);
}

// --- ls ---

// Names of the registered models, so that a list shows them instead of digests.
std::map<Digest, std::string> ModelNames(const Service& service) {
  std::map<Digest, std::string> names;
  const absl::StatusOr<std::vector<ModelSpec>> specs = service.admin->ListModels();
  if (!specs.ok()) return names;  // the list itself says what is wrong
  for (const ModelSpec& spec : *specs) names[spec.Fingerprint()] = spec.name;
  return names;
}

struct ListTotals {
  uint64_t num_blocks = 0;
  uint64_t record_bytes = 0;
  uint64_t logical_bytes = 0;
};

void ShowBlock(const ListedBlock& block, const std::string& model, bool is_long, Table& table,
               Output& output) {
  output.Json({{"key", block.key.ToHex()},
               {"fingerprint", block.fingerprint.ToHex()},
               {"model", model},
               {"codec", block.codec},
               {"tiers", TierText(block.locations)},
               {"tokens", block.num_tokens},
               {"record_bytes", block.record_bytes},
               {"logical_bytes", block.logical_bytes},
               {"pinned", block.is_pinned}});
  if (output.is_json()) return;
  const std::string key = block.key.ToHex();
  std::vector<std::string> cells = {is_long ? key : key.substr(0, kShortHexDigits),
                                    model.empty() ? "?" : model,
                                    block.codec,
                                    TierText(block.locations),
                                    absl::StrCat(block.num_tokens),
                                    FormatBytes(static_cast<int64_t>(block.record_bytes)),
                                    RatioText(block.logical_bytes, block.record_bytes)};
  if (is_long) {
    cells.push_back(block.is_pinned ? "yes" : "no");
    cells.push_back(block.fingerprint.ToHex());
  }
  table.AddRow(std::move(cells));
}

Table NewListTable(bool is_long) {
  std::vector<std::string> header = {"KEY", "MODEL", "CODEC", "TIERS", "TOKENS", "STORED", "RATIO"};
  if (is_long) {
    header.push_back("PINNED");
    header.push_back("FINGERPRINT");
  }
  return Table(std::move(header));
}

absl::Status RunLs(const Args& args, Output& output) {
  ListOptions options{.page_size = kListPageSize};
  if (args.Has("fingerprint")) {
    const absl::StatusOr<Digest> fingerprint = Digest::FromHex(args.Text("fingerprint"));
    if (!fingerprint.ok()) return UsageError("--fingerprint wants 64 hexadecimal digits");
    options.fingerprint = *fingerprint;
  }
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  const std::map<Digest, std::string> names = ModelNames(service);
  const bool is_long = args.Has("long");
  ListTotals totals;
  do {  // a table per page: a long list shows at once, and is never held whole
    const absl::StatusOr<BlockPage> page = service.admin->ListBlocks(options);
    if (!page.ok()) return service.Explain(page.status());
    Table table = NewListTable(is_long);
    for (const ListedBlock& block : page->blocks) {
      const auto name = names.find(block.fingerprint);
      ShowBlock(block, name == names.end() ? "" : name->second, is_long, table, output);
      ++totals.num_blocks;
      totals.record_bytes += block.record_bytes;
      totals.logical_bytes += block.logical_bytes;
    }
    if (!page->blocks.empty()) output.Line(table.Text());
    options.page_token = page->next_page_token;
  } while (!options.page_token.empty());
  output.Line(absl::StrCat(totals.num_blocks, " blocks, ",
                           FormatBytes(static_cast<int64_t>(totals.record_bytes)), " stored for ",
                           FormatBytes(static_cast<int64_t>(totals.logical_bytes)), " of KV"));
  return absl::OkStatus();
}

// --- stat ---

Json StatJson(const ServiceStat& stat) {
  Json tiers = Json::array();
  for (const ServiceTier& tier : stat.tiers) {
    tiers.push_back({{"tier", tier.tier},
                     {"capacity_bytes", tier.capacity_bytes},
                     {"used_bytes", tier.used_bytes},
                     {"sealed_bytes", tier.sealed_bytes},
                     {"reserved_bytes", tier.reserved_bytes},
                     {"blocks", tier.num_blocks}});
  }
  Json codecs = Json::array();
  for (const ServiceCodec& codec : stat.codecs) {
    codecs.push_back({{"codec", codec.codec},
                      {"blocks", codec.num_blocks},
                      {"record_bytes", codec.record_bytes},
                      {"logical_bytes", codec.logical_bytes}});
  }
  Json models = Json::array();
  for (const ServiceModel& model : stat.models) {
    models.push_back({{"fingerprint", model.fingerprint.ToHex()},
                      {"model", model.name},
                      {"plan", model.plan.has_value() ? PlanJson(*model.plan) : Json()}});
  }
  Json counters = Json::object();
  for (const auto& [name, value] : stat.counters) counters[name] = value;
  return {{"version", stat.version},
          {"uptime_s", absl::ToDoubleSeconds(stat.uptime)},
          {"policy", stat.policy},
          {"resident_bytes", stat.resident_bytes},
          {"blocks", stat.num_blocks},
          {"index_bytes", stat.index_bytes},
          {"policy_bytes", stat.policy_bytes},
          {"open_tickets", stat.open_tickets},
          {"open_leases", stat.open_leases},
          {"pinned_bytes", stat.pinned_bytes},
          {"tiers", tiers},
          {"codecs", codecs},
          {"models", models},
          {"counters", counters}};
}

void ShowStat(const ServiceStat& stat, bool all_counters, Output& output) {
  const auto bytes = [](uint64_t value) { return FormatBytes(static_cast<int64_t>(value)); };
  output.Line(absl::StrFormat("kvstowd %s, up %s, %s resident", stat.version,
                              UptimeText(stat.uptime), bytes(stat.resident_bytes)));
  output.Line(absl::StrFormat("%d blocks, index %s, %d open tickets, %d leases, %s pinned\n",
                              stat.num_blocks, bytes(stat.index_bytes), stat.open_tickets,
                              stat.open_leases, bytes(stat.pinned_bytes)));
  Table tiers({"TIER", "BLOCKS", "SEALED", "RESERVED", "USED", "CAPACITY", "FULL"});
  for (const ServiceTier& tier : stat.tiers) {
    const double share = tier.capacity_bytes == 0 ? 0
                                                  : static_cast<double>(tier.used_bytes) /
                                                        static_cast<double>(tier.capacity_bytes);
    tiers.AddRow({tier.tier, absl::StrCat(tier.num_blocks), bytes(tier.sealed_bytes),
                  bytes(tier.reserved_bytes), bytes(tier.used_bytes), bytes(tier.capacity_bytes),
                  absl::StrFormat("%.1f %%", 100 * share)});
  }
  output.Line(tiers.Text());
  if (!stat.codecs.empty()) {
    Table codecs({"CODEC", "BLOCKS", "STORED", "KV", "RATIO"});
    for (const ServiceCodec& codec : stat.codecs) {
      codecs.AddRow({codec.codec, absl::StrCat(codec.num_blocks), bytes(codec.record_bytes),
                     bytes(codec.logical_bytes),
                     RatioText(codec.logical_bytes, codec.record_bytes)});
    }
    output.Line(absl::StrCat("\n", codecs.Text()));
  }
  if (!stat.models.empty()) {
    Table models({"MODEL", "FINGERPRINT", "LAYERS WITH A CODEC OF THEIR OWN"});
    for (const ServiceModel& model : stat.models) {
      models.AddRow({model.name, model.fingerprint.ToHex().substr(0, kShortHexDigits),
                     PlanSummary(model.plan)});
    }
    output.Line(absl::StrCat("\n", models.Text()));
  }
  Table counters({"COUNTER", "VALUE"});
  bool has_counters = false;
  for (const auto& [name, value] : stat.counters) {
    if (value == 0 && !all_counters) continue;
    has_counters = true;
    counters.AddRow({name, absl::StrCat(value)});
  }
  if (has_counters) output.Line(absl::StrCat("\n", counters.Text()));
}

absl::Status RunStat(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  const absl::StatusOr<ServiceStat> stat = service.admin->Stat();
  if (!stat.ok()) return service.Explain(stat.status());
  output.Json(StatJson(*stat));
  ShowStat(*stat, args.Has("counters"), output);
  return absl::OkStatus();
}

// --- verify ---

absl::Status RunVerify(const Args& args, Output& output) {
  std::vector<BlockKey> keys;
  for (const std::string& word : args.positionals()) {
    const absl::StatusOr<BlockKey> key = BlockKey::FromHex(word);
    if (!key.ok()) return UsageError(absl::StrCat("\"", word, "\": ", key.status().message()));
    keys.push_back(*key);
  }
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  const absl::Time start = absl::Now();
  absl::StatusOr<VerifySummary> summary = absl::UnknownError("not asked");
  {
    Progress progress(output, "verify", 0);
    summary = service.admin->Verify(
        keys, [&](uint64_t num_checked, uint64_t num_total, absl::Span<const BlockKey>) {
          progress.SetTotal(num_total);
          progress.Update(num_checked);
        });
  }
  if (!summary.ok()) return service.Explain(summary.status());
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  Json bad = Json::array();
  for (const BlockKey& key : summary->bad_keys) {
    bad.push_back(key.ToHex());
    output.Line(absl::StrCat("bad  ", key.ToHex()));
  }
  output.Json({{"checked", summary->num_checked},
               {"bad", summary->bad_keys.size()},
               {"bad_keys", bad},
               {"seconds", seconds}});
  output.Line(absl::StrFormat("%d blocks checked in %.2f s, %d bad", summary->num_checked, seconds,
                              summary->bad_keys.size()));
  if (summary->bad_keys.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(summary->bad_keys.size(), " of ", summary->num_checked,
                                          " blocks were bad and are dropped: they will be misses; "
                                          "check the disk and the memory of the machine"));
}

// --- ping ---

absl::Status RunPing(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const absl::Duration wait, args.Duration("wait"));
  KVSTOW_ASSIGN_OR_RETURN(const absl::Duration timeout, args.Duration("timeout"));
  const absl::Time give_up = absl::Now() + wait;
  absl::Status status;
  do {
    // A new channel each time: one that has failed waits before it tries again.
    KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
    const absl::Duration left = std::max(give_up - absl::Now(), absl::Seconds(1));
    const absl::StatusOr<absl::Duration> answer = service.admin->Ping(std::min(timeout, left));
    if (answer.ok()) {
      const absl::StatusOr<ServiceStat> stat = service.admin->Stat();
      const std::string version = stat.ok() ? stat->version : "?";
      output.Json({{"target", service.target},
                   {"ms", absl::ToDoubleMilliseconds(*answer)},
                   {"version", version}});
      output.Line(absl::StrFormat("kvstowd %s at %s answers in %.2f ms", version, service.target,
                                  absl::ToDoubleMilliseconds(*answer)));
      return absl::OkStatus();
    }
    status = service.Explain(answer.status());
    if (absl::Now() + kPingAgain < give_up) absl::SleepFor(kPingAgain);
  } while (absl::Now() < give_up);
  return status;
}

constexpr Command kInspectCommands[] = {
    {{.name = "ls",
      .summary = "list the blocks of the service",
      .options = kLsOptions,
      .example = "kvstow ls --json | jq -r .codec | sort | uniq -c"},
     &RunLs},
    {{.name = "stat",
      .summary = "tiers, codecs, plans of models and counters of the service",
      .options = kStatOptions,
      .example = "kvstow stat --json | jq .tiers"},
     &RunStat},
    {{.name = "verify",
      .summary = "have the service read every record and check it",
      .details = "Bad records are named and dropped; exit status 1 when there was any. With keys, "
                 "only those are read.",
      .positionals = "[KEY...]",
      .num_positionals_max = 65536,
      .example = "kvstow verify"},
     &RunVerify},
    {{.name = "ping",
      .summary = "does the service answer, and how fast",
      .options = kPingOptions,
      .example = "kvstow ping --wait 10s"},
     &RunPing},
};

}  // namespace

absl::Span<const Command> InspectCommands() { return kInspectCommands; }

}  // namespace kvstow
