// DataService: Put and Get of data.proto over raw buffers, so that payload is not copied on its way
// between gRPC and the store. The bytes on the wire are those of the messages in data.proto.
#pragma once

#include "kvstow/v1/data.grpc.pb.h"
#include "service/service_parts.h"

namespace kvstow {

class DataService final : public v1::Data::WithRawCallbackMethod_Put<
                              v1::Data::WithRawCallbackMethod_Get<v1::Data::Service>> {
 public:
  // `parts` must outlive the server this is registered with.
  explicit DataService(const ServiceParts& parts) : parts_(parts) {}

  grpc::ServerReadReactor<grpc::ByteBuffer>* Put(grpc::CallbackServerContext* context,
                                                 grpc::ByteBuffer* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Get(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request) override;

 private:
  const ServiceParts& parts_;
};

}  // namespace kvstow
