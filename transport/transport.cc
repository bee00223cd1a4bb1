#include "transport/transport.h"

#include "kernels/core/check.h"

namespace kvstow {

std::string_view PathName(PathKind path) {
  switch (path) {
    case PathKind::kShm:
      return "shm";
    case PathKind::kUcx:
      return "ucx";
    case PathKind::kNccl:
      return "nccl";
    case PathKind::kGrpc:
      return "grpc";
  }
  KVSTOW_CHECK(false);
  return "";
}

}  // namespace kvstow
