// Device backends of the codecs: "cuda" rows of the codec table. Link-time halves: device_codec.cu
// in a CUDA build, device_codec_none.cc otherwise.
#pragma once

#include "absl/types/span.h"
#include "kernels/codec/codec.h"

namespace kvstow {

// Rows and planes are host memory: the backend copies them to the device and back and is finished
// on return, so that tests, benchmarks and the host share one interface. `supported` asks the
// driver. Empty where the build has no CUDA or the codec no kernel.
absl::Span<const CodecBackend> DeviceBackends(CodecId id);

}  // namespace kvstow
