#include "storage/policy/replay_options.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "storage/policy/policy.h"

namespace kvstow::policy {
namespace {

constexpr int64_t kBlocksMax = 1'000'000'000;

absl::Status Bad(std::string_view option, std::string_view found, std::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat("--", ToAbsl(option), ": found `", ToAbsl(found),
                                                 "`, must be ", ToAbsl(allowed)));
}

absl::Status ParseInt(std::string_view option, std::string_view text, int64_t max, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 || value > max) {
    return Bad(option, text, absl::StrCat("a whole number from 1 to ", max));
  }
  return absl::OkStatus();
}

// A number in [0, max], or [0, max) if `is_open`.
absl::Status ParseShare(std::string_view option, std::string_view text, bool is_open,
                        double& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  if (!is_number || !(value >= 0 && (is_open ? value < 1 : value <= 1))) {
    return Bad(option, text, is_open ? "at least 0 and below 1" : "from 0 to 1");
  }
  return absl::OkStatus();
}

std::vector<std::string_view> SplitList(std::string_view text) {
  std::vector<std::string_view> items;
  for (;;) {
    const size_t comma = text.find(',');
    items.push_back(text.substr(0, comma));
    if (comma == std::string_view::npos) return items;
    text.remove_prefix(comma + 1);
  }
}

// "2000,5000", or "none".
absl::Status ParseSizes(std::string_view option, std::string_view text, size_t count_max,
                        std::vector<int64_t>& sizes) {
  sizes.clear();
  if (text == "none") return absl::OkStatus();
  for (const std::string_view item : SplitList(text)) {
    int64_t size = 0;
    KVSTOW_RETURN_IF_ERROR(ParseInt(option, item, kBlocksMax, size));
    sizes.push_back(size);
  }
  if (sizes.size() > count_max) {
    return Bad(option, text, absl::StrCat("at most ", count_max, " numbers"));
  }
  return absl::OkStatus();
}

absl::Status ParsePolicies(std::string_view text, std::vector<std::string>& policies) {
  policies.clear();
  std::vector<std::string> known;
  for (const PolicyKind& kind : AllPolicies()) known.emplace_back(kind.name);
  if (text == "all") {
    policies = known;
    return absl::OkStatus();
  }
  for (const std::string_view item : SplitList(text)) {
    if (std::find(known.begin(), known.end(), item) == known.end()) {
      std::string names = "all, or some of";
      for (const std::string& name : known) absl::StrAppend(&names, " ", name);
      const std::string nearest = NearestName(item, known);
      if (!nearest.empty()) absl::StrAppend(&names, "; did you mean ", nearest, "?");
      return Bad("policy", item, names);
    }
    policies.emplace_back(item);
  }
  return absl::OkStatus();
}

absl::Status ParseHint(std::string_view text, ReplayOptions& options) {
  constexpr std::string_view kName = "session-over=";
  if (text.substr(0, kName.size()) != kName) {
    return Bad("hint", text, "session-over=SHARE, the share of sessions that announce their end");
  }
  return ParseShare("hint session-over", text.substr(kName.size()), false, options.session_over);
}

absl::Status SetOption(std::string_view name, std::string_view value, ReplayOptions& options) {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  constexpr size_t kCapacitiesMax = 20;
  if (name == "policy") return ParsePolicies(value, options.policies);
  if (name == "blocks") {
    KVSTOW_RETURN_IF_ERROR(ParseSizes(name, value, kCapacitiesMax, options.blocks));
    // A curve has its points in order, each once.
    std::sort(options.blocks.begin(), options.blocks.end());
    options.blocks.erase(std::unique(options.blocks.begin(), options.blocks.end()),
                         options.blocks.end());
    return absl::OkStatus();
  }
  if (name == "tiers") return ParseSizes(name, value, kTiersMax, options.tiers);
  if (name == "hint") return ParseHint(value, options);
  if (name == "block-tokens") return ParseInt(name, value, 1 << 20, options.block_tokens);
  if (name == "warmup") return ParseShare(name, value, true, options.warmup);
  if (name == "alpha") return ParseShare(name, value, false, options.alpha);
  if (name == "seed") return ParseInt(name, value, kAny, options.seed);
  if (name == "html") {
    options.html_path = std::string(value);
    return value.empty() ? Bad(name, value, "the name of a file") : absl::OkStatus();
  }
  if (name == "repeat") return ParseInt(name, value, 1'000'000, options.repeat);
  const std::string nearest =
      NearestName(name, {"policy", "blocks", "tiers", "hint", "block-tokens", "warmup", "alpha",
                         "seed", "repeat", "html", "json", "help"});
  return absl::InvalidArgumentError(
      absl::StrCat("unknown option --", ToAbsl(name),
                   nearest.empty() ? "" : absl::StrCat("; did you mean --", nearest, "?")));
}

}  // namespace

