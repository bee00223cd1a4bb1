// The emulated launches, behind one plain interface: the kernel unit may be instrumented, the test
// is not.
#pragma once

#include <cstddef>

#include "kernels/codec/device_params.h"

namespace kvstow::testing {

// One plane through the emulated encode kernel. True where the kernel wants the rows kept raw.
bool EmulatedEncode(const DeviceParams& params, const std::byte* rows, std::size_t rows_bytes,
                    std::byte* plane);
void EmulatedDecode(const DeviceParams& params, const std::byte* plane, std::byte* rows,
                    std::size_t rows_bytes);

}  // namespace kvstow::testing
