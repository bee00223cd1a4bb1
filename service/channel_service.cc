#include "service/channel_service.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "service/call_deadline.h"
#include "service/unary_answer.h"

namespace kvstow {
namespace {

constexpr int kMaxOffers = 8;

absl::Status DoOpenChannel(const ServiceParts& parts, const v1::OpenChannelRequest& request,
                           absl::Duration timeout, v1::OpenChannelResponse* response) {
  if (request.offers_size() < 1 || request.offers_size() > kMaxOffers) {
    return absl::InvalidArgumentError(
        absl::StrCat("offers: ", request.offers_size(), ", want 1 to ", kMaxOffers));
  }
  for (const v1::WindowOffer& offer : request.offers()) {
    const absl::StatusOr<uint64_t> channel =
        parts.channels->Open(offer.path(), offer.ticket(), timeout);
    if (channel.ok()) {
      response->set_channel(*channel);
      response->set_path(offer.path());
      return absl::OkStatus();
    }
    // A limit is the service's, not the path's: other offers would meet it too.
    if (absl::IsResourceExhausted(channel.status())) return channel.status();
    response->add_refusals(absl::StrCat(offer.path(), ": ", channel.status().message()));
  }
  return absl::FailedPreconditionError(absl::StrJoin(response->refusals(), "; "));
}

absl::Status DoListPaths(const ServiceParts& parts, v1::ListPathsResponse* response) {
  for (const ServedPath& served : parts.channels->paths()) {
    v1::PathInfo* info = response->add_paths();
    info->set_path(std::string(PathName(served.path)));
    info->set_address(served.address);
    info->set_unavailable(served.unavailable);
  }
  return absl::OkStatus();
}

}  // namespace

grpc::ServerUnaryReactor* ChannelService::ListPaths(grpc::CallbackServerContext* context,
                                                    const v1::ListPathsRequest*,
                                                    v1::ListPathsResponse* response) {
  return Answer(parts_, context, Method::kListPaths, Where::kRpcThread,
                [this, response] { return DoListPaths(parts_, response); });
}

grpc::ServerUnaryReactor* ChannelService::OpenChannel(grpc::CallbackServerContext* context,
                                                      const v1::OpenChannelRequest* request,
                                                      v1::OpenChannelResponse* response) {
  const absl::Duration timeout = CallDeadline(*context).Left();
  return Answer(parts_, context, Method::kOpenChannel, Where::kControlExecutor,
                [this, request, timeout, response] {
                  return DoOpenChannel(parts_, *request, timeout, response);
                });
}

grpc::ServerUnaryReactor* ChannelService::CloseChannel(grpc::CallbackServerContext* context,
                                                       const v1::CloseChannelRequest* request,
                                                       v1::CloseChannelResponse*) {
  return Answer(parts_, context, Method::kCloseChannel, Where::kControlExecutor,
                [this, request] { return parts_.channels->Close(request->channel()); });
}

}  // namespace kvstow
