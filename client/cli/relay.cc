#include "client/cli/relay.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "transport/shm_wire.h"

namespace kvstow {
namespace {

constexpr size_t kBufferBytes = size_t{256} << 10;
// Bytes at a rate are passed on in portions of this long, and so much is saved up when none come: a
// wire keeps no credit for the time in which it was idle.
constexpr absl::Duration kPortion = absl::Milliseconds(1);

int Index(WireDirection direction) { return static_cast<int>(direction); }

double BurstBytes(const WireRule& rule) {
  return std::max(rule.bytes_per_s * absl::ToDoubleSeconds(kPortion), 1.0);
}

bool IsLater() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

OwnedFd ConnectTo(const std::string& path) {
  const absl::StatusOr<sockaddr_un> address = ShmSocketAddress(path);
  OwnedFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!address.ok() ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0) {
    fd.Reset();
  }
  return fd;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Relay>> Relay::Listen(const std::string& path) {
  KVSTOW_ASSIGN_OR_RETURN(const sockaddr_un address, ShmSocketAddress(path));
  OwnedFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!listener.is_open() || !wake.is_open() ||
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("a relay at ", path));
  }
  return std::unique_ptr<Relay>(new Relay(std::move(listener), std::move(wake)));
}

Relay::~Relay() = default;

void Relay::SetTarget(const std::string& socket_path) {
  MutexLock lock(&mutex_);
  target_ = socket_path;
  eventfd_write(wake_.get(), 1);
}

void Relay::SetRule(const WireRule& rule) {
  MutexLock lock(&mutex_);
  rule_ = rule;
  eventfd_write(wake_.get(), 1);
}

void Relay::Freeze() {
  MutexLock lock(&mutex_);
  is_freezing_ = true;
  eventfd_write(wake_.get(), 1);
}

int64_t Relay::num_damaged() const {
  MutexLock lock(&mutex_);
  return num_damaged_;
}

void Relay::Stop() {
  MutexLock lock(&mutex_);
  is_stopping_ = true;
  eventfd_write(wake_.get(), 1);
}

void Relay::Run() {
  while (true) {
    WireRule rule;
    std::string target;
    bool is_freezing = false;
    {
      MutexLock lock(&mutex_);
      if (is_stopping_) break;
      rule = rule_;
      target = target_;
      is_freezing = std::exchange(is_freezing_, false);
    }
    for (Connection& connection : connections_) connection.is_frozen |= is_freezing;
    if (!target.empty()) Accept(target);
    Fill(rule);
    for (Connection& connection : connections_) {
      Pump(rule, WireDirection::kToService, connection);
      Pump(rule, WireDirection::kToClient, connection);
    }
    connections_.remove_if([](const Connection& connection) {
      return connection.is_broken ||
             (connection.flows[0].has_ended && connection.flows[1].has_ended);
    });
    Wait(rule, !target.empty());
  }
  connections_.clear();
}

void Relay::Accept(const std::string& target) {
  while (true) {
    OwnedFd client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!client.is_open()) return;
    OwnedFd service = ConnectTo(target);
    if (!service.is_open()) continue;  // the client sees its connection close
    Connection& added = connections_.emplace_back();
    added.client = std::move(client);
    added.service = std::move(service);
    added.flows[Index(WireDirection::kToService)] = {.from = added.client.get(),
                                                     .to = added.service.get()};
    added.flows[Index(WireDirection::kToClient)] = {.from = added.service.get(),
                                                    .to = added.client.get()};
    for (Flow& flow : added.flows) flow.buffer.resize(kBufferBytes);
  }
}

void Relay::Fill(const WireRule& rule) {
  const absl::Time now = clock_.Now();
  for (Bucket& bucket : buckets_) {
    const double seconds = absl::ToDoubleSeconds(now - bucket.filled);
    bucket.bytes = std::min(bucket.bytes + seconds * rule.bytes_per_s, BurstBytes(rule));
    bucket.filled = now;
  }
}

