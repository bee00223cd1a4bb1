// What a decision of each eviction policy costs, at 10^4, 10^6 and 10^7 resident blocks.
//
//   policy_bench [--policy NAME] [--blocks N] [--check]
//
// One tier is filled, then requests of 20 blocks go on arriving, a quarter of them follow-up turns;
// each evicts as many blocks as it brought. Timed in CPU time of the thread: `evict` is choosing
// one victim and taking it out, bookkeeping included; `request` is everything else (model updates,
// new owners, age bins), per request. The resident set spans 3,000 s of the trace's time at every
// size.
// --check: exit status 1 if a decision or an eviction of rtv costs 1 us or more.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/core/check.h"
#include "storage/policy/block_tree.h"
#include "storage/policy/ledger.h"
#include "storage/policy/policy.h"
#include "tests/testing/rng.h"

namespace kvstow::policy {
namespace {

constexpr int kBlocksPerRequest = 20;
constexpr int kNewOfFollowUp = 4;  // blocks that a follow-up turn adds
constexpr double kSpanS = 3000;
constexpr size_t kRecent = 100;    // requests that may be followed up
constexpr int64_t kSpare = 16384;  // block numbers beyond the capacity

double CpuSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Cost {
  double choose_ns = 0;
  double evict_ns = 0;
  double request_ns = 0;
};

class Load {
 public:
  Load(std::string_view policy, int64_t capacity)
      : capacity_(capacity), step_s_(kSpanS * kBlocksPerRequest / static_cast<double>(capacity)) {
    policy_ = *MakePolicy(policy, {.tier_blocks = {capacity}}, tree_);
    ledger_ = std::make_unique<TierLedger>(1, &tree_, policy_.get());
    is_free_.assign(static_cast<size_t>(capacity + kSpare), true);
    for (int64_t i = 0; i < capacity + kSpare; ++i) free_.push_back(static_cast<BlockNumber>(i));
  }

  Cost Run() {
    while (ledger_->num_blocks(0) < capacity_) Arrive();
    EvictWhile(victims_);
    Recycle();
    // Until as many have left as there is room for: at first only the partial tails go.
    for (int64_t evicted = 0; evicted < capacity_;) {
      Arrive();
      EvictWhile(victims_);
      evicted += static_cast<int64_t>(victims_.size());
      Recycle();
    }
    constexpr int kTimed = 20000;
    double evict_s = 0;
    double request_s = 0;
    int64_t evictions = 0;
    for (int i = 0; i < kTimed; ++i) {
      const double start = CpuSeconds();
      Arrive();
      const double middle = CpuSeconds();
      EvictWhile(victims_);
      evict_s += CpuSeconds() - middle;
      request_s += middle - start;
      evictions += static_cast<int64_t>(victims_.size());
      Recycle();
    }
    KVSTOW_CHECK(ledger_->num_blocks(0) == capacity_ && evictions > kTimed);
    return {MedianChoose(), 1e9 * evict_s / static_cast<double>(evictions),
            1e9 * request_s / kTimed};
  }

 private:
  struct Sent {
    Request request;
    std::vector<BlockNumber> chain;
  };

  BlockNumber NewBlock() {
    for (;;) {
      const BlockNumber block = free_.front();
      free_.pop_front();
      is_free_[block] = false;
      if (!tree_.IsResident(block)) return block;
    }
  }

