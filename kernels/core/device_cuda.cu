#include <cuda_runtime_api.h>

#include "kernels/core/device.h"

namespace kvstow {

DeviceList ListDevices() {
  DeviceList list;
  list.built_with_cuda = true;
  int num_devices = 0;
  const cudaError_t counted = cudaGetDeviceCount(&num_devices);
  if (counted != cudaSuccess) {
    list.why_none = cudaGetErrorString(counted);
    return list;
  }
  for (int i = 0; i < num_devices; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    list.devices.push_back({properties.name, properties.major, properties.minor,
                            static_cast<int64_t>(properties.totalGlobalMem)});
  }
  if (list.devices.empty()) list.why_none = "the driver answers, but no device does";
  return list;
}

}  // namespace kvstow
