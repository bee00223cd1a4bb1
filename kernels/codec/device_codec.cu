#include <cstdio>
#include <cstdlib>

#include "kernels/codec/device_codec.h"
#include "kernels/codec/device_kernels.cuh"
#include "kernels/codec/device_plan.h"
#include "kernels/core/device.h"

namespace kvstow {
namespace {

// A failed CUDA call on this path is a broken device, and the interface has no room for an error:
// stop instead of returning bytes that nobody checked.
void CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "cuda: %s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

// Device memory that grows and is kept for the thread's next call.
class DeviceScratch {
 public:
  ~DeviceScratch() { cudaFree(data_); }
  unsigned char* Get(std::size_t bytes) {
    if (bytes > bytes_) {
      CheckCuda(cudaFree(data_), "free");
      CheckCuda(cudaMalloc(&data_, bytes), "malloc");
      bytes_ = bytes;
    }
    return static_cast<unsigned char*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// One plane's buffers on the device: the job, its flag, the output pointer, rows, the plane.
struct DevicePlane {
  gpu::PlaneJob* job;
  unsigned char** output;
  int* keep_raw;
  unsigned char* rows;
  unsigned char* plane;
};

DevicePlane PlaceOnDevice(std::size_t rows_bytes, const DeviceParams& params) {
  thread_local DeviceScratch scratch;
  constexpr std::size_t kHead = 256;
  const std::size_t rows_room = (rows_bytes + 255) / 256 * 256;
  unsigned char* base = scratch.Get(kHead + rows_room + params.plane_bytes);
  DevicePlane device;
  device.job = reinterpret_cast<gpu::PlaneJob*>(base);
  device.output = reinterpret_cast<unsigned char**>(base + 64);
  device.keep_raw = reinterpret_cast<int*>(base + 128);
  device.rows = base + kHead;
  device.plane = base + kHead + rows_room;
  const gpu::PlaneJob job{device.rows, device.plane, device.keep_raw};
  CheckCuda(cudaMemcpy(device.job, &job, sizeof(job), cudaMemcpyHostToDevice), "copy job");
  CheckCuda(cudaMemcpy(device.output, &device.rows, sizeof(device.rows), cudaMemcpyHostToDevice),
            "copy output");
  return device;
}

template <CodecId kId>
DeviceParams ParamsOf(const PlaneShape& shape) {
  DeviceParams params;
  params.num_tokens = shape.num_tokens;
  params.dim = shape.dim;
  params.dtype = static_cast<int32_t>(shape.dtype);
  DeviceCodec codec;
  if (!DeviceCodecOf(kId, codec) || !MakeDeviceParams(codec, shape.role, params)) {
    std::fprintf(stderr, "cuda: no kernel for %d tokens of dim %d\n", shape.num_tokens, shape.dim);
    std::abort();
  }
  return params;
}

std::size_t RowsBytes(const PlaneShape& shape) {
  return static_cast<std::size_t>(DTypeBytes(shape.dtype, int64_t{shape.num_tokens} * shape.dim));
}

template <CodecId kId>
EncodeResult Encode(const PlaneShape& shape, const std::byte* rows, std::byte* plane) {
  const DeviceParams params = ParamsOf<kId>(shape);
  const DevicePlane device = PlaceOnDevice(RowsBytes(shape), params);
  CheckCuda(cudaMemcpy(device.rows, rows, RowsBytes(shape), cudaMemcpyHostToDevice), "copy rows");
  CheckCuda(gpu::LaunchEncode(params, device.job, 1, nullptr), "launch encode");
  int keep_raw = 0;
  CheckCuda(cudaMemcpy(&keep_raw, device.keep_raw, sizeof(int), cudaMemcpyDeviceToHost), "flag");
  if (keep_raw != 0) return EncodeResult::kKeepRaw;
  CheckCuda(cudaMemcpy(plane, device.plane, params.plane_bytes, cudaMemcpyDeviceToHost), "plane");
  return EncodeResult::kEncoded;
}

template <CodecId kId>
void Decode(const PlaneShape& shape, const std::byte* plane, std::byte* rows) {
  const DeviceParams params = ParamsOf<kId>(shape);
  const DevicePlane device = PlaceOnDevice(RowsBytes(shape), params);
  CheckCuda(cudaMemcpy(device.plane, plane, params.plane_bytes, cudaMemcpyHostToDevice), "plane");
  CheckCuda(gpu::LaunchDecode(params, device.job, device.output, 1, nullptr), "launch decode");
  CheckCuda(cudaMemcpy(rows, device.rows, RowsBytes(shape), cudaMemcpyDeviceToHost), "copy rows");
}

bool HasDevice() {
  static const bool has_device = !ListDevices().devices.empty();
  return has_device;
}

template <CodecId kId>
absl::Span<const CodecBackend> Backend() {
  static constexpr CodecBackend kBackend[] = {{"cuda", HasDevice, Encode<kId>, Decode<kId>}};
  return kBackend;
}

}  // namespace

absl::Span<const CodecBackend> DeviceBackends(CodecId id) {
  switch (id) {
    case CodecId::kInt8:
      return Backend<CodecId::kInt8>();
    case CodecId::kTq4:
      return Backend<CodecId::kTq4>();
    case CodecId::kTq3:
      return Backend<CodecId::kTq3>();
    case CodecId::kTq2:
      return Backend<CodecId::kTq2>();
    case CodecId::kTqm4:
      return Backend<CodecId::kTqm4>();
    case CodecId::kTqm3:
      return Backend<CodecId::kTqm3>();
    case CodecId::kTqm2:
      return Backend<CodecId::kTqm2>();
    case CodecId::kInt4:
      return Backend<CodecId::kInt4>();
    case CodecId::kKivi4:
      return Backend<CodecId::kKivi4>();
    case CodecId::kKivi2:
      return Backend<CodecId::kKivi2>();
    default:
      return {};
  }
}

}  // namespace kvstow
