#include "client/cli/args.h"

#include <algorithm>
#include <array>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr char kUsagePayload[] = "kvstow/usage";

constexpr std::array<Option, 4> kCommonOptions = {{
    {"target", "ADDRESS", "the service: unix:PATH or HOST:PORT", "unix:/tmp/kvstow.sock"},
    {"timeout", "TIME", "longest that one call may take", "60s"},
    {"json", "", "one JSON object per line instead of text"},
    {"help", "", "this page", {}, 'h'},
}};

const Option* FindOption(absl::Span<const Option> own, std::string_view name) {
  for (absl::Span<const Option> options : {own, CommonOptions()}) {
    for (const Option& option : options) {
      if (option.name == name) return &option;
    }
  }
  return nullptr;
}

const Option* FindLetter(absl::Span<const Option> own, char letter) {
  for (absl::Span<const Option> options : {own, CommonOptions()}) {
    for (const Option& option : options) {
      if (option.letter == letter) return &option;
    }
  }
  return nullptr;
}

absl::Status UnknownOption(const CommandSpec& spec, std::string_view given) {
  std::vector<std::string> known;
  for (absl::Span<const Option> options : {spec.options, CommonOptions()}) {
    for (const Option& option : options) known.emplace_back(option.name);
  }
  const std::string nearest = NearestName(given, known);
  return UsageError(absl::StrCat("no option --", ToAbsl(given),
                                 nearest.empty()
                                     ? absl::StrCat("; see: kvstow help ", ToAbsl(spec.name))
                                     : absl::StrCat("; did you mean --", nearest, "?")));
}

std::string OptionLine(const Option& option) {
  std::string left = option.letter != 0 ? absl::StrCat("-", std::string(1, option.letter), ", ")
                                        : std::string("    ");
  absl::StrAppend(&left, "--", ToAbsl(option.name));
  if (!option.value.empty()) absl::StrAppend(&left, " ", ToAbsl(option.value));
  std::string line = absl::StrFormat("  %-26s  %s", left, std::string(option.help));
  if (!option.default_text.empty()) absl::StrAppend(&line, " [", ToAbsl(option.default_text), "]");
  return absl::StrCat(line, "\n");
}

}  // namespace

absl::Span<const Option> CommonOptions() { return kCommonOptions; }

absl::Status UsageError(std::string_view message) {
  absl::Status status = absl::InvalidArgumentError(ToAbsl(message));
  status.SetPayload(kUsagePayload, absl::Cord());
  return status;
}

bool IsUsageError(const absl::Status& status) {
  return status.GetPayload(kUsagePayload).has_value();
}

// Takes the option at words[word_idx], and the word after it when that is its value.
absl::Status Args::AddOption(const CommandSpec& spec, absl::Span<const std::string> words,
                             size_t& word_idx) {
  const std::string_view word = words[word_idx];
  const bool is_long = word.starts_with("--");
  const size_t equals = is_long ? word.find('=') : std::string_view::npos;
  const std::string_view name =
      is_long ? word.substr(2, equals == std::string_view::npos ? equals : equals - 2)
              : word.substr(1, 1);
  const Option* option =
      is_long ? FindOption(spec.options, name) : FindLetter(spec.options, word[1]);
  if (option == nullptr && !is_long) return UsageError(absl::StrCat("no option ", ToAbsl(word)));
  if (option == nullptr) return UnknownOption(spec, name);
  const std::string shown = absl::StrCat("--", ToAbsl(option->name));
  if (Has(option->name)) return UsageError(absl::StrCat(shown, " is given twice"));
  bool has_value = equals != std::string_view::npos;
  std::string value(has_value ? word.substr(equals + 1) : std::string_view());
  if (!is_long && word.size() > 2) {  // -oFILE
    has_value = true;
    value = word.substr(2);
  }
  if (option->value.empty()) {
    if (has_value) return UsageError(absl::StrCat(shown, " takes no value, got \"", value, "\""));
  } else if (!has_value) {
    if (word_idx + 1 == words.size()) {
      return UsageError(absl::StrCat(shown, " needs a value (", ToAbsl(option->value), ")"));
    }
    value = words[++word_idx];
  }
  given_.push_back({option, std::move(value)});
  return absl::OkStatus();
}

