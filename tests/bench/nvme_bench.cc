// What the disk tier writes and reads, beside plain files of the same size in the same minutes.
//
//   nvme_bench [--dir DIR] [--mib N] [--rounds N] [--check]
//
// A round writes N MiB (256) of records of 128 KiB, 1 MiB and 4 MiB: once with NvmeTier::Put and
// Flush, once with pwrite into one file per record and fdatasync of each at the end, in turns. Then
// both are read once in a random order after posix_fadvise(DONTNEED) has dropped the page cache of
// every file below DIR (default: a folder in the current one, so that it is a disk and not tmpfs).
// The medians of the rounds (5) are printed, and the share of the plain files' rate. Every byte
// that the tier gave is compared. At last the tier is filled several times over, oldest record out
// first: bytes that the kernel was told to write (write_bytes of /proc/self/io) per byte put.
// --check: exit status 1 where puts are below 0.5 or cold gets below 0.6 from 1 MiB on, the figures
// this was built to reach on an idle machine.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/clock.h"
#include "kernels/core/text.h"
#include "storage/nvme_tier.h"
#include "tests/storage/records.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::FolderBytes;
using testing::KeyOf;
using testing::RecordOf;
using testing::Rng;
using testing::TempDir;

constexpr int64_t kRecordBytes[] = {128 << 10, 1 << 20, 4 << 20};

struct Options {
  std::string dir = ".";
  int64_t mib = 256;
  int rounds = 5;
  bool is_checked = false;
};

double SecondsOf(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Drops the page cache of everything below `path`.
void DropCache(const std::string& path) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    fdatasync(fd);  // dirty pages stay where they are
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
}

// 0 where the kernel does not say.
int64_t BytesToDisk() {
  std::ifstream io("/proc/self/io");
  std::string name;
  int64_t value = 0;
  while (io >> name >> value) {
    if (name == "write_bytes:") return value;
  }
  return 0;
}

std::vector<uint64_t> Shuffled(size_t count, uint64_t seed) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  Rng rng(seed);
  for (size_t i = count; i > 1; --i) std::swap(order[i - 1], order[rng.Below(i)]);
  return order;
}

std::unique_ptr<NvmeTier> OpenTier(const std::string& path, int64_t capacity_bytes,
                                   const Clock* clock) {
  auto tier = NvmeTier::Open({.path = path, .capacity_bytes = capacity_bytes, .clock = clock},
                             [](const BlockInfo&) {});
  KVSTOW_CHECK(tier.ok());
  return *std::move(tier);
}

std::string FileName(const std::string& dir, uint64_t number) {
  return absl::StrCat(dir, "/", number);
}

