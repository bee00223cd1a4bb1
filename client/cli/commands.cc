#include "client/cli/commands.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr int kDone = 0;
constexpr int kFailed = 1;
constexpr int kUsage = 2;

int Report(const absl::Status& status, std::string_view command, const CliStreams& streams) {
  if (status.ok()) return kDone;
  std::string message(status.message());
  // One line whatever a library put into its message.
  std::replace(message.begin(), message.end(), '\n', ' ');
  if (message.empty()) message = absl::StatusCodeToString(status.code());
  streams.err << "kvstow";
  if (!command.empty()) streams.err << " " << command;
  streams.err << ": " << message << std::endl;
  return IsUsageError(status) ? kUsage : kFailed;
}

int RunCommand(const Command& command, absl::Span<const std::string> words,
               const CliStreams& streams) {
  const absl::StatusOr<Args> args = Args::Parse(command.spec, words);
  if (!args.ok()) return Report(args.status(), command.spec.name, streams);
  if (args->Has("help")) {
    streams.out << CommandHelp(command.spec) << std::flush;
    return kDone;
  }
  Output output(streams.out, streams.err, args->Has("json"), streams.err_is_terminal);
  const absl::Status status = command.run(*args, output);
  if (status.ok() && !streams.out.good()) {
    return Report(absl::DataLossError("standard output cannot be written"), command.spec.name,
                  streams);
  }
  return Report(status, command.spec.name, streams);
}

absl::Status UnknownCommand(const std::string& word) {
  std::vector<std::string> known;
  for (const Command* command : AllCommands()) known.emplace_back(command->spec.name);
  const std::string nearest = NearestName(word, known);
  return UsageError(absl::StrCat(
      "there is no command \"", word, "\"; ",
      nearest.empty() ? "see: kvstow help" : absl::StrCat("did you mean ", nearest, "?")));
}

absl::Status RunHelp(const Args& args, Output& output) {
  if (args.positionals().empty()) {
    output.Raw(OverviewText());
    return absl::OkStatus();
  }
  const Command* command = FindCommand(args.positionals()[0]);
  if (command == nullptr) return UnknownCommand(args.positionals()[0]);
  output.Raw(CommandHelp(command->spec));
  return absl::OkStatus();
}

absl::Status RunCompletion(const Args& args, Output& output) {
  if (args.positionals()[0] != "bash") {
    return UsageError(absl::StrCat("no completion for \"", args.positionals()[0], "\", want bash"));
  }
  output.Raw(BashCompletion());
  return absl::OkStatus();
}

constexpr Command kShellCommands[] = {
    {{.name = "completion",
      .summary = "print a script that completes kvstow's words in the shell",
      .positionals = "bash",
      .num_positionals_min = 1,
      .num_positionals_max = 1,
      .example = "source <(kvstow completion bash)"},
     &RunCompletion},
    {{.name = "help",
      .summary = "explain a command, or list them all",
      .positionals = "[COMMAND]",
      .num_positionals_max = 1,
      .example = "kvstow help put"},
     &RunHelp},
};

}  // namespace

absl::Span<const Command> ShellCommands() { return kShellCommands; }

std::vector<const Command*> AllCommands() {
  std::vector<const Command*> commands;
  for (absl::Span<const Command> group :
       {TransferCommands(), InspectCommands(), TopCommands(), JudgeCommands(), CalibrateCommands(),
        PlanCommands(), RecommendCommands(), BenchCommands(), MachineCommands(), ShellCommands()}) {
    for (const Command& command : group) commands.push_back(&command);
  }
  return commands;
}

const Command* FindCommand(std::string_view name) {
  for (const Command* command : AllCommands()) {
    if (command->spec.name == name) return command;
  }
  return nullptr;
}

std::string_view CliVersion() { return KVSTOW_VERSION; }

std::string OverviewText() {
  std::string text = absl::StrCat("kvstow ", ToAbsl(CliVersion()),
                                  ": keeps the KV caches of language models, compressed\n\n"
                                  "usage: kvstow COMMAND [words and options]\n\ncommands:\n");
  for (const Command* command : AllCommands()) {
    absl::StrAppendFormat(&text, "  %-11s %s\n", std::string(command->spec.name),
                          std::string(command->spec.summary));
  }
  absl::StrAppend(&text,
                  "\nkvstow help COMMAND shows its options and an example; --json gives one JSON "
                  "object per line;\n--target says where the service is (default "
                  "unix:/tmp/kvstow.sock). To begin:\n\n"
                  "  kvstow doctor\n"
                  "  kvstow serve &\n"
                  "  kvstow put tests/data/smollm2_kv.safetensors\n");
  return text;
}

int RunCli(const std::vector<std::string>& words, const CliStreams& streams) {
  if (words.empty()) {
    streams.err << OverviewText();
    return kUsage;
  }
  if (words[0] == "--help" || words[0] == "-h") {
    streams.out << OverviewText() << std::flush;
    return kDone;
  }
  if (words[0] == "--version") {
    streams.out << "kvstow " << CliVersion() << std::endl;
    return kDone;
  }
  const Command* command = FindCommand(words[0]);
  if (command == nullptr) return Report(UnknownCommand(words[0]), "", streams);
  return RunCommand(*command, absl::MakeConstSpan(words).subspan(1), streams);
}

}  // namespace kvstow
