// Watches the daemon of soak.sh: that no tier passes its cap while there is load, and that nothing
// is left when there is none any more.
//
//   soak_watch TARGET METRICS_ADDRESS NVME_FOLDER DAEMON_PID
//
// Says `watching` when it has seen the daemon at rest and `loaded` when the load has brought all
// that it must; polls until SIGTERM, which soak.sh sends after the last client has gone. Exit
// status: 0 all well, 3 a cap was passed, something leaked, or the load was none.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/nvme_tier.h"
#include "tests/e2e/daemon.h"
#include "tests/e2e/kv_data.h"
#include "tests/storage/records.h"

namespace kvstow::testing {
namespace {

volatile std::sig_atomic_t g_stop = 0;
int g_faults = 0;

void Fault(const std::string& what) {
  ++g_faults;
  std::printf("FAULT: %s\n", what.c_str());
}

// The metrics page by "name{labels}", without the prefix.
using Page = std::map<std::string, double>;

Page ReadPage(const std::string& address) {
  Page page;
  std::istringstream lines(HttpGet(address, "/metrics"));
  for (std::string line; std::getline(lines, line);) {
    const size_t space = line.rfind(' ');
    if (line.rfind("kvstow_", 0) != 0 || space == std::string::npos) continue;
    page[line.substr(7, space - 7)] = std::strtod(line.c_str() + space + 1, nullptr);
  }
  return page;
}

double ValueOf(const Page& page, const std::string& name) {
  const auto found = page.find(name);
  if (found == page.end()) {
    Fault("the metrics page has no " + name);
    return 0;
  }
  return found->second;
}

// Open files of the daemon by what they are, without those of the database: the disk tier opens and
// closes its files as it likes, within limits of its own.
std::map<std::string, int> OpenFiles(int pid, const std::string& nvme_folder) {
  std::map<std::string, int> files;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error)) {
    std::error_code gone;
    std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (gone || target.rfind(nvme_folder, 0) == 0) continue;
    // "socket:[12345]" and "/memfd:window (deleted)" by their kind.
    ++files[target.substr(0, target.find_first_of("[ "))];
  }
  return files;
}

std::string TextOf(const std::map<std::string, int>& files) {
  std::string text;
  for (const auto& [name, count] : files) absl::StrAppend(&text, " ", count, " x ", name);
  return text;
}

int64_t ResidentMib(int pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("VmRSS:", 0) == 0) return std::atoll(line.c_str() + 6) >> 10;
  }
  return 0;
}

struct Watched {
  std::string target;
  std::string metrics;
  std::string folder;
  int pid = 0;
};

// One put and one get over each path, so that what a daemon opens once is open.
bool WarmUp(const Watched& daemon) {
  for (const PathKind path : {PathKind::kShm, PathKind::kUcx, PathKind::kGrpc}) {
    KvClientOptions options{.target = daemon.target, .num_channels = 1};
    options.ucx = {.tls = "tcp", .net_devices = "lo"};
    options.paths.clear();
    if (path != PathKind::kGrpc) options.paths = {path};
    const auto client = KvClient::Create(options).value();
    const absl::StatusOr<Model> model = client->RegisterModel(LargerModel());
    if (!model.ok()) return false;
    const KvData data(LargerModel(), 1'000'000 + static_cast<uint64_t>(path), 2);
    const std::vector<LayerRows> layers = data.layers();
    const absl::StatusOr<PutSummary> put =
        client->Put(*model, {.tokens = data.tokens(), .layers = layers});
    if (!put.ok() || !client->Get(*model, put->keys, layers).ok()) return false;
    if (!client->Delete(put->keys).ok()) return false;
  }
  return true;
}

// What is neither zero nor allowed to be something else while nobody calls; empty: nothing.
std::string LeftOver(const Page& page) {
  std::string left;
  for (const char* name :
       {"open_tickets", "open_leases", "pinned_bytes", "tier_reserved_bytes{tier=\"dram\"}",
        "tier_reserved_bytes{tier=\"nvme\"}", "write_behind_bytes", "calls_in_flight",
        "bytes_in_flight", "open_channels", "executor_queued{executor=\"workers\"}",
        "executor_running{executor=\"workers\"}", "executor_queued{executor=\"control\"}",
        "executor_running{executor=\"control\"}"}) {
    const double value = ValueOf(page, name);
    if (value != 0) absl::StrAppend(&left, " ", name, "=", value);
  }
  return left;
}

struct Most {
  double dram = 0, nvme = 0;
  int64_t folder = 0, resident_mib = 0;
  int polls = 0;
  bool is_loaded = false;
};

// What a load must have brought, or it proves nothing.
constexpr const char* kLoad[] = {"seals",          "aborts",         "tickets_expired",
                                 "leases_expired", "dram_hits",      "nvme_hits",
                                 "misses",         "dram_evictions", "nvme_evictions"};

bool IsLoaded(const Page& page) {
  return std::all_of(std::begin(kLoad), std::end(kLoad), [&](const char* name) {
    return ValueOf(page, absl::StrCat(name, "_total")) > 0;
  });
}

