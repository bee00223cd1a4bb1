#include "client/cli/wire_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr char kUnixPrefix[] = "unix:";

// The child's life: learns its service, then passes bytes until it is killed.
void Serve(Relay& relay, int order_fd, const WireRule& rule) {
  std::array<char, 256> path = {};
  if (read(order_fd, path.data(), path.size() - 1) <= 0) return;
  relay.SetTarget(path.data());
  relay.SetRule(rule);
  relay.Run();
}

}  // namespace

absl::StatusOr<std::unique_ptr<WireProcess>> WireProcess::Start(const WireRule& rule) {
  std::unique_ptr<WireProcess> wire(new WireProcess);
  wire->dir_ = (std::filesystem::temp_directory_path() / "kvstow-wire-XXXXXX").string();
  if (mkdtemp(wire->dir_.data()) == nullptr) return absl::ErrnoToStatus(errno, wire->dir_);
  KVSTOW_ASSIGN_OR_RETURN(const std::unique_ptr<Relay> relay, Relay::Listen(wire->dir_ + "/wire"));
  std::array<int, 2> ends;
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe");
  const OwnedFd child_end(ends[0]);
  wire->order_.Reset(ends[1]);
  const pid_t parent = getpid();
  wire->pid_ = fork();
  if (wire->pid_ < 0) return absl::ErrnoToStatus(errno, "fork");
  if (wire->pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    wire->order_.Reset();
    if (getppid() == parent) Serve(*relay, child_end.get(), rule);
    _exit(0);
  }
  return wire;
}

WireProcess::~WireProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;  // a temporary directory that stays is no failure of the benchmark
  std::filesystem::remove_all(dir_, ignored);
}

absl::Status WireProcess::ConnectTo(const std::string& target) {
  if (!absl::StartsWith(target, kUnixPrefix)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the wire to \"", target, "\" cannot be held: want a unix socket"));
  }
  const std::string path = target.substr(std::strlen(kUnixPrefix));
  if (write(order_.get(), path.data(), path.size()) != static_cast<ssize_t>(path.size())) {
    return absl::UnavailableError("the process that holds the wire has ended");
  }
  return absl::OkStatus();
}

}  // namespace kvstow
