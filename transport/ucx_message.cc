#include "transport/ucx_message.h"

#include <ucp/api/ucp.h>

#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace kvstow {
namespace {

using DoneFn = std::function<void(const absl::Status&)>;

absl::Status StatusOf(ucs_status_t status) {
  if (status == UCS_OK) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("UCX, moving bytes: ", ucs_status_string(status)));
}

// Lives until UCX has given the request back.
struct Request {
  UcxMessage header;
  DoneFn on_done;

  static void Finish(void* self, ucs_status_t status) {
    const std::unique_ptr<Request> request(static_cast<Request*>(self));
    request->on_done(StatusOf(status));
  }
  static void OnSent(void* request, ucs_status_t status, void* self) {
    ucp_request_free(request);
    Finish(self, status);
  }
  static void OnReceived(void* request, ucs_status_t status, size_t, void* self) {
    ucp_request_free(request);
    Finish(self, status);
  }
  // What the call itself returned.
  static void Begun(ucs_status_ptr_t request, Request* self) {
    if (request == nullptr || UCS_PTR_IS_ERR(request)) Finish(self, UCS_PTR_STATUS(request));
  }
};

}  // namespace

void UcxData::Take(absl::Span<std::byte> to, DoneFn on_taken) {
  KVSTOW_CHECK(to.size() == bytes_ && !is_taken_);
  is_taken_ = true;
  if (!is_announced_) {
    if (bytes_ > 0) std::memcpy(to.data(), data_, bytes_);
    on_taken(absl::OkStatus());
    return;
  }
  auto* const request = new Request{.header = {}, .on_done = std::move(on_taken)};
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = &Request::OnReceived;
  param.user_data = request;
  Request::Begun(ucp_am_recv_data_nbx(worker_, data_, to.data(), to.size(), &param), request);
}

void SendUcxMessage(ucp_ep* endpoint, const UcxMessage& message, absl::Span<const std::byte> data,
                    DoneFn on_sent) {
  auto* const request = new Request{.header = message, .on_done = std::move(on_sent)};
  ucp_request_param_t param = {};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_REPLY;
  param.cb.send = &Request::OnSent;
  param.user_data = request;
  Request::Begun(ucp_am_send_nbx(endpoint, kUcxMessageId, &request->header, sizeof(UcxMessage),
                                 data.data(), data.size(), &param),
                 request);
}

}  // namespace kvstow
