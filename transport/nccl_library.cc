#include "transport/nccl_library.h"

#include <dlfcn.h>

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/mutex.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr int kOldestVersion = 21800;

absl::StatusOr<void*> OpenFirst(const std::vector<std::string>& names) {
  std::string why;
  for (const std::string& name : names) {
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL); handle != nullptr) {
      return handle;
    }
    const char* const error = dlerror();
    absl::StrAppend(&why, why.empty() ? "" : "; ", error == nullptr ? name.c_str() : error);
  }
  return absl::UnavailableError(why);
}

template <typename Function>
absl::Status Find(void* handle, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(handle, name));
  if (function != nullptr) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the library has no function ", name));
}

absl::Status FindNccl(void* handle, NcclLibrary& library) {
  KVSTOW_RETURN_IF_ERROR(Find(handle, "ncclGetVersion", library.get_version));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "ncclGetUniqueId", library.get_unique_id));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "ncclCommInitRankConfig", library.comm_init_rank_config));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "ncclCommGetAsyncError", library.comm_get_async_error));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "ncclCommAbort", library.comm_abort));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "ncclSend", library.send));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "ncclRecv", library.recv));
  return Find(handle, "ncclGetErrorString", library.get_error_string);
}

absl::Status FindCuda(void* handle, NcclLibrary& library) {
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaSetDevice", library.set_device));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaMalloc", library.malloc));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaFree", library.free));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaMemset", library.memset));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaDeviceSynchronize", library.synchronize));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaStreamCreateWithFlags", library.stream_create));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaStreamDestroy", library.stream_destroy));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaEventCreateWithFlags", library.event_create));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaEventRecord", library.event_record));
  KVSTOW_RETURN_IF_ERROR(Find(handle, "cudaEventQuery", library.event_query));
  return Find(handle, "cudaEventDestroy", library.event_destroy);
}

absl::Status Load(const NcclDevice& device, NcclLibrary& library) {
  const auto names = [](const std::string& path, std::vector<std::string> usual) {
    return path.empty() ? usual : std::vector<std::string>{path};
  };
  KVSTOW_ASSIGN_OR_RETURN(void* const nccl, OpenFirst(names(device.nccl_path, {"libnccl.so.2"})));
  KVSTOW_RETURN_IF_ERROR(FindNccl(nccl, library));
  KVSTOW_ASSIGN_OR_RETURN(
      void* const cuda,
      OpenFirst(names(device.cudart_path, {"libcudart.so.13", "libcudart.so.12"})));
  KVSTOW_RETURN_IF_ERROR(FindCuda(cuda, library));
  if (const int result = library.get_version(&library.version); result != kNcclSuccess) {
    return library.NcclError("asking for its version", result);
  }
  if (library.version < kOldestVersion) {
    return absl::UnavailableError(
        absl::StrCat("NCCL ", library.version, " is older than ", kOldestVersion));
  }
  return absl::OkStatus();
}

// One per pair of paths, kept for ever.
struct Loaded {
  Mutex mutex;
  std::map<std::pair<std::string, std::string>, const NcclLibrary*> libraries
      ABSL_GUARDED_BY(mutex);
};

}  // namespace

absl::Status NcclLibrary::NcclError(absl::string_view doing, int result) const {
  return absl::UnavailableError(absl::StrCat("NCCL, ", doing, ": ", get_error_string(result)));
}

absl::Status NcclLibrary::CudaError(absl::string_view doing, int result) {
  return absl::UnavailableError(absl::StrCat("CUDA, ", doing, ": error ", result));
}

absl::StatusOr<const NcclLibrary*> LoadNccl(const NcclDevice& device) {
  static auto* const loaded = new Loaded;
  MutexLock lock(&loaded->mutex);
  const auto key = std::make_pair(device.nccl_path, device.cudart_path);
  if (const auto it = loaded->libraries.find(key); it != loaded->libraries.end()) return it->second;
  auto library = std::make_unique<NcclLibrary>();
  KVSTOW_RETURN_IF_ERROR(Load(device, *library));
  return loaded->libraries[key] = library.release();
}

}  // namespace kvstow
