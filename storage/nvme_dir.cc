#include "storage/nvme_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;

constexpr char kBrokenPrefix[] = "rocksdb.broken-";

absl::Status CannotUse(const std::string& path, const std::string& what, int error) {
  const std::string message =
      absl::StrCat("disk tier directory ", path, ": ", what, ": ", strerror(error));
  const bool is_device = error == ENOSPC || error == EDQUOT || error == EIO;
  return is_device ? absl::UnavailableError(message) : absl::PermissionDeniedError(message);
}

// Who holds the lock, as it wrote itself; "" where it has not yet.
std::string Holder(int fd) {
  char text[32] = {};
  const ssize_t size = pread(fd, text, sizeof(text) - 1, 0);
  std::string holder(text, size > 0 ? static_cast<size_t>(size) : 0);
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  return holder;
}

}  // namespace

absl::StatusOr<DirLock> DirLock::Acquire(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) return CannotUse(path, "cannot be made", error.value());
  const std::string lock_path = (fs::path(path) / "LOCK").string();
  const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return CannotUse(path, "LOCK cannot be opened for writing", errno);
  DirLock lock(fd);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return CannotUse(path, "LOCK cannot be locked", errno);
    return absl::FailedPreconditionError(absl::StrCat(
        "disk tier directory ", path, " is in use: process ", Holder(fd), " holds ", lock_path));
  }
  const std::string self = absl::StrCat(getpid(), "\n");
  if (ftruncate(fd, 0) != 0 ||
      pwrite(fd, self.data(), self.size(), 0) != static_cast<ssize_t>(self.size())) {
    return CannotUse(path, "LOCK cannot be written", errno);
  }
  return lock;
}

DirLock::DirLock(DirLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

DirLock::~DirLock() {
  if (fd_ >= 0) close(fd_);
}

std::string DatabasePath(const std::string& path) { return (fs::path(path) / "rocksdb").string(); }

absl::Status SetDatabaseAside(const std::string& path) {
  std::error_code error;
  std::vector<fs::path> old;
  int64_t last = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    absl::string_view number = name;
    int64_t n = 0;
    if (!absl::ConsumePrefix(&number, kBrokenPrefix) || !absl::SimpleAtoi(number, &n)) continue;
    last = std::max(last, n);
    old.push_back(entry.path());
  }
  // Before the rename: the room of two would be needed otherwise.
  for (const fs::path& broken : old) {
    if (!error) fs::remove_all(broken, error);
  }
  const fs::path target = fs::path(path) / absl::StrCat(kBrokenPrefix, last + 1);
  if (!error) fs::rename(DatabasePath(path), target, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("disk tier directory ", path,
                     ": the broken database cannot be set aside: ", error.message()));
  }
  return absl::OkStatus();
}

}  // namespace kvstow
