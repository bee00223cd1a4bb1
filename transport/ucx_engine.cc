#include "transport/ucx_engine.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr absl::Duration kSpin = absl::Microseconds(20);
constexpr absl::Duration kEndPatience = absl::Seconds(1);
constexpr int kProgressPerRound = 64;

absl::Status UcxError(absl::string_view doing, ucs_status_t status) {
  return absl::UnavailableError(absl::StrCat("UCX, ", doing, ": ", ucs_status_string(status)));
}

// UCX reads the keys of its transports from the environment alone, so that is where we set them;
// what is set already stays. README.md says why each.
void SetDefaults() {
  static std::once_flag once;
  std::call_once(once, [] {
    // One setting: a worker does not start where it can receive less than it sends.
    if (getenv("UCX_TCP_TX_SEG_SIZE") == nullptr && getenv("UCX_TCP_RX_SEG_SIZE") == nullptr) {
      setenv("UCX_TCP_TX_SEG_SIZE", "256k", 0);
      setenv("UCX_TCP_RX_SEG_SIZE", "256k", 0);
    }
    constexpr std::array<std::array<const char*, 2>, 5> kDefaults = {{
        {"UCX_TCP_CM_REUSEADDR", "y"},
        {"UCX_TCP_CONN_NB", "y"},
        {"UCX_PROTO_ENABLE", "n"},
        {"UCX_KEEPALIVE_INTERVAL", "1s"},
        {"UCX_TLS", "^shm"},
    }};
    for (const auto& [name, value] : kDefaults) setenv(name, value, 0);
  });
}

absl::StatusOr<ucp_config_t*> ReadConfig(const UcxNetwork& network) {
  SetDefaults();
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return UcxError("reading UCX_* variables", status);
  if (!network.tls.empty()) status = ucp_config_modify(config, "TLS", network.tls.c_str());
  if (status == UCS_OK && !network.net_devices.empty()) {
    status = ucp_config_modify(config, "NET_DEVICES", network.net_devices.c_str());
  }
  if (status == UCS_OK) return config;
  ucp_config_release(config);
  return UcxError(
      absl::StrCat("transports \"", network.tls, "\" and devices \"", network.net_devices, "\""),
      status);
}

}  // namespace

struct UcxEngineCallbacks {
  static ucs_status_t OnMessage(void* engine, const void* header, size_t header_bytes, void* data,
                                size_t bytes, const ucp_am_recv_param_t* param) {
    UcxMessage message;
    const bool has_sender = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
    if (header_bytes != sizeof(message) || !has_sender) return UCS_OK;
    std::memcpy(&message, header, sizeof(message));
    auto& of = *static_cast<UcxEngine*>(engine);
    const bool is_announced = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    UcxData arrived(of.worker_, data, bytes, is_announced);
    of.OnMessage(param->reply_ep, message, arrived);
    return is_announced && arrived.is_taken() ? UCS_INPROGRESS : UCS_OK;
  }
};

absl::StatusOr<std::shared_ptr<UcxEngine>> UcxEngine::Open(const UcxNetwork& network) {
  std::shared_ptr<UcxEngine> engine(new UcxEngine);
  KVSTOW_RETURN_IF_ERROR(engine->Initialize(network));
  return engine;
}

void UcxEngine::Start() {
  KVSTOW_CHECK(!thread_.joinable());
  thread_ = std::thread([this] { Run(); });
}

absl::Status UcxEngine::Initialize(const UcxNetwork& network) {
  KVSTOW_ASSIGN_OR_RETURN(ucp_config_t * config, ReadConfig(network));
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  // Not RMA: over TCP UCX would serve it at whatever address a message names.
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucs_status_t status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status != UCS_OK) return UcxError("starting", status);
  ucp_worker_params_t worker_params = {};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  status = ucp_worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK) return UcxError("starting a worker", status);
  ucp_am_handler_param_t handler = {};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kUcxMessageId;
  handler.cb = &UcxEngineCallbacks::OnMessage;
  handler.arg = this;
  status = ucp_worker_set_am_recv_handler(worker_, &handler);
  if (status != UCS_OK) return UcxError("asking for messages", status);
  status = ucp_worker_get_efd(worker_, &event_fd_);
  if (status != UCS_OK) return UcxError("asking for the event descriptor", status);
  wake_fd_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_fd_.is_open()) return absl::ResourceExhaustedError("eventfd: no descriptors left");
  return absl::OkStatus();
}

UcxEngine::~UcxEngine() {
  Stop();
  if (context_ != nullptr && !is_context_left_) ucp_cleanup(context_);
}

absl::StatusOr<std::string> UcxEngine::Listen(const std::string& ip, UcxServedWindow* window) {
  KVSTOW_CHECK(!thread_.joinable());
  KVSTOW_ASSIGN_OR_RETURN(listener_, UcxListener::Open(worker_, ip, window));
  return listener_->address();
}

