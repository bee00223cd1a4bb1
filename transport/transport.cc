#include "transport/transport.h"

#include "absl/strings/str_cat.h"
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

bool IsInsideWindow(int64_t window_offset, int64_t bytes, int64_t window_bytes) {
  return window_offset >= 0 && bytes >= 0 && window_offset <= window_bytes &&
         bytes <= window_bytes - window_offset;
}

absl::Status CheckTransfer(const Transfer& transfer, int64_t window_bytes) {
  const auto bytes = static_cast<int64_t>(transfer.local.size());
  if (!IsInsideWindow(transfer.window_offset, bytes, window_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(bytes, " bytes at ", transfer.window_offset,
                                                   " are not inside the window of ", window_bytes,
                                                   " bytes"));
  }
  if (transfer.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("a transfer's timeout must be positive");
  }
  return absl::OkStatus();
}

}  // namespace kvstow
