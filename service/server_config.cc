#include "service/server_config.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "server_config.pb.h"
#include "storage/policy/policy.h"

namespace kvstow {
namespace {

// sockaddr_un::sun_path has 108 bytes, the last of which is a zero.
constexpr size_t kUnixPathBytesMax = 107;
constexpr int64_t kDramBytesMin = int64_t{1} << 20;
constexpr int64_t kHbmBytesMax = int64_t{1} << 44;  // what there is says the device
constexpr int64_t kNvmeBytesMin = int64_t{1} << 20;
constexpr int64_t kNvmeBytesMax = int64_t{1} << 50;
// A data call holds 8 MiB of its own, and the blocks that it reads.
constexpr int64_t kInFlightBytesMin = int64_t{16} << 20;
constexpr int64_t kDefaultNvmeBytes = int64_t{8} << 30;
constexpr int64_t kDefaultWriteBehindBytes = int64_t{256} << 20;

constexpr std::array<std::pair<std::string_view, Severity>, 4> kLogLevels = {{
    {"debug", Severity::kDebug},
    {"info", Severity::kInfo},
    {"warning", Severity::kWarning},
    {"error", Severity::kError},
}};

absl::Status BadField(std::string_view field, std::string_view found, std::string_view want) {
  return absl::InvalidArgumentError(
      absl::StrCat(ToAbsl(field), " is ", ToAbsl(found), ", want ", ToAbsl(want)));
}

absl::Status CheckCount(std::string_view field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return BadField(field, absl::StrCat(value), absl::StrCat(min, " to ", max));
}

absl::Status CheckBytes(std::string_view field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return BadField(field, FormatBytes(value),
                  absl::StrCat(FormatBytes(min), " to ", FormatBytes(max)));
}

absl::Status CheckDuration(std::string_view field, absl::Duration value, absl::Duration min,
                           absl::Duration max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return BadField(field, absl::FormatDuration(value),
                  absl::StrCat(absl::FormatDuration(min), " to ", absl::FormatDuration(max)));
}

// "HOST:PORT" with a port of 0 to 65535. The host may be a name, an address or "[v6]".
absl::Status CheckHostPort(std::string_view field, const std::string& address) {
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  const bool is_good = colon != std::string::npos && colon > 0 && colon + 1 < address.size() &&
                       address.size() - colon <= 6 &&
                       address.find_first_not_of("0123456789", colon + 1) == std::string::npos &&
                       absl::SimpleAtoi(address.substr(colon + 1), &port) && port <= 65535;
  if (is_good) return absl::OkStatus();
  return BadField(field, absl::StrCat("\"", address, "\""),
                  "HOST:PORT with a port of 0 to 65535, for example 127.0.0.1:7070");
}

// One value of the message and the name it is reported under.
struct TextField {
  std::string_view name;
  const std::string& text;
};

absl::Status ReadBytes(const TextField& field, int64_t& bytes) {
  absl::StatusOr<int64_t> parsed = ParseBytes(field.text);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToAbsl(field.name), ": ", parsed.status().message()));
  }
  bytes = *parsed;
  return absl::OkStatus();
}

absl::Status ReadDuration(const TextField& field, absl::Duration& duration) {
  absl::StatusOr<absl::Duration> parsed = ParseDuration(field.text);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(ToAbsl(field.name), ": ", parsed.status().message()));
  }
  duration = *parsed;
  return absl::OkStatus();
}

// uint32 and uint64 fields go into signed members: out of range is caught by Validate.
int32_t ClampToInt32(uint64_t value) {
  return static_cast<int32_t>(std::min<uint64_t>(value, std::numeric_limits<int32_t>::max()));
}

