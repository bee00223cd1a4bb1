#include "service/server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/device_memory.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "service/admission.h"
#include "service/calibration_service.h"
#include "service/calibration_store.h"
#include "service/channel_service.h"
#include "service/control_service.h"
#include "service/data_service.h"
#include "service/executor.h"
#include "service/listen_address.h"
#include "service/metrics.h"
#include "service/model_registry.h"
#include "service/plan_book.h"
#include "service/served_paths.h"
#include "service/service_parts.h"

namespace kvstow {
namespace {

// Twice what a request of 65,536 keys or 1,048,576 tokens takes, so that one that is somewhat too
// large gets our answer, which names the limit, and not gRPC's.
constexpr int kMaxReceiveBytes = 8 << 20;
// Threads for control work that waits: a few durable seals at once.
constexpr int32_t kControlThreads = 4;
// Gets that wait for peers at once; the others wait in line for at most a fetch's timeout.
constexpr int32_t kFetcherThreads = 4;
// How long Drain gives short control calls, once the long ones have ended.
constexpr absl::Duration kShortCallTimeout = absl::Milliseconds(500);
// How long Drain waits for gRPC to let go of the slices it was sending.
constexpr absl::Duration kSliceTimeout = absl::Seconds(5);

// Keeps the library up for the rest of the process. Its own clean-up, when the last object goes,
// may wait 10 s for a poller thread that nobody wakes.
void KeepGrpcInitialized() {
  static const bool is_initialized = (grpc_init(), true);
  static_cast<void>(is_initialized);
}

void SetChannelOptions(grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  builder.SetMaxSendMessageSize(-1);
  // Two daemons on one port would share its connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // A reader whose machine is gone holds pins until its connection is found dead.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Clients ask, too (KvClientOptions::silence).
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 100);
}

// Null where no hbm tier is wanted: a service without one leaves the GPU alone.
absl::StatusOr<std::shared_ptr<DeviceMemory>> OpenDevice(const StoreOptions& store) {
  if (store.hbm_bytes == 0) return nullptr;
  absl::StatusOr<std::shared_ptr<DeviceMemory>> device = OpenDeviceMemory(0);
  if (device.ok()) return device;
  return absl::InvalidArgumentError(absl::StrCat("hbm.capacity is ", FormatBytes(store.hbm_bytes),
                                                 ", want 0: ", device.status().message()));
}

}  // namespace

// Members in the order in which they are built; destroyed in reverse.
struct Server::State {
  explicit State(const ServerOptions& server_options) : options(server_options) {}

  const ServerOptions options;
  std::unique_ptr<TieredStore> store;
  std::unique_ptr<ModelRegistry> models;
  std::unique_ptr<CalibrationStore> calibrations;
  std::unique_ptr<PlanBook> plans;
  std::shared_ptr<Admission> admission;
  Metrics metrics;
  std::unique_ptr<Executor> workers;
  std::unique_ptr<Executor> control;
  std::unique_ptr<Executor> fetchers;
  std::unique_ptr<ChannelTable> channels;
  std::unique_ptr<PeerSet> peers;
  ServiceParts parts;
  std::unique_ptr<ModelService> model_service;
  std::unique_ptr<ControlService> control_service;
  std::unique_ptr<DataService> data_service;
  std::unique_ptr<ChannelService> channel_service;
  std::unique_ptr<CalibrationService> calibration_service;
  std::unique_ptr<grpc::Server> grpc_server;
  int tcp_port = 0;
  bool is_drained = false;

  absl::Status OpenStore(const Clock* clock);
  void BuildServices();
  absl::Status Listen();
  void WaitForSlices() const;
};

absl::Status Server::State::OpenStore(const Clock* clock) {
  // Addresses before the store: a second daemon is refused before it touches anything.
  if (!options.unix_socket.empty()) KVSTOW_RETURN_IF_ERROR(FreeUnixSocket(options.unix_socket));
  if (!options.tcp.empty()) {
    KVSTOW_RETURN_IF_ERROR(CheckTcpAddressIsFree("listen.tcp", options.tcp));
  }
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<DeviceMemory> device, OpenDevice(options.store));
  KVSTOW_ASSIGN_OR_RETURN(store, TieredStore::Open(options.store, clock, std::move(device)));
  const std::string& path = options.store.nvme_path;
  const std::string directory = path.empty() ? "" : absl::StrCat(path, "/models");
  KVSTOW_ASSIGN_OR_RETURN(models, ModelRegistry::Open(directory));
  KVSTOW_ASSIGN_OR_RETURN(plans, PlanBook::Open(directory, options.guard_derives));
  KVSTOW_ASSIGN_OR_RETURN(
      calibrations,
      CalibrationStore::Open(path.empty() ? "" : absl::StrCat(path, "/calibrations")));
  return absl::OkStatus();
}

