// index_bench: time per key of a lookup and bytes per block of the index, without RPC.
//
//   index_bench [--blocks=1000000] [--keys=1000] [--check-ns=N] [--json]
//
// Looks prefixes of `keys` keys up, in random places and half of them absent, after checking that
// the answers are right. With --check-ns the exit status is 1 when a key takes longer.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "storage/block_index.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

BlockKey KeyOf(uint64_t number) {
  testing::Rng rng(number);
  BlockKey key;
  for (int word = 0; word < 4; ++word) {
    const uint64_t value = rng.Next();
    std::memcpy(key.bytes.data() + 8 * word, &value, 8);
  }
  return key;
}

struct Result {
  double ns_per_key = 0;
  double bytes_per_block = 0;
  bool is_right = true;
};

Result Run(int64_t num_blocks, int64_t num_keys) {
  BlockIndex index(num_blocks);
  BlockInfo block{.codecs = {CodecId::kTqm4, CodecId::kTq4},
                  .location = {.in_dram = true},
                  .num_tokens = 64,
                  .record_bytes = 400 << 10,
                  .logical_bytes = 1 << 20};
  for (int64_t i = 0; i < num_blocks; ++i) {
    block.key = KeyOf(static_cast<uint64_t>(i));
    if (!index.Insert(block, [](IndexedBlock&) {}).ok()) return {.is_right = false};
  }
  Result result;
  result.bytes_per_block =
      static_cast<double>(index.totals().index_bytes) / static_cast<double>(num_blocks);
  testing::Rng rng(1);
  std::vector<double> ns;
  for (int round = 0; round < 200; ++round) {
    // Numbers up to twice the blocks: every second key is absent.
    std::vector<BlockKey> keys;
    std::vector<bool> want;
    for (int64_t i = 0; i < num_keys; ++i) {
      const uint64_t number = rng.Below(static_cast<uint64_t>(2 * num_blocks));
      keys.push_back(KeyOf(number));
      want.push_back(number < static_cast<uint64_t>(num_blocks));
    }
    std::vector<bool> found(keys.size());
    const auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < keys.size(); ++i) found[i] = index.Lookup(keys[i]).present();
    const auto end = std::chrono::steady_clock::now();
    ns.push_back(std::chrono::duration<double, std::nano>(end - start).count() /
                 static_cast<double>(num_keys));
    result.is_right = result.is_right && found == want;
  }
  std::nth_element(ns.begin(), ns.begin() + static_cast<int64_t>(ns.size() / 2), ns.end());
  result.ns_per_key = ns[ns.size() / 2];
  return result;
}

int Main(int argc, char** argv) {
  int64_t num_blocks = 1'000'000;
  int64_t num_keys = 1000;
  double check_ns = 0;
  bool is_json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const size_t equals = arg.find('=');
    const std::string_view name = arg.substr(0, equals);
    const char* value = equals == std::string_view::npos ? "" : argv[i] + equals + 1;
    if (name == "--blocks") {
      num_blocks = std::atoll(value);
    } else if (name == "--keys") {
      num_keys = std::atoll(value);
    } else if (name == "--check-ns") {
      check_ns = std::atof(value);
    } else if (arg == "--json") {
      is_json = true;
    } else {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  if (num_blocks < 1 || num_keys < 1) {
    std::fprintf(stderr, "--blocks and --keys must be at least 1\n");
    return 2;
  }
  const Result result = Run(num_blocks, num_keys);
  if (!result.is_right) {
    std::fprintf(stderr, "a lookup gave a wrong answer\n");
    return 1;
  }
  const char* format = is_json ? "{\"case\": \"index/lookup/blocks:%lld/keys:%lld\", "
                                 "\"ns_per_key\": %.1f, \"bytes_per_block\": %.1f}\n"
                               : "%lld blocks, prefixes of %lld keys: %.1f ns per key, %.1f bytes "
                                 "per block\n";
  std::printf(format, static_cast<long long>(num_blocks), static_cast<long long>(num_keys),
              result.ns_per_key, result.bytes_per_block);
  if (check_ns > 0 && result.ns_per_key > check_ns) {
    std::fprintf(stderr, "more than %.0f ns per key\n", check_ns);
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace kvstow

int main(int argc, char** argv) { return kvstow::Main(argc, argv); }
