// How the real daemon starts, refuses to start, and ends.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/daemon.h"
#include "tests/e2e/kv_data.h"
#include "tests/e2e/process.h"

namespace kvstow::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Runs kvstowd, which is expected to refuse; its output. Fails when it becomes ready instead.
CommandResult Refused(const TempFolder& folder, const std::vector<std::string>& flags) {
  std::vector<std::string> argv = {DaemonBinary(),
                                   "--listen.unix_socket=" + folder.path() + "/kvstow.sock"};
  argv.insert(argv.end(), flags.begin(), flags.end());
  ChildProcess child(argv);
  EXPECT_FALSE(child.WaitForOutput("ready ", absl::Seconds(20))) << child.output();
  const std::optional<int> status = child.WaitForExit(absl::Seconds(10));
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/kvstow.sock"));
  return {status.value_or(-1), child.output()};
}

void ExpectRefusal(const std::vector<std::string>& flags, const std::vector<std::string>& says) {
  const TempFolder folder;
  const CommandResult result = Refused(folder, flags);
  EXPECT_GT(result.status, 0) << result.output;
  EXPECT_LT(result.status, 128) << "ended by a signal: " << result.output;
  for (const std::string& text : says) EXPECT_THAT(result.output, HasSubstr(text)) << flags.back();
}

TEST(U19BadConfiguration, MisspeltFlagNamesItselfAndTheNearest) {
  ExpectRefusal({"--dram.capacty=64MiB"}, {"dram.capacty", "dram.capacity"});
}

TEST(U19BadConfiguration, UnknownFlagIsNamed) { ExpectRefusal({"--frobnicate=1"}, {"frobnicate"}); }

TEST(U19BadConfiguration, MisspeltFileKeyNamesItselfAndTheNearest) {
  const TempFolder folder;
  const std::string path = folder.path() + "/server.textproto";
  std::ofstream(path) << "dram { capacty: \"64MiB\" }\n";
  const CommandResult result = Refused(folder, {"--config=" + path});
  EXPECT_GT(result.status, 0);
  EXPECT_THAT(result.output, AllOf(HasSubstr(path), HasSubstr("capacty"), HasSubstr("capacity")));
}

TEST(U19BadConfiguration, DiskCapWithoutFolderIsRefused) {
  ExpectRefusal({"--nvme.path=", "--nvme.capacity=1GiB"}, {"nvme.path"});
}

TEST(U19BadConfiguration, CapWithBadUnitIsRefused) {
  ExpectRefusal({"--dram.capacity=64MoB"}, {"dram.capacity", "64MoB"});
}

TEST(U19BadConfiguration, NegativeLeaseIsRefused) {
  ExpectRefusal({"--leases.max_ttl=-5s"}, {"leases.max_ttl", "-5s"});
}

TEST(U19BadConfiguration, MissingFileIsNamed) {
  ExpectRefusal({"--config=/nonexistent/server.textproto"}, {"/nonexistent/server.textproto"});
}

TEST(U19BadConfiguration, UnknownCodecNamesTheNearest) {
  const CommandResult result =
      RunCommand({CliBinary(), "put", std::string(KVSTOW_TEST_DATA) + "/smollm2_kv.safetensors",
                  "--codec", "k=tqm4,v=tq44", "--target", "unix:/nonexistent.sock"});
  EXPECT_GT(result.status, 0);
  EXPECT_THAT(result.output, AllOf(HasSubstr("tq44"), HasSubstr("tq4")));
}

TEST(Startup, ConfigurationFileAndFlagsTogetherServe) {
  const TempFolder folder;
  const std::string path = folder.path() + "/server.textproto";
  std::ofstream(path) << "dram { capacity: \"1GiB\" }\n"
                      << "nvme { path: \"" << folder.path() << "/nvme\" capacity: \"128MiB\" }\n";
  Daemon daemon(folder, {.dram = "32MiB", .extra_flags = {"--config=" + path}});
  ASSERT_TRUE(daemon.Start()) << daemon.log();
  const v1::StatResponse stat = daemon.Stat();
  EXPECT_EQ(TierOf(stat, "dram").capacity_bytes(), 32u << 20) << "the flag wins over the file";
  EXPECT_EQ(TierOf(stat, "nvme").capacity_bytes(), 128u << 20);
}

