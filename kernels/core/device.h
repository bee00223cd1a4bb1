// Devices: the GPUs this process can use, found at run time. Their absence is no error.
//
// Link-time halves: device_cuda.cu in a CUDA build, device_none.cc otherwise.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvstow {

struct DeviceInfo {
  std::string name;
  int32_t compute_major = 0;
  int32_t compute_minor = 0;
  int64_t memory_bytes = 0;
};

struct DeviceList {
  bool built_with_cuda = false;
  std::vector<DeviceInfo> devices;
  std::string why_none;  // for people, when `devices` is empty
};

// Asks the driver. Never fails: without a driver or a device the list is empty and says why.
DeviceList ListDevices();

}  // namespace kvstow