absl::Status ReadLogLevel(const std::string& text, Severity& level) {
  std::vector<std::string> names;
  for (const auto& [name, severity] : kLogLevels) {
    if (name == text) {
      level = severity;
      return absl::OkStatus();
    }
    names.emplace_back(name);
  }
  const std::string nearest = NearestName(text, names);
  return absl::InvalidArgumentError(
      absl::StrCat("log.level is \"", text, "\", want debug, info, warning or error",
                   nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?")));
}

// One of `known`; else the error names them and the nearest.
absl::Status CheckName(const TextField& field, const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), field.text) != known.end()) return absl::OkStatus();
  std::string all;
  for (size_t i = 0; i < known.size(); ++i) {
    absl::StrAppend(&all, i == 0 ? "" : i + 1 == known.size() ? " or " : ", ", known[i]);
  }
  const std::string nearest = NearestName(field.text, known);
  return absl::InvalidArgumentError(
      absl::StrCat(ToAbsl(field.name), " is \"", field.text, "\", want ", all,
                   nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?")));
}

absl::Status ReadPolicy(const v1::PolicyConfig& config, StoreOptions& store) {
  std::vector<std::string> known;
  for (const policy::PolicyKind& kind : policy::AllPolicies()) {
    if (!kind.is_oracle) known.emplace_back(kind.name);
  }
  KVSTOW_RETURN_IF_ERROR(CheckName({"policy.name", config.name()}, known));
  store.policy = config.name();
  if (!config.ttl().empty()) {
    KVSTOW_RETURN_IF_ERROR(ReadDuration({"policy.ttl", config.ttl()}, store.block_ttl));
    KVSTOW_RETURN_IF_ERROR(
        CheckDuration("policy.ttl", store.block_ttl, absl::Seconds(1), absl::Hours(24 * 365)));
  }
  return ReadDuration({"policy.turn_gap", config.turn_gap()}, store.turn_gap);
}

absl::Status ReadAdmission(const v1::NvmeConfig& nvme, StoreOptions& store) {
  if (nvme.admission().empty()) return absl::OkStatus();
  KVSTOW_RETURN_IF_ERROR(CheckName({"nvme.admission", nvme.admission()}, {"all", "second-sight"}));
  if (nvme.path().empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("nvme.admission is ", nvme.admission(),
                     " but nvme.path is empty: set nvme.path or leave nvme.admission out"));
  }
  store.disk_admission =
      nvme.admission() == "all" ? DiskAdmission::kAll : DiskAdmission::kSecondSight;
  return absl::OkStatus();
}

// Empty capacities mean "the default, if there is a disk tier at all": so a capacity without a path
// can be told from the default and refused.
absl::Status ReadNvme(const v1::NvmeConfig& nvme, StoreOptions& store) {
  store.nvme_path = nvme.path();
  KVSTOW_RETURN_IF_ERROR(ReadAdmission(nvme, store));
  store.nvme_bytes = kDefaultNvmeBytes;
  store.write_behind_bytes_max = kDefaultWriteBehindBytes;
  for (const auto& [name, text, bytes] :
       {std::tuple("nvme.capacity", &nvme.capacity(), &store.nvme_bytes),
        std::tuple("nvme.write_behind_max", &nvme.write_behind_max(),
                   &store.write_behind_bytes_max),
        std::tuple("nvme.writes_per_day", &nvme.writes_per_day(),
                   &store.disk_write_bytes_per_day)}) {
    if (text->empty()) continue;
    KVSTOW_RETURN_IF_ERROR(ReadBytes({name, *text}, *bytes));
    if (nvme.path().empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, " is ", *text, " but nvme.path is empty: set nvme.path or leave ", name, " out"));
    }
  }
  return absl::OkStatus();
}

