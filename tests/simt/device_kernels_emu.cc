#include "device_kernels_emu.h"

#include <cstdlib>

#include "kernels/codec/device_kernels.cuh"

namespace kvstow::testing {

bool EmulatedEncode(const DeviceParams& params, const std::byte* rows, std::size_t rows_bytes,
                    std::byte* plane) {
  int keep_raw = -1;
  const emu::PlaneJob job{reinterpret_cast<const unsigned char*>(rows),
                          reinterpret_cast<unsigned char*>(plane), &keep_raw};
  const simt::Buffer rows_buffer(rows, rows_bytes, "rows", true);
  const simt::Buffer plane_buffer(plane, params.plane_bytes, "plane", false);
  const simt::Buffer job_buffer(&job, sizeof(job), "jobs", true);
  const simt::Buffer flag_buffer(&keep_raw, sizeof(keep_raw), "keep_raw", false);
  if (emu::LaunchEncode(params, &job, 1, nullptr) != cudaSuccess) std::abort();
  if (keep_raw != 0 && keep_raw != 1) std::abort();
  return keep_raw == 1;
}

void EmulatedDecode(const DeviceParams& params, const std::byte* plane, std::byte* rows,
                    std::size_t rows_bytes) {
  int unused = 0;
  const emu::PlaneJob job{nullptr, reinterpret_cast<unsigned char*>(const_cast<std::byte*>(plane)),
                          &unused};
  unsigned char* const output = reinterpret_cast<unsigned char*>(rows);
  const simt::Buffer rows_buffer(rows, rows_bytes, "rows", false);
  const simt::Buffer plane_buffer(plane, params.plane_bytes, "plane", true);
  const simt::Buffer job_buffer(&job, sizeof(job), "jobs", true);
  const simt::Buffer output_buffer(&output, sizeof(output), "outputs", true);
  if (emu::LaunchDecode(params, &job, &output, 1, nullptr) != cudaSuccess) std::abort();
}

}  // namespace kvstow::testing
