// T-LIVE: a recorded hour replayed against a live store, whose counters must agree with the
// simulator's. Blocks are scaled down, nothing else: each request looks up its prompt, reads the
// leading blocks that are there and writes the others.
#include <map>
#include <string>

#include "gtest/gtest.h"
#include "storage/policy/sessions.h"
#include "storage/policy/simulator.h"
#include "storage/policy/trace.h"
#include "tests/storage/store_fixture.h"
#include "tests/testing/sanitizer.h"

namespace kvstow {
namespace {

using testing::KeyOf;
using testing::RequestOf;
using testing::WriteUnits;

constexpr int64_t kBlocks = 5000;
// No request of the trace has more: headroom for one.
constexpr int64_t kLongestPrompt = 250;

struct Counts {
  int64_t hits = 0;  // leading blocks found
  int64_t full_hits = 0;
  int64_t follow_ups = 0;
  int64_t blocks = 0;
};

struct Input {
  policy::Trace trace;
  std::vector<policy::Request> requests;
};

const Input& Conversation() {
  static const auto* input = [] {
    auto* loaded = new Input;
    loaded->trace = *policy::ReadTrace(
        std::string(KVSTOW_TEST_DATA) + "/mooncake_conversation_trace.jsonl", {});
    // A sanitizer takes ten times as long: the first minutes must do.
    if (testing::kIsSanitized) loaded->trace.requests.resize(1500);
    loaded->requests = policy::FindSessions(loaded->trace);
    return loaded;
  }();
  return *input;
}

class LiveReplayTest : public testing::StoreTest {
 protected:
  static int64_t RecordBytes() { return RecordPrefixBytes(1) + 64; }

  // With memory for the longest prompt beside the blocks that are kept.
  void OpenFor(const std::string& policy) {
    options_.policy = policy;
    options_.dram_headroom_bytes = kLongestPrompt * RecordBytes();
    options_.dram_bytes = kBlocks * RecordBytes() + options_.dram_headroom_bytes;
    Open();
  }

  Counts Replay() {
    const Input& input = Conversation();
    Counts counts;
    double now_s = 0;
    for (size_t i = 0; i < input.requests.size(); ++i) {
      const policy::Request& request = input.requests[i];
      clock_.Advance(absl::Seconds(request.time_s - now_s));
      now_s = request.time_s;
      const int64_t leading = Send(input.trace.Chain(i), request);
      counts.hits += leading;
      counts.blocks += request.num_blocks;
      if (!request.continues) continue;
      ++counts.follow_ups;
      if (leading >= input.requests[request.parent].full_blocks) ++counts.full_hits;
    }
    return counts;
  }

  // Returns the number of leading blocks found.
  int64_t Send(absl::Span<const policy::BlockNumber> chain, const policy::Request& request) {
    std::vector<BlockKey> keys;
    for (const policy::BlockNumber block : chain) keys.push_back(KeyOf(block));
    const auto use = store_->Use({.keys = keys,
                                  .hints = {.input_tokens = request.input_tokens,
                                            .output_tokens = request.output_tokens,
                                            .full_blocks = request.full_blocks}});
    const std::vector<Location> found = store_->Lookup(keys);
    size_t leading = 0;
    while (leading < keys.size() && found[leading].present()) ++leading;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (i < leading) {
        EXPECT_TRUE(store_->Read(keys[i]).ok());
      } else if (!found[i].present()) {
        Write(keys[i], use);
      }
    }
    return static_cast<int64_t>(leading);
  }

  void Write(const BlockKey& key, const std::shared_ptr<const TurnUse>& use) {
    ReserveRequest request = RequestOf(key, {64});
    request.use = use;
    const absl::StatusOr<TicketId> ticket = store_->Reserve(request);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    ASSERT_TRUE(WriteUnits(*store_, *ticket, key, {64}).ok());
    ASSERT_TRUE(store_->Seal(*ticket).ok());
  }

  static policy::SimResult Simulated(const std::string& policy) {
    const Input& input = Conversation();
    const absl::StatusOr<policy::SimResult> result = policy::Simulate(
        input.trace, input.requests, policy, {.tier_blocks = {kBlocks}, .warmup = 0});
    EXPECT_TRUE(result.ok()) << result.status();
    return *result;
  }

  // The store's own counters, too.
  void ExpectSame(const std::string& policy, const Counts& live, double tolerance) {
    const policy::SimResult simulated = Simulated(policy);
    const StoreStats stats = store_->Stats();
    EXPECT_EQ(live.blocks, simulated.blocks);
    EXPECT_EQ(stats.dram_hits, live.hits);
    const auto near = [tolerance](int64_t a, int64_t b, const char* what) {
      EXPECT_NEAR(static_cast<double>(a), static_cast<double>(b),
                  tolerance * static_cast<double>(b))
          << what;
    };
    near(live.hits, simulated.hits[0], "blocks found");
    near(live.full_hits, simulated.full_hits, "follow-ups that found their whole history");
    std::printf("%-7s live: %lld blocks found, %lld of %lld whole; simulated: %lld, %lld\n",
                policy.c_str(), static_cast<long long>(live.hits),
                static_cast<long long>(live.full_hits), static_cast<long long>(live.follow_ups),
                static_cast<long long>(simulated.hits[0]),
                static_cast<long long>(simulated.full_hits));
    RecordProperty(policy + "_hits", static_cast<int>(live.hits));
    RecordProperty(policy + "_full_hits", static_cast<int>(live.full_hits));
  }
};

// turn_gap is zero here: as in the simulator each request is a turn.
TEST_F(LiveReplayTest, LruFindsWhatTheSimulatorFinds) {
  OpenFor("lru");
  ExpectSame("lru", Replay(), 0.01);
}

TEST_F(LiveReplayTest, RtvFindsWhatTheSimulatorFinds) {
  OpenFor("rtv");
  const Counts live = Replay();
  ExpectSame("rtv", live, 0.01);
  const StoreStats stats = store_->Stats();
  EXPECT_EQ(stats.dram_hits + stats.seals, live.blocks);  // no block stands behind a missing one
  EXPECT_EQ(stats.turns, static_cast<int64_t>(Conversation().requests.size()));
  EXPECT_EQ(stats.follow_up_turns, live.follow_ups);
}

TEST_F(LiveReplayTest, TheOtherPoliciesFindWhatTheSimulatorFinds) {
  if (testing::kIsSanitized) GTEST_SKIP() << "the same code, four times as long";
  for (const char* policy : {"s3fifo", "arc", "gdsf", "hazard"}) {
    OpenFor(policy);
    ExpectSame(policy, Replay(), 0.01);
  }
}

// As a service runs: what comes close together is one turn, and the headroom is part of the memory.
TEST_F(LiveReplayTest, WithAServicesDefaultsRtvFindsWhatTheSimulatorFinds) {
  if (testing::kIsSanitized) GTEST_SKIP() << "needs the whole hour";
  options_.policy = "rtv";
  options_.turn_gap = StoreOptions().turn_gap;
  options_.dram_bytes = kBlocks * RecordBytes();
  options_.dram_headroom_bytes = StoreOptions::UsualHeadroomBytes(options_.dram_bytes);
  Open();
  const Counts live = Replay();
  ExpectSame("rtv", live, 0.01);
  const policy::SimResult lru = Simulated("lru");
  EXPECT_GT(live.hits, 3 * lru.hits[0] / 2);
  EXPECT_GT(live.full_hits, 2 * lru.full_hits);
}

}  // namespace
}  // namespace kvstow
