// Configuration against any bytes: no crash, and what is accepted keeps to its ranges.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server_config.pb.h"
#include "service/server_config.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::Rng;

constexpr uint64_t kSeed = 20261130;
constexpr Machine kMachine = {.memory_bytes = int64_t{16} << 30, .num_cores = 2};

void ExpectInRange(const ServerOptions& options, const std::string& input) {
  EXPECT_GE(options.store.dram_bytes, int64_t{1} << 20) << input;
  EXPECT_LE(options.store.dram_bytes, kMachine.memory_bytes) << input;
  EXPECT_GT(options.store.write_deadline, absl::ZeroDuration()) << input;
  EXPECT_GT(options.store.tickets_max, 0) << input;
  EXPECT_GT(options.limits.queue_max, 0) << input;
  EXPECT_FALSE(options.unix_socket.empty() && options.tcp.empty()) << input;
}

// One to three bytes changed, dropped or repeated.
std::string Mutate(std::string text, Rng& rng) {
  const uint64_t num_changes = 1 + rng.Below(3);
  for (uint64_t i = 0; i < num_changes && !text.empty(); ++i) {
    const size_t at = rng.Below(text.size());
    switch (rng.Below(3)) {
      case 0:
        text[at] = static_cast<char>(rng.Next());
        break;
      case 1:
        text.erase(at, 1 + rng.Below(4));
        break;
      default:
        text.insert(at, text.substr(at, 1 + rng.Below(8)));
    }
  }
  return text;
}

TEST(ConfigFuzz, FilesOfAnyBytesAreRefusedOrInRange) {
  const std::string good =
      "listen { unix_socket: \"/run/k.sock\" tcp: \"127.0.0.1:0\" }\n"
      "dram { capacity: \"2GiB\" } nvme { path: \"/d\" capacity: \"8GiB\" }\n"
      "tickets { write_deadline: \"30s\" max: 100 } leases { max_ttl: \"1m\" max: 7 }\n"
      "limits { worker_threads: 2 queue: 10 bytes_in_flight: \"64MiB\" blocks: 1000 }\n"
      "log { level: \"info\" } drain_timeout: \"10s\"\n";
  Rng rng(kSeed);
  int num_accepted = 0;
  for (int i = 0; i < 5000; ++i) {
    const std::string text = i == 0 ? good : Mutate(good, rng);
    v1::ServerConfig config = DefaultConfig(kMachine);
    absl::Status status = MergeConfigText(text, "fuzz", config);
    if (status.ok()) {
      const absl::StatusOr<ServerOptions> options = OptionsFromConfig(config, kMachine);
      status = options.status();
      if (options.ok()) {
        ExpectInRange(*options, text);
        ++num_accepted;
      }
    }
    EXPECT_TRUE(status.ok() || !status.message().empty()) << text;
  }
  EXPECT_GT(num_accepted, 0) << "seed " << kSeed;
  EXPECT_LT(num_accepted, 5000) << "seed " << kSeed;
}

TEST(ConfigFuzz, FlagsOfAnyBytesAreRefusedOrInRange) {
  const std::vector<std::string> names = ConfigFieldNames();
  const std::vector<std::string> values = {"1GiB", "30s", "17", "127.0.0.1:0", "info", "", "/d"};
  Rng rng(kSeed);
  int num_accepted = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string flag =
        absl::StrCat("--", names[rng.Below(names.size())], "=", values[rng.Below(values.size())]);
    if (i % 2 == 1) flag = Mutate(flag, rng);
    const absl::StatusOr<CommandLine> line = ParseCommandLine({flag}, kMachine);
    if (!line.ok()) {
      EXPECT_FALSE(line.status().message().empty()) << flag;
    } else if (line->action == CommandLine::Action::kServe) {
      ExpectInRange(line->options, flag);
      ++num_accepted;
    }
  }
  EXPECT_GT(num_accepted, 0) << "seed " << kSeed;
  EXPECT_LT(num_accepted, 5000) << "seed " << kSeed;
}

}  // namespace
}  // namespace kvstow
