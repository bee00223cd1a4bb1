#include "transport/ucx_link.h"

#include <netinet/in.h>
#include <ucp/api/ucp.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "transport/ucx_listener.h"

namespace kvstow {
namespace {

absl::Status UcxError(absl::string_view doing, int status) {
  return absl::UnavailableError(
      absl::StrCat("UCX, ", doing, ": ", ucs_status_string(static_cast<ucs_status_t>(status))));
}

}  // namespace

struct UcxLinkCallbacks {
  static void OnClosed(void* request, ucs_status_t, void* link) {
    ucp_request_free(request);
    --static_cast<UcxLink*>(link)->num_own_requests_;
  }
  // The endpoint may not be closed from here: Tick does it.
  static void OnError(void* link, ucp_ep*, ucs_status_t status) {
    auto& of = *static_cast<UcxLink*>(link);
    of.broken_by_ = status;
    of.is_alive_.store(false, std::memory_order_release);
  }
};

absl::Status UcxLink::Connect(ucp_worker* worker, const std::string& listener) {
  KVSTOW_ASSIGN_OR_RETURN(const sockaddr_storage address, ParseSocketAddress(listener));
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address);
  params.sockaddr.addrlen =
      address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {.cb = &UcxLinkCallbacks::OnError, .arg = this};
  if (const ucs_status_t status = ucp_ep_create(worker, &params, &endpoint_); status != UCS_OK) {
    endpoint_ = nullptr;
    return UcxError("connecting to the worker", status);
  }
  return absl::OkStatus();
}

void UcxLink::Open(ucp_worker* worker, const UcxTicket& ticket,
                   std::function<void(const absl::Status&)> on_opened) {
  if (const absl::Status status = Connect(worker, ticket.listener); !status.ok()) {
    on_opened(status);
    return;
  }
  is_alive_.store(true, std::memory_order_release);
  on_opened_ = std::move(on_opened);
  window_id_ = ticket.window_id;
  ++num_own_requests_;
  SendUcxMessage(endpoint_, {.verb = UcxVerb::kAttach},
                 {reinterpret_cast<const std::byte*>(window_id_.data()), window_id_.size()},
                 [this](const absl::Status&) { --num_own_requests_; });
}

void UcxLink::OnMessage(const UcxMessage& message, UcxData& data) {
  if (message.verb == UcxVerb::kAttached) OnAttached(message);
  if (message.verb == UcxVerb::kData) OnData(message, data);
  if (message.verb == UcxVerb::kDone) OnDone(message);
}

void UcxLink::OnAttached(const UcxMessage& message) {
  if (on_opened_ == nullptr) return;
  const auto code = static_cast<absl::StatusCode>(message.code);
  absl::Status status;
  if (code == absl::StatusCode::kAlreadyExists) {
    status = absl::NotFoundError("the UCX window of this ticket was attached before");
  } else if (code != absl::StatusCode::kOk) {
    status = absl::NotFoundError("the UCX window of this ticket is not there any more");
  }
  std::exchange(on_opened_, nullptr)(status);
}

void UcxLink::Start(TransferId id, UcxOperation operation) {
  if (endpoint_ == nullptr || broken_by_ != 0) {
    operation.on_completed(absl::UnavailableError("the UCX channel has ended"), true);
    return;
  }
  Running& running = running_[id];
  running.id = id;
  running.operation = std::move(operation);
  running.bytes_left = running.operation.local.size();
  deadlines_.emplace(running.operation.deadline, id);
  // One request more than there are, so that it does not finish under our hands.
  running.num_requests = 1;
  if (running.bytes_left > 0) Submit(running);
  OnPiece(id, absl::OkStatus(), 0, /*is_request=*/true);
}

void UcxLink::Submit(Running& running) {
  const UcxOperation& operation = running.operation;
  const TransferId id = running.id;
  const auto on_sent = [this, id](const absl::Status& status) { OnPiece(id, status, 0, true); };
  const absl::Span<const std::byte> local = operation.local;
  if (operation.op == TransferOp::kRead) {
    ++running.num_requests;
    SendUcxMessage(endpoint_,
                   {.verb = UcxVerb::kRead,
                    .transfer = id,
                    .offset = operation.window_offset,
                    .bytes = local.size()},
                   {}, on_sent);
    return;
  }
  for (size_t at = 0; at < local.size(); at += kUcxPieceBytes) {
    ++running.num_requests;
    SendUcxMessage(
        endpoint_,
        {.verb = UcxVerb::kWrite, .transfer = id, .offset = operation.window_offset + at},
        local.subspan(at, kUcxPieceBytes), on_sent);
  }
}

