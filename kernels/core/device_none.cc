#include "absl/strings/str_cat.h"
#include "kernels/core/device.h"
#include "kernels/core/device_memory.h"

namespace kvstow {

DeviceList ListDevices() {
  return {.built_with_cuda = false,
          .devices = {},
          .why_none = "this build has no CUDA sources (configure with the preset cuda)"};
}

absl::StatusOr<std::shared_ptr<DeviceMemory>> OpenDeviceMemory(int32_t device_idx) {
  return absl::UnavailableError(absl::StrCat("no GPU ", device_idx, ": ", ListDevices().why_none));
}

}  // namespace kvstow
