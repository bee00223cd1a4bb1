#include "tests/e2e/process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/clock.h"

namespace kvstow::testing {
namespace {

// In the child, between fork and exec: only calls that are safe there.
[[noreturn]] void ExecChild(const std::vector<char*>& argv, int output_fd, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(126);
  const int nothing = open("/dev/null", O_RDONLY);
  dup2(nothing, STDIN_FILENO);
  dup2(output_fd, STDOUT_FILENO);
  dup2(output_fd, STDERR_FILENO);
  execv(argv[0], argv.data());
  _exit(127);
}

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& argv) {
  std::array<int, 2> ends;
  KVSTOW_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0);
  std::vector<char*> raw;
  for (const std::string& arg : argv) raw.push_back(const_cast<char*>(arg.c_str()));
  raw.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  KVSTOW_CHECK(pid_ >= 0);
  if (pid_ == 0) ExecChild(raw, ends[1], parent);
  close(ends[1]);
  output_fd_ = ends[0];
  reader_ = std::thread([this] { ReadOutput(); });
}

ChildProcess::~ChildProcess() {
  if (!exit_status_.has_value()) {
    Signal(SIGKILL);
    WaitForExit(absl::Seconds(30));
  }
  reader_.join();
  close(output_fd_);
}

// The end of the output is the end of the child: the pipe closes with its last holder.
void ChildProcess::ReadOutput() {
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t n = read(output_fd_, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    MutexLock lock(&mutex_);
    if (n <= 0) {
      ended_ = true;
      changed_.SignalAll();
      return;
    }
    output_.append(buffer.data(), static_cast<size_t>(n));
    changed_.SignalAll();
  }
}

bool ChildProcess::WaitForOutput(std::string_view text, absl::Duration timeout) {
  const RealClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  MutexLock lock(&mutex_);
  while (output_.find(text) == std::string::npos) {
    const absl::Duration left = deadline - clock.Now();
    if (ended_ || left <= absl::ZeroDuration()) return false;
    changed_.WaitFor(&mutex_, left);
  }
  return true;
}

void ChildProcess::Signal(int signal_number) {
  if (!exit_status_.has_value()) kill(pid_, signal_number);
}

std::optional<int> ChildProcess::WaitForExit(absl::Duration timeout) {
  if (exit_status_.has_value()) return exit_status_;
  const RealClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  {
    MutexLock lock(&mutex_);
    while (!ended_) {
      const absl::Duration left = deadline - clock.Now();
      if (left <= absl::ZeroDuration()) return std::nullopt;
      changed_.WaitFor(&mutex_, left);
    }
  }
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  exit_status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return exit_status_;
}

std::string ChildProcess::output() const {
  MutexLock lock(&mutex_);
  return output_;
}

CommandResult RunCommand(const std::vector<std::string>& argv, absl::Duration timeout) {
  ChildProcess child(argv);
  const std::optional<int> status = child.WaitForExit(timeout);
  return {status.value_or(-1), child.output()};
}

bool Eventually(const std::function<bool()>& holds, absl::Duration timeout) {
  const RealClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  Mutex mutex;
  CondVar never;
  while (!holds()) {
    if (clock.Now() > deadline) return false;
    MutexLock lock(&mutex);
    never.WaitFor(&mutex, absl::Milliseconds(20));
  }
  return true;
}

bool AllThreadsAreStopped(pid_t pid) {
  for (const auto& task :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"))) {
    std::ifstream file(task.path() / "stat");
    const std::string stat((std::istreambuf_iterator<char>(file)),
                           std::istreambuf_iterator<char>());
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos || stat.substr(name_end, 3) != ") T") return false;
  }
  return true;
}

TempFolder::TempFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "kvstow-e2e-XXXXXX").string();
  KVSTOW_CHECK(mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace kvstow::testing
