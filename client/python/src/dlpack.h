// DLPack: the part of its stable C interface that reading a tensor needs (v0, "dltensor" capsules).
// Source of the layout: the DLPack specification. Field order and sizes are the interface's.
#pragma once

#include <cstdint>

namespace kvstow::python {

enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDAHost = 3 };

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

// Values of DLDataType::code.
enum DLTypeCode : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4 };
// 7 and up below this are the 8-bit floats, each with a number of its own.
inline constexpr uint8_t kDLFirstFloat8 = 7;
inline constexpr uint8_t kDLLastFloat8 = 14;

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in values; null for C order
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

}  // namespace kvstow::python