void WriteFiles(const std::string& dir, const std::vector<std::vector<std::byte>>& records) {
  std::vector<int> fds;
  for (size_t i = 0; i < records.size(); ++i) {
    const int fd = open(FileName(dir, i).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    KVSTOW_CHECK(fd >= 0);
    KVSTOW_CHECK(pwrite(fd, records[i].data(), records[i].size(), 0) ==
                 static_cast<ssize_t>(records[i].size()));
    fds.push_back(fd);
  }
  for (const int fd : fds) {
    KVSTOW_CHECK(fdatasync(fd) == 0);
    close(fd);
  }
}

void ReadFiles(const std::string& dir, const std::vector<uint64_t>& order, size_t bytes) {
  for (const uint64_t number : order) {
    const auto buffer = std::make_unique_for_overwrite<std::byte[]>(bytes);
    const int fd = open(FileName(dir, number).c_str(), O_RDONLY | O_CLOEXEC);
    KVSTOW_CHECK(pread(fd, buffer.get(), bytes, 0) == static_cast<ssize_t>(bytes));
    close(fd);
  }
}

struct Rates {
  std::vector<double> put_s, file_put_s, get_s, file_get_s;
};

void Round(const Options& options, const std::vector<std::vector<std::byte>>& records,
           uint64_t round, Rates& rates) {
  const RealClock clock;
  const TempDir dir(options.dir);
  const std::string files = dir.path() + "/files";
  std::filesystem::create_directory(files);
  const auto tier = OpenTier(dir.path() + "/tier", 2 * options.mib << 20, &clock);
  const auto put = [&] {
    for (size_t i = 0; i < records.size(); ++i) {
      KVSTOW_CHECK(tier->Put(KeyOf(i), records[i]).ok());
    }
    KVSTOW_CHECK(tier->Flush().ok());
  };
  const auto write_files = [&] { WriteFiles(files, records); };
  // Whoever comes second finds a busier disk: by turns.
  if (round % 2 == 0) rates.put_s.push_back(SecondsOf(put));
  rates.file_put_s.push_back(SecondsOf(write_files));
  if (round % 2 == 1) rates.put_s.push_back(SecondsOf(put));

  const std::vector<uint64_t> order = Shuffled(records.size(), round);
  const auto get = [&] {
    for (const uint64_t number : order) {
      const absl::StatusOr<BlockRef> block = tier->Get(KeyOf(number));
      KVSTOW_CHECK(block.ok());
      KVSTOW_CHECK(block->bytes().size() == records[number].size());
    }
  };
  DropCache(dir.path());
  rates.get_s.push_back(SecondsOf(get));
  DropCache(dir.path());
  rates.file_get_s.push_back(SecondsOf([&] { ReadFiles(files, order, records[0].size()); }));
  for (const uint64_t number : order) {
    KVSTOW_CHECK(testing::IsEqual(tier->Get(KeyOf(number))->bytes(), records[number]));
  }
}

// Bytes to disk per byte put, over four times the capacity; the oldest record makes room.
double WriteAmplification(const Options& options, int64_t record_bytes) {
  const RealClock clock;
  const TempDir dir(options.dir);
  const int64_t capacity = options.mib << 20;
  const auto tier = OpenTier(dir.path() + "/tier", capacity, &clock);
  const std::vector<std::byte> sample = RecordOf(uint64_t{0}, record_bytes);
  const auto num_records = static_cast<uint64_t>(4 * capacity / record_bytes);
  uint64_t oldest = 0;
  const int64_t before = BytesToDisk();
  for (uint64_t number = 0; number < num_records; ++number) {
    const std::vector<std::byte> record = RecordOf(number, record_bytes);
    absl::Status status;
    while (absl::IsResourceExhausted(status = tier->Put(KeyOf(number), record))) {
      tier->Drop(KeyOf(oldest++));
    }
    KVSTOW_CHECK(status.ok());
  }
  KVSTOW_CHECK(tier->Flush().ok());
  KVSTOW_CHECK(FolderBytes(dir.path()) <= capacity + NvmeTier::SlackBytes(capacity));
  return static_cast<double>(BytesToDisk() - before) /
         static_cast<double>(num_records * sample.size());
}

// True where both shares reach their marks.
bool Measure(const Options& options, int64_t record_bytes) {
  const auto count = static_cast<size_t>((options.mib << 20) / record_bytes);
  std::vector<std::vector<std::byte>> records;
  for (uint64_t i = 0; i < count; ++i) records.push_back(RecordOf(i, record_bytes));
  Rates rates;
  for (int round = 0; round < options.rounds; ++round) {
    Round(options, records, static_cast<uint64_t>(round), rates);
  }
  const double mib = static_cast<double>(count * records[0].size()) / (1 << 20);
  const auto rate = [&](const std::vector<double>& seconds) { return mib / Median(seconds); };
  const double put_share = rate(rates.put_s) / rate(rates.file_put_s);
  const double get_share = rate(rates.get_s) / rate(rates.file_get_s);
  std::printf("%-9s%11.0f%11.0f%8.2f%11.0f%11.0f%8.2f%9.2f\n", FormatBytes(record_bytes).c_str(),
              rate(rates.put_s), rate(rates.file_put_s), put_share, rate(rates.get_s),
              rate(rates.file_get_s), get_share, WriteAmplification(options, record_bytes));
  std::fflush(stdout);
  return record_bytes < 1 << 20 || (put_share >= 0.5 && get_share >= 0.6);
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : "";
    if (word == "--check") {
      options.is_checked = true;
    } else if (word == "--dir" && std::filesystem::is_directory(value)) {
      options.dir = argv[++i];
    } else if (word == "--mib" && std::atoll(value) >= 32) {
      options.mib = std::atoll(argv[++i]);
    } else if (word == "--rounds" && std::atoi(value) >= 1) {
      options.rounds = std::atoi(argv[++i]);
    } else {
      std::fputs("usage: nvme_bench [--dir DIR] [--mib N, 32 or more] [--rounds N] [--check]\n",
                 stderr);
      return 2;
    }
  }
  std::printf("%lld MiB a round, %d rounds, MiB/s; durable at the end of each put\n",
              static_cast<long long>(options.mib), options.rounds);
  std::printf("%-9s%11s%11s%8s%11s%11s%8s%9s\n", "record", "put", "pwrite", "share", "cold get",
              "pread", "share", "written");
  bool is_reached = true;
  for (const int64_t bytes : kRecordBytes) is_reached = Measure(options, bytes) && is_reached;
  return options.is_checked && !is_reached ? 1 : 0;
}

}  // namespace
}  // namespace kvstow

int main(int argc, char** argv) { return kvstow::Main(argc, argv); }
