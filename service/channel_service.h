// ChannelService: the calls of channels.proto.
#pragma once

#include "kvstow/v1/channels.grpc.pb.h"
#include "service/service_parts.h"

namespace kvstow {

class ChannelService final : public v1::Channels::CallbackService {
 public:
  // `parts` must outlive the server this is registered with.
  explicit ChannelService(const ServiceParts& parts) : parts_(parts) {}

  grpc::ServerUnaryReactor* ListPaths(grpc::CallbackServerContext* context,
                                      const v1::ListPathsRequest* request,
                                      v1::ListPathsResponse* response) override;
  grpc::ServerUnaryReactor* OpenChannel(grpc::CallbackServerContext* context,
                                        const v1::OpenChannelRequest* request,
                                        v1::OpenChannelResponse* response) override;
  grpc::ServerUnaryReactor* CloseChannel(grpc::CallbackServerContext* context,
                                         const v1::CloseChannelRequest* request,
                                         v1::CloseChannelResponse* response) override;

 private:
  const ServiceParts& parts_;
};

}  // namespace kvstow
