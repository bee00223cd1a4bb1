#include "kernels/core/device.h"

namespace kvstow {

DeviceList ListDevices() {
  return {.built_with_cuda = false,
          .devices = {},
          .why_none = "this build has no CUDA sources (configure with the preset cuda)"};
}

}  // namespace kvstow