  void Arrive() {
    Sent sent;
    sent.request.number = ++number_;
    sent.request.time_s = step_s_ * static_cast<double>(number_);
    sent.request.output_tokens = static_cast<int64_t>(rng_.Below(1000));
    if (recent_.size() == kRecent && rng_.Below(4) == 0) {
      const size_t which = rng_.Below(kRecent);
      const Sent& parent = recent_[which];
      sent.chain.assign(parent.chain.begin(), parent.chain.end() - 1);
      sent.request.continues = true;
      sent.request.parent = parent.request.number;
      sent.request.parent_tokens = parent.request.input_tokens + parent.request.output_tokens;
      sent.request.turn = parent.request.turn + 1;
      sent.request.seen_blocks = static_cast<int32_t>(sent.chain.size());
      if (sent.chain.size() > 4 * kBlocksPerRequest) sent.chain.resize(kBlocksPerRequest);
    }
    const size_t added = sent.request.continues ? kNewOfFollowUp : kBlocksPerRequest;
    for (size_t i = 0; i < added; ++i) sent.chain.push_back(NewBlock());
    sent.request.num_blocks = static_cast<int32_t>(sent.chain.size());
    sent.request.full_blocks = sent.request.num_blocks - 1;
    sent.request.input_tokens = 512 * sent.request.full_blocks + 100;
    ledger_->BeginRequest(sent.request);
    for (const BlockNumber block : sent.chain) ledger_->Touch(block);
    recent_.push_back(std::move(sent));
    if (recent_.size() > kRecent) recent_.pop_front();
  }

  void EvictWhile(std::vector<BlockNumber>& victims) {
    while (ledger_->num_blocks(0) > capacity_) {
      victims.push_back(ledger_->Evict(0));
      KVSTOW_CHECK(victims.back() != kNone);
    }
  }

  // Reused only after kSpare others: no request of `recent_` can mean them any more.
  void Recycle() {
    for (const BlockNumber block : victims_) {
      if (!is_free_[block]) free_.push_back(block);
      is_free_[block] = true;
    }
    victims_.clear();
  }

  double MedianChoose() {
    std::vector<double> ns;
    for (int i = 0; i < 2000; ++i) {
      Arrive();
      while (ledger_->num_blocks(0) > capacity_) {
        const auto start = std::chrono::steady_clock::now();
        const BlockNumber block = ledger_->ChooseVictim(0);
        ns.push_back(
            std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start)
                .count());
        ledger_->Erase(block);
        victims_.push_back(block);
      }
      Recycle();
    }
    std::nth_element(ns.begin(), ns.begin() + static_cast<std::ptrdiff_t>(ns.size() / 2), ns.end());
    return ns[ns.size() / 2];
  }

  const int64_t capacity_;
  const double step_s_;
  BlockTree tree_;
  std::unique_ptr<Policy> policy_;
  std::unique_ptr<TierLedger> ledger_;
  std::deque<BlockNumber> free_;
  std::vector<bool> is_free_;
  std::deque<Sent> recent_;
  std::vector<BlockNumber> victims_;
  uint64_t number_ = 0;
  testing::Rng rng_{7};
};

int Main(int argc, char** argv) {
  std::vector<int64_t> sizes{10'000, 1'000'000, 10'000'000};
  std::vector<std::string> policies{"lru", "arc", "s3fifo", "gdsf", "hazard", "rtv"};
  bool is_checked = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--check") {
      is_checked = true;
    } else if (word == "--policy" && i + 1 < argc) {
      policies = {argv[++i]};
    } else if (word == "--blocks" && i + 1 < argc && std::atoll(argv[i + 1]) >= 1000) {
      sizes = {std::atoll(argv[++i])};
    } else {
      std::fputs("usage: policy_bench [--policy NAME] [--blocks N, 1000 or more] [--check]\n",
                 stderr);
      return 2;
    }
  }
  bool is_fast = true;
  std::printf("%-8s%12s%12s%12s%14s\n", "policy", "blocks", "choose, ns", "evict, ns",
              "request, ns");
  for (const std::string& policy : policies) {
    for (const int64_t blocks : sizes) {
      const Cost cost = Load(policy, blocks).Run();
      std::printf("%-8s%12lld%12.0f%12.0f%14.0f\n", policy.c_str(), static_cast<long long>(blocks),
                  cost.choose_ns, cost.evict_ns, cost.request_ns);
      std::fflush(stdout);
      if (policy == "rtv" && std::max(cost.choose_ns, cost.evict_ns) >= 1000) is_fast = false;
    }
  }
  if (is_checked && !is_fast) {
    std::fputs("a decision or an eviction of rtv costs 1 us or more\n", stderr);
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace kvstow::policy

int main(int argc, char** argv) { return kvstow::policy::Main(argc, argv); }