TEST(Startup, PortInUseIsNamed) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  socklen_t size = sizeof(address);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string taken = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));

  ExpectRefusal({"--dram.capacity=16MiB", "--listen.tcp=" + taken}, {taken});
  ExpectRefusal({"--dram.capacity=16MiB", "--metrics.address=" + taken}, {taken});
  close(fd);
}

TEST(Startup, DirectoryWithoutWritePermissionIsNamed) {
  if (geteuid() == 0) {
    // Root may write anywhere, so a read-only place stands in.
    ExpectRefusal({"--dram.capacity=16MiB", "--nvme.path=/proc/kvstow", "--nvme.capacity=64MiB"},
                  {"/proc/kvstow"});
    return;
  }
  const TempFolder folder;
  const std::string path = folder.path() + "/locked";
  std::filesystem::create_directory(path);
  std::filesystem::permissions(path, std::filesystem::perms::owner_read);
  ExpectRefusal({"--dram.capacity=16MiB", "--nvme.path=" + path, "--nvme.capacity=64MiB"}, {path});
}

TEST(U15SecondDaemon, OnTheSameFolderRefusesAndNamesTheLock) {
  const TempFolder folder;
  Daemon first(folder, {.dram = "16MiB", .nvme = "64MiB"});
  ASSERT_TRUE(first.Start()) << first.log();
  const TempFolder other;
  const CommandResult result = Refused(
      other,
      {"--dram.capacity=16MiB", "--nvme.path=" + folder.path() + "/nvme", "--nvme.capacity=64MiB"});
  EXPECT_GT(result.status, 0);
  EXPECT_THAT(result.output, AllOf(HasSubstr(folder.path() + "/nvme"), HasSubstr("LOCK")));
  EXPECT_EQ(first.Stat().num_blocks(), 0u) << "the first one is untouched";
}

TEST(Startup, SecondDaemonOnTheSameSocketDoesNotTakeItAway) {
  const TempFolder folder;
  Daemon first(folder, {.dram = "16MiB"});
  ASSERT_TRUE(first.Start()) << first.log();
  Daemon second(folder, {.dram = "16MiB"});
  EXPECT_FALSE(second.Start());
  EXPECT_THAT(second.log(), HasSubstr("kvstow.sock"));
  const auto client = first.NewClient();
  EXPECT_TRUE(client->RegisterModel(SmallModel()).ok());
}

TEST(Startup, SocketLeftByAKilledDaemonIsTakenOver) {
  const TempFolder folder;
  Daemon daemon(folder, {.dram = "16MiB"});
  ASSERT_TRUE(daemon.Start()) << daemon.log();
  daemon.Kill();
  ASSERT_TRUE(std::filesystem::exists(folder.path() + "/kvstow.sock"));
  EXPECT_TRUE(daemon.Start()) << daemon.log();
}

TEST(Startup, SigtermEndsWithStatusZeroAndRemovesTheSocket) {
  const TempFolder folder;
  Daemon daemon(folder, {.dram = "16MiB", .nvme = "64MiB"});
  ASSERT_TRUE(daemon.Start()) << daemon.log();
  EXPECT_EQ(daemon.Terminate(), 0) << daemon.log();
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/kvstow.sock"));
}

TEST(Startup, ReadyLineNamesEveryAddress) {
  const TempFolder folder;
  Daemon daemon(
      folder, {.dram = "16MiB", .with_metrics = true, .extra_flags = {"--listen.tcp=127.0.0.1:0"}});
  ASSERT_TRUE(daemon.Start()) << daemon.log();
  const std::string log = daemon.log();
  EXPECT_THAT(log, AllOf(HasSubstr("unix=" + folder.path() + "/kvstow.sock"),
                         HasSubstr("tcp=127.0.0.1:"), HasSubstr("metrics=127.0.0.1:")));
  EXPECT_THAT(log, Not(HasSubstr("127.0.0.1:0 ")));
  EXPECT_THAT(daemon.MetricsPage(), HasSubstr("# TYPE kvstow_"));
}

TEST(Startup, HelpAndVersionEndWithStatusZero) {
  const CommandResult help = RunCommand({DaemonBinary(), "--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.output, AllOf(HasSubstr("--dram.capacity"), HasSubstr("--config")));
  const CommandResult version = RunCommand({DaemonBinary(), "--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_THAT(version.output, HasSubstr("0.1.0"));
}

}  // namespace
}  // namespace kvstow::testing
