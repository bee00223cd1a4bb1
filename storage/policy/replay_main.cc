// kvstow-replay: a trace through every eviction policy in virtual time. See --help.
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "storage/policy/replay_options.h"
#include "storage/policy/replay_page.h"
#include "storage/policy/replay_report.h"
#include "storage/policy/sessions.h"
#include "storage/policy/simulator.h"
#include "storage/policy/trace.h"

namespace kvstow::policy {
namespace {

// One line on standard error that is overwritten, if that is a terminal.
class ProgressLine {
 public:
  explicit ProgressLine(int64_t total) : total_(total), is_shown_(isatty(STDERR_FILENO) == 1) {}
  ~ProgressLine() {
    if (is_shown_) std::fputs("\r\x1b[K", stderr);
  }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void Begin(std::string what) {
    what_ = std::move(what);
    Show(0);
  }
  void End(int64_t requests) { done_ += requests; }
  void Show(int64_t requests) const {
    if (!is_shown_) return;
    const double percent =
        100 * static_cast<double>(done_ + requests) / static_cast<double>(total_);
    std::fprintf(stderr, "\r\x1b[K%3.0f %%  %s", percent, what_.c_str());
  }

 private:
  const int64_t total_;
  const bool is_shown_;
  int64_t done_ = 0;
  std::string what_;
};

// The trace with what is derived from it once.
struct Input {
  Trace trace;
  std::vector<Request> requests;
  std::vector<bool> announced_ends;  // empty without hints
};

absl::StatusOr<SimResult> RunOnce(const Input& input, const Future& future, const ReplayRow& row,
                                  SimOptions sim, ProgressLine& progress) {
  sim.future = &future;
  if (row.session_over > 0) sim.announced_ends = input.announced_ends;
  sim.progress = [&](int64_t requests) { progress.Show(requests); };
  std::string what = row.policy;
  for (const int64_t blocks : sim.tier_blocks) absl::StrAppend(&what, " ", blocks);
  progress.Begin(what);
  KVSTOW_ASSIGN_OR_RETURN(SimResult result, Simulate(input.trace, input.requests, row.policy, sim));
  progress.End(static_cast<int64_t>(input.requests.size()));
  return result;
}

absl::Status RunRow(const Input& input, const Future& future, const ReplayOptions& options,
                    ReplayRow& row, ProgressLine& progress) {
  const auto start = std::chrono::steady_clock::now();
  SimOptions sim;
  sim.warmup = options.warmup;
  sim.alpha = options.alpha;
  for (const int64_t blocks : options.blocks) {
    sim.tier_blocks = {blocks};
    KVSTOW_ASSIGN_OR_RETURN(SimResult result, RunOnce(input, future, row, sim, progress));
    row.by_capacity.push_back(result);
  }
  if (!options.tiers.empty()) {
    sim.tier_blocks = options.tiers;
    KVSTOW_ASSIGN_OR_RETURN(row.tiers, RunOnce(input, future, row, sim, progress));
  }
  row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return absl::OkStatus();
}

absl::StatusOr<ReplayReport> Run(const ReplayOptions& options) {
  Input input;
  KVSTOW_ASSIGN_OR_RETURN(input.trace,
                          ReadTrace(options.trace_path, {.block_tokens = options.block_tokens}));
  if (options.repeat > 1) {
    KVSTOW_ASSIGN_OR_RETURN(input.trace, RepeatTrace(input.trace, options.repeat));
  }
  input.requests = FindSessions(input.trace);
  const Future future(input.trace, input.requests);
  ReplayReport report;
  report.options = options;
  report.num_requests = static_cast<int64_t>(input.requests.size());
  for (const Request& request : input.requests) report.num_follow_ups += request.continues ? 1 : 0;
  report.num_blocks = static_cast<int64_t>(input.trace.blocks.size());
  report.num_distinct = input.trace.num_distinct;
  report.span_s = input.requests.back().time_s - input.requests.front().time_s;
  for (const std::string& policy : options.policies) {
    report.rows.push_back({.policy = policy});
    if (policy == "rtv" && options.session_over > 0) {
      report.rows.push_back({.policy = policy, .session_over = options.session_over});
      input.announced_ends = ChooseAnnouncedEnds(input.requests, options.session_over,
                                                 static_cast<uint64_t>(options.seed));
    }
  }
  const size_t runs = options.blocks.size() + (options.tiers.empty() ? 0 : 1);
  ProgressLine progress(static_cast<int64_t>(report.rows.size() * runs) * report.num_requests);
  for (ReplayRow& row : report.rows) {
    KVSTOW_RETURN_IF_ERROR(RunRow(input, future, options, row, progress));
  }
  return report;
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "wb"),
                                                             &std::fclose);
  if (file == nullptr || std::fwrite(text.data(), 1, text.size(), file.get()) != text.size() ||
      std::fflush(file.get()) != 0) {
    return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const absl::StatusOr<ReplayOptions> options =
      ParseReplayOptions(std::vector<std::string>(argv + 1, argv + argc));
  if (!options.ok()) {
    std::fprintf(stderr, "kvstow-replay: %s\nTry kvstow-replay --help.\n",
                 std::string(options.status().message()).c_str());
    return 2;
  }
  if (options->is_help) {
    std::fputs(ReplayHelp().c_str(), stdout);
    return 0;
  }
  const absl::StatusOr<ReplayReport> report = Run(*options);
  if (!report.ok()) {
    std::fprintf(stderr, "kvstow-replay: %s\n", std::string(report.status().message()).c_str());
    return 1;
  }
  if (!options->html_path.empty()) {
    const absl::Status written = WriteFile(options->html_path, FormatPage(*report));
    if (!written.ok()) {
      std::fprintf(stderr, "kvstow-replay: %s\n", std::string(written.message()).c_str());
      return 1;
    }
  }
  const std::string text = options->is_json ? FormatJson(*report) : FormatTable(*report);
  std::fputs(text.c_str(), stdout);
  return std::fflush(stdout) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kvstow::policy

int main(int argc, char** argv) { return kvstow::policy::Main(argc, argv); }
