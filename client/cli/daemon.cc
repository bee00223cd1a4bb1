#include "client/cli/daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cpp/admin_client.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(60);  // populating memory: 1 s a GiB
constexpr absl::Duration kStopTimeout = absl::Seconds(15);   // the daemon drains for 10 s
constexpr absl::Duration kPoll = absl::Milliseconds(20);
constexpr int kExecFailed = 127;

// Runs `words` with standard error in `log_path`. The child dies with this process.
pid_t Spawn(const std::vector<std::string>& words, const std::string& log_path) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid != 0) return pid;
  // Only async-signal-safe calls from here on: other threads may have held locks at the fork.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExecFailed);
  const int log = open(log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execv(argv[0], argv.data());
  _exit(kExecFailed);
}

}  // namespace

absl::StatusOr<std::string> FindProgram(const std::string& name, const std::string& build_folder) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  std::vector<std::string> places = {self.parent_path() / name,
                                     self.parent_path().parent_path() / build_folder / name,
                                     "/usr/local/bin/" + name, "/usr/bin/" + name};
  for (const std::string& place : places) {
    if (access(place.c_str(), X_OK) == 0) return place;
  }
  return absl::NotFoundError(
      absl::StrCat("there is no ", name, " at ", absl::StrJoin(places, ", "), "; build it"));
}

absl::StatusOr<std::string> FindDaemon() {
  absl::StatusOr<std::string> program = FindProgram("kvstowd", "service");
  if (program.ok()) return program;
  return absl::NotFoundError(
      absl::StrCat(program.status().message(), ", or start a daemon and give --target"));
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(
    int64_t dram_bytes, const std::vector<std::string>& extra_flags) {
  KVSTOW_ASSIGN_OR_RETURN(const std::string program, FindDaemon());
  std::string dir = (std::filesystem::temp_directory_path() / "kvstow-bench-XXXXXX").string();
  if (mkdtemp(dir.data()) == nullptr) return absl::ErrnoToStatus(errno, dir);
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess);
  daemon->dir_ = dir;
  const std::string socket = absl::StrCat(dir, "/kvstow.sock");
  daemon->target_ = absl::StrCat("unix:", socket);
  std::vector<std::string> argv = {program,
                                   absl::StrCat("--listen.unix_socket=", socket),
                                   "--listen.tcp=",
                                   "--nvme.path=",
                                   "--metrics.address=",
                                   absl::StrCat("--dram.capacity=", dram_bytes, "B")};
  argv.insert(argv.end(), extra_flags.begin(), extra_flags.end());
  daemon->pid_ = Spawn(argv, absl::StrCat(dir, "/log"));
  if (daemon->pid_ < 0) return absl::ErrnoToStatus(errno, "fork");
  daemon->pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, daemon->pid_, 0));
  if (daemon->pidfd_ < 0) return absl::ErrnoToStatus(errno, "pidfd_open");
  KVSTOW_RETURN_IF_ERROR(daemon->WaitUntilReady());
  return daemon;
}

bool DaemonProcess::WaitForEnd(absl::Duration timeout) {
  pollfd event = {.fd = pidfd_, .events = POLLIN, .revents = 0};
  if (poll(&event, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) <= 0) return false;
  waitpid(pid_, nullptr, 0);
  has_ended_ = true;
  return true;
}

absl::Status DaemonProcess::WaitUntilReady() {
  const absl::Time give_up = absl::Now() + kStartTimeout;
  const std::string socket = target_.substr(std::strlen("unix:"));
  while (absl::Now() < give_up) {
    if (WaitForEnd(kPoll)) {
      return absl::UnavailableError(absl::StrCat("kvstowd ended at its start: ", LastLogLine()));
    }
    // The socket first: a channel that fails to connect waits a while before it tries again.
    if (access(socket.c_str(), F_OK) != 0) continue;
    KVSTOW_ASSIGN_OR_RETURN(auto admin, AdminClient::Create({.target = target_}));
    if (admin->Ping(absl::Seconds(1)).ok()) return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat(
      "kvstowd does not answer after ", absl::FormatDuration(kStartTimeout), ": ", LastLogLine()));
}

std::string DaemonProcess::LastLogLine() const {
  std::ifstream log(absl::StrCat(dir_, "/log"));
  std::string line;
  std::string last = "it logged nothing";
  while (std::getline(log, line)) {
    if (!line.empty()) last = line;
  }
  return last;
}

DaemonProcess::~DaemonProcess() {
  if (pidfd_ >= 0 && !has_ended_) {
    kill(pid_, SIGTERM);
    if (!WaitForEnd(kStopTimeout)) {
      kill(pid_, SIGKILL);
      WaitForEnd(kStopTimeout);
    }
  }
  if (pidfd_ >= 0) close(pidfd_);
  std::error_code ignored;  // a temporary directory that stays is no failure of the benchmark
  std::filesystem::remove_all(dir_, ignored);
}

double ProcessCpuSeconds(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  // The second field is the program's name in parentheses and may hold anything; fields 14 and 15
  // are user and system time, so 12 and 13 of what follows it.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return -1;
  const std::vector<std::string> fields =
      absl::StrSplit(text.substr(name_end + 1), ' ', absl::SkipEmpty());
  int64_t user_ticks = 0;
  int64_t system_ticks = 0;
  if (fields.size() < 13 || !absl::SimpleAtoi(fields[11], &user_ticks) ||
      !absl::SimpleAtoi(fields[12], &system_ticks)) {
    return -1;
  }
  return static_cast<double>(user_ticks + system_ticks) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double OwnCpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

pid_t PeerPid(const std::string& target) {
  if (!absl::StartsWith(target, "unix:")) return -1;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = target.substr(std::strlen("unix:"));
  if (path.size() >= sizeof(address.sun_path)) return -1;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  ucred peer = {};
  socklen_t size = sizeof(peer);
  const bool known = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                     getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  close(fd);
  return known ? peer.pid : -1;
}

}  // namespace kvstow
