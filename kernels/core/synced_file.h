// Synced files: small files that are there, whole, after kill -9 and power loss.
//
//   KVSTOW_RETURN_IF_ERROR(WriteSyncedFile("/var/lib/kvstow/models", "3f9c.model", bytes));
//   KVSTOW_ASSIGN_OR_RETURN(std::string bytes, ReadWholeFile(path, /*bytes_max=*/1 << 20));
//
// Thread safety: plain functions; calls may write the same file at once, the last rename wins.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvstow {

// Writes beside `name`, syncs, renames, syncs the directory.
//   kPermissionDenied, kUnavailable  with the path and the system's reason
absl::Status WriteSyncedFile(const std::string& directory, const std::string& name,
                             std::string_view bytes);

// kNotFound, kDataLoss (larger than `bytes_max`, or it cannot be read).
absl::StatusOr<std::string> ReadWholeFile(const std::filesystem::path& path, int64_t bytes_max);

// Removes what writers of `<name>` left behind when they died, for names that end in `suffix`.
void RemoveUnfinishedWrites(const std::string& directory, std::string_view suffix);

// Makes the directory where it is missing, removes what a dying writer left behind, and calls
// `load` with each file that ends in `suffix`. One that `load` refuses is renamed to
// `<name>.broken` and logged. Returns how many were.
//   kPermissionDenied, kUnavailable  the directory cannot be used; it is named
absl::StatusOr<int64_t> LoadSyncedFiles(
    const std::string& directory, std::string_view suffix,
    const std::function<absl::Status(const std::filesystem::path&)>& load);

}  // namespace kvstow
