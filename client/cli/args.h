// Args: the command line of one subcommand, checked against the options it declares.
//
//   static constexpr Option kOptions[] = {{"out", "FILE", "where to write"}, {"long", "", "all"}};
//   static constexpr CommandSpec kSpec = {.name = "get", .summary = "...", .positionals = "FILE",
//                                         .num_positionals_min = 1, .num_positionals_max = 1,
//                                         .options = kOptions, .example = "kvstow get a -o b"};
//   KVSTOW_ASSIGN_OR_RETURN(Args args, Args::Parse(kSpec, words));
//   KVSTOW_ASSIGN_OR_RETURN(int64_t size, args.Bytes("size"));
//
// `--name=value` and `--name value` mean the same; a flag takes no value; `--` ends the options. An
// option given twice is refused. Every error of this file is a usage error: exit status 2.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace kvstow {

struct Option {
  std::string_view name;   // without dashes
  std::string_view value;  // what stands for the value in the help, "FILE"; empty for a flag
  std::string_view help;
  std::string_view default_text = {};  // the value when it is not given; empty for none
  char letter = 0;                     // `-o` beside `--out`; 0 for none
};

struct CommandSpec {
  std::string_view name;
  std::string_view summary;           // one line, for the list of commands
  std::string_view details = {};      // more lines, for the command's own help
  std::string_view positionals = {};  // as the help shows them, "FILE"
  int num_positionals_min = 0;
  int num_positionals_max = 0;
  absl::Span<const Option> options;
  std::string_view example;
  // Words after the command's name are not looked at: they belong to another program.
  bool passes_words_on = false;
};

// Options that every command has: --target, --timeout, --json, --help.
absl::Span<const Option> CommonOptions();

// A kInvalidArgument status that ends the program with exit status 2 instead of 1.
absl::Status UsageError(std::string_view message);
bool IsUsageError(const absl::Status& status);

class Args {
 public:
  static absl::StatusOr<Args> Parse(const CommandSpec& spec, absl::Span<const std::string> words);

  const std::vector<std::string>& positionals() const { return positionals_; }
  bool Has(std::string_view name) const;  // given on the command line
  // The value given, or the option's default. CHECKs that the command declares the option.
  std::string Text(std::string_view name) const;
  // Usage errors name the option, what was given and what is allowed.
  absl::StatusOr<int64_t> Int(std::string_view name, int64_t min, int64_t max) const;
  absl::StatusOr<int64_t> Bytes(std::string_view name) const;            // "64MiB"; more than 0
  absl::StatusOr<absl::Duration> Duration(std::string_view name) const;  // "10s"
  // The value must be one of `allowed`.
  absl::StatusOr<std::string> OneOf(std::string_view name,
                                    const std::vector<std::string>& allowed) const;
  // A list with commas; empty items are refused.
  absl::StatusOr<std::vector<std::string>> List(std::string_view name) const;

 private:
  struct Given {
    const Option* option;
    std::string value;
  };

  Args() = default;
  absl::Status AddOption(const CommandSpec& spec, absl::Span<const std::string> words,
                         size_t& word_idx);
  const Given* FindGiven(std::string_view name) const;

  absl::Span<const Option> own_options_;
  std::vector<Given> given_;
  std::vector<std::string> positionals_;
};

// The help page of one command: usage, details, options with their defaults, an example.
std::string CommandHelp(const CommandSpec& spec);

}  // namespace kvstow
