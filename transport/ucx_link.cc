#include "transport/ucx_link.h"

#include <ucp/api/ucp.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace kvstow {
namespace {

absl::Status UcxError(absl::string_view doing, int status) {
  return absl::UnavailableError(
      absl::StrCat("UCX, ", doing, ": ", ucs_status_string(static_cast<ucs_status_t>(status))));
}

}  // namespace

struct UcxCallbacks {
  static void OnRequest(void* request, ucs_status_t status, void* running) {
    ucp_request_free(request);
    auto& of = *static_cast<UcxLink::Running*>(running);
    of.link->OnPart(of, status);
  }
  static void OnClosed(void* request, ucs_status_t, void* link) {
    ucp_request_free(request);
    static_cast<UcxLink*>(link)->is_closing_ = false;
  }
  // The endpoint may not be closed from here: Tick does it.
  static void OnError(void* link, ucp_ep*, ucs_status_t status) {
    auto& of = *static_cast<UcxLink*>(link);
    of.broken_by_ = status;
    of.is_alive_.store(false, std::memory_order_release);
  }
};

absl::Status UcxLink::Open(ucp_worker* worker, const std::string& worker_address,
                           const std::string& rkey) {
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(worker_address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {.cb = &UcxCallbacks::OnError, .arg = this};
  if (const ucs_status_t status = ucp_ep_create(worker, &params, &endpoint_); status != UCS_OK) {
    endpoint_ = nullptr;
    return UcxError("connecting to the worker", status);
  }
  is_alive_.store(true, std::memory_order_release);
  if (const ucs_status_t status = ucp_ep_rkey_unpack(endpoint_, rkey.data(), &rkey_);
      status != UCS_OK) {
    rkey_ = nullptr;
    return UcxError("unpacking the window's key", status);
  }
  return absl::OkStatus();
}

void UcxLink::Start(TransferId id, UcxOperation operation) {
  if (endpoint_ == nullptr || broken_by_ != 0) {
    operation.on_completed(absl::UnavailableError("the UCX channel has ended"), true);
    return;
  }
  Running& running = running_[id];
  running.link = this;
  running.id = id;
  running.operation = std::move(operation);
  deadlines_.emplace(running.operation.deadline, id);
  // One part more than there are, so that it does not finish under our hands.
  running.num_requests = 1;
  if (!running.operation.local.empty()) Submit(running);
  OnPart(running, UCS_OK);
}

void UcxLink::Submit(Running& running) {
  const UcxOperation& operation = running.operation;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &UcxCallbacks::OnRequest;
  param.user_data = &running;
  const auto take = [&](ucs_status_ptr_t request) {
    if (request != nullptr && !UCS_PTR_IS_ERR(request)) {
      ++running.num_requests;
    } else if (request != nullptr && running.error == 0) {
      running.error = UCS_PTR_STATUS(request);
    }
  };
  absl::Span<std::byte> local = operation.local;
  if (operation.op == TransferOp::kRead) {
    take(ucp_get_nbx(endpoint_, local.data(), local.size(), operation.address, rkey_, &param));
    return;
  }
  take(ucp_put_nbx(endpoint_, local.data(), local.size(), operation.address, rkey_, &param));
  // A put has ended when its source may be reused; that its bytes have arrived is what a flush
  // says.
  if (running.error == 0) take(ucp_ep_flush_nbx(endpoint_, &param));
}

void UcxLink::OnPart(Running& running, int status) {
  if (status != UCS_OK && running.error == 0) running.error = status;
  if (--running.num_requests == 0) Finish(running);
}

void UcxLink::Finish(Running& running) {
  const UcxOperation operation = std::move(running.operation);
  const bool is_completed = running.is_completed;
  const int error = running.error;
  deadlines_.erase({operation.deadline, running.id});
  running_.erase(TransferId{running.id});
  if (is_completed) {
    operation.on_released();
  } else {
    operation.on_completed(error == 0 ? absl::OkStatus() : UcxError("moving bytes", error), true);
  }
}

void UcxLink::CompleteEarly(Running& running, const absl::Status& status) {
  if (running.is_completed) return;
  running.is_completed = true;
  running.operation.on_completed(status, false);
}

// UCX cannot take a transfer back once it has begun: it runs on, unseen, until its deadline.
void UcxLink::Cancel(TransferId id) {
  const auto it = running_.find(id);
  if (it != running_.end()) CompleteEarly(it->second, absl::CancelledError("cancelled"));
}

void UcxLink::Close(const absl::Status& why) {
  is_alive_.store(false, std::memory_order_release);
  for (auto& [id, running] : running_) CompleteEarly(running, why);
  deadlines_.clear();
  if (endpoint_ == nullptr) return;
  ucp_request_param_t param = {};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = &UcxCallbacks::OnClosed;
  param.user_data = this;
  is_closing_ = true;
  ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &param);
  if (request == nullptr || UCS_PTR_IS_ERR(request)) is_closing_ = false;
}

absl::Time UcxLink::Tick(absl::Time now) {
  if (broken_by_ != 0 && endpoint_ != nullptr) Close(UcxError("the worker is gone", broken_by_));
  if (deadlines_.empty() || deadlines_.begin()->first > now) {
    return deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
  }
  // Nothing but closing the endpoint gives the memory back: the other transfers end with it.
  for (const auto& [deadline, id] : deadlines_) {
    if (deadline > now) break;
    CompleteEarly(running_.at(id), absl::DeadlineExceededError("the transfer took too long"));
  }
  Close(absl::UnavailableError("the channel was given up: another transfer took too long"));
  return absl::InfiniteFuture();
}

bool UcxLink::TryFinish() {
  if (endpoint_ != nullptr || is_closing_ || !running_.empty()) return false;
  if (rkey_ != nullptr) ucp_rkey_destroy(std::exchange(rkey_, nullptr));
  return true;
}

}  // namespace kvstow
