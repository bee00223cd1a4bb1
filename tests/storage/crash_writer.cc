// Writes blocks into a store until it is killed: the other process of the crash tests.
//
//   storage_crash_writer DIR NUM_PERSISTED
//
// Puts blocks 0, 1, 2, ... of records.h; once the first NUM_PERSISTED are on disk it prints "ready"
// and goes on without persisting.
#include <cstdio>
#include <cstdlib>

#include "tests/storage/records.h"

namespace kvstow {
namespace {

int Run(const char* dir, uint64_t num_persisted) {
  const RealClock clock;
  StoreOptions options;
  options.dram_bytes = 64 << 20;
  options.nvme_path = dir;
  options.nvme_bytes = 256 << 20;
  absl::StatusOr<std::unique_ptr<TieredStore>> store = TieredStore::Open(options, &clock);
  if (!store.ok()) {
    std::fprintf(stderr, "%s\n", store.status().ToString().c_str());
    return 1;
  }
  std::vector<BlockKey> keys;
  for (uint64_t number = 0;; ++number) {
    const BlockKey key = testing::KeyOf(number);
    absl::Status status = testing::PutBlock(**store, key, {30000, 30000});
    keys.push_back(key);
    if (absl::IsAlreadyExists(status)) status = absl::OkStatus();  // from the round before
    if (status.ok() && keys.size() == num_persisted) {
      status = (*store)->Persist(keys, absl::Seconds(60));
      std::printf("ready\n");
      std::fflush(stdout);
    }
    if (!status.ok()) {
      std::fprintf(stderr, "block %llu: %s\n", static_cast<unsigned long long>(number),
                   status.ToString().c_str());
      return 1;
    }
  }
}

}  // namespace
}  // namespace kvstow

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  return kvstow::Run(argv[1], std::strtoull(argv[2], nullptr, 10));
}
