// ServerOptions: everything kvstowd may be told, checked; and the road from files and flags to it.
//
//   KVSTOW_ASSIGN_OR_RETURN(CommandLine line, ParseCommandLine(args, ThisMachine()));
//   if (line.action == CommandLine::Action::kServe) { ... Server::Start(line.options) ... }
//
// A value comes from, in rising order: the default, the text-format file named by --config
// (proto/server_config.proto), the flag `--section.field=value`. Flags are generated from the
// message, so file and flags cannot differ. Unknown names are refused, with the nearest right one.
// No other file reads flags, environment or configuration.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/core/log.h"
#include "service/peer_set.h"
#include "storage/tiered_store.h"
#include "transport/ucx.h"

namespace kvstow {
namespace v1 {
class ServerConfig;  // proto/server_config.proto
}  // namespace v1

// What bounds the options from outside. A value, so that tests choose it.
struct Machine {
  int64_t memory_bytes = 0;  // physical memory, or the limit of our control group where lower
  int32_t num_cores = 1;
};
Machine ThisMachine();

struct LimitsOptions {
  // Threads that encode, decode and wait for the disk. One per core: the work is CPU-bound.
  int32_t worker_threads = 1;
  // Work items that may wait for them. 4,096 is four frames of each of 1,024 calls.
  int32_t queue_max = 4096;
  // Put, Get and Verify calls at once. More hold more memory for no gain in throughput.
  int32_t calls_in_flight_max = 256;
  // Bytes held for these calls: frames in work, records pinned until they are sent.
  int64_t bytes_in_flight_max = int64_t{512} << 20;
};

struct ChannelOptions {
  std::string shm_socket;  // path; empty for none
  int32_t channels_max = 256;
  int64_t window_bytes_max = int64_t{4} << 30;
  bool with_ucx = false;
  UcxNetwork ucx;
};

struct ServerOptions {
  bool guard_derives = true;                     // plans of models without one (plan_book.h)
  std::string unix_socket = "/tmp/kvstow.sock";  // path; empty for none
  std::string tcp;                               // "HOST:PORT"; port 0 takes a free one
  StoreOptions store;
  LimitsOptions limits;
  ChannelOptions channels;
  PeerOptions peers;
  std::string metrics_address;  // "HOST:PORT" of the Prometheus page; empty for none
  Severity log_level = Severity::kInfo;
  absl::Duration drain_timeout = absl::Seconds(10);  // how long SIGTERM waits for calls in flight

  // Ranges and relations of the fields; kInvalidArgument names the field as files and flags do.
  absl::Status Validate(const Machine& machine) const;
};

// The message with every default filled in.
v1::ServerConfig DefaultConfig(const Machine& machine);

// Checks every field and turns the message into options. kInvalidArgument names the field.
absl::StatusOr<ServerOptions> OptionsFromConfig(const v1::ServerConfig& config,
                                                const Machine& machine);

// Lays the text of a configuration file over `config`. `file_name` is for messages only.
//   kInvalidArgument: FILE:LINE and the unknown key, the wrong type, the key given twice
absl::Status MergeConfigText(std::string_view text, std::string_view file_name,
                             v1::ServerConfig& config);

struct CommandLine {
  enum class Action { kServe, kHelp, kVersion };
  Action action = Action::kServe;
  ServerOptions options;  // for kServe
};

// `args` without the program's name. kInvalidArgument for anything wrong with flags or values,
// kNotFound for a configuration file that cannot be read.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args,
                                             const Machine& machine);

// Every field with its default and an example.
std::string HelpText(const Machine& machine);

// Names of all fields, "dram.capacity", in the order of the message.
std::vector<std::string> ConfigFieldNames();

// "0.1.0".
std::string_view ServerVersion();

}  // namespace kvstow
