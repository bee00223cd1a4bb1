// From a codec and the shape of a plane to what the device kernels need. Apart from
// device_params.h, which kernels include, so that these see plain data only.
#pragma once

#include "kernels/codec/codec.h"
#include "kernels/codec/device_params.h"

namespace kvstow {

// A codec as the device kernels see it.
struct DeviceCodec {
  DeviceFamily family = DeviceFamily::kHadamard;
  int32_t bits = 0;
  bool has_mean = false;
};

// False where the codec has no kernel.
bool DeviceCodecOf(CodecId id, DeviceCodec& codec);

// Fills in the rest of `params`, of which num_tokens, dim and dtype are set. False where the shape
// has no device kernel: other dtypes, dims that are no multiple of 8 or above kDeviceMaxDim, that
// have no Hadamard matrix here, or groups that do not fit.
bool MakeDeviceParams(const DeviceCodec& codec, Role role, DeviceParams& params);

}  // namespace kvstow
