// The worker's end of NCCL windows: device memory, and the thread that enqueues its half of each
// transfer that the service asks for.
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/clock.h"
#include "kernels/core/status_macros.h"
#include "transport/nccl.h"
#include "transport/nccl_pair.h"
#include "transport/nccl_wire.h"

namespace kvstow {
namespace {

constexpr absl::Duration kHandshakePatience = absl::Seconds(2);
constexpr absl::Duration kInitPatience = absl::Seconds(30);
constexpr absl::Duration kSendPatience = absl::Seconds(5);
constexpr int kPollMs = 1;  // while transfers run: NCCL has no descriptor to wait on

class NcclWindow final : public Window {
 public:
  explicit NcclWindow(const NcclLibrary* library, int32_t device_idx)
      : library_(library), device_idx_(device_idx) {}
  ~NcclWindow() override;

  absl::Status Open(const NcclWindowOptions& options);

  PathKind path() const override { return PathKind::kNccl; }
  absl::Span<std::byte> memory() override { return memory_; }
  const std::string& ticket() const override { return ticket_; }
  bool is_alive() override { return is_alive_; }

 private:
  struct Running {
    uint64_t id = 0;
    CudaEvent event = nullptr;
  };

  absl::Status Listen(const std::string& host);
  void Run();
  // Until the service goes or something fails.
  absl::Status Serve(NcclSocket& socket, NcclPair& pair);
  absl::Status Greet(NcclSocket& socket);
  absl::Status Begin(const NcclMessage& request, NcclPair& pair);
  absl::Status Finish(NcclSocket& socket, NcclPair& pair);
  // Somebody else connects while a service is attached, or after.
  void TurnAway();
  bool IsStopping();

