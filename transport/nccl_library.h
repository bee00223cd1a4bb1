// NcclLibrary: the functions of NCCL and of the CUDA runtime that we call, found by dlopen.
//
// Declared here as their ABI has them (NCCL 2.18 to 2.28), so that neither header is needed to
// build. Loaded once per pair of paths and never unloaded.
#pragma once

#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "transport/nccl.h"

namespace kvstow {

struct NcclUniqueId {
  char bytes[128];
};

// ncclConfig_t up to what 2.18 has, which later ones accept by its size.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  uint32_t magic = 0xcafebeef;
  uint32_t version = 21800;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // INT_MIN: as the library likes
  int min_ctas = INT_MIN;
  int max_ctas = 4;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int traffic_class = INT_MIN;  // from 2.27 on; padding before
};
static_assert(sizeof(NcclConfig) == 48);

inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclInProgress = 7;
inline constexpr int kNcclUint8 = 1;
inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaErrorNotReady = 600;
inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventDisableTiming = 2;

using NcclComm = void*;
using CudaStream = void*;
using CudaEvent = void*;

struct NcclLibrary {
  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(NcclUniqueId*) = nullptr;
  int (*comm_init_rank_config)(NcclComm*, int, NcclUniqueId, int, NcclConfig*) = nullptr;
  int (*comm_get_async_error)(NcclComm, int*) = nullptr;
  int (*comm_abort)(NcclComm) = nullptr;
  int (*send)(const void*, size_t, int, int, NcclComm, CudaStream) = nullptr;
  int (*recv)(void*, size_t, int, int, NcclComm, CudaStream) = nullptr;
  const char* (*get_error_string)(int) = nullptr;

  int (*set_device)(int) = nullptr;
  int (*malloc)(void**, size_t) = nullptr;
  int (*free)(void*) = nullptr;
  int (*memset)(void*, int, size_t) = nullptr;
  int (*synchronize)() = nullptr;  // the device
  int (*stream_create)(CudaStream*, unsigned) = nullptr;
  int (*stream_destroy)(CudaStream) = nullptr;
  int (*event_create)(CudaEvent*, unsigned) = nullptr;
  int (*event_record)(CudaEvent, CudaStream) = nullptr;
  int (*event_query)(CudaEvent) = nullptr;
  int (*event_destroy)(CudaEvent) = nullptr;

  int version = 0;  // of NCCL, 22809 for example
  // An abort did not return: nothing more is begun with this library in this process.
  mutable std::atomic<bool> is_stuck{false};

  absl::Status NcclError(absl::string_view doing, int result) const;
  static absl::Status CudaError(absl::string_view doing, int result);
};

// Lives for ever. kUnavailable names the library or function that is missing.
absl::StatusOr<const NcclLibrary*> LoadNccl(const NcclDevice& device);

}  // namespace kvstow
