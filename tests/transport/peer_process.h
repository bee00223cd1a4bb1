// PeerProcess: a worker of its own (peer_main.cc), which opens a window and does as it is told.
//
//   PeerProcess peer({"shm", "8388608", "7", socket_path});
//   ASSERT_NE(peer.ticket(), "") << peer.output();
//   EXPECT_EQ(peer.Ask("check 0 4096 9"), "yes");
//   peer.Signal(SIGKILL);
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "tests/e2e/process.h"
#include "transport/owned_fd.h"

namespace kvstow::testing {

// Bytes that follow from a seed; equal prefixes for equal seeds.
void FillPattern(absl::Span<std::byte> bytes, uint64_t seed);
bool IsPattern(absl::Span<const std::byte> bytes, uint64_t seed);
std::vector<std::byte> PatternOf(size_t bytes, uint64_t seed);

class PeerProcess {
 public:
  // See peer_main.cc for the arguments; the file of commands is added.
  explicit PeerProcess(std::vector<std::string> args);

  // "" when no window could be opened.
  const std::string& ticket() const { return ticket_; }
  // The answer, or "" when none came within 30 s.
  std::string Ask(const std::string& command);
  // Returns when the command is begun; only for those that say so.
  bool Begin(const std::string& command);
  void Signal(int signal_number) { child_->Signal(signal_number); }
  // SIGSTOP, and waits until it has reached every thread.
  bool Stop();
  // Collects the exit status, after which the process is gone altogether.
  void Reap() { child_->WaitForExit(absl::Seconds(30)); }
  pid_t pid() const { return child_->pid(); }
  std::string output() const { return child_->output(); }

 private:
  std::string Tell(const std::string& command);  // its number

  TempFolder folder_;
  OwnedFd commands_;
  std::unique_ptr<ChildProcess> child_;
  std::string ticket_;
  int num_asked_ = 0;
};

}  // namespace kvstow::testing
