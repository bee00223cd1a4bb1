// RunningDaemon: the fixture of the end-to-end tests: a daemon in a fresh folder, a client and a
// registered model.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/daemon.h"
#include "tests/e2e/kv_data.h"
#include "tests/e2e/raw_calls.h"

namespace kvstow::testing {

class RunningDaemon : public ::testing::Test {
 protected:
  void StartDaemon(const DaemonOptions& options, const ModelSpec& spec = SmallModel()) {
    daemon_ = std::make_unique<Daemon>(folder_, options);
    ASSERT_TRUE(daemon_->Start()) << daemon_->log();
    client_ = daemon_->NewClient();
    const absl::StatusOr<Model> registered = client_->RegisterModel(spec);
    ASSERT_TRUE(registered.ok()) << registered.status();
    model_ = *registered;
    calls_ = std::make_unique<RawCalls>(*daemon_, model_);
  }

  void Restart() {
    ASSERT_TRUE(daemon_->Start()) << daemon_->log();
    // The first call may find the connection of the daemon that was killed.
    ASSERT_TRUE(
        Eventually([&] { return client_->RegisterModel(model_.spec).ok(); }, absl::Seconds(20)));
  }

  std::vector<BlockKey> KeysOf(const KvData& kv, KeyContext context = {}) const {
    context.fingerprint = model_.fingerprint;
    return ChainKeys(context, kv.tokens(), model_.spec.tokens_per_block);
  }

  absl::StatusOr<PutSummary> Put(const KvData& kv, std::string_view codec, bool durable = false) {
    const std::vector<LayerRows> layers = kv.layers();
    return client_->Put(model_, {.tokens = kv.tokens(),
                                 .layers = layers,
                                 .codec = ParseCodecChoice(codec).value(),
                                 .durable = durable});
  }

  // Puts, and fails the test unless every block was stored now.
  void MustPut(const KvData& kv, std::string_view codec, bool durable = false) {
    const absl::StatusOr<PutSummary> put = Put(kv, codec, durable);
    ASSERT_TRUE(put.ok()) << put.status();
    ASSERT_EQ(put->num_stored, kv.num_blocks()) << put->first_refusal;
  }

  // Gets the blocks of `want` and compares: the number that were there. Wrong bytes fail the test.
  int CountHits(const KvData& want) { return CountHits(*client_, want); }
  int CountHits(KvClient& from, const KvData& want) {
    const KvData got = KvData::Empty(model_.spec, want.num_blocks());
    const std::vector<LayerRows> layers = got.layers();
    const absl::StatusOr<GetSummary> summary = from.Get(model_, KeysOf(want), layers);
    EXPECT_TRUE(summary.ok()) << summary.status();
    if (!summary.ok()) return -1;
    int hits = 0;
    for (int block = 0; block < want.num_blocks(); ++block) {
      if (!summary->blocks[block].ok()) {
        EXPECT_TRUE(got.IsUntouched(block)) << "a miss must leave the caller's rows alone";
        continue;
      }
      EXPECT_TRUE(got.EqualsBlock(want, block)) << "WRONG BYTES in block " << block;
      ++hits;
    }
    return hits;
  }

  uint64_t Counter(const std::string& name) {
    const v1::StatResponse stat = daemon_->Stat();
    const auto entry = stat.counters().find(name);
    EXPECT_NE(entry, stat.counters().end()) << "no counter " << name;
    return entry == stat.counters().end() ? 0 : entry->second;
  }

  const TempFolder folder_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<KvClient> client_;
  std::unique_ptr<RawCalls> calls_;
  Model model_;
};

}  // namespace kvstow::testing
