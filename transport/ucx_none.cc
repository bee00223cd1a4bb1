// The half of ucx.h for builds without UCX.
#include "transport/ucx.h"

namespace kvstow {
namespace {

absl::Status NotBuilt() {
  return absl::UnimplementedError(
      "built without UCX: its development files (libucx-dev) were not found at configuration");
}

}  // namespace

bool IsUcxBuilt() { return false; }

absl::StatusOr<std::unique_ptr<Window>> OpenUcxWindow(const UcxWindowOptions&) {
  return NotBuilt();
}

absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const UcxTransportOptions&) {
  return NotBuilt();
}

}  // namespace kvstow
