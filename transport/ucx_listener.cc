#include "transport/ucx_listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <ucp/api/ucp.h>

#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

absl::Status NoAddress(const std::string& text) {
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text.substr(0, 64), "\" is no IP address and port"));
}

socklen_t LengthOf(const sockaddr_storage& address) {
  return address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

}  // namespace

absl::StatusOr<sockaddr_storage> ParseSocketAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &port) ||
      port > UINT16_MAX) {
    return NoAddress(text);
  }
  absl::string_view ip = absl::string_view(text).substr(0, colon);
  if (absl::ConsumePrefix(&ip, "[") && !absl::ConsumeSuffix(&ip, "]")) return NoAddress(text);
  sockaddr_storage address = {};
  auto* const v4 = reinterpret_cast<sockaddr_in*>(&address);
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(&address);
  if (inet_pton(AF_INET, std::string(ip).c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
  } else if (inet_pton(AF_INET6, std::string(ip).c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
  } else {
    return NoAddress(text);
  }
  return address;
}

std::string FormatSocketAddress(const sockaddr_storage& address) {
  char ip[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &v6.sin6_addr, ip, sizeof(ip));
    return absl::StrCat("[", ip, "]:", ntohs(v6.sin6_port));
  }
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
  inet_ntop(AF_INET, &v4.sin_addr, ip, sizeof(ip));
  return absl::StrCat(ip, ":", ntohs(v4.sin_port));
}

struct UcxListenerCallbacks {
  static void OnRequest(ucp_conn_request_h request, void* listener) {
    static_cast<UcxListener*>(listener)->Accept(request);
  }
  // The endpoint may not be closed from here: Tick does it.
  static void OnError(void* connection, ucp_ep*, ucs_status_t) {
    auto& of = *static_cast<UcxListener::Connection*>(connection);
    of.is_broken = true;
    if (of.is_attached) of.listener->window_->state = UcxServedWindow::State::kClosed;
  }
  static void OnClosed(void* request, ucs_status_t, void* connection) {
    ucp_request_free(request);
    static_cast<UcxListener::Connection*>(connection)->is_closed = true;
  }
};

absl::StatusOr<std::unique_ptr<UcxListener>> UcxListener::Open(ucp_worker* worker,
                                                               const std::string& ip,
                                                               UcxServedWindow* window) {
  const bool is_v6 = absl::StrContains(ip, ':');
  KVSTOW_ASSIGN_OR_RETURN(
      const sockaddr_storage address,
      ParseSocketAddress(is_v6 ? absl::StrCat("[", ip, "]:0") : absl::StrCat(ip, ":0")));
  std::unique_ptr<UcxListener> listener(new UcxListener(worker, window));
  ucp_listener_params_t params = {};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address);
  params.sockaddr.addrlen = LengthOf(address);
  params.conn_handler = {.cb = &UcxListenerCallbacks::OnRequest, .arg = listener.get()};
  ucs_status_t status = ucp_listener_create(worker, &params, &listener->listener_);
  ucp_listener_attr_t attributes = {};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  if (status == UCS_OK) status = ucp_listener_query(listener->listener_, &attributes);
  if (status != UCS_OK) {
    return absl::UnavailableError(
        absl::StrCat("UCX, listening on ", ip, ": ", ucs_status_string(status)));
  }
  listener->address_ = FormatSocketAddress(attributes.sockaddr);
  return listener;
}

UcxListener::~UcxListener() {
  if (listener_ != nullptr) ucp_listener_destroy(listener_);
}

void UcxListener::Accept(void* request) {
  auto* const connection_request = static_cast<ucp_conn_request_h>(request);
  if (listener_ == nullptr) return;
  if (connections_.size() >= kConnectionsMax) {
    ucp_listener_reject(listener_, connection_request);
    return;
  }
  Connection& connection = connections_.emplace_back();
  connection.listener = this;
  connection.number = ++num_accepted_;
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.conn_request = connection_request;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {.cb = &UcxListenerCallbacks::OnError, .arg = &connection};
  // Where it fails, UCX has rejected the request itself.
  if (ucp_ep_create(worker_, &params, &connection.endpoint) != UCS_OK) connections_.pop_back();
}

