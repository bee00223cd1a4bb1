#include "service/data_service.h"

#include <memory>

#include "service/get_call.h"
#include "service/put_call.h"

namespace kvstow {

// The calls delete themselves when they are done.

grpc::ServerReadReactor<grpc::ByteBuffer>* DataService::Put(grpc::CallbackServerContext* context,
                                                            grpc::ByteBuffer* response) {
  return PutCall::Start(parts_, CallDeadline(*context), response);
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* DataService::Get(grpc::CallbackServerContext* context,
                                                             const grpc::ByteBuffer* request) {
  return GetCall::Start(parts_, CallDeadline(*context), *request);
}

}  // namespace kvstow