void UcxEngine::Stop() {
  if (thread_.joinable()) {
    {
      MutexLock lock(&mutex_);
      is_stopping_ = true;
    }
    Do([] {});
    thread_.join();
  }
  if (worker_ == nullptr) return;
  const bool is_finished = listener_ == nullptr || listener_->IsFinished();
  if (!links_.empty() || !is_finished) {
    LeaveWorker();
    return;
  }
  listener_ = nullptr;
  ucp_worker_destroy(std::exchange(worker_, nullptr));
}

// A worker with requests that never end is not destroyed: it may still write to their memory, and
// its callbacks still refer to what asked for them.
void UcxEngine::LeaveWorker() {
  Log(Severity::kError, "UCX does not give back requests of dead peers; leaving them",
      {{"channels", absl::StrCat(links_.size())}});
  new std::vector<std::shared_ptr<UcxLink>>(std::move(links_));
  links_.clear();
  [[maybe_unused]] const UcxListener* const left = listener_.release();
  worker_ = nullptr;
  is_context_left_ = true;
}

void UcxEngine::OnMessage(const ucp_ep* from, const UcxMessage& message, UcxData& data) {
  if (listener_ != nullptr) listener_->OnMessage(from, message, data);
  for (const std::shared_ptr<UcxLink>& link : links_) {
    if (link->IsAt(from)) link->OnMessage(message, data);
  }
}

void UcxEngine::Do(std::function<void()> command) {
  {
    MutexLock lock(&mutex_);
    commands_.push_back(std::move(command));
    if (!is_asleep_) return;
  }
  const uint64_t one = 1;
  // A full counter would mean that the thread is about to wake anyhow.
  [[maybe_unused]] const ssize_t written = write(wake_fd_.get(), &one, sizeof(one));
}

// False: the engine is to end.
bool UcxEngine::RunCommands() {
  std::vector<std::function<void()>> commands;
  bool is_stopping = false;
  {
    MutexLock lock(&mutex_);
    commands.swap(commands_);
    is_stopping = is_stopping_;
  }
  for (const std::function<void()>& command : commands) command();
  return !is_stopping;
}

absl::Time UcxEngine::TickLinks(absl::Time now) {
  absl::Time next = absl::InfiniteFuture();
  for (const std::shared_ptr<UcxLink>& link : links_) next = std::min(next, link->Tick(now));
  links_.erase(std::remove_if(links_.begin(), links_.end(),
                              [](const auto& link) { return link->TryFinish(); }),
               links_.end());
  return next;
}

void UcxEngine::Sleep(absl::Duration at_most) {
  const ucs_status_t status = ucp_worker_arm(worker_);
  if (status == UCS_ERR_BUSY) return;  // events are there already
  KVSTOW_CHECK(status == UCS_OK);
  {
    MutexLock lock(&mutex_);
    if (!commands_.empty()) return;
    is_asleep_ = true;
  }
  std::array<pollfd, 2> entries = {
      {{.fd = event_fd_, .events = POLLIN}, {.fd = wake_fd_.get(), .events = POLLIN}}};
  const absl::Duration wait = std::clamp(at_most, absl::ZeroDuration(), absl::Seconds(1));
  poll(entries.data(), entries.size(), static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1);
  if ((entries[1].revents & POLLIN) != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(wake_fd_.get(), &count, sizeof(count));
  }
  MutexLock lock(&mutex_);
  is_asleep_ = false;
}

void UcxEngine::Run() {
  absl::Time last_traffic = clock_.Now();
  while (RunCommands()) {
    bool had_traffic = false;
    for (int i = 0; i < kProgressPerRound && ucp_worker_progress(worker_) != 0; ++i) {
      had_traffic = true;
    }
    const absl::Time now = clock_.Now();
    const absl::Time next = TickLinks(now);
    if (listener_ != nullptr) listener_->Tick();
    if (had_traffic) last_traffic = now;
    if (now - last_traffic > kSpin) Sleep(next - now);
  }
  EndLinks();
}

void UcxEngine::EndLinks() {
  for (const std::shared_ptr<UcxLink>& link : links_) {
    link->Close(absl::CancelledError("the UCX transport ends"));
  }
  if (listener_ != nullptr) listener_->Close();
  const auto is_finished = [&] {
    return links_.empty() && (listener_ == nullptr || listener_->IsFinished());
  };
  const absl::Time deadline = clock_.Now() + kEndPatience;
  while (!is_finished() && clock_.Now() < deadline) {
    ucp_worker_progress(worker_);
    TickLinks(clock_.Now());
    if (listener_ != nullptr) listener_->Tick();
  }
}

}  // namespace kvstow
