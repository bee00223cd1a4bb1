// Many clients, dead services, memory over time: what shows only under load.
#include <atomic>
#include <csignal>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/core/clock.h"
#include "tests/e2e/store_fixture.h"
#include "tests/testing/rng.h"
#include "tests/testing/sanitizer.h"

namespace kvstow::testing {
namespace {

using ::testing::HasSubstr;

class Load : public RunningDaemon {};

// --- U01 ---

// One of eight clients: puts its own prompts, gets everyone's. Returns the number of hits.
int PutAndGetAll(Daemon& daemon, const Model& model, uint64_t client_idx, absl::Time end) {
  constexpr uint64_t kClients = 8;
  constexpr uint64_t kPromptsPerClient = 8;
  constexpr absl::Duration kDeadline = absl::Seconds(10);
  const RealClock clock;
  const auto client =
      daemon.NewClient({.control_timeout = absl::Seconds(5), .data_timeout = kDeadline});
  Rng rng(client_idx + 1);
  int hits = 0;
  while (clock.Now() < end) {
    const uint64_t own = client_idx * kPromptsPerClient + rng.Below(kPromptsPerClient);
    const KvData kv(model.spec, 5000 + own, 4);
    const std::vector<LayerRows> rows = kv.layers();
    absl::Time began = clock.Now();
    const auto put = client->Put(model, {.tokens = kv.tokens(), .layers = rows});
    EXPECT_TRUE(put.ok()) << put.status();
    EXPECT_LT(clock.Now() - began, 4 * kDeadline);

    const KvData want(model.spec, 5000 + rng.Below(kClients * kPromptsPerClient), 4);
    const KvData got = KvData::Empty(model.spec, 4);
    const std::vector<LayerRows> layers = got.layers();
    began = clock.Now();
    const auto summary = client->Get(
        model,
        ChainKeys({.fingerprint = model.fingerprint}, want.tokens(), model.spec.tokens_per_block),
        layers);
    EXPECT_LT(clock.Now() - began, 2 * kDeadline);
    EXPECT_TRUE(summary.ok()) << summary.status();
    for (int block = 0; summary.ok() && block < 4; ++block) {
      if (!summary->blocks[block].ok()) continue;
      ++hits;
      EXPECT_TRUE(got.EqualsBlock(want, block)) << "WRONG BYTES";
    }
  }
  return hits;
}

TEST_F(Load, U01EightClientsOverAQuarterOfTheMemoryNeverGetAWrongByte) {
  StartDaemon({.dram = "8MiB", .nvme = "128MiB"});  // the data is 32 MiB
  const RealClock clock;
  const absl::Time end = clock.Now() + absl::Seconds(8);
  std::atomic<int> hits{0};
  std::vector<std::thread> clients;
  for (uint64_t i = 0; i < 8; ++i) {
    clients.emplace_back([&, i] { hits += PutAndGetAll(*daemon_, model_, i, end); });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_GT(hits, 100) << "the load must hit";
  EXPECT_EQ(daemon_->Stat().pinned_bytes(), 0u);
  EXPECT_EQ(daemon_->Stat().open_tickets(), 0u);
}

// --- U11 ---

TEST_F(Load, U11ClientOutlivesItsDaemon) {
  StartDaemon({.dram = "32MiB", .nvme = "64MiB"});
  const KvData kv(model_.spec, 1, 4);
  MustPut(kv, "raw", /*durable=*/true);
  const auto caller =
      daemon_->NewClient({.control_timeout = absl::Seconds(2), .data_timeout = absl::Seconds(2)});
  ASSERT_TRUE(caller->GetModel(model_.fingerprint).ok());

  const RealClock clock;
  std::atomic<bool> stop{false};
  std::atomic<int> num_ok{0};
  std::atomic<int> num_failed{0};
  absl::Duration longest;
  std::thread loop([&] {
    const KvData got = KvData::Empty(model_.spec, 4);
    const std::vector<LayerRows> layers = got.layers();
    const std::vector<BlockKey> keys = KeysOf(kv);
    while (!stop) {
      const absl::Time began = clock.Now();
      const auto summary = caller->Get(model_, keys, layers);
      longest = std::max(longest, clock.Now() - began);
      if (!summary.ok()) {
        ++num_failed;
        continue;
      }
      ++num_ok;
      for (int block = 0; block < 4; ++block) {
        if (summary->blocks[block].ok()) {
          EXPECT_TRUE(got.EqualsBlock(kv, block)) << "WRONG BYTES";
        }
      }
    }
  });
  EXPECT_TRUE(Eventually([&] { return num_ok > 3; }, absl::Seconds(20)));
  daemon_->Kill();
  EXPECT_TRUE(Eventually([&] { return num_failed > 3; }, absl::Seconds(20)));
  ASSERT_TRUE(daemon_->Start()) << daemon_->log();
  const int before = num_ok;
  EXPECT_TRUE(Eventually([&] { return num_ok > before + 3; }, absl::Seconds(30)))
      << "the same client must recover by itself";
  stop = true;
  loop.join();
  EXPECT_LT(longest, absl::Seconds(4)) << "a call outlived its deadline of 2 s";
  EXPECT_EQ(caller->breaker_state(), BreakerState::kClosed);
}

TEST_F(Load, StoppedDaemonCostsItsCallersNoMoreThanTheirDeadline) {
  StartDaemon({.dram = "32MiB"});
  const KvData kv(model_.spec, 2, 4);
  MustPut(kv, "raw");
  const auto caller =
      daemon_->NewClient({.control_timeout = absl::Seconds(1), .data_timeout = absl::Seconds(1)});
  ASSERT_TRUE(caller->GetModel(model_.fingerprint).ok());
  daemon_->Signal(SIGSTOP);
  ASSERT_TRUE(Eventually([&] { return AllThreadsAreStopped(daemon_->pid()); }, absl::Seconds(20)));
  const RealClock clock;
  const absl::Time began = clock.Now();
  EXPECT_FALSE(caller->Lookup(KeysOf(kv)).ok());
  EXPECT_LT(clock.Now() - began, absl::Seconds(3));
  daemon_->Signal(SIGCONT);
  EXPECT_TRUE(Eventually([&] { return caller->Lookup(KeysOf(kv)).ok(); }, absl::Seconds(20)));
  EXPECT_EQ(CountHits(kv), 4);
}

// --- U20 ---

TEST_F(Load, U20MetricsCountExactly) {
  StartDaemon({.dram = "64MiB", .nvme = "128MiB", .with_metrics = true});
  const KvData raw(model_.spec, 3, 4);
  const KvData int8(model_.spec, 4, 4);
  MustPut(raw, "raw", /*durable=*/true);
  MustPut(int8, "int8", /*durable=*/true);
  EXPECT_EQ(daemon_->Metric("kvstow_codec_blocks{codec=\"raw\"}"), 4);
  EXPECT_EQ(daemon_->Metric("kvstow_codec_blocks{codec=\"int8\"}"), 4);
  EXPECT_EQ(daemon_->Metric("kvstow_tier_blocks{tier=\"dram\"}"), 8);
  EXPECT_EQ(daemon_->Metric("kvstow_tier_blocks{tier=\"nvme\"}"), 8);
  EXPECT_EQ(daemon_->Metric("kvstow_codec_logical_bytes{codec=\"int8\"}"),
            4.0 * model_.layout->block_bytes());
  double record_bytes = 0;
  for (const v1::BlockInfo& block : daemon_->List()) record_bytes += block.record_bytes();
  EXPECT_EQ(daemon_->Metric("kvstow_tier_sealed_bytes{tier=\"dram\"}"), record_bytes);
  EXPECT_EQ(daemon_->Metric("kvstow_tier_sealed_bytes{tier=\"nvme\"}"), record_bytes);

  const double lookups = daemon_->Metric("kvstow_lookups_total");
  const double hits = daemon_->Metric("kvstow_lookup_hits_total");
  const double calls = daemon_->Metric("kvstow_rpc_total{method=\"Lookup\",code=\"OK\"}");
  // Ten lookups of four keys over two tenants: three full hits, one half, six misses.
  const std::vector<BlockKey> stranger = KeysOf(raw, {.tenant = "team-b"});
  std::vector<BlockKey> half = KeysOf(raw);
  std::copy_n(stranger.begin(), 2, half.begin() + 2);
  for (const auto& keys : {KeysOf(raw), KeysOf(int8), KeysOf(raw), half, stranger, stranger,
                           stranger, stranger, stranger, stranger}) {
    ASSERT_TRUE(client_->Lookup(keys).ok());
  }
  EXPECT_EQ(daemon_->Metric("kvstow_lookups_total") - lookups, 40);
  EXPECT_EQ(daemon_->Metric("kvstow_lookup_hits_total") - hits, 14);
  EXPECT_EQ(daemon_->Metric("kvstow_rpc_total{method=\"Lookup\",code=\"OK\"}") - calls, 10);

  const double dram_hits = daemon_->Metric("kvstow_dram_hits_total");
  const double misses = daemon_->Metric("kvstow_misses_total");
  const double rows = daemon_->Metric("kvstow_get_rows_bytes_total");
  const double encoded = daemon_->Metric("kvstow_get_encoded_bytes_total");
  EXPECT_EQ(CountHits(raw), 4);
  EXPECT_EQ(CountHits(KvData(model_.spec, 5, 4)), 0);
  EXPECT_EQ(daemon_->Metric("kvstow_dram_hits_total") - dram_hits, 4);
  EXPECT_EQ(daemon_->Metric("kvstow_misses_total") - misses, 4);
  EXPECT_EQ(daemon_->Metric("kvstow_get_rows_bytes_total") - rows +
                daemon_->Metric("kvstow_get_encoded_bytes_total") - encoded,
            4.0 * model_.layout->block_bytes());
}

// --- memory ---

uint64_t ResidentBytes(pid_t pid) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("VmRSS:", 0) == 0) {
      std::istringstream fields(line.substr(6));
      uint64_t kib = 0;
      fields >> kib;
      return kib << 10;
    }
  }
  return 0;
}