absl::StatusOr<ReplayOptions> ParseReplayOptions(const std::vector<std::string>& words) {
  ReplayOptions options;
  KVSTOW_RETURN_IF_ERROR(ParsePolicies("all", options.policies));
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string_view word = words[i];
    if (word == "--help" || word == "-h") {
      options.is_help = true;
      return options;
    }
    if (word == "--json") {
      options.is_json = true;
      continue;
    }
    if (word.substr(0, 2) != "--") {
      if (!options.trace_path.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat("two traces: ", options.trace_path, " and ", words[i], "; give one"));
      }
      options.trace_path = words[i];
      continue;
    }
    const size_t equals = word.find('=');
    const std::string_view name = word.substr(2, equals == word.npos ? word.npos : equals - 2);
    if (equals != word.npos) {
      KVSTOW_RETURN_IF_ERROR(SetOption(name, word.substr(equals + 1), options));
    } else if (i + 1 < words.size()) {
      KVSTOW_RETURN_IF_ERROR(SetOption(name, words[++i], options));
    } else {
      return absl::InvalidArgumentError(absl::StrCat(words[i], ": its value is missing"));
    }
  }
  if (options.trace_path.empty()) return absl::InvalidArgumentError("no trace is given");
  if (options.blocks.empty() && options.tiers.empty()) {
    return absl::InvalidArgumentError("--blocks none --tiers none leaves nothing to simulate");
  }
  return options;
}

std::string ReplayHelp() {
  std::string text =
      "Usage: kvstow-replay TRACE [options]\n"
      "Replays a trace of requests in virtual time and shows what each eviction policy keeps.\n"
      "\n"
      "TRACE is Mooncake JSONL (timestamp in ms, input_length, output_length, hash_ids), or CSV\n"
      "with the same four columns and the ids separated by spaces (name ends in .csv).\n"
      "\n"
      "  --policy NAMES         all (default), or names with commas, see below\n"
      "  --blocks SIZES         capacities of a single tier in blocks, or none\n"
      "                         (default 2000,5000,10000,20000,40000)\n"
      "  --tiers SIZES          capacities of HBM, DRAM and disk in blocks, or none\n"
      "                         (default 800,4096,12288)\n"
      "  --hint session-over=P  a share P of the sessions announces its end; rtv is run with and\n"
      "                         without these hints\n"
      "  --block-tokens N       tokens per block of the trace (default 512)\n"
      "  --warmup SHARE         leading share of the requests that is not scored (default 0.2)\n"
      "  --alpha A              rtv: weight of whole sessions (default 0.1)\n"
      "  --seed N               which sessions announce their end (default 1)\n"
      "  --repeat N             the trace N times in a row, each time with blocks of its own\n"
      "  --html FILE            also writes a page with curves over capacity\n"
      "  --json                 numbers for programs instead of the table\n"
      "\n"
      "Policies:\n";
  for (const PolicyKind& kind : AllPolicies()) {
    std::string name(kind.name);
    name.resize(std::max<size_t>(name.size(), 16), ' ');
    absl::StrAppend(&text, "  ", name, ToAbsl(kind.about), "\n");
  }
  text +=
      "\n"
      "Example:\n"
      "  kvstow-replay conversation_trace.jsonl --policy lru,rtv,belady --hint session-over=0.5\n"
      "\n"
      "Exit status: 0 done; 1 the trace cannot be used; 2 the command line is wrong.\n";
  return text;
}

}  // namespace kvstow::policy