void Poll(const Watched& daemon, Most& most) {
  const Page page = ReadPage(daemon.metrics);
  if (page.empty()) return Fault("the metrics page does not answer");
  ++most.polls;
  if (!most.is_loaded && IsLoaded(page)) {
    most.is_loaded = true;
    std::printf("loaded\n");
  }
  for (const char* tier : {"dram", "nvme"}) {
    const std::string labels = absl::StrCat("{tier=\"", tier, "\"}");
    const double used = ValueOf(page, "tier_used_bytes" + labels);
    const double capacity = ValueOf(page, "tier_capacity_bytes" + labels);
    if (used > capacity) {
      Fault(absl::StrCat(tier, " holds ", static_cast<int64_t>(used), " bytes, its cap is ",
                         static_cast<int64_t>(capacity)));
    }
    double& so_far = tier == std::string_view("dram") ? most.dram : most.nvme;
    so_far = std::max(so_far, used / capacity);
  }
  const auto capacity = static_cast<int64_t>(ValueOf(page, "tier_capacity_bytes{tier=\"nvme\"}"));
  const int64_t folder = FolderBytes(daemon.folder);
  if (folder > capacity + NvmeTier::SlackBytes(capacity)) {
    Fault(absl::StrCat("the folder has ", folder, " bytes, the cap is ", capacity, " and ",
                       NvmeTier::SlackBytes(capacity), " for logs"));
  }
  most.folder = std::max(most.folder, folder);
  most.resident_mib = std::max(most.resident_mib, ResidentMib(daemon.pid));
}

void CheckLoad(const Page& page) {
  for (const char* name : kLoad) {
    const double value = ValueOf(page, absl::StrCat(name, "_total"));
    std::printf(" %s %.0f", name, value);
    if (value == 0) Fault(absl::StrCat("the load proves nothing: no ", name));
  }
  std::printf("\n");
  for (const char* name : {"corrupt_blocks_total", "nvme_write_errors_total"}) {
    if (ValueOf(page, name) != 0) Fault(absl::StrCat(name, " is ", ValueOf(page, name)));
  }
}

void CheckRecords(const Watched& daemon) {
  const auto control =
      v1::Control::NewStub(grpc::CreateChannel(daemon.target, grpc::InsecureChannelCredentials()));
  const auto context = Deadline(absl::Minutes(2));
  const auto reader = control->Verify(context.get(), {});
  v1::VerifyProgress progress;
  uint64_t num_checked = 0;
  int num_bad = 0;
  while (reader->Read(&progress)) {
    num_checked = progress.num_checked();
    num_bad += progress.bad_keys_size();
  }
  const bool is_ok = reader->Finish().ok();
  std::printf("verify: %llu records, %d bad\n", static_cast<unsigned long long>(num_checked),
              num_bad);
  if (!is_ok || num_bad != 0) Fault("verify found bad records, or did not end");
}

int Watch(const Watched& daemon) {
  std::string left;
  const auto is_at_rest = [&] {
    left = LeftOver(ReadPage(daemon.metrics));
    return left.empty();
  };
  if (!WarmUp(daemon)) {
    std::printf("FAULT: the daemon does not answer\n");
    return 3;
  }
  if (!Eventually(is_at_rest, absl::Seconds(20))) Fault("before the load:" + left);
  // The fewest of a second: connections of the warm-up may still be closing.
  std::map<std::string, int> at_start = OpenFiles(daemon.pid, daemon.folder);
  Eventually(
      [&] {
        for (const auto& [name, count] : OpenFiles(daemon.pid, daemon.folder)) {
          at_start[name] = std::min(at_start[name], count);
        }
        return false;
      },
      absl::Seconds(1));
  std::printf("watching; open files:%s\n", TextOf(at_start).c_str());

  Most most;
  do {
    Poll(daemon, most);
    Eventually([] { return g_stop != 0; }, absl::Milliseconds(100));
  } while (g_stop == 0);

  // Tickets and leases of the dead end by their clocks, windows with their workers.
  if (!Eventually(is_at_rest, absl::Seconds(20))) Fault("left over after the load:" + left);
  std::map<std::string, int> at_end;
  if (!Eventually(
          [&] {
            at_end = OpenFiles(daemon.pid, daemon.folder);
            return std::all_of(at_end.begin(), at_end.end(), [&](const auto& file) {
              return file.second <= at_start[file.first];
            });
          },
          absl::Seconds(20))) {
    Fault(absl::StrCat("open files at the end:", TextOf(at_end)));
  }
  Poll(daemon, most);
  CheckLoad(ReadPage(daemon.metrics));
  CheckRecords(daemon);
  std::printf(
      "watch: %d polls; dram at most %.1f %% full, nvme %.1f %%, folder %lld MiB, resident %lld "
      "MiB, %d faults\n",
      most.polls, 100 * most.dram, 100 * most.nvme, static_cast<long long>(most.folder >> 20),
      static_cast<long long>(most.resident_mib), g_faults);
  return g_faults == 0 ? 0 : 3;
}

}  // namespace
}  // namespace kvstow::testing

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fputs("usage: soak_watch TARGET METRICS_ADDRESS NVME_FOLDER DAEMON_PID\n", stderr);
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::signal(SIGTERM, [](int) { kvstow::testing::g_stop = 1; });
  return kvstow::testing::Watch({argv[1], argv[2], argv[3], std::atoi(argv[4])});
}