// Lower of the machine's memory and our control group's limit (version 2, then version 1).
int64_t MemoryLimitBytes() {
  struct sysinfo info = {};
  int64_t bytes = std::numeric_limits<int64_t>::max();
  if (sysinfo(&info) == 0) bytes = static_cast<int64_t>(info.totalram) * info.mem_unit;
  for (const char* file :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream in(file);
    int64_t limit = 0;
    if (in >> limit && limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

absl::Status CheckAddresses(const ServerOptions& options) {
  if (options.unix_socket.empty() && options.tcp.empty()) {
    return absl::InvalidArgumentError(
        "nothing to listen on: listen.unix_socket and listen.tcp are both empty");
  }
  if (options.unix_socket.size() > kUnixPathBytesMax) {
    return BadField("listen.unix_socket", absl::StrCat(options.unix_socket.size(), " bytes"),
                    absl::StrCat("at most ", kUnixPathBytesMax, " bytes"));
  }
  if (!options.tcp.empty()) KVSTOW_RETURN_IF_ERROR(CheckHostPort("listen.tcp", options.tcp));
  if (options.metrics_address.empty()) return absl::OkStatus();
  KVSTOW_RETURN_IF_ERROR(CheckHostPort("metrics.address", options.metrics_address));
  if (options.metrics_address == options.tcp && !options.tcp.ends_with(":0")) {
    return absl::InvalidArgumentError(absl::StrCat("metrics.address and listen.tcp are both ",
                                                   options.tcp, ", want two addresses"));
  }
  return absl::OkStatus();
}

// Blocks that can be known beside the memory tier: the index refuses at its limit, before the
// machine has no memory left. Small numbers always do.
int64_t BlocksThatFit(const StoreOptions& store, const Machine& machine) {
  constexpr int64_t kAlways = 200'000;
  return std::max(kAlways, (machine.memory_bytes - store.dram_bytes) / store.BytesPerBlock());
}

absl::Status CheckStore(const StoreOptions& store, const Machine& machine) {
  if (store.dram_bytes > machine.memory_bytes) {
    return BadField(
        "dram.capacity", FormatBytes(store.dram_bytes),
        absl::StrCat("at most the machine's memory of ", FormatBytes(machine.memory_bytes)));
  }
  KVSTOW_RETURN_IF_ERROR(
      CheckBytes("dram.capacity", store.dram_bytes, kDramBytesMin, machine.memory_bytes));
  if (store.hbm_bytes != 0) {
    KVSTOW_RETURN_IF_ERROR(
        CheckBytes("hbm.capacity", store.hbm_bytes, kDramBytesMin, kHbmBytesMax));
  }
  KVSTOW_RETURN_IF_ERROR(
      CheckBytes("dram.headroom", store.dram_headroom_bytes, 0, store.dram_bytes / 2));
  KVSTOW_RETURN_IF_ERROR(
      CheckDuration("policy.turn_gap", store.turn_gap, absl::ZeroDuration(), absl::Hours(1)));
  KVSTOW_RETURN_IF_ERROR(
      CheckBytes("nvme.capacity", store.nvme_bytes, kNvmeBytesMin, kNvmeBytesMax));
  KVSTOW_RETURN_IF_ERROR(CheckBytes("nvme.write_behind_max", store.write_behind_bytes_max,
                                    kDramBytesMin, kNvmeBytesMax));
  KVSTOW_RETURN_IF_ERROR(CheckDuration("tickets.write_deadline", store.write_deadline,
                                       absl::Milliseconds(10), absl::Hours(1)));
  KVSTOW_RETURN_IF_ERROR(CheckDuration("tickets.reuse_delay", store.reuse_delay,
                                       absl::ZeroDuration(), absl::Hours(1)));
  KVSTOW_RETURN_IF_ERROR(CheckCount("tickets.max", store.tickets_max, 1, 1 << 24));
  KVSTOW_RETURN_IF_ERROR(
      CheckDuration("leases.max_ttl", store.lease_max, absl::Milliseconds(1), absl::Hours(24)));
  KVSTOW_RETURN_IF_ERROR(CheckCount("leases.max", store.leases_max, 1, 1 << 24));
  const int64_t blocks_fit = BlocksThatFit(store, machine);
  if (store.blocks_max > blocks_fit) {
    return BadField(
        "limits.blocks", absl::StrCat(store.blocks_max),
        absl::StrCat("1 to ", blocks_fit, ": index, policy and tiers take ", store.BytesPerBlock(),
                     " bytes of each in the ", FormatBytes(machine.memory_bytes - store.dram_bytes),
                     " that dram.capacity leaves"));
  }
  return CheckCount("limits.blocks", store.blocks_max, 1, int64_t{1} << 32);
}

absl::Status CheckLimits(const LimitsOptions& limits, const Machine& machine) {
  KVSTOW_RETURN_IF_ERROR(CheckCount("limits.worker_threads", limits.worker_threads, 1, 1024));
  KVSTOW_RETURN_IF_ERROR(CheckCount("limits.queue", limits.queue_max, 1, 1 << 20));
  KVSTOW_RETURN_IF_ERROR(
      CheckCount("limits.calls_in_flight", limits.calls_in_flight_max, 1, 1 << 16));
  return CheckBytes("limits.bytes_in_flight", limits.bytes_in_flight_max, kInFlightBytesMin,
                    machine.memory_bytes);
}

// "auto" has no shared memory where there is no unix socket, or where the longer path does not fit.
absl::Status ReadChannels(const v1::ServerConfig& config, ServerOptions& options) {
  ChannelOptions& channels = options.channels;
  channels.shm_socket = config.channels().shm_socket();
  if (channels.shm_socket == "auto") {
    channels.shm_socket = options.unix_socket.empty() ? "" : options.unix_socket + ".shm";
    if (channels.shm_socket.size() > kUnixPathBytesMax) channels.shm_socket.clear();
  }
  channels.channels_max = ClampToInt32(config.channels().max());
  channels.with_ucx = config.channels().ucx();
  channels.ucx = {.tls = config.channels().ucx_tls(),
                  .net_devices = config.channels().ucx_devices()};
  return ReadBytes({"channels.window_bytes", config.channels().window_bytes()},
                   channels.window_bytes_max);
}

absl::Status CheckChannels(const ChannelOptions& channels, const Machine& machine) {
  if (channels.shm_socket.size() > kUnixPathBytesMax) {
    return BadField("channels.shm_socket", absl::StrCat(channels.shm_socket.size(), " bytes"),
                    absl::StrCat("at most ", kUnixPathBytesMax, " bytes"));
  }
  KVSTOW_RETURN_IF_ERROR(CheckCount("channels.max", channels.channels_max, 1, 1 << 16));
  return CheckBytes("channels.window_bytes", channels.window_bytes_max, kDramBytesMin,
                    std::max(machine.memory_bytes, ChannelOptions().window_bytes_max));
}

}  // namespace

Machine ThisMachine() {
  return {.memory_bytes = MemoryLimitBytes(),
          .num_cores = std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()))};
}

