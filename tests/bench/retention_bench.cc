// What the policy costs a live store, with keys, locks and bookkeeping: per decision, per block of
// a turn, and bytes per block.
//
//   retention_bench [--policy NAME] [--blocks N] [--check] [--json]
//
// Memory is filled with N blocks; then turns of 20 blocks arrive, a quarter of them follow-ups, and
// each evicts as many blocks as it brought. CPU time of the thread but for the decisions. --check:
// exit status 1 if a decision of any policy measured takes 1 us or more.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/core/check.h"
#include "storage/retention.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

constexpr int kBlocksPerTurn = 20;
constexpr int kNewOfFollowUp = 4;
constexpr double kSpanS = 3000;  // the resident blocks' ages, at every size
constexpr size_t kRecent = 100;  // turns that may be followed up
constexpr int64_t kBlockBytes = 1 << 20;

double CpuSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Cost {
  double choose_ns = 0;  // one decision
  double evict_ns = 0;   // and taking the block out
  double block_ns = 0;   // of a turn: use, and placing what is new
  double bytes_per_block = 0;
};

class Load {
 public:
  Load(const std::string& policy, int64_t num_blocks) : num_blocks_(num_blocks) {
    retention_ = *Retention::Create({.policy = policy,
                                     .tier_bytes = {0, num_blocks * kBlockBytes, 0},
                                     .blocks_max = 2 * num_blocks},
                                    &clock_);
  }

  Cost Run() {
    const int64_t empty_bytes = retention_->stats().memory_bytes;
    while (resident_ < num_blocks_) Arrive();
    Evict();
    for (int64_t evicted = 0; evicted < num_blocks_; evicted += Evict()) Arrive();
    constexpr int kTurns = 5000;
    double block_s = 0;
    double evict_s = 0;
    int64_t blocks = 0;
    int64_t evictions = 0;
    for (int i = 0; i < kTurns; ++i) {
      const double start = CpuSeconds();
      blocks += Arrive();
      const double middle = CpuSeconds();
      evictions += Evict();
      evict_s += CpuSeconds() - middle;
      block_s += middle - start;
    }
    KVSTOW_CHECK(evictions > kTurns && resident_ == num_blocks_);
    return {.choose_ns = ChooseNs(),
            .evict_ns = 1e9 * evict_s / static_cast<double>(evictions),
            .block_ns = 1e9 * block_s / static_cast<double>(blocks),
            .bytes_per_block = static_cast<double>(retention_->stats().memory_bytes - empty_bytes) /
                               static_cast<double>(num_blocks_)};
  }

 private:
  BlockKey NewKey() {
    BlockKey key;
    for (int word = 0; word < 4; ++word) {
      const uint64_t value = rng_.Next();
      std::memcpy(key.bytes.data() + 8 * word, &value, 8);
    }
    return key;
  }

  // Returns the number of blocks of the turn.
  int64_t Arrive() {
    clock_.Advance(absl::Seconds(kSpanS * kBlocksPerTurn / static_cast<double>(num_blocks_)));
    std::vector<BlockKey> chain;
    int num_new = kBlocksPerTurn;
    if (recent_.size() == kRecent && rng_.Below(4) == 0) {
      chain = recent_[rng_.Below(kRecent)];
      if (chain.size() > 4 * kBlocksPerTurn) chain.resize(kBlocksPerTurn);
      num_new = kNewOfFollowUp;
    }
    for (int i = 0; i < num_new; ++i) chain.push_back(NewKey());
    const auto use = retention_->Use({.keys = chain});
    for (size_t i = chain.size() - static_cast<size_t>(num_new); i < chain.size(); ++i) {
      retention_->OnPlaced(chain[i], TierKind::kDram, kBlockBytes);
      ++resident_;
    }
    const auto size = static_cast<int64_t>(chain.size());
    recent_.push_back(std::move(chain));
    if (recent_.size() > kRecent) recent_.pop_front();
    return size;
  }

  int64_t Evict() {
    int64_t evictions = 0;
    for (; resident_ > num_blocks_; ++evictions, --resident_) {
      const std::optional<BlockKey> key = retention_->Choose(TierKind::kDram);
      KVSTOW_CHECK(key.has_value());
      retention_->OnRemoved(*key, TierKind::kDram, kBlockBytes);
    }
    return evictions;
  }

  // Median over decisions after a change each, by the wall clock: the thread's takes longer to read
  // than a decision does.
  double ChooseNs() {
    std::vector<double> ns;
    for (int i = 0; i < 500; ++i) {
      Arrive();
      for (; resident_ > num_blocks_; --resident_) {
        const auto start = std::chrono::steady_clock::now();
        const std::optional<BlockKey> key = retention_->Choose(TierKind::kDram);
        const auto end = std::chrono::steady_clock::now();
        ns.push_back(std::chrono::duration<double, std::nano>(end - start).count());
        retention_->OnRemoved(*key, TierKind::kDram, kBlockBytes);
      }
    }
    std::nth_element(ns.begin(), ns.begin() + static_cast<std::ptrdiff_t>(ns.size() / 2), ns.end());
    return ns[ns.size() / 2];
  }

  const int64_t num_blocks_;
  testing::FakeClock clock_;
  testing::Rng rng_{7};
  std::unique_ptr<Retention> retention_;
  std::deque<std::vector<BlockKey>> recent_;
  int64_t resident_ = 0;
};

int Main(int argc, char** argv) {
  std::vector<int64_t> sizes{10'000, 1'000'000};
  std::vector<std::string> policies{"lru", "s3fifo", "arc", "gdsf", "hazard", "rtv"};
  bool is_checked = false;
  bool is_json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--check") {
      is_checked = true;
    } else if (word == "--json") {
      is_json = true;
    } else if (word == "--policy" && i + 1 < argc) {
      policies = {argv[++i]};
    } else if (word == "--blocks" && i + 1 < argc && std::atoll(argv[i + 1]) >= 1000) {
      sizes = {std::atoll(argv[++i])};
    } else {
      std::fputs(
          "usage: retention_bench [--policy NAME] [--blocks N, 1000 or more] [--check] "
          "[--json]\n",
          stderr);
      return 2;
    }
  }
  bool is_fast = true;
  if (!is_json) {
    std::printf("%-8s%12s%14s%12s%12s%14s\n", "policy", "blocks", "decision, ns", "evict, ns",
                "block, ns", "bytes/block");
  }
  for (const std::string& policy : policies) {
    for (const int64_t size : sizes) {
      const Cost cost = Load(policy, size).Run();
      const char* format = is_json ? "{\"case\": \"retention/%s/blocks:%lld\", \"decision_ns\": "
                                     "%.0f, \"evict_ns\": %.0f, \"block_ns\": %.0f, "
                                     "\"bytes_per_block\": %.0f}\n"
                                   : "%-8s%12lld%14.0f%12.0f%12.0f%14.0f\n";
      std::printf(format, policy.c_str(), static_cast<long long>(size), cost.choose_ns,
                  cost.evict_ns, cost.block_ns, cost.bytes_per_block);
      std::fflush(stdout);
      is_fast = is_fast && cost.choose_ns < 1000;
    }
  }
  return is_checked && !is_fast ? 1 : 0;
}

}  // namespace
}  // namespace kvstow

int main(int argc, char** argv) { return kvstow::Main(argc, argv); }
