// ChildProcess: a program run by a test, its output collected, its end awaited with a deadline.
//
//   ChildProcess child({"/path/kvstowd", "--dram.capacity=64MiB"});
//   ASSERT_TRUE(child.WaitForOutput("ready ", absl::Seconds(20))) << child.output();
//   child.Signal(SIGTERM);
//   EXPECT_EQ(child.WaitForExit(absl::Seconds(20)), 0);
//
// The child dies with the test: the kernel kills it when its parent ends, and so does the
// destructor.
//
// Thread safety: one thread at a time, apart from output().
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/core/mutex.h"

namespace kvstow::testing {

class ChildProcess {
 public:
  // Starts argv[0] with both output streams collected and nothing on standard input.
  explicit ChildProcess(const std::vector<std::string>& argv);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // True when the output so far, or within `timeout`, contains `text`. False at once when the child
  // ends without it.
  bool WaitForOutput(std::string_view text, absl::Duration timeout);

  void Signal(int signal_number);

  // Exit status, 128 + N after signal N, as a shell says it; nothing when it still runs.
  std::optional<int> WaitForExit(absl::Duration timeout);

  std::string output() const;
  pid_t pid() const { return pid_; }

 private:
  void ReadOutput();

  pid_t pid_ = -1;
  int output_fd_ = -1;
  std::optional<int> exit_status_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::string output_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread reader_;
};

struct CommandResult {
  int status = -1;  // -1: killed at the deadline
  std::string output;
};

// Runs a program to its end.
CommandResult RunCommand(const std::vector<std::string>& argv,
                         absl::Duration timeout = absl::Seconds(60));

// True when `holds` becomes true within `timeout`; asks every 20 ms. For what another process does
// on its own time: there is no event to wait for.
bool Eventually(const std::function<bool()>& holds, absl::Duration timeout);

// A stop signal reaches the threads of a process one after the other.
bool AllThreadsAreStopped(pid_t pid);

// A fresh folder under the system's temporary folder, removed with all it holds.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace kvstow::testing
