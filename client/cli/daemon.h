// DaemonProcess: a kvstowd of our own on a temporary directory, for benchmarks. Also: CPU time of
// another process.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto daemon, DaemonProcess::Start(dram_bytes));
//   ... connect to daemon->target() ...
//   // its end stops the process (by its id) and removes the directory
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvstow {

// A program of kvstow's: beside this binary, in the folder of the build tree where it is made, or
// in the usual places. kNotFound says where it was looked for.
absl::StatusOr<std::string> FindProgram(const std::string& name, const std::string& build_folder);
absl::StatusOr<std::string> FindDaemon();

class DaemonProcess {
 public:
  // Memory tier only. kUnavailable: it did not answer in 60 s or ended; with its last log line.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(
      int64_t dram_bytes, const std::vector<std::string>& extra_flags = {});
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  const std::string& target() const { return target_; }
  pid_t pid() const { return pid_; }

 private:
  DaemonProcess() = default;
  absl::Status WaitUntilReady();
  bool WaitForEnd(absl::Duration timeout);  // true when the process has ended
  std::string LastLogLine() const;

  std::string dir_;
  std::string target_;
  pid_t pid_ = -1;
  int pidfd_ = -1;  // readable when the process has ended
  bool has_ended_ = false;
};

// User and system time used so far by a process of this machine, in seconds; below 0 where it
// cannot be read. Steps of 10 ms.
double ProcessCpuSeconds(pid_t pid);
// The same of this process, without its children.
double OwnCpuSeconds();

// The process at the other end of a unix socket; -1 for other targets or when it cannot be told.
pid_t PeerPid(const std::string& target);

}  // namespace kvstow
