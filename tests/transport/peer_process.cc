#include "tests/transport/peer_process.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);

// What stands between `begin` and the end of its line.
std::string Between(const std::string& text, const std::string& begin) {
  const size_t at = text.find(begin);
  if (at == std::string::npos) return "";
  const size_t from = at + begin.size();
  return text.substr(from, text.find('\n', from) - from);
}

}  // namespace

void FillPattern(absl::Span<std::byte> bytes, uint64_t seed) {
  Rng rng(seed);
  for (size_t at = 0; at < bytes.size(); at += 8) {
    const uint64_t word = rng.Next();
    std::memcpy(bytes.data() + at, &word, std::min<size_t>(8, bytes.size() - at));
  }
}

std::vector<std::byte> PatternOf(size_t bytes, uint64_t seed) {
  std::vector<std::byte> pattern(bytes);
  FillPattern(absl::MakeSpan(pattern), seed);
  return pattern;
}

bool IsPattern(absl::Span<const std::byte> bytes, uint64_t seed) {
  const std::vector<std::byte> want = PatternOf(bytes.size(), seed);
  return bytes.empty() || std::memcmp(bytes.data(), want.data(), want.size()) == 0;
}

PeerProcess::PeerProcess(std::vector<std::string> args) {
  const std::string commands = folder_.path() + "/commands";
  KVSTOW_CHECK(mkfifo(commands.c_str(), 0600) == 0);
  // Both ways, so that opening waits for nobody.
  commands_ = OwnedFd(open(commands.c_str(), O_RDWR | O_CLOEXEC));
  KVSTOW_CHECK(commands_.is_open());
  args.insert(args.begin(), {KVSTOW_TRANSPORT_PEER, commands});
  child_ = std::make_unique<ChildProcess>(args);
  if (child_->WaitForOutput("ticket end\n", kPatience)) {
    ticket_ = absl::HexStringToBytes(Between(child_->output(), "ticket begin "));
  }
}

bool PeerProcess::Stop() {
  Signal(SIGSTOP);
  return Eventually([this] { return AllThreadsAreStopped(child_->pid()); }, kPatience);
}

std::string PeerProcess::Tell(const std::string& command) {
  const std::string number = absl::StrCat(++num_asked_);
  const std::string line = absl::StrCat(number, " ", command, "\n");
  KVSTOW_CHECK(write(commands_.get(), line.data(), line.size()) ==
               static_cast<ssize_t>(line.size()));
  return number;
}

std::string PeerProcess::Ask(const std::string& command) {
  const std::string number = Tell(command);
  if (!child_->WaitForOutput(absl::StrCat("answered ", number, "\n"), kPatience)) return "";
  return Between(child_->output(), absl::StrCat("answer ", number, " "));
}

bool PeerProcess::Begin(const std::string& command) {
  return child_->WaitForOutput(absl::StrCat("begun ", Tell(command), "\n"), kPatience);
}

}  // namespace kvstow::testing