void Server::State::BuildServices() {
  const LimitsOptions& limits = options.limits;
  admission = std::make_shared<Admission>(limits.calls_in_flight_max, limits.bytes_in_flight_max);
  channels =
      std::make_unique<ChannelTable>(OpenPaths(options.channels), options.channels.channels_max);
  workers = std::make_unique<Executor>("worker", limits.worker_threads, limits.queue_max);
  fetchers = std::make_unique<Executor>("fetcher", kFetcherThreads, limits.queue_max);
  control = std::make_unique<Executor>("control", kControlThreads, limits.queue_max);
  parts = {.options = &options,
           .store = store.get(),
           .models = models.get(),
           .calibrations = calibrations.get(),
           .plans = plans.get(),
           .workers = workers.get(),
           .control = control.get(),
           .admission = admission,
           .metrics = &metrics,
           .channels = channels.get(),
           .peers = peers.get(),
           .fetchers = fetchers.get(),
           .started_at = std::chrono::steady_clock::now()};
  model_service = std::make_unique<ModelService>(parts);
  control_service = std::make_unique<ControlService>(parts);
  data_service = std::make_unique<DataService>(parts);
  channel_service = std::make_unique<ChannelService>(parts);
  calibration_service = std::make_unique<CalibrationService>(parts);
}

absl::Status Server::State::Listen() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  SetChannelOptions(builder);
  const auto credentials = grpc::InsecureServerCredentials();
  int unix_bound = 0;
  if (!options.unix_socket.empty()) {
    builder.AddListeningPort("unix:" + options.unix_socket, credentials, &unix_bound);
  }
  if (!options.tcp.empty()) builder.AddListeningPort(options.tcp, credentials, &tcp_port);
  builder.RegisterService(model_service.get());
  builder.RegisterService(control_service.get());
  builder.RegisterService(data_service.get());
  builder.RegisterService(channel_service.get());
  builder.RegisterService(calibration_service.get());
  grpc_server = builder.BuildAndStart();
  // gRPC does not say which address it was or why; the checks before catch all but a race.
  if (grpc_server == nullptr || (!options.tcp.empty() && tcp_port == 0) ||
      (!options.unix_socket.empty() && unix_bound == 0)) {
    return absl::UnavailableError(absl::StrCat("cannot listen on unix \"", options.unix_socket,
                                               "\" and tcp \"", options.tcp, "\""));
  }
  if (options.metrics_address.empty()) return absl::OkStatus();
  return metrics.Serve(options.metrics_address, {.store = store.get(),
                                                 .admission = admission.get(),
                                                 .workers = workers.get(),
                                                 .control = control.get(),
                                                 .channels = channels.get(),
                                                 .peers = peers.get(),
                                                 .calibrations = calibrations.get(),
                                                 .policy = options.store.policy,
                                                 .started_at = parts.started_at});
}

// Slices point into the store's memory: it must not go before gRPC has let go of them.
void Server::State::WaitForSlices() const {
  if (admission->WaitUntilIdle(kSliceTimeout)) return;
  // Only a bug of ours or of gRPC; going on would read freed memory.
  Log(Severity::kError, "bytes still in flight after the drain; ending without flush",
      {{"bytes", absl::StrCat(admission->bytes_in_flight())}});
  _exit(1);
}

Server::Server(std::unique_ptr<State> state) : state_(std::move(state)) {}

Server::~Server() { Drain(); }

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      const Clock* clock) {
  KeepGrpcInitialized();
  auto state = std::make_unique<State>(options);
  KVSTOW_ASSIGN_OR_RETURN(state->peers, PeerSet::Create(options.peers));
  KVSTOW_RETURN_IF_ERROR(state->OpenStore(clock));
  state->BuildServices();
  std::unique_ptr<Server> server(new Server(std::move(state)));
  KVSTOW_RETURN_IF_ERROR(server->state_->Listen());
  return server;
}

void Server::Drain() {
  if (std::exchange(state_->is_drained, true)) return;
  State& state = *state_;
  if (state.grpc_server != nullptr) {
    if (auto* health = state.grpc_server->GetHealthCheckService()) health->Shutdown();
    // gRPC's own wait also waits for clients that are connected and idle, until its deadline. So we
    // wait for the long calls, and leave gRPC the time that short ones need.
    state.admission->StartDrain();
    state.admission->WaitUntilIdle(state.options.drain_timeout);
    state.grpc_server->Shutdown(std::chrono::system_clock::now() +
                                absl::ToChronoNanoseconds(kShortCallTimeout));
    state.grpc_server->Wait();
    state.grpc_server.reset();
  }
  state.metrics.Stop();
  state.fetchers.reset();
  state.control.reset();
  state.workers.reset();
  state.WaitForSlices();
  state.channels.reset();
  state.calibrations.reset();
  state.plans.reset();
  state.models.reset();
  state.store.reset();  // flushes
  // gRPC removes the socket when it stops to listen; where it did not, we do.
  if (!state.options.unix_socket.empty()) {
    FreeUnixSocket(state.options.unix_socket).IgnoreError();
  }
}

const std::string& Server::unix_socket() const { return state_->options.unix_socket; }
int Server::tcp_port() const { return state_->tcp_port; }
int Server::metrics_port() const { return state_->metrics.port(); }
TieredStore& Server::store() { return *state_->store; }

}  // namespace kvstow