void UcxListener::OnMessage(const ucp_ep* endpoint, const UcxMessage& message, UcxData& data) {
  for (Connection& connection : connections_) {
    if (connection.endpoint == nullptr || connection.endpoint != endpoint) continue;
    if (message.verb == UcxVerb::kAttach) {
      const absl::StatusCode code = Attach(connection, data.here());
      Answer(connection.number, {.verb = UcxVerb::kAttached, .code = static_cast<uint32_t>(code)});
    }
    if (message.verb == UcxVerb::kRead) Read(connection, message);
    if (message.verb == UcxVerb::kWrite) Write(connection, message, data);
    return;
  }
}

absl::StatusCode UcxListener::Attach(Connection& connection,
                                     absl::Span<const std::byte> window_id) {
  if (window_id.size() != window_->id.size() ||
      std::memcmp(window_id.data(), window_->id.data(), window_id.size()) != 0) {
    return absl::StatusCode::kNotFound;
  }
  auto offered = UcxServedWindow::State::kOffered;
  if (!window_->state.compare_exchange_strong(offered, UcxServedWindow::State::kAttached)) {
    return absl::StatusCode::kAlreadyExists;
  }
  connection.is_attached = true;
  return absl::StatusCode::kOk;
}

void UcxListener::Answer(uint64_t connection_number, const UcxMessage& message) {
  for (const Connection& connection : connections_) {
    if (connection.number != connection_number || connection.endpoint == nullptr) continue;
    ++num_requests_;
    SendUcxMessage(connection.endpoint, message, {},
                   [this](const absl::Status&) { --num_requests_; });
  }
}

void UcxListener::Read(const Connection& connection, const UcxMessage& message) {
  const uint64_t size = window_->memory.size();
  if (!connection.is_attached || message.offset > size || message.bytes > size - message.offset) {
    Answer(connection.number, {.verb = UcxVerb::kDone,
                               .code = static_cast<uint32_t>(absl::StatusCode::kInvalidArgument),
                               .transfer = message.transfer});
    return;
  }
  const absl::Span<const std::byte> wanted = window_->memory.subspan(message.offset, message.bytes);
  for (size_t at = 0; at < wanted.size(); at += kUcxPieceBytes) {
    ++num_requests_;
    SendUcxMessage(
        connection.endpoint, {.verb = UcxVerb::kData, .transfer = message.transfer, .offset = at},
        wanted.subspan(at, kUcxPieceBytes), [this](const absl::Status&) { --num_requests_; });
  }
}

void UcxListener::Write(const Connection& connection, const UcxMessage& message, UcxData& data) {
  const uint64_t size = window_->memory.size();
  UcxMessage answer{.verb = UcxVerb::kDone, .transfer = message.transfer, .bytes = data.size()};
  if (!connection.is_attached || message.offset > size || data.size() > size - message.offset) {
    answer.code = static_cast<uint32_t>(absl::StatusCode::kInvalidArgument);
    Answer(connection.number, answer);
    return;
  }
  ++num_requests_;
  data.Take(window_->memory.subspan(message.offset, data.size()),
            [this, number = connection.number, answer](const absl::Status& status) mutable {
              --num_requests_;
              answer.code = static_cast<uint32_t>(status.code());
              Answer(number, answer);
            });
}

void UcxListener::CloseConnection(Connection& connection) {
  if (connection.is_closing) return;
  connection.is_closing = true;
  if (connection.is_attached) window_->state = UcxServedWindow::State::kClosed;
  ucp_request_param_t param = {};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = &UcxListenerCallbacks::OnClosed;
  param.user_data = &connection;
  ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(connection.endpoint, nullptr), &param);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) connection.is_closed = true;
}

void UcxListener::Tick() {
  for (Connection& connection : connections_) {
    if (connection.is_broken) CloseConnection(connection);
  }
  connections_.remove_if([](const Connection& connection) { return connection.is_closed; });
}

void UcxListener::Close() {
  if (listener_ != nullptr) ucp_listener_destroy(std::exchange(listener_, nullptr));
  for (Connection& connection : connections_) CloseConnection(connection);
  Tick();
}

}  // namespace kvstow
