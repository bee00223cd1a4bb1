// Daemon: a real kvstowd process for tests, with its addresses, its stubs and its life.
//
//   TempFolder folder;
//   Daemon daemon(folder, {.dram = "16MiB", .nvme = "64MiB"});
//   ASSERT_TRUE(daemon.Start()) << daemon.log();
//   daemon.Kill();                        // -9
//   ASSERT_TRUE(daemon.Start());          // the same folder and socket
//
// Thread safety: one thread at a time, apart from the stubs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/cpp/kv_client.h"
#include "kvstow/v1/control.grpc.pb.h"
#include "kvstow/v1/data.grpc.pb.h"
#include "kvstow/v1/model.grpc.pb.h"
#include "tests/e2e/process.h"

namespace kvstow::testing {

struct DaemonOptions {
  std::string dram = "64MiB";
  std::string nvme;           // capacity; empty for no disk tier
  bool with_metrics = false;  // on a free port
  std::string drain_timeout = "1s";
  std::vector<std::string> extra_flags;  // "--tickets.write_deadline=1s"
};

// The flags that DaemonOptions stand for. The socket is <folder>/kvstow.sock, the disk
// <folder>/nvme.
std::vector<std::string> DaemonFlags(const TempFolder& folder, const DaemonOptions& options);

// Paths of the binaries of this build.
std::string DaemonBinary();
std::string CliBinary();
std::string FaultWorkerBinary();

class Daemon {
 public:
  Daemon(const TempFolder& folder, const DaemonOptions& options);

  // Starts the process and waits for its ready line. False when it ends or takes over a minute.
  bool Start();
  void Kill();                     // SIGKILL, and waits
  std::optional<int> Terminate();  // SIGTERM; the exit status
  void Signal(int signal_number) { process_->Signal(signal_number); }

  std::string target() const { return "unix:" + socket_; }
  std::string metrics_address() const;  // "127.0.0.1:9400", from the ready line
  std::string log() const { return process_ == nullptr ? "" : process_->output(); }
  pid_t pid() const { return process_->pid(); }
  std::string nvme_path() const { return nvme_path_; }

  v1::Control::Stub& control() { return *control_; }
  v1::Data::Stub& data() { return *data_; }
  v1::Models::Stub& models() { return *models_; }
  std::shared_ptr<grpc::Channel> channel() { return channel_; }

  // A new client of this daemon; it outlives restarts.
  std::unique_ptr<KvClient> NewClient(KvClientOptions options = {}) const;

  v1::StatResponse Stat();            // CHECKs that the call succeeds
  std::vector<v1::BlockInfo> List();  // all pages
  // The value of a metric line "name{labels} value"; 0 where there is none.
  double Metric(const std::string& name_and_labels) const;
  std::string MetricsPage() const;

 private:
  std::string socket_;
  std::string nvme_path_;
  std::vector<std::string> argv_;
  std::unique_ptr<ChildProcess> process_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Control::Stub> control_;
  std::unique_ptr<v1::Data::Stub> data_;
  std::unique_ptr<v1::Models::Stub> models_;
};

// A context with a deadline: no call of a test waits for ever.
std::unique_ptr<grpc::ClientContext> Deadline(absl::Duration timeout = absl::Seconds(20));

// GET over HTTP/1.0; the body, or an empty string.
std::string HttpGet(const std::string& address, const std::string& path);

// Field `tier` of a Stat answer; all zero where the daemon has no such tier.
v1::TierStat TierOf(const v1::StatResponse& stat, const std::string& tier);

}  // namespace kvstow::testing
