#include "tests/e2e/damage.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "transport/owned_fd.h"

namespace kvstow::testing {
namespace {

namespace fs = std::filesystem;

struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// The arena is shared memory without a file, which the kernel calls "/dev/zero (deleted)".
std::vector<Range> ArenaRanges(pid_t pid) {
  std::vector<Range> ranges;
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0;
    unsigned long long end = 0;
    if (line.find("/dev/zero") == std::string::npos ||
        std::sscanf(line.c_str(), "%llx-%llx", &begin, &end) != 2) {
      continue;
    }
    ranges.push_back({begin, end});
  }
  return ranges;
}

}  // namespace

std::vector<fs::path> BlobFiles(const std::string& nvme_path) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(nvme_path)) {
    if (entry.is_regular_file() && entry.path().extension() == ".blob") {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
    return fs::file_size(a) > fs::file_size(b);
  });
  return files;
}

bool FlipByte(const fs::path& path, uint64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const char was = static_cast<char>(file.get());
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(was ^ 0x10));
  return file.good();
}

int FlipInMemory(pid_t pid, absl::Span<const std::byte> pattern) {
  const OwnedFd memory(open(absl::StrCat("/proc/", pid, "/mem").c_str(), O_RDWR | O_CLOEXEC));
  if (!memory.is_open()) return -1;
  const std::string_view wanted(reinterpret_cast<const char*>(pattern.data()), pattern.size());
  int num_flipped = 0;
  for (const Range& range : ArenaRanges(pid)) {
    std::string bytes(range.end - range.begin, '\0');
    if (pread(memory.get(), bytes.data(), bytes.size(), static_cast<off_t>(range.begin)) !=
        static_cast<ssize_t>(bytes.size())) {
      return -1;
    }
    for (size_t at = bytes.find(wanted); at != std::string::npos;
         at = bytes.find(wanted, at + wanted.size())) {
      const size_t middle = at + wanted.size() / 2;
      const char changed = static_cast<char>(bytes[middle] ^ 0x04);
      const auto address = static_cast<off_t>(range.begin + middle);
      if (pwrite(memory.get(), &changed, 1, address) != 1) return -1;
      ++num_flipped;
    }
  }
  return num_flipped;
}

}  // namespace kvstow::testing
