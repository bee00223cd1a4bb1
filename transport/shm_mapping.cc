#include "transport/shm_mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/clock.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, which the headers of older systems lack

absl::Status SystemError(std::string_view doing, int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat(absl::string_view(doing.data(), doing.size()), ": ", std::strerror(error)));
}

absl::Status CheckOffered(int fd, int64_t bytes) {
  struct statfs system = {};
  struct stat info = {};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC ||
      fstat(fd, &info) != 0) {
    return absl::InvalidArgumentError(
        "the window's descriptor is no memfd of ordinary pages; wanted is one of memfd_create "
        "with MFD_ALLOW_SEALING");
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError("the window's memfd is not sealed with F_SEAL_SHRINK");
  }
  if (info.st_size != bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the window's memfd has ", info.st_size, " bytes, its hello says ", bytes));
  }
  if (int64_t{info.st_blocks} * 512 < bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the window's memfd is populated with ",
                                                   info.st_blocks * 512, " of ", bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

ShmMapping::~ShmMapping() { munmap(address_, bytes_); }

absl::StatusOr<std::shared_ptr<ShmMapping>> ShmMapping::Map(int fd, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED && (errno == EPERM || errno == EACCES)) {
    return absl::InvalidArgumentError("the window's memfd cannot be mapped for writing");
  }
  if (address == MAP_FAILED) return SystemError("mapping the window", errno);
  madvise(address, size, MADV_DONTFORK);
  madvise(address, size, MADV_DONTDUMP);
  return std::shared_ptr<ShmMapping>(new ShmMapping(static_cast<std::byte*>(address), size));
}

absl::StatusOr<std::shared_ptr<ShmMapping>> ShmMapping::MapOffered(int fd, int64_t bytes) {
  KVSTOW_RETURN_IF_ERROR(CheckOffered(fd, bytes));
  return Map(fd, bytes);
}

absl::StatusOr<std::shared_ptr<ShmMapping>> ShmMapping::MapOwn(int fd, int64_t bytes) {
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<ShmMapping> mapping, Map(fd, bytes));
  if (madvise(mapping->address_, mapping->bytes_, MADV_POPULATE_WRITE) == 0) return mapping;
  // Kernels before 5.14 do not know it.
  if (errno != EINVAL) return SystemError("allocating the window's pages", errno);
  if (const int error = posix_fallocate(fd, 0, bytes); error != 0) {
    return SystemError("allocating the window's pages", error);
  }
  return mapping;
}

void ShmMapping::Prefault(absl::Duration timeout) {
  constexpr size_t kStep = size_t{64} << 20;
  const RealClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  for (size_t at = 0; at < bytes_ && clock.Now() < deadline; at += kStep) {
    if (madvise(address_ + at, std::min(kStep, bytes_ - at), MADV_POPULATE_READ) != 0) return;
  }
}

absl::StatusOr<OwnedFd> CreateWindowFd(int64_t bytes) {
  // Some sites allow no others (vm.memfd_noexec=2); kernels before 6.3 do not know the flag.
  OwnedFd fd(memfd_create("kvstow-window", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal));
  if (!fd.is_open() && errno == EINVAL) {
    fd.Reset(memfd_create("kvstow-window", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  }
  if (!fd.is_open()) return SystemError("memfd_create", errno);
  if (ftruncate(fd.get(), bytes) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return SystemError("sizing the window", errno);
  }
  return fd;
}

}  // namespace kvstow