  const NcclLibrary* const library_;
  const int32_t device_idx_;
  const RealClock clock_;
  absl::Span<std::byte> memory_;
  NcclTicket address_;
  std::string ticket_;
  OwnedFd listener_;
  OwnedFd stop_;  // eventfd
  std::deque<Running> running_;
  std::atomic<bool> is_alive_{true};
  bool is_memory_held_ = false;  // by a communicator that could not be aborted
  std::thread thread_;
};

absl::Status NcclWindow::Open(const NcclWindowOptions& options) {
  int result = library_->set_device(device_idx_);
  if (result != kCudaSuccess) return NcclLibrary::CudaError("choosing the device", result);
  void* address = nullptr;
  const auto bytes = static_cast<size_t>(options.bytes);
  result = library_->malloc(&address, bytes);
  if (result != kCudaSuccess) {
    return absl::ResourceExhaustedError(
        absl::StrCat("CUDA, allocating ", bytes, " bytes: error ", result));
  }
  memory_ = {static_cast<std::byte*>(address), bytes};
  result = library_->memset(address, 0, bytes);
  // Clearing goes on behind the call, and our stream does not wait for it.
  if (result == kCudaSuccess) result = library_->synchronize();
  if (result != kCudaSuccess) return NcclLibrary::CudaError("clearing the window", result);
  KVSTOW_CHECK(getrandom(address_.secret.data(), address_.secret.size(), 0) ==
               static_cast<ssize_t>(address_.secret.size()));
  address_.bytes = options.bytes;
  KVSTOW_RETURN_IF_ERROR(Listen(options.host));
  ticket_ = EncodeNcclTicket(address_);
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

absl::Status NcclWindow::Listen(const std::string& host) {
  if (inet_pton(AF_INET, host.c_str(), &address_.host) != 1) {
    return absl::InvalidArgumentError(absl::StrCat("\"", host, "\" is no IPv4 address"));
  }
  stop_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  listener_ = OwnedFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr = address_.host;
  socklen_t length = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (!stop_.is_open() || !listener_.is_open() || bind(listener_.get(), any, length) != 0 ||
      listen(listener_.get(), 4) != 0 || getsockname(listener_.get(), any, &length) != 0) {
    return absl::UnavailableError(
        absl::StrCat("NCCL control port at ", host, ": ", std::strerror(errno)));
  }
  address_.port = ntohs(address.sin_port);
  return absl::OkStatus();
}

NcclWindow::~NcclWindow() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    KVSTOW_CHECK(write(stop_.get(), &one, sizeof(one)) == sizeof(one));
    thread_.join();
  }
  if (!memory_.empty() && !is_memory_held_) library_->free(memory_.data());
}

bool NcclWindow::IsStopping() {
  pollfd entry = {.fd = stop_.get(), .events = POLLIN};
  return poll(&entry, 1, 0) > 0;
}

void NcclWindow::Run() {
  bool was_attached = false;
  while (!IsStopping()) {
    std::array<pollfd, 2> entries = {
        {{.fd = listener_.get(), .events = POLLIN}, {.fd = stop_.get(), .events = POLLIN}}};
    poll(entries.data(), entries.size(), 1000);
    if ((entries[0].revents & POLLIN) == 0) continue;
    if (was_attached) {
      TurnAway();
      continue;
    }
    OwnedFd accepted(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!accepted.is_open()) continue;
    NcclSocket socket(std::move(accepted));
    NcclPair pair(library_, device_idx_, stop_.get());
    // Who does not know the secret changes nothing.
    if (!Greet(socket).ok()) continue;
    was_attached = true;
    Serve(socket, pair).IgnoreError();
    is_alive_ = false;
    is_memory_held_ = !pair.Abort();
    for (const Running& running : running_) {
      if (!is_memory_held_) pair.Drop(running.event);
    }
    running_.clear();
  }
}

void NcclWindow::TurnAway() {
  OwnedFd accepted(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!accepted.is_open()) return;
  NcclSocket socket(std::move(accepted));
  // The worker speaks first: nothing of the other end is unread when this closes.
  socket
      .Send({.kind = NcclMessageKind::kGreeting,
             .status = static_cast<uint32_t>(absl::StatusCode::kNotFound)},
            clock_.Now())
      .IgnoreError();
}

absl::Status NcclWindow::Greet(NcclSocket& socket) {
  const absl::Time deadline = clock_.Now() + kHandshakePatience;
  KVSTOW_RETURN_IF_ERROR(
      socket.Send({.kind = NcclMessageKind::kGreeting, .version = library_->version}, deadline));
  KVSTOW_ASSIGN_OR_RETURN(const NcclMessage hello,
                          socket.Receive(NcclMessageKind::kHello, deadline));
  if (hello.secret != address_.secret) return absl::NotFoundError("another window's secret");
  return absl::OkStatus();
}

absl::Status NcclWindow::Serve(NcclSocket& socket, NcclPair& pair) {
  NcclMessage accept = {.kind = NcclMessageKind::kAccept};
  const int result = library_->get_unique_id(&accept.unique_id);
  if (result != kNcclSuccess) return library_->NcclError("making an id", result);
  KVSTOW_RETURN_IF_ERROR(socket.Send(accept, clock_.Now() + kSendPatience));
  KVSTOW_RETURN_IF_ERROR(pair.Init(accept.unique_id, 0, clock_.Now() + kInitPatience));
  while (!IsStopping()) {
    std::array<pollfd, 3> entries = {{{.fd = socket.fd(), .events = POLLIN},
                                      {.fd = stop_.get(), .events = POLLIN},
                                      {.fd = listener_.get(), .events = POLLIN}}};
    poll(entries.data(), entries.size(), running_.empty() ? 1000 : kPollMs);
    if ((entries[2].revents & POLLIN) != 0) TurnAway();
    while (true) {
      KVSTOW_ASSIGN_OR_RETURN(const std::optional<NcclMessage> message, socket.TryReceive());
      if (!message.has_value()) break;
      KVSTOW_RETURN_IF_ERROR(Begin(*message, pair));
    }
    KVSTOW_RETURN_IF_ERROR(Finish(socket, pair));
    KVSTOW_RETURN_IF_ERROR(pair.AsyncError());
  }
  return absl::OkStatus();
}

absl::Status NcclWindow::Begin(const NcclMessage& request, NcclPair& pair) {
  const int64_t window_bytes = address_.bytes;
  if (request.kind != NcclMessageKind::kRequest || request.op > 1 ||
      !IsInsideWindow(request.offset, request.bytes, window_bytes) ||
      running_.size() >= size_t{kMaxTransfersInFlight}) {
    return absl::InvalidArgumentError("a request that no service makes");
  }
  const bool is_read = static_cast<TransferOp>(request.op) == TransferOp::kRead;
  const absl::Span<std::byte> range =
      memory_.subspan(static_cast<size_t>(request.offset), static_cast<size_t>(request.bytes));
  KVSTOW_ASSIGN_OR_RETURN(const CudaEvent event,
                          pair.Enqueue(/*is_send=*/is_read, range, clock_.Now() + kSendPatience));
  running_.push_back({request.id, event});
  return absl::OkStatus();
}

absl::Status NcclWindow::Finish(NcclSocket& socket, NcclPair& pair) {
  while (!running_.empty()) {
    const absl::StatusOr<bool> has_passed = pair.HasPassed(running_.front().event);
    if (has_passed.ok() && !*has_passed) break;
    const uint64_t id = running_.front().id;
    running_.pop_front();
    KVSTOW_RETURN_IF_ERROR(has_passed.status());
    KVSTOW_RETURN_IF_ERROR(
        socket.Send({.kind = NcclMessageKind::kDone, .id = id}, clock_.Now() + kSendPatience));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Window>> OpenNcclWindow(const NcclWindowOptions& options) {
  if (options.bytes < 1 || options.bytes > kMaxWindowBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a window of ", options.bytes, " bytes; 1 to ",
                                                   kMaxWindowBytes, " are allowed"));
  }
  KVSTOW_ASSIGN_OR_RETURN(const NcclLibrary* const library, LoadNccl(options.device));
  auto window = std::make_unique<NcclWindow>(library, options.device.device_idx);
  KVSTOW_RETURN_IF_ERROR(window->Open(options));
  return window;
}

}  // namespace kvstow
