#include "service/server_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "server_config.pb.h"

namespace kvstow {
namespace {

using ::testing::HasSubstr;

constexpr Machine kMachine = {.memory_bytes = int64_t{16} << 30, .num_cores = 2};

// The message a command line is refused with; "accepted" when it is not.
std::string Refusal(const std::vector<std::string>& args) {
  const absl::StatusOr<CommandLine> line = ParseCommandLine(args, kMachine);
  if (line.ok()) return "accepted";
  EXPECT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(line.status().message());
}

ServerOptions Accepted(const std::vector<std::string>& args) {
  const absl::StatusOr<CommandLine> line = ParseCommandLine(args, kMachine);
  EXPECT_TRUE(line.ok()) << line.status();
  return line.ok() ? line->options : ServerOptions();
}

std::string FileRefusal(std::string_view text) {
  v1::ServerConfig config = DefaultConfig(kMachine);
  absl::Status status = MergeConfigText(text, "f", config);
  if (status.ok()) status = OptionsFromConfig(config, kMachine).status();
  return status.ok() ? "accepted" : std::string(status.message());
}

class TempFile {
 public:
  explicit TempFile(const std::string& text) {
    char name[] = "/tmp/kvstow_config_XXXXXX";
    const int fd = mkstemp(name);
    path_ = name;
    std::ofstream(path_) << text;
    close(fd);
  }
  ~TempFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(ServerConfig, DefaultsAreThoseOfTheStructs) {
  const ServerOptions from_nothing = Accepted({});
  const ServerOptions fresh;
  EXPECT_EQ(from_nothing.unix_socket, fresh.unix_socket);
  EXPECT_EQ(from_nothing.tcp, fresh.tcp);
  EXPECT_EQ(from_nothing.metrics_address, fresh.metrics_address);
  EXPECT_EQ(from_nothing.drain_timeout, fresh.drain_timeout);
  EXPECT_EQ(from_nothing.log_level, fresh.log_level);
  EXPECT_EQ(from_nothing.store.dram_bytes, fresh.store.dram_bytes);
  EXPECT_EQ(from_nothing.store.dram_headroom_bytes, fresh.store.dram_bytes / 128);
  EXPECT_EQ(from_nothing.store.policy, fresh.store.policy);
  EXPECT_EQ(from_nothing.guard_derives, fresh.guard_derives);
  EXPECT_EQ(from_nothing.store.hbm_bytes, 0);
  EXPECT_EQ(from_nothing.store.turn_gap, fresh.store.turn_gap);
  EXPECT_EQ(from_nothing.store.block_ttl, fresh.store.block_ttl);
  EXPECT_EQ(from_nothing.store.disk_admission, fresh.store.disk_admission);
  EXPECT_EQ(from_nothing.store.disk_write_bytes_per_day, fresh.store.disk_write_bytes_per_day);
  EXPECT_EQ(from_nothing.store.nvme_path, fresh.store.nvme_path);
  EXPECT_EQ(from_nothing.store.nvme_bytes, fresh.store.nvme_bytes);
  EXPECT_EQ(from_nothing.store.write_behind_bytes_max, fresh.store.write_behind_bytes_max);
  EXPECT_EQ(from_nothing.store.write_deadline, fresh.store.write_deadline);
  EXPECT_EQ(from_nothing.store.reuse_delay, fresh.store.reuse_delay);
  EXPECT_EQ(from_nothing.store.lease_max, fresh.store.lease_max);
  EXPECT_EQ(from_nothing.store.leases_max, fresh.store.leases_max);
  EXPECT_EQ(from_nothing.store.tickets_max, fresh.store.tickets_max);
  EXPECT_EQ(from_nothing.store.blocks_max, fresh.store.blocks_max);
  EXPECT_EQ(from_nothing.limits.worker_threads, kMachine.num_cores);
  EXPECT_EQ(from_nothing.limits.queue_max, fresh.limits.queue_max);
  EXPECT_EQ(from_nothing.limits.calls_in_flight_max, fresh.limits.calls_in_flight_max);
  EXPECT_EQ(from_nothing.limits.bytes_in_flight_max, fresh.limits.bytes_in_flight_max);
}

// Every field by its flag, each to a value that is not the default.
TEST(ServerConfig, EveryFlagReachesItsOption) {
  const ServerOptions options = Accepted({"--listen.unix_socket=/run/k.sock",
                                          "--listen.tcp",
                                          "127.0.0.1:7070",
                                          "--dram.capacity=2GiB",
                                          "--dram.headroom=18MiB",
                                          "--nvme.path=/data",
                                          "--nvme.capacity=3GiB",
                                          "--nvme.admission=second-sight",
                                          "--nvme.writes_per_day=19GiB",
                                          "--policy.name=hazard",
                                          "--policy.turn_gap=20s",
                                          "--guard.mode=off",
                                          "--hbm.capacity=5GiB",
                                          "--policy.ttl=21h",
                                          "--nvme.write_behind_max=64MiB",
                                          "--tickets.write_deadline=7s",
                                          "--tickets.reuse_delay=8s",
                                          "--tickets.max=9",
                                          "--leases.max_ttl=10s",
                                          "--leases.max=11",
                                          "--limits.worker_threads=12",
                                          "--limits.queue=13",
                                          "--limits.calls_in_flight=14",
                                          "--limits.bytes_in_flight=17MiB",
                                          "--limits.blocks=16",
                                          "--metrics.address=127.0.0.1:9400",
                                          "--log.level=error",
                                          "--drain_timeout=17s"});
  EXPECT_EQ(options.unix_socket, "/run/k.sock");
  EXPECT_EQ(options.tcp, "127.0.0.1:7070");
  EXPECT_EQ(options.store.dram_bytes, int64_t{2} << 30);
  EXPECT_EQ(options.store.dram_headroom_bytes, int64_t{18} << 20);
  EXPECT_EQ(options.store.disk_admission, DiskAdmission::kSecondSight);
  EXPECT_EQ(options.store.disk_write_bytes_per_day, int64_t{19} << 30);
  EXPECT_EQ(options.store.policy, "hazard");
  EXPECT_FALSE(options.guard_derives);
  EXPECT_EQ(options.store.hbm_bytes, int64_t{5} << 30);
  EXPECT_EQ(options.store.turn_gap, absl::Seconds(20));
  EXPECT_EQ(options.store.block_ttl, absl::Hours(21));
  EXPECT_EQ(options.store.nvme_path, "/data");
  EXPECT_EQ(options.store.nvme_bytes, int64_t{3} << 30);
  EXPECT_EQ(options.store.write_behind_bytes_max, int64_t{64} << 20);
  EXPECT_EQ(options.store.write_deadline, absl::Seconds(7));
  EXPECT_EQ(options.store.reuse_delay, absl::Seconds(8));
  EXPECT_EQ(options.store.tickets_max, 9);
  EXPECT_EQ(options.store.lease_max, absl::Seconds(10));
  EXPECT_EQ(options.store.leases_max, 11);
  EXPECT_EQ(options.limits.worker_threads, 12);
  EXPECT_EQ(options.limits.queue_max, 13);
  EXPECT_EQ(options.limits.calls_in_flight_max, 14);
  EXPECT_EQ(options.limits.bytes_in_flight_max, int64_t{17} << 20);
  EXPECT_EQ(options.store.blocks_max, 16);
  EXPECT_EQ(options.metrics_address, "127.0.0.1:9400");
  EXPECT_EQ(options.log_level, Severity::kError);
  EXPECT_EQ(options.drain_timeout, absl::Seconds(17));
}

// The index refuses blocks at its limit, so the limit must come before the end of the memory.
TEST(ServerConfig, TheIndexFitsBesideTheMemoryTierUnlessToldOtherwise) {
  EXPECT_EQ(Accepted({}).store.blocks_max, 10'000'000);
  // 1 GiB is left, of which half: 1,073,741 blocks of 500 bytes, or fewer of more.
  EXPECT_EQ(Accepted({"--dram.capacity=15GiB"}).store.blocks_max, 1'073'741);
  EXPECT_EQ(Accepted({"--dram.capacity=15GiB", "--nvme.path=/d"}).store.blocks_max, 894'784);
  EXPECT_EQ(Accepted({"--dram.capacity=15GiB", "--nvme.path=/d", "--hbm.capacity=1GiB",
                      "--policy.name=arc"})
                .store.blocks_max,
            335'544);
  EXPECT_EQ(Accepted({"--dram.capacity=16GiB"}).store.blocks_max, 100'000);
  EXPECT_EQ(Accepted({"--dram.capacity=15GiB", "--limits.blocks=2000000"}).store.blocks_max,
            2'000'000);
}

TEST(ServerConfig, FlagsWinOverTheFileWhereverItStands) {
  const TempFile file("dram { capacity: \"4GiB\" }\ntickets { max: 5 }\n# a comment\n");
  const ServerOptions options =
      Accepted({"--dram.capacity=2GiB", absl::StrCat("--config=", file.path())});
  EXPECT_EQ(options.store.dram_bytes, int64_t{2} << 30);
  EXPECT_EQ(options.store.tickets_max, 5);
  EXPECT_EQ(options.unix_socket, "/tmp/kvstow.sock");  // untouched: the default
}

TEST(ServerConfig, FileMayTurnAListenerOff) {
  const TempFile file("listen { unix_socket: \"\" tcp: \"127.0.0.1:0\" }");
  EXPECT_EQ(Accepted({"--config", file.path()}).unix_socket, "");
}

TEST(ServerConfig, EmptyFileIsTheDefaults) {
  const TempFile file("");
  EXPECT_EQ(Accepted({"--config", file.path()}).store.dram_bytes, int64_t{1} << 30);
}

TEST(ServerConfig, MissingFileIsNamed) {
  const auto line = ParseCommandLine({"--config=/nonexistent/kvstowd.textproto"}, kMachine);
  EXPECT_EQ(line.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(line.status().message(), "config file /nonexistent/kvstowd.textproto cannot be read");
}

TEST(ServerConfig, DirectoryAsFileIsRefused) {
  EXPECT_EQ(ParseCommandLine({"--config=/tmp"}, kMachine).status().message(),
            "config file /tmp cannot be read");
}

TEST(ServerConfig, HelpListsEveryFieldWithDefaultAndExample) {
  const std::string help = HelpText(kMachine);
  const std::vector<std::string> names = ConfigFieldNames();
  EXPECT_EQ(names.size(), 35u);
  for (const std::string& name : names) EXPECT_THAT(help, HasSubstr("--" + name + "="));
  EXPECT_THAT(help, HasSubstr("--dram.capacity=8GiB\n      bytes of the memory tier, populated at "
                              "start (default: 1GiB)\n"));
  EXPECT_THAT(help, HasSubstr("(default: one per core, 2 here)"));
}

// The example of a field is a value that the field takes.
TEST(ServerConfig, ExamplesInHelpAreAccepted) {
  const std::string help = HelpText(kMachine);
  for (const std::string& name : ConfigFieldNames()) {
    const size_t begin = help.find("  --" + name + "=") + 2;
    const std::string flag = help.substr(begin, help.find('\n', begin) - begin);
    EXPECT_EQ(Refusal(name == "nvme.path" ? std::vector<std::string>{flag}
                                          : std::vector<std::string>{flag, "--nvme.path=/data"}),
              "accepted")
        << flag;
  }
}

TEST(ServerConfig, HelpAndVersionWinOverOtherFlags) {
  EXPECT_EQ(ParseCommandLine({"--help"}, kMachine)->action, CommandLine::Action::kHelp);
  EXPECT_EQ(ParseCommandLine({"-h"}, kMachine)->action, CommandLine::Action::kHelp);
  EXPECT_EQ(ParseCommandLine({"--version", "--dram.capacity=0"}, kMachine)->action,
            CommandLine::Action::kVersion);
}

struct RefusedLine {
  std::vector<std::string> args;
  std::string text;
};

TEST(ServerConfig, RefusesWrongFlagsByName) {
  const std::vector<RefusedLine> cases = {
      {{"--dram.capactiy=1GiB"}, "unknown flag --dram.capactiy; did you mean --dram.capacity?"},
      {{"--dram.capactiy", "1GiB"}, "unknown flag --dram.capactiy; did you mean --dram.capacity?"},
      {{"--listen.unix-socket=/x"},
       "unknown flag --listen.unix-socket; did you mean --listen.unix_socket?"},
      {{"--confg=x"}, "unknown flag --confg; did you mean --config?"},
      {{"--zzzzzzzzzzzzzzzzzzzz"}, "unknown flag --zzzzzzzzzzzzzzzzzzzz; kvstowd --help lists all"},
      {{"--dram"}, "unknown flag --dram; kvstowd --help lists all"},
      {{"serve"}, "unexpected argument \"serve\": flags look like --dram.capacity=8GiB"},
      {{"-d"}, "unexpected argument \"-d\": flags look like --dram.capacity=8GiB"},
      {{"--"}, "unexpected argument \"--\": flags look like --dram.capacity=8GiB"},
      {{"--dram.capacity"}, "flag --dram.capacity needs a value, for example --dram.capacity=8GiB"},
      {{"--dram.capacity", "--log.level=info"},
       "flag --dram.capacity needs a value, for example --dram.capacity=8GiB"},
      {{"--config"},
       "flag --config needs a value, for example --config=/etc/kvstow/kvstowd.textproto"},
      {{"--help=yes"}, "flag --help takes no value"},
      {{"--tickets.max=1", "--tickets.max=2"}, "flag --tickets.max is given twice"},
      {{"--tickets.max=many"}, "tickets.max: \"many\" is not a whole number"},
      {{"--tickets.max=-1"}, "tickets.max: \"-1\" is not a whole number"},
      {{"--tickets.max=4294967296"}, "tickets.max: \"4294967296\" is not a whole number"},
  };
  for (const RefusedLine& c : cases) EXPECT_EQ(Refusal(c.args), c.text);
}

TEST(ServerConfig, RefusesMoreBlocksThanFitAndSaysWhatEachTakes) {
  const std::vector<RefusedLine> cases = {
      {{"--dram.capacity=3GiB", "--limits.blocks=27917288"},
       "limits.blocks is 27917288, want 1 to 27917287: index, policy and tiers take 500 bytes of "
       "each in the 13 GiB that dram.capacity leaves"},
      {{"--dram.capacity=3GiB", "--nvme.path=/d", "--policy.name=s3fifo",
        "--limits.blocks=11632204"},
       "limits.blocks is 11632204, want 1 to 11632203: index, policy and tiers take 1200 bytes of "
       "each in the 13 GiB that dram.capacity leaves"}};
  for (const RefusedLine& c : cases) EXPECT_EQ(Refusal(c.args), c.text);
}

TEST(ServerConfig, RefusesWrongValuesByField) {
  const std::string units = " is not a number with a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB)";
  const std::string durations =
      " is not a positive number with a unit (ms, s, m, h), for example 30s";
  const std::string address =
      ", want HOST:PORT with a port of 0 to 65535, for example 127.0.0.1:7070";
  const std::vector<RefusedLine> cases = {
      {{"--dram.capacity=8Gib"}, "dram.capacity: size \"8Gib\"" + units},
      {{"--dram.capacity="}, "dram.capacity: size \"\"" + units},
      {{"--dram.capacity=-1GiB"}, "dram.capacity: size \"-1GiB\"" + units},
      {{"--dram.capacity=0"}, "dram.capacity is 0 B, want 1 MiB to 16 GiB"},
      {{"--dram.capacity=17GiB"},
       "dram.capacity is 17 GiB, want at most the machine's memory of 16 GiB"},
      {{"--nvme.capacity=1GiB"},
       "nvme.capacity is 1GiB but nvme.path is empty: set nvme.path or leave nvme.capacity out"},
      {{"--nvme.write_behind_max=1GiB"},
       "nvme.write_behind_max is 1GiB but nvme.path is empty: set nvme.path or leave "
       "nvme.write_behind_max out"},
      {{"--nvme.path=/d", "--nvme.capacity=5XB"}, "nvme.capacity: size \"5XB\"" + units},
      {{"--nvme.path=/d", "--nvme.capacity=0"}, "nvme.capacity is 0 B, want 1 MiB to 1.02e+03 TiB"},
      {{"--nvme.path=/d", "--nvme.write_behind_max=0"},
       "nvme.write_behind_max is 0 B, want 1 MiB to 1.02e+03 TiB"},
      {{"--tickets.write_deadline=30"}, "tickets.write_deadline: duration \"30\"" + durations},
      {{"--tickets.write_deadline=0"}, "tickets.write_deadline is 0, want 10ms to 1h"},
      {{"--tickets.reuse_delay=2h"}, "tickets.reuse_delay is 2h, want 0 to 1h"},
      {{"--tickets.max=0"}, "tickets.max is 0, want 1 to 16777216"},
      {{"--leases.max_ttl=-5s"}, "leases.max_ttl: duration \"-5s\"" + durations},
      {{"--leases.max_ttl=25h"}, "leases.max_ttl is 25h, want 1ms to 24h"},
      {{"--leases.max=0"}, "leases.max is 0, want 1 to 16777216"},
      {{"--limits.worker_threads=0"}, "limits.worker_threads is 0, want 1 to 1024"},
      {{"--limits.worker_threads=4294967295"},
       "limits.worker_threads is 2147483647, want 1 to 1024"},
      {{"--limits.queue=0"}, "limits.queue is 0, want 1 to 1048576"},
      {{"--limits.calls_in_flight=0"}, "limits.calls_in_flight is 0, want 1 to 65536"},
      {{"--limits.bytes_in_flight=1MiB"}, "limits.bytes_in_flight is 1 MiB, want 16 MiB to 16 GiB"},
      {{"--limits.blocks=0"}, "limits.blocks is 0, want 1 to 4294967296"},
      {{"--metrics.address=9400"}, "metrics.address is \"9400\"" + address},
      {{"--metrics.address=localhost:"}, "metrics.address is \"localhost:\"" + address},
      {{"--listen.tcp=:7070"}, "listen.tcp is \":7070\"" + address},
      {{"--listen.tcp=localhost:65536"}, "listen.tcp is \"localhost:65536\"" + address},
      {{"--listen.tcp=localhost:+1"}, "listen.tcp is \"localhost:+1\"" + address},
      {{"--listen.tcp=h:1", "--metrics.address=h:1"},
       "metrics.address and listen.tcp are both h:1, want two addresses"},
      {{"--listen.unix_socket="},
       "nothing to listen on: listen.unix_socket and listen.tcp are both empty"},
      {{"--listen.unix_socket=" + std::string(108, 'x')},
       "listen.unix_socket is 108 bytes, want at most 107 bytes"},
      {{"--log.level=loud"}, "log.level is \"loud\", want debug, info, warning or error"},
      {{"--log.level=warnin"},
       "log.level is \"warnin\", want debug, info, warning or error; did you mean warning?"},
      {{"--drain_timeout=2h"}, "drain_timeout is 2h, want 0 to 1h"},
  };
  for (const RefusedLine& c : cases) {
    EXPECT_EQ(Refusal(c.args), c.text) << ::testing::PrintToString(c.args);
  }
}

TEST(ServerConfig, RefusesWrongPoliciesByFieldAndNamesTheNearest) {
  const std::vector<RefusedLine> cases = {
      {{"--hbm.capacity=512KiB"}, "hbm.capacity is 512 KiB, want 1 MiB to 16 TiB"},
      {{"--dram.capacity=4MiB", "--dram.headroom=3MiB"},
       "dram.headroom is 3 MiB, want 0 B to 2 MiB"},
      {{"--guard.mode=offf"}, "guard.mode is \"offf\", want on or off; did you mean off?"},
      {{"--policy.name=rvt"},
       "policy.name is \"rvt\", want lru, s3fifo, arc, gdsf, hazard or rtv; did you mean rtv?"},
      {{"--policy.name=belady"},
       "policy.name is \"belady\", want lru, s3fifo, arc, gdsf, hazard or rtv"},
      {{"--policy.turn_gap=2h"}, "policy.turn_gap is 2h, want 0 to 1h"},
      {{"--policy.ttl=10ms"}, "policy.ttl is 10ms, want 1s to 8760h"},
      {{"--nvme.path=/d", "--nvme.admission=second-site"},
       "nvme.admission is \"second-site\", want all or second-sight; did you mean second-sight?"},
      {{"--nvme.admission=all"},
       "nvme.admission is all but nvme.path is empty: set nvme.path or leave nvme.admission out"},
      {{"--nvme.writes_per_day=1GiB"},
       "nvme.writes_per_day is 1GiB but nvme.path is empty: set nvme.path or leave "
       "nvme.writes_per_day out"},
  };
  for (const RefusedLine& c : cases) {
    EXPECT_EQ(Refusal(c.args), c.text) << ::testing::PrintToString(c.args);
  }
}

TEST(ServerConfig, FileRefusesUnknownKeysWithPlaceAndNearestName) {
  EXPECT_EQ(FileRefusal("dram {\n  capactiy: \"1GiB\"\n}"),
            "config f:2: unknown key \"dram.capactiy\"; did you mean dram.capacity?");
  EXPECT_EQ(FileRefusal("drm { capacity: \"1GiB\" }"),
            "config f:1: unknown key \"drm\"; did you mean dram?");
  EXPECT_EQ(FileRefusal("drain_timeuot: \"1s\""),
            "config f:1: unknown key \"drain_timeuot\"; did you mean drain_timeout?");
  EXPECT_EQ(FileRefusal("leases { zzzzzzzzzzzzz: 1 }"),
            "config f:1: unknown key \"leases.zzzzzzzzzzzzz\"; kvstowd --help lists all");
}

TEST(ServerConfig, FileRefusesWrongTypesRepeatsAndSyntax) {
  EXPECT_THAT(FileRefusal("tickets { max: \"5\" }"), HasSubstr("config f:1: "));
  EXPECT_THAT(FileRefusal("tickets { max: -5 }"), HasSubstr("config f:1: "));
  EXPECT_THAT(FileRefusal("tickets { max: 1 max: 2 }"), HasSubstr("\"max\" is specified multiple"));
  EXPECT_THAT(FileRefusal("dram { capacity: "), HasSubstr("config f:1: "));
  EXPECT_EQ(FileRefusal("nvme { capacity: \"1GiB\" }"),
            "nvme.capacity is 1GiB but nvme.path is empty: set nvme.path or leave nvme.capacity "
            "out");
}

TEST(ServerConfig, ThisMachineHasCoresAndMemory) {
  const Machine machine = ThisMachine();
  EXPECT_GE(machine.num_cores, 1);
  EXPECT_GT(machine.memory_bytes, int64_t{64} << 20);
  EXPECT_LT(machine.memory_bytes, int64_t{1} << 50);
}

}  // namespace
}  // namespace kvstow
