// The directory of the disk tier, apart from the database in it: who holds it, and what happens to
// a database that cannot be opened.
//
//   <path>/LOCK               held (flock) while a process uses the directory; its id as text
//   <path>/rocksdb            the database
//   <path>/rocksdb.broken-<n> a database that was set aside; at most one is kept
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvstow {

// The right to use a directory, until the end of its life.
class DirLock {
 public:
  // Makes the directory where it is missing.
  //   kPermissionDenied    it cannot be made or written; the message names it
  //   kUnavailable         the disk is full or fails
  //   kFailedPrecondition  another process, or another tier of this one, holds it; the message
  //   names
  //                        the lock file and the holder
  static absl::StatusOr<DirLock> Acquire(const std::string& path);

  DirLock(DirLock&& other) noexcept;
  DirLock& operator=(DirLock&&) = delete;
  ~DirLock();

 private:
  explicit DirLock(int fd) : fd_(fd) {}
  int fd_;  // -1 after a move
};

// Where the database of a directory is.
std::string DatabasePath(const std::string& path);

// Renames `<path>/rocksdb` to `<path>/rocksdb.broken-<n>`, n one more than the last, and removes
// those set aside before. kUnavailable.
absl::Status SetDatabaseAside(const std::string& path);

}  // namespace kvstow
