// Commands: the subcommands of `kvstow`, and the one function that runs a command line.
//
//   int main(int argc, char** argv) { return RunCli({argv + 1, argv + argc}, {...}); }
//
// Exit status: 0 done; 1 it did not work or a check found something; 2 the command line is wrong.
#pragma once

#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/cli/args.h"
#include "client/cli/output.h"

namespace kvstow {

struct Command {
  CommandSpec spec;
  absl::Status (*run)(const Args& args, Output& output);
};

// One list per file; AllCommands joins them in the order of the help.
absl::Span<const Command> TransferCommands();   // put, get, key, delete
absl::Span<const Command> InspectCommands();    // ls, stat, verify, ping
absl::Span<const Command> TopCommands();        // top
absl::Span<const Command> JudgeCommands();      // eval
absl::Span<const Command> CalibrateCommands();  // calibrate, calibration
absl::Span<const Command> PlanCommands();       // plan
absl::Span<const Command> RecommendCommands();  // recommend
absl::Span<const Command> BenchCommands();      // bench
absl::Span<const Command> MachineCommands();    // doctor, serve, replay
absl::Span<const Command> ShellCommands();      // completion, help

std::vector<const Command*> AllCommands();
const Command* FindCommand(std::string_view name);  // nullptr where there is none

// The version of this build, "0.1.0".
std::string_view CliVersion();

// The page of `kvstow help`.
std::string OverviewText();

// The script that `kvstow completion bash` prints.
std::string BashCompletion();

struct CliStreams {
  std::ostream& out;
  std::ostream& err;
  bool err_is_terminal = false;
};

// Runs `words` (without the program's name); returns the exit status.
int RunCli(const std::vector<std::string>& words, const CliStreams& streams);

}  // namespace kvstow