absl::StatusOr<Args> Args::Parse(const CommandSpec& spec, absl::Span<const std::string> words) {
  Args args;
  args.own_options_ = spec.options;
  if (spec.passes_words_on) {
    args.positionals_.assign(words.begin(), words.end());
    return args;
  }
  bool options_ended = false;
  for (size_t i = 0; i < words.size(); ++i) {
    if (!options_ended && words[i] == "--") {
      options_ended = true;
    } else if (!options_ended && words[i].size() > 1 && words[i][0] == '-') {
      KVSTOW_RETURN_IF_ERROR(args.AddOption(spec, words, i));
    } else {
      args.positionals_.push_back(words[i]);
    }
  }
  if (args.Has("help")) return args;  // whatever else is wrong, the help is the answer
  const int num_words = static_cast<int>(args.positionals_.size());
  if (num_words < spec.num_positionals_min) {
    return UsageError(absl::StrCat(ToAbsl(spec.positionals), " is missing; usage: kvstow ",
                                   ToAbsl(spec.name), " ", ToAbsl(spec.positionals)));
  }
  if (num_words > spec.num_positionals_max) {
    return UsageError(absl::StrCat("\"", args.positionals_[spec.num_positionals_max],
                                   "\" is one word too many; usage: kvstow ", ToAbsl(spec.name),
                                   " ", ToAbsl(spec.positionals)));
  }
  return args;
}

const Args::Given* Args::FindGiven(std::string_view name) const {
  for (const Given& given : given_) {
    if (given.option->name == name) return &given;
  }
  return nullptr;
}

bool Args::Has(std::string_view name) const { return FindGiven(name) != nullptr; }

std::string Args::Text(std::string_view name) const {
  if (const Given* given = FindGiven(name)) return given->value;
  const Option* option = FindOption(own_options_, name);
  KVSTOW_CHECK(option != nullptr);
  return std::string(option->default_text);
}

absl::StatusOr<int64_t> Args::Int(std::string_view name, int64_t min, int64_t max) const {
  const std::string text = Text(name);
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < min || value > max) {
    return UsageError(absl::StrCat("--", ToAbsl(name), " is \"", text, "\", want a whole number, ",
                                   min, " to ", max));
  }
  return value;
}

absl::StatusOr<int64_t> Args::Bytes(std::string_view name) const {
  const absl::StatusOr<int64_t> bytes = ParseBytes(Text(name));
  if (!bytes.ok()) {
    return UsageError(absl::StrCat("--", ToAbsl(name), ": ", bytes.status().message()));
  }
  if (*bytes < 1) return UsageError(absl::StrCat("--", ToAbsl(name), " is 0, want more"));
  return *bytes;
}

absl::StatusOr<absl::Duration> Args::Duration(std::string_view name) const {
  const absl::StatusOr<absl::Duration> time = ParseDuration(Text(name));
  if (!time.ok()) {
    return UsageError(absl::StrCat("--", ToAbsl(name), ": ", time.status().message()));
  }
  return *time;
}

absl::StatusOr<std::string> Args::OneOf(std::string_view name,
                                        const std::vector<std::string>& allowed) const {
  std::string text = Text(name);
  if (std::find(allowed.begin(), allowed.end(), text) != allowed.end()) return text;
  const std::string nearest = NearestName(text, allowed);
  return UsageError(absl::StrCat("--", ToAbsl(name), " is \"", text, "\", want one of ",
                                 absl::StrJoin(allowed, ", "),
                                 nearest.empty() ? "" : absl::StrCat(" (", nearest, "?)")));
}

absl::StatusOr<std::vector<std::string>> Args::List(std::string_view name) const {
  std::vector<std::string> items = absl::StrSplit(Text(name), ',');
  for (const std::string& item : items) {
    if (item.empty()) {
      return UsageError(absl::StrCat("--", ToAbsl(name), " is \"", Text(name),
                                     "\", want words with commas between them"));
    }
  }
  return items;
}

std::string CommandHelp(const CommandSpec& spec) {
  std::string help = absl::StrCat("kvstow ", ToAbsl(spec.name), ": ", ToAbsl(spec.summary),
                                  "\n\nusage: kvstow ", ToAbsl(spec.name));
  if (!spec.positionals.empty()) absl::StrAppend(&help, " ", ToAbsl(spec.positionals));
  absl::StrAppend(&help, spec.passes_words_on ? "\n" : " [options]\n");
  if (!spec.details.empty()) absl::StrAppend(&help, "\n", ToAbsl(spec.details), "\n");
  if (!spec.passes_words_on) {
    absl::StrAppend(&help, "\noptions:\n");
    for (const Option& option : spec.options) absl::StrAppend(&help, OptionLine(option));
    for (const Option& option : CommonOptions()) absl::StrAppend(&help, OptionLine(option));
  }
  absl::StrAppend(&help, "\nexample:\n  ", ToAbsl(spec.example), "\n");
  return help;
}

}  // namespace kvstow