void Relay::Pump(const WireRule& rule, WireDirection direction, Connection& connection) {
  Flow& flow = connection.flows[Index(direction)];
  if (flow.has_ended || connection.is_broken || connection.is_frozen) return;
  if (flow.is_empty() && !Read(rule, direction, connection)) return;
  Write(rule, direction, connection);
}

// False: nothing came.
bool Relay::Read(const WireRule& rule, WireDirection direction, Connection& connection) {
  Flow& flow = connection.flows[Index(direction)];
  const ssize_t count = recv(flow.from, flow.buffer.data(), flow.buffer.size(), 0);
  if (count < 0) {
    connection.is_broken = !IsLater();
    return false;
  }
  if (count == 0) {
    flow.has_ended = true;
    shutdown(flow.to, SHUT_WR);
    return false;
  }
  flow.begin = 0;
  flow.end = static_cast<size_t>(count);
  if (rule.damage_every <= 0 || direction != rule.direction) return true;
  // Bytes that pass unharmed before the next damaged one.
  int64_t& unharmed = until_damage_[Index(direction)];
  if (unharmed <= 0 || unharmed >= rule.damage_every) unharmed = rule.damage_every - 1;
  for (; unharmed < count; unharmed += rule.damage_every) {
    MutexLock lock(&mutex_);
    flow.buffer[static_cast<size_t>(unharmed)] ^= static_cast<std::byte>(1 << (num_damaged_ % 8));
    ++num_damaged_;
  }
  unharmed -= count;
  return true;
}

void Relay::Write(const WireRule& rule, WireDirection direction, Connection& connection) {
  Flow& flow = connection.flows[Index(direction)];
  Bucket& bucket = buckets_[Index(direction)];
  auto most = static_cast<int64_t>(flow.end - flow.begin);
  if (rule.piece_bytes > 0) most = std::min(most, rule.piece_bytes);
  if (rule.bytes_per_s > 0) most = std::min(most, static_cast<int64_t>(bucket.bytes));
  const bool is_cut = rule.cut_after > 0 && direction == rule.direction;
  if (is_cut) most = std::min(most, std::max<int64_t>(rule.cut_after - flow.passed_bytes, 0));
  if (most > 0) {
    const ssize_t sent =
        send(flow.to, flow.buffer.data() + flow.begin, static_cast<size_t>(most), MSG_NOSIGNAL);
    if (sent < 0) {
      connection.is_broken = !IsLater();
      return;
    }
    flow.begin += static_cast<size_t>(sent);
    flow.passed_bytes += sent;
    if (rule.bytes_per_s > 0) bucket.bytes -= static_cast<double>(sent);
  }
  if (is_cut && flow.passed_bytes >= rule.cut_after) connection.is_broken = true;
}

// Until a socket is ready, the rate lets bytes pass again, or somebody has called.
void Relay::Wait(const WireRule& rule, bool has_target) {
  std::vector<pollfd> events = {{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
  if (has_target) events.push_back({.fd = listener_.get(), .events = POLLIN, .revents = 0});
  std::optional<absl::Duration> limit;
  for (const Connection& connection : connections_) {
    for (int i = 0; i < 2; ++i) {
      const Flow& flow = connection.flows[i];
      if (flow.has_ended || connection.is_frozen) continue;
      if (flow.is_empty()) {
        events.push_back({.fd = flow.from, .events = POLLIN, .revents = 0});
      } else if (rule.bytes_per_s <= 0 || buckets_[i].bytes >= 1) {
        events.push_back({.fd = flow.to, .events = POLLOUT, .revents = 0});
      } else {
        const double missing_bytes = std::max(BurstBytes(rule) / 4, 1.0) - buckets_[i].bytes;
        const absl::Duration wait = absl::Seconds(missing_bytes / rule.bytes_per_s);
        limit = std::min(limit.value_or(wait), wait);
      }
    }
  }
  timespec timeout = {};
  if (limit.has_value()) timeout = absl::ToTimespec(*limit);
  ppoll(events.data(), events.size(), limit.has_value() ? &timeout : nullptr, nullptr);
  eventfd_t ignored = 0;
  eventfd_read(wake_.get(), &ignored);
}

}  // namespace kvstow