TEST_F(Load, ResidentMemoryStaysBoundedOver10000PutsAndEvictions) {
  if (kIsSanitized) GTEST_SKIP() << "the address sanitizer keeps freed memory";
  constexpr uint64_t kDram = uint64_t{64} << 20;
  constexpr uint64_t kSlack = uint64_t{200} << 20;
  StartDaemon({.dram = "64MiB", .nvme = "256MiB"});
  constexpr int kBlocksPerPut = 8;
  uint64_t most = 0;
  for (uint64_t i = 0; i < 10000 / kBlocksPerPut; ++i) {
    const KvData kv(model_.spec, 20000 + i, kBlocksPerPut);
    const absl::StatusOr<PutSummary> put = Put(kv, "raw");
    ASSERT_TRUE(put.ok()) << put.status();
    if (i % 50 == 0) most = std::max(most, ResidentBytes(daemon_->pid()));
  }
  const v1::StatResponse stat = daemon_->Stat();
  most = std::max(most, ResidentBytes(daemon_->pid()));
  EXPECT_GT(stat.counters().at("dram_evictions"), 5000u);
  EXPECT_LE(most, kDram + stat.index_bytes() + kSlack)
      << "resident " << (most >> 20) << " MiB, DRAM arena 64 MiB, index "
      << (stat.index_bytes() >> 20) << " MiB";
  RecordProperty("resident_mib", static_cast<int>(most >> 20));
}

}  // namespace
}  // namespace kvstow::testing
