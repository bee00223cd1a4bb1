// DeviceMemory: memory of one GPU and copies between it and the host. An interface, so that what
// stands on it is also tested where there is no GPU.
//
//   KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<DeviceMemory> device, OpenDeviceMemory(0));
//   KVSTOW_ASSIGN_OR_RETURN(DeviceSlab slab, device->Allocate(1 << 30));
//   KVSTOW_ASSIGN_OR_RETURN(DeviceStream stream, device->CreateStream());
//   KVSTOW_RETURN_IF_ERROR(device->CopyToDevice(stream, slab.address, host.get(), 4096));
//   KVSTOW_ASSIGN_OR_RETURN(DeviceEvent event, device->Record(stream));
//   KVSTOW_RETURN_IF_ERROR(device->Wait(event, absl::Seconds(1)));   // now, and not before
//
// What is queued on one stream runs in its order, what is queued on two in any. Until an event that
// was recorded behind a copy has been waited for, both ends of the copy are the device's: the host
// neither changes nor frees nor reads them.
//
// Errors of all methods: kUnavailable, the device failed; the message is the driver's.
// Thread safety: all methods may be called at once; a stream by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvstow {

// A place in device memory: arithmetic yes, reading on the host no.
using DeviceAddress = uint64_t;

// The four below keep what they name until the last copy goes, and their device alive.
struct DeviceSlab {
  std::shared_ptr<const void> owner;
  DeviceAddress address = 0;  // a multiple of 256
};
using DeviceStream = std::shared_ptr<void>;
using DeviceEvent = std::shared_ptr<void>;
using HostBuffer = std::shared_ptr<std::byte>;  // page-locked: copies run beside the host's work

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // kResourceExhausted: the message says how much was wanted. Content is arbitrary. `bytes` > 0.
  virtual absl::StatusOr<DeviceSlab> Allocate(int64_t bytes) = 0;
  virtual absl::StatusOr<HostBuffer> AllocateHost(int64_t bytes) = 0;
  virtual absl::StatusOr<DeviceStream> CreateStream() = 0;

  // Queue a copy and return at once.
  virtual absl::Status CopyToDevice(const DeviceStream& stream, DeviceAddress target,
                                    const std::byte* source, int64_t bytes) = 0;
  virtual absl::Status CopyToHost(const DeviceStream& stream, std::byte* target,
                                  DeviceAddress source, int64_t bytes) = 0;

  // Completes when all that is queued on the stream by now has run.
  virtual absl::StatusOr<DeviceEvent> Record(const DeviceStream& stream) = 0;
  // kDeadlineExceeded: not completed within `timeout`, it may still be: wait again. What the device
  // holds it goes on holding.
  virtual absl::Status Wait(const DeviceEvent& event, absl::Duration timeout) = 0;
};

// Device `device_idx` of ListDevices (device.h). kUnavailable: there is none; the message says why.
absl::StatusOr<std::shared_ptr<DeviceMemory>> OpenDeviceMemory(int32_t device_idx);

}  // namespace kvstow
