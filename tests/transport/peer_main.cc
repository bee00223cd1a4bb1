// The worker of the transport tests: opens a window, prints its ticket and obeys.
//
//   transport_peer COMMANDS PATH BYTES SEED [SOCKET]
//
// COMMANDS is a file (a FIFO) of numbered lines; each is answered on standard output:
//   N fill SEED                  window's memory follows from SEED; as at the start
//   N check OFFSET BYTES SEED    "yes" when these bytes are as SEED gives them
//   N alive                      "yes" while the service's end is there
//   N env NAME                   the environment variable
//   N fork                       a child that keeps the window's socket open until its end
//
// PATH "attach": no window, but a service over UCX, which lives until it is killed:
//   N attach TICKET              says that it begins, and attaches; TICKET in hexadecimal
//   N move TICKET                attaches, says so, and reads and writes the window for ever
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "tests/transport/peer_process.h"
#include "transport/nccl.h"
#include "transport/shm_window.h"
#include "transport/ucx.h"

namespace kvstow::testing {
namespace {

absl::StatusOr<std::unique_ptr<Window>> Open(const std::string& path, int64_t bytes,
                                             const std::string& socket) {
  if (path == "nccl") {
    const NcclDevice device = {.nccl_path = KVSTOW_NCCL_STAND_IN,
                               .cudart_path = KVSTOW_NCCL_STAND_IN};
    return OpenNcclWindow({.bytes = bytes, .device = device});
  }
  if (path == "ucx") {
    return OpenUcxWindow({.bytes = bytes, .network = {.tls = "tcp", .net_devices = "lo"}});
  }
  if (path == "shm") return OpenShmWindow({.socket_path = socket, .bytes = bytes});
  return absl::InvalidArgumentError("no such path: " + path);
}

// Shares every descriptor but the output, and outlives a parent that is killed: until the service
// has closed the window.
void ForkAndWait(Window& window) {
  if (fork() != 0) return;
  prctl(PR_SET_PDEATHSIG, 0);
  alarm(60);
  close(STDOUT_FILENO);
  close(STDERR_FILENO);
  while (window.is_alive()) poll(nullptr, 0, 20);
  _exit(0);
}

std::string Obey(Window& window, std::istream& words) {
  std::string verb;
  words >> verb;
  uint64_t seed = 0;
  if (verb == "fill") {
    words >> seed;
    FillPattern(window.memory(), seed);
    return "yes";
  }
  if (verb == "check") {
    size_t offset = 0;
    size_t bytes = 0;
    words >> offset >> bytes >> seed;
    return IsPattern(window.memory().subspan(offset, bytes), seed) ? "yes" : "no";
  }
  if (verb == "alive") return window.is_alive() ? "yes" : "no";
  if (verb == "env") {
    std::string name;
    words >> name;
    const char* const value = std::getenv(name.c_str());
    return value == nullptr ? "" : value;
  }
  if (verb == "fork") {
    ForkAndWait(window);
    return "yes";
  }
  return "what?";
}

void MoveForEver(Channel& channel) {
  std::vector<std::byte> locals[4];
  for (std::vector<std::byte>& local : locals) local.resize(channel.window_bytes());
  for (int i = 0; channel.is_alive(); ++i) {
    const auto op = i % 2 == 0 ? TransferOp::kRead : TransferOp::kWrite;
    const auto id = channel.Post(
        {.op = op, .local = absl::MakeSpan(locals[i % 4]), .timeout = absl::Seconds(30)});
    if (!id.ok()) continue;
    Completion done[2];
    if (i >= 2) channel.Poll(absl::MakeSpan(done), absl::Seconds(30));
  }
}

int AttachToAll(const std::string& commands_path) {
  const absl::StatusOr<std::unique_ptr<Transport>> transport =
      MakeUcxTransport({.network = {.tls = "tcp", .net_devices = "lo"}});
  if (!transport.ok()) return 1;
  const auto say = [](const std::string& line) {
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  };
  say("ticket begin 00\nticket end");
  std::ifstream commands(commands_path);
  std::string number, verb, ticket;
  while (commands >> number >> verb >> ticket) {
    if (verb == "attach") say("begun " + number);
    const auto channel = (*transport)->Attach(absl::HexStringToBytes(ticket), absl::Seconds(30));
    if (verb != "move" || !channel.ok()) continue;
    say("begun " + number);
    MoveForEver(**channel);
  }
  return 0;
}

int Main(int argc, char** argv) {
  if (argc < 5) return 2;
  if (std::string(argv[2]) == "attach") return AttachToAll(argv[1]);
  absl::StatusOr<std::unique_ptr<Window>> window =
      Open(argv[2], std::atoll(argv[3]), argc > 5 ? argv[5] : "");
  if (!window.ok()) {
    std::printf("%s\n", window.status().ToString().c_str());
    return 1;
  }
  FillPattern((*window)->memory(), std::strtoull(argv[4], nullptr, 10));
  std::printf("ticket begin %s\nticket end\n", absl::BytesToHexString((*window)->ticket()).c_str());
  std::fflush(stdout);
  std::ifstream commands(argv[1]);
  std::string line;
  while (std::getline(commands, line)) {
    std::istringstream words(line);
    std::string number;
    words >> number;
    std::printf("answer %s %s\n", number.c_str(), Obey(**window, words).c_str());
    std::printf("answered %s\n", number.c_str());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace kvstow::testing

int main(int argc, char** argv) { return kvstow::testing::Main(argc, argv); }
