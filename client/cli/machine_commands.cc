// doctor, serve, replay: the machine, its daemon, and the simulator.
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/connect.h"
#include "client/cli/daemon.h"
#include "client/cli/doctor.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

absl::Status RunDoctor(const Args& args, Output& output) {
  KVSTOW_ASSIGN_OR_RETURN(const Service service, Connect(args));
  std::vector<Finding> findings = ExamineMachine();
  findings.push_back(ExaminePaths(service));
  findings.push_back(ExamineService(service));
  Table table({"WHAT", "STATE", "FOUND"});
  for (const Finding& finding : findings) {
    const std::string state(FindingStateName(finding.state));
    output.Json({{"what", finding.name},
                 {"state", state},
                 {"found", finding.detail},
                 {"hint", finding.hint}});
    table.AddRow({finding.name, state, finding.detail});
    if (!finding.hint.empty()) table.AddRow({"", "", absl::StrCat("-> ", finding.hint)});
  }
  output.Line(table.Text());
  return absl::OkStatus();
}

// Becomes `program`. Returns only when it cannot.
absl::Status Become(const std::string& program, const Args& args) {
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& word : args.positionals())
    argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execv(program.c_str(), argv.data());
  return absl::ErrnoToStatus(errno, program);
}

absl::Status RunServe(const Args& args, Output&) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string program, FindDaemon());
  return Become(program, args);
}

absl::Status RunReplay(const Args& args, Output&) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string program,
                          FindProgram("kvstow-replay", "storage/policy"));
  return Become(program, args);
}

constexpr Command kMachineCommands[] = {
    {{.name = "doctor",
      .summary = "what this machine can do for kvstow, and why not",
      .details = "Absent things that are optional are no error: the exit status is 0.",
      .example = "kvstow doctor"},
     &RunDoctor},
    {{.name = "serve",
      .summary = "run the daemon, kvstowd, in the foreground",
      .details = "All words go to kvstowd; kvstowd --help lists them.",
      .positionals = "[kvstowd's flags]",
      .example = "kvstow serve --dram.capacity=1GiB --nvme.path=/var/tmp/kvstow "
                 "--nvme.capacity=8GiB",
      .passes_words_on = true},
     &RunServe},
    {{.name = "replay",
      .summary = "what each eviction policy keeps of a trace of requests, simulated",
      .details = "All words go to kvstow-replay; kvstow replay --help lists them.",
      .positionals = "TRACE [kvstow-replay's options]",
      .example = "kvstow replay tests/data/mooncake_conversation_trace.jsonl --policy all "
                 "--hint session-over=0.5 --html report.html",
      .passes_words_on = true},
     &RunReplay},
};

}  // namespace

absl::Span<const Command> MachineCommands() { return kMachineCommands; }

}  // namespace kvstow
