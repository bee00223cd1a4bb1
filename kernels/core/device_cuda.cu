#include <cuda_runtime_api.h>

#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/device.h"
#include "kernels/core/device_memory.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

// How often an event is asked: CUDA has no wait that ends with a time. Copies of some 100 KiB take
// tens of microseconds, so first without a pause.
constexpr std::chrono::microseconds kSpin(50);
constexpr std::chrono::microseconds kPause(20);

absl::Status ToStatus(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(call, ": ", cudaGetErrorString(error));
  (void)cudaGetLastError();  // what is not sticky is over
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::UnavailableError(message);
}

class CudaMemory final : public DeviceMemory, public std::enable_shared_from_this<CudaMemory> {
 public:
  explicit CudaMemory(int32_t device_idx) : device_idx_(device_idx) {}

  absl::StatusOr<DeviceSlab> Allocate(int64_t bytes) override {
    KVSTOW_RETURN_IF_ERROR(Use());
    void* base = nullptr;
    const absl::Status status = ToStatus("cudaMalloc", cudaMalloc(&base, bytes));
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(bytes, " bytes of device memory: ", status.message()));
    }
    return DeviceSlab{Owned(base, [](void* slab) { cudaFree(slab); }),
                      reinterpret_cast<DeviceAddress>(base)};
  }

  absl::StatusOr<HostBuffer> AllocateHost(int64_t bytes) override {
    KVSTOW_RETURN_IF_ERROR(Use());
    void* base = nullptr;
    KVSTOW_RETURN_IF_ERROR(
        ToStatus("cudaHostAlloc", cudaHostAlloc(&base, bytes, cudaHostAllocDefault)));
    return HostBuffer(Owned(base, [](void* host) { cudaFreeHost(host); }),
                      static_cast<std::byte*>(base));
  }

  absl::StatusOr<DeviceStream> CreateStream() override {
    KVSTOW_RETURN_IF_ERROR(Use());
    cudaStream_t stream = nullptr;
    KVSTOW_RETURN_IF_ERROR(ToStatus("cudaStreamCreateWithFlags",
                                    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
    return Owned(stream, [](void* s) { cudaStreamDestroy(static_cast<cudaStream_t>(s)); });
  }

  absl::Status CopyToDevice(const DeviceStream& stream, DeviceAddress target,
                            const std::byte* source, int64_t bytes) override {
    KVSTOW_RETURN_IF_ERROR(Use());
    return ToStatus("cudaMemcpyAsync to the device",
                    cudaMemcpyAsync(reinterpret_cast<void*>(target), source, bytes,
                                    cudaMemcpyHostToDevice, StreamOf(stream)));
  }

  absl::Status CopyToHost(const DeviceStream& stream, std::byte* target, DeviceAddress source,
                          int64_t bytes) override {
    KVSTOW_RETURN_IF_ERROR(Use());
    return ToStatus("cudaMemcpyAsync to the host",
                    cudaMemcpyAsync(target, reinterpret_cast<const void*>(source), bytes,
                                    cudaMemcpyDeviceToHost, StreamOf(stream)));
  }

  absl::StatusOr<DeviceEvent> Record(const DeviceStream& stream) override {
    KVSTOW_RETURN_IF_ERROR(Use());
    cudaEvent_t event = nullptr;
    KVSTOW_RETURN_IF_ERROR(ToStatus("cudaEventCreateWithFlags",
                                    cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
    DeviceEvent owned =
        Owned(event, [](void* e) { cudaEventDestroy(static_cast<cudaEvent_t>(e)); });
    KVSTOW_RETURN_IF_ERROR(ToStatus("cudaEventRecord", cudaEventRecord(event, StreamOf(stream))));
    return owned;
  }

  absl::Status Wait(const DeviceEvent& event, absl::Duration timeout) override {
    KVSTOW_RETURN_IF_ERROR(Use());
    const auto start = std::chrono::steady_clock::now();
    while (true) {
      const cudaError_t state = cudaEventQuery(static_cast<cudaEvent_t>(event.get()));
      if (state != cudaErrorNotReady) return ToStatus("cudaEventQuery", state);
      const auto waited = std::chrono::steady_clock::now() - start;
      if (absl::FromChrono(waited) >= timeout) {
        (void)cudaGetLastError();
        return absl::DeadlineExceededError(
            absl::StrCat("the device has not ended a copy within ", absl::FormatDuration(timeout)));
      }
      if (waited > kSpin) std::this_thread::sleep_for(kPause);
    }
  }

  // The calling thread's device: each has its own.
  absl::Status Use() const { return ToStatus("cudaSetDevice", cudaSetDevice(device_idx_)); }

 private:
  static cudaStream_t StreamOf(const DeviceStream& stream) {
    return static_cast<cudaStream_t>(stream.get());
  }
  std::shared_ptr<void> Owned(void* handle, void (*destroy)(void*)) {
    return {handle, [self = shared_from_this(), destroy](void* owned) {
              if (self->Use().ok()) destroy(owned);
            }};
  }

  const int32_t device_idx_;
};

}  // namespace

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

absl::StatusOr<std::shared_ptr<DeviceMemory>> OpenDeviceMemory(int32_t device_idx) {
  const DeviceList list = ListDevices();
  if (device_idx < 0 || device_idx >= static_cast<int64_t>(list.devices.size())) {
    return absl::UnavailableError(absl::StrCat(
        "no GPU ", device_idx, ": ",
        list.devices.empty() ? list.why_none : absl::StrCat(list.devices.size(), " found")));
  }
  auto device = std::make_shared<CudaMemory>(device_idx);
  const absl::Status status = device->Use();
  if (!status.ok()) {
    return absl::UnavailableError(absl::StrCat("GPU ", device_idx, ": ", status.message()));
  }
  return device;
}

}  // namespace kvstow
