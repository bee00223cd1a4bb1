#include "kernels/core/synced_file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/log.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTempMark = ".tmp";

absl::Status FileError(std::string_view what, const std::string& path, int error) {
  const std::string text = absl::StrCat(ToAbsl(what), " ", path, ": ", std::strerror(error));
  if (error == EACCES || error == EPERM || error == EROFS) {
    return absl::PermissionDeniedError(text);
  }
  return absl::UnavailableError(text);
}

// Writes and syncs a new file.
absl::Status WriteSynced(const std::string& path, std::string_view bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return FileError("create", path, errno);
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written = write(fd, bytes.data() + done, bytes.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    done += static_cast<size_t>(written);
  }
  const int error = done < bytes.size() || fsync(fd) != 0 ? errno : 0;
  close(fd);
  if (error == 0) return absl::OkStatus();
  unlink(path.c_str());
  return FileError("write", path, error);
}

// A rename is durable only when the directory is synced too.
absl::Status SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return FileError("open", path, errno);
  const int error = fsync(fd) != 0 ? errno : 0;
  close(fd);
  return error == 0 ? absl::OkStatus() : FileError("sync", path, error);
}

std::vector<fs::path> FilesIn(const std::string& directory) {
  std::vector<fs::path> files;
  std::error_code error;  // then there are none to see
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    files.push_back(entry.path());
  }
  return files;
}

}  // namespace

absl::Status WriteSyncedFile(const std::string& directory, const std::string& name,
                             std::string_view bytes) {
  static std::atomic<uint64_t> num_writes{0};  // two calls may write the same file at once
  const std::string path = absl::StrCat(directory, "/", name);
  const std::string temp = absl::StrCat(path, ToAbsl(kTempMark), num_writes.fetch_add(1));
  KVSTOW_RETURN_IF_ERROR(WriteSynced(temp, bytes));
  if (rename(temp.c_str(), path.c_str()) != 0) {
    const absl::Status status = FileError("rename to", path, errno);
    unlink(temp.c_str());
    return status;
  }
  return SyncDirectory(directory);
}

absl::StatusOr<std::string> ReadWholeFile(const fs::path& path, int64_t bytes_max) {
  std::error_code error;
  const uintmax_t size = fs::file_size(path, error);
  if (error) return absl::NotFoundError(absl::StrCat(path.string(), ": ", error.message()));
  if (size > static_cast<uintmax_t>(bytes_max)) {
    return absl::DataLossError(absl::StrCat(size, " bytes, want at most ", bytes_max));
  }
  std::string bytes(size, '\0');
  std::ifstream in(path, std::ios::binary);
  in.read(bytes.data(), static_cast<std::streamsize>(size));
  if (!in.good()) return absl::DataLossError(absl::StrCat("cannot read ", size, " bytes of it"));
  return bytes;
}

void RemoveUnfinishedWrites(const std::string& directory, std::string_view suffix) {
  const std::string mark = absl::StrCat(ToAbsl(suffix), ToAbsl(kTempMark));
  for (const fs::path& path : FilesIn(directory)) {
    if (path.filename().string().find(mark) == std::string::npos) continue;
    std::error_code error;
    fs::remove(path, error);
  }
}

absl::StatusOr<int64_t> LoadSyncedFiles(const std::string& directory, std::string_view suffix,
                                        const std::function<absl::Status(const fs::path&)>& load) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return FileError("create directory", directory, error.value());
  if (access(directory.c_str(), W_OK | X_OK) != 0) {
    return FileError("write to directory", directory, errno);
  }
  RemoveUnfinishedWrites(directory, suffix);
  int64_t num_broken = 0;
  for (const fs::path& path : FilesIn(directory)) {
    if (path.extension() != suffix) continue;
    const absl::Status status = load(path);
    if (status.ok()) continue;
    ++num_broken;
    Log(Severity::kWarning, "file set aside",
        {{"file", path.string()}, {"reason", std::string(status.message())}});
    fs::rename(path, path.string() + ".broken", error);
  }
  return num_broken;
}

}  // namespace kvstow
