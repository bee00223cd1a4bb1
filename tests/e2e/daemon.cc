#include "tests/e2e/daemon.h"

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>

#include "kernels/core/check.h"

namespace kvstow::testing {

std::string DaemonBinary() { return KVSTOW_DAEMON_BINARY; }
std::string CliBinary() { return KVSTOW_CLI_BINARY; }
std::string FaultWorkerBinary() { return KVSTOW_FAULT_WORKER_BINARY; }

std::vector<std::string> DaemonFlags(const TempFolder& folder, const DaemonOptions& options) {
  std::vector<std::string> flags = {"--listen.unix_socket=" + folder.path() + "/kvstow.sock",
                                    "--dram.capacity=" + options.dram,
                                    // A client that makes no call does not see the end coming; the
                                    // drain waits for it in vain.
                                    "--drain_timeout=" + options.drain_timeout};
  if (!options.nvme.empty()) {
    flags.push_back("--nvme.path=" + folder.path() + "/nvme");
    flags.push_back("--nvme.capacity=" + options.nvme);
  }
  if (options.with_metrics) flags.emplace_back("--metrics.address=127.0.0.1:0");
  flags.insert(flags.end(), options.extra_flags.begin(), options.extra_flags.end());
  return flags;
}

Daemon::Daemon(const TempFolder& folder, const DaemonOptions& options)
    : socket_(folder.path() + "/kvstow.sock"), nvme_path_(folder.path() + "/nvme") {
  argv_ = DaemonFlags(folder, options);
  argv_.insert(argv_.begin(), DaemonBinary());
}

bool Daemon::Start() {
  process_ = std::make_unique<ChildProcess>(argv_);
  if (!process_->WaitForOutput("ready ", absl::Minutes(1))) return false;
  // A new one each time: the one before may not have noticed yet that its daemon is gone.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel_ = grpc::CreateCustomChannel(target(), grpc::InsecureChannelCredentials(), arguments);
  control_ = v1::Control::NewStub(channel_);
  data_ = v1::Data::NewStub(channel_);
  models_ = v1::Models::NewStub(channel_);
  return channel_->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(20));
}

void Daemon::Kill() {
  process_->Signal(SIGKILL);
  KVSTOW_CHECK(process_->WaitForExit(absl::Seconds(30)).has_value());
}

std::optional<int> Daemon::Terminate() {
  process_->Signal(SIGTERM);
  return process_->WaitForExit(absl::Seconds(60));
}

std::string Daemon::metrics_address() const {
  const std::string text = log();
  const std::string key = "metrics=";
  const size_t at = text.find(key, text.find("ready "));
  if (at == std::string::npos) return "";
  const size_t begin = at + key.size();
  return text.substr(begin, text.find_first_of(" \n", begin) - begin);
}

std::unique_ptr<KvClient> Daemon::NewClient(KvClientOptions options) const {
  options.target = target();
  absl::StatusOr<std::unique_ptr<KvClient>> client = KvClient::Create(options);
  KVSTOW_CHECK(client.ok());
  return *std::move(client);
}

v1::StatResponse Daemon::Stat() {
  v1::StatResponse response;
  const auto context = Deadline();
  context->set_wait_for_ready(true);
  KVSTOW_CHECK(control_->Stat(context.get(), {}, &response).ok());
  return response;
}

std::vector<v1::BlockInfo> Daemon::List() {
  std::vector<v1::BlockInfo> blocks;
  v1::ListRequest request;
  do {
    v1::ListResponse response;
    const auto context = Deadline();
    KVSTOW_CHECK(control_->List(context.get(), request, &response).ok());
    blocks.insert(blocks.end(), response.blocks().begin(), response.blocks().end());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  return blocks;
}

std::string Daemon::MetricsPage() const { return HttpGet(metrics_address(), "/metrics"); }

double Daemon::Metric(const std::string& name_and_labels) const {
  const std::string page = "\n" + MetricsPage();
  const std::string key = "\n" + name_and_labels + " ";
  const size_t at = page.find(key);
  return at == std::string::npos ? 0 : std::strtod(page.c_str() + at + key.size(), nullptr);
}

std::unique_ptr<grpc::ClientContext> Deadline(absl::Duration timeout) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
  return context;
}

std::string HttpGet(const std::string& address, const std::string& path) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return "";
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + colon + 1)));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &peer.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval timeout{.tv_sec = 10, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  std::string answer;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&peer), sizeof(peer)) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\nHost: " + address + "\r\n\r\n";
    if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
      std::array<char, 8192> buffer;
      ssize_t n = 0;
      while ((n = read(fd, buffer.data(), buffer.size())) > 0) {
        answer.append(buffer.data(), static_cast<size_t>(n));
      }
    }
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

v1::TierStat TierOf(const v1::StatResponse& stat, const std::string& tier) {
  for (const v1::TierStat& row : stat.tiers()) {
    if (row.tier() == tier) return row;
  }
  return {};
}

}  // namespace kvstow::testing
