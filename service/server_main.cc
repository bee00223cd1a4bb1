// kvstowd: the daemon. Parses, builds, serves until SIGTERM or SIGINT, drains.
//
// Exit status: 0 after a drained stop, 1 when it cannot start, 2 for wrong use or configuration.
#include <malloc.h>
#include <signal.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/clock.h"
#include "kernels/core/log.h"
#include "service/server.h"
#include "service/server_config.h"

namespace kvstow {
namespace {

constexpr int kExitOk = 0;
constexpr int kExitCannotStart = 1;
constexpr int kExitUsage = 2;

// glibc gives large buffers back to the kernel and pays for their first touch again with every
// message: with these two a raw gRPC stream moves about twice as much.
void TuneMalloc() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

// Blocks the signals that stop us in this thread and all that it starts; `Serve` waits for them.
sigset_t BlockStopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  return signals;
}

int Serve(const ServerOptions& options) {
  const sigset_t signals = BlockStopSignals();
  const RealClock clock;
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options, &clock);
  if (!server.ok()) {
    Log(Severity::kError, "cannot start", {{"reason", std::string(server.status().message())}});
    return kExitCannotStart;
  }
  const std::string host = options.tcp.substr(0, options.tcp.rfind(':'));
  const std::string metrics_host =
      options.metrics_address.substr(0, options.metrics_address.rfind(':'));
  Log(Severity::kInfo, "ready",
      {{"unix", (*server)->unix_socket()},
       {"tcp", host.empty() ? "" : absl::StrCat(host, ":", (*server)->tcp_port())},
       {"metrics",
        metrics_host.empty() ? "" : absl::StrCat(metrics_host, ":", (*server)->metrics_port())},
       {"version", std::string(ServerVersion())}});
  int signal_number = 0;
  sigwait(&signals, &signal_number);
  Log(Severity::kInfo, "draining", {{"signal", signal_number == SIGTERM ? "TERM" : "INT"}});
  (*server)->Drain();
  Log(Severity::kInfo, "stopped");
  return kExitOk;
}

int Main(const std::vector<std::string>& args) {
  TuneMalloc();
  const Machine machine = ThisMachine();
  const absl::StatusOr<CommandLine> line = ParseCommandLine(args, machine);
  if (!line.ok()) {
    std::fprintf(stderr, "kvstowd: %s\n", std::string(line.status().message()).c_str());
    return kExitUsage;
  }
  switch (line->action) {
    case CommandLine::Action::kHelp:
      std::fputs(HelpText(machine).c_str(), stdout);
      return kExitOk;
    case CommandLine::Action::kVersion:
      std::printf("kvstowd %s\n", std::string(ServerVersion()).c_str());
      return kExitOk;
    case CommandLine::Action::kServe:
      break;
  }
  SetMinLogSeverity(line->options.log_level);
  return Serve(line->options);
}

}  // namespace
}  // namespace kvstow

int main(int argc, char** argv) {
  return kvstow::Main(std::vector<std::string>(argv + 1, argv + argc));
}