absl::Status ServerOptions::Validate(const Machine& machine) const {
  KVSTOW_RETURN_IF_ERROR(CheckAddresses(*this));
  KVSTOW_RETURN_IF_ERROR(CheckStore(store, machine));
  KVSTOW_RETURN_IF_ERROR(CheckLimits(limits, machine));
  KVSTOW_RETURN_IF_ERROR(CheckChannels(channels, machine));
  KVSTOW_RETURN_IF_ERROR(
      CheckDuration("peers.timeout", peers.timeout, absl::Milliseconds(10), absl::Minutes(1)));
  KVSTOW_RETURN_IF_ERROR(peers.Validate());
  KVSTOW_RETURN_IF_ERROR(
      CheckDuration("drain_timeout", drain_timeout, absl::ZeroDuration(), absl::Hours(1)));
  return store.Validate();
}

absl::StatusOr<ServerOptions> OptionsFromConfig(const v1::ServerConfig& config,
                                                const Machine& machine) {
  ServerOptions options;
  StoreOptions& store = options.store;
  options.unix_socket = config.listen().unix_socket();
  options.tcp = config.listen().tcp();
  KVSTOW_RETURN_IF_ERROR(ReadBytes({"dram.capacity", config.dram().capacity()}, store.dram_bytes));
  KVSTOW_RETURN_IF_ERROR(ReadBytes({"hbm.capacity", config.hbm().capacity()}, store.hbm_bytes));
  store.dram_headroom_bytes = StoreOptions::UsualHeadroomBytes(store.dram_bytes);
  if (!config.dram().headroom().empty()) {
    KVSTOW_RETURN_IF_ERROR(
        ReadBytes({"dram.headroom", config.dram().headroom()}, store.dram_headroom_bytes));
  }
  KVSTOW_RETURN_IF_ERROR(ReadPolicy(config.policy(), store));
  KVSTOW_RETURN_IF_ERROR(ReadNvme(config.nvme(), store));
  KVSTOW_RETURN_IF_ERROR(ReadDuration({"tickets.write_deadline", config.tickets().write_deadline()},
                                      store.write_deadline));
  KVSTOW_RETURN_IF_ERROR(
      ReadDuration({"tickets.reuse_delay", config.tickets().reuse_delay()}, store.reuse_delay));
  store.tickets_max = ClampToInt32(config.tickets().max());
  KVSTOW_RETURN_IF_ERROR(
      ReadDuration({"leases.max_ttl", config.leases().max_ttl()}, store.lease_max));
  store.leases_max = ClampToInt32(config.leases().max());
  options.limits.worker_threads = ClampToInt32(config.limits().worker_threads());
  options.limits.queue_max = ClampToInt32(config.limits().queue());
  options.limits.calls_in_flight_max = ClampToInt32(config.limits().calls_in_flight());
  KVSTOW_RETURN_IF_ERROR(ReadBytes({"limits.bytes_in_flight", config.limits().bytes_in_flight()},
                                   options.limits.bytes_in_flight_max));
  if (config.limits().has_blocks()) {
    store.blocks_max = static_cast<int64_t>(
        std::min<uint64_t>(config.limits().blocks(), std::numeric_limits<int64_t>::max()));
  } else {
    store.blocks_max = std::min(store.blocks_max, BlocksThatFit(store, machine) / 2);
  }
  KVSTOW_RETURN_IF_ERROR(ReadChannels(config, options));
  options.peers.targets = absl::StrSplit(config.peers().list(), ',', absl::SkipWhitespace());
  KVSTOW_RETURN_IF_ERROR(
      ReadDuration({"peers.timeout", config.peers().timeout()}, options.peers.timeout));
  KVSTOW_RETURN_IF_ERROR(CheckName({"guard.mode", config.guard().mode()}, {"on", "off"}));
  options.guard_derives = config.guard().mode() == "on";
  options.metrics_address = config.metrics().address();
  KVSTOW_RETURN_IF_ERROR(ReadLogLevel(config.log().level(), options.log_level));
  KVSTOW_RETURN_IF_ERROR(
      ReadDuration({"drain_timeout", config.drain_timeout()}, options.drain_timeout));
  KVSTOW_RETURN_IF_ERROR(options.Validate(machine));
  return options;
}

std::string_view ServerVersion() { return KVSTOW_VERSION; }

}  // namespace kvstow