void UcxLink::OnData(const UcxMessage& message, UcxData& data) {
  const auto it = running_.find(message.transfer);
  if (it == running_.end() || it->second.is_completed) return;  // cancelled: nobody waits for it
  const UcxOperation& operation = it->second.operation;
  const size_t size = operation.local.size();
  if (operation.op != TransferOp::kRead || message.offset > size || data.size() == 0 ||
      data.size() > size - message.offset || data.size() > it->second.bytes_left) {
    OnPiece(message.transfer, absl::UnavailableError("UCX: the worker sent what was not asked for"),
            0, false);
    return;
  }
  ++it->second.num_requests;
  const TransferId id = message.transfer;
  const uint64_t bytes = data.size();
  data.Take(operation.local.subspan(message.offset, data.size()),
            [this, id, bytes](const absl::Status& status) { OnPiece(id, status, bytes, true); });
}

void UcxLink::OnDone(const UcxMessage& message) {
  const auto it = running_.find(message.transfer);
  if (it == running_.end()) return;
  absl::Status status;
  if (message.code != 0) {
    status = absl::UnavailableError(absl::StrCat("UCX: the worker refused, code ", message.code));
  } else if (it->second.operation.op != TransferOp::kWrite ||
             message.bytes > it->second.bytes_left) {
    status = absl::UnavailableError("UCX: the worker answered what was not asked");
  }
  OnPiece(message.transfer, status, status.ok() ? message.bytes : 0, false);
}

void UcxLink::OnPiece(TransferId id, const absl::Status& status, uint64_t bytes, bool is_request) {
  const auto it = running_.find(id);
  if (it == running_.end()) return;
  Running& running = it->second;
  if (is_request) --running.num_requests;
  running.error.Update(status);
  running.bytes_left -= bytes;
  FinishIfDone(running);
}

void UcxLink::FinishIfDone(Running& running) {
  const bool is_over = running.bytes_left == 0 || running.is_completed || !running.error.ok() ||
                       endpoint_ == nullptr;
  if (running.num_requests > 0 || !is_over) return;
  const UcxOperation operation = std::move(running.operation);
  const bool is_completed = running.is_completed;
  const absl::Status error = running.error;
  deadlines_.erase({operation.deadline, running.id});
  running_.erase(TransferId{running.id});
  if (is_completed) {
    operation.on_released();
  } else {
    operation.on_completed(error, true);
  }
}

void UcxLink::CompleteEarly(Running& running, const absl::Status& status) {
  if (running.is_completed) return;
  running.is_completed = true;
  running.operation.on_completed(status, false);
}

// What is under way runs on, unseen; pieces still to come are dropped when they do.
void UcxLink::Cancel(TransferId id) {
  const auto it = running_.find(id);
  if (it == running_.end()) return;
  CompleteEarly(it->second, absl::CancelledError("cancelled"));
  FinishIfDone(it->second);
}

void UcxLink::Close(const absl::Status& why) {
  is_alive_.store(false, std::memory_order_release);
  if (on_opened_ != nullptr) std::exchange(on_opened_, nullptr)(why);
  for (auto& [id, running] : running_) CompleteEarly(running, why);
  deadlines_.clear();
  if (endpoint_ != nullptr) {
    ucp_request_param_t param = {};
    param.op_attr_mask =
        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    param.cb.send = &UcxLinkCallbacks::OnClosed;
    param.user_data = this;
    ++num_own_requests_;
    ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &param);
    if (request == nullptr || UCS_PTR_IS_ERR(request)) --num_own_requests_;
  }
  // Nobody answers any more: what holds no request of UCX is over.
  std::vector<TransferId> ids;
  for (const auto& [id, running] : running_) ids.push_back(id);
  for (const TransferId id : ids) FinishIfDone(running_.at(id));
}

absl::Time UcxLink::Tick(absl::Time now) {
  if (broken_by_ != 0 && endpoint_ != nullptr) Close(UcxError("the worker is gone", broken_by_));
  if (deadlines_.empty() || deadlines_.begin()->first > now) {
    return deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
  }
  // A transfer that is late may have requests that only the end of the endpoint gives back: the
  // other transfers end with it.
  for (const auto& [deadline, id] : deadlines_) {
    if (deadline > now) break;
    CompleteEarly(running_.at(id), absl::DeadlineExceededError("the transfer took too long"));
  }
  Close(absl::UnavailableError("the channel was given up: another transfer took too long"));
  return absl::InfiniteFuture();
}

bool UcxLink::TryFinish() {
  return endpoint_ == nullptr && num_own_requests_ == 0 && running_.empty();
}

}  // namespace kvstow
