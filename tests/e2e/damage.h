// Damage: single bits changed in a daemon's files and in its memory.
//
//   FlipByte(BlobFiles(daemon.nvme_path()).at(0), 4711);
//   EXPECT_GT(FlipInMemory(daemon.pid(), unit_bytes), 0);
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace kvstow::testing {

// The files that hold records, largest first.
std::vector<std::filesystem::path> BlobFiles(const std::string& nvme_path);

// False where the file could not be changed.
bool FlipByte(const std::filesystem::path& path, uint64_t offset);

// Changes one bit in the middle of every copy of `pattern` in the memory tier of a child process.
// Returns how many copies there were; -1 where the kernel does not let us at its memory.
int FlipInMemory(pid_t pid, absl::Span<const std::byte> pattern);

}  // namespace kvstow::testing
