// Tensor parallelism: each rank of the prefill puts its own heads of a block under the one key of
// all, and ranks of any other number read theirs.
#include "kernels/layout/ranks.h"

#include <thread>

#include "tests/e2e/store_fixture.h"

namespace kvstow::testing {
namespace {

constexpr int kNumHeads = 8;

class Ranks : public RunningDaemon {
 protected:
  static ModelSpec Spec(int num_heads = kNumHeads) {
    ModelSpec spec = LargerModel();
    spec.groups[0].num_kv_heads = num_heads;
    return spec;
  }

  // `heads` of `whole`, in memory of their own, as a rank has them.
  static KvData HeadsOf(const KvData& whole, const HeadRange& heads) {
    const TpRank rank{.rank = heads.first / heads.count, .num_ranks = kNumHeads / heads.count};
    KvData part = KvData::Empty(Spec(heads.count), whole.num_blocks());
    for (int block = 0; block < whole.num_blocks(); ++block) {
      const std::vector<std::byte> from = whole.RowForm(block);
      std::vector<std::byte> to(part.layout().block_bytes());
      const absl::Status status = ReshardBlock(Spec(), {from}, rank, absl::MakeSpan(to));
      EXPECT_TRUE(status.ok()) << status;
      part.SetBlock(block, to);
    }
    return part;
  }

  absl::StatusOr<PutSummary> PutAs(KvClient& client, const KvData& whole, const HeadRange& heads,
                                   std::string_view codec) {
    const KvData part = HeadsOf(whole, heads);
    const std::vector<LayerRows> layers = part.layers();
    return client.Put(model_, {.tokens = whole.tokens(),
                               .layers = layers,
                               .codec = ParseCodecChoice(codec).value(),
                               .heads = heads});
  }

  // The blocks that a rank with these heads finds.
  int CountHitsAs(const KvData& want, const HeadRange& heads) {
    const KvData wanted = HeadsOf(want, heads);
    const KvData got = KvData::Empty(Spec(heads.count), want.num_blocks());
    const std::vector<LayerRows> layers = got.layers();
    const absl::StatusOr<GetSummary> summary =
        client_->Get(model_, KeysOf(want), layers, /*first_token=*/0, {.heads = heads});
    EXPECT_TRUE(summary.ok()) << summary.status();
    int hits = 0;
    for (int block = 0; summary.ok() && block < want.num_blocks(); ++block) {
      const bool is_hit = summary->blocks[block].ok();
      EXPECT_TRUE(is_hit ? got.EqualsBlock(wanted, block) : got.IsUntouched(block))
          << "WRONG BYTES in block " << block << " of heads " << heads.first;
      hits += is_hit ? 1 : 0;
    }
    return hits;
  }
};

TEST_F(Ranks, FourWritersMakeOneBlockThatTwoOrEightReadersRead) {
  StartDaemon({.dram = "128MiB"}, Spec());
  for (const char* codec : {"raw", "k=tqm4,v=tq4"}) {
    const KvData kv(model_.spec, codec[0] == 'r' ? 1 : 2, 4);
    std::vector<absl::StatusOr<PutSummary>> puts(4);
    std::vector<std::thread> writers;
    for (int rank = 0; rank < 4; ++rank) {
      writers.emplace_back([&, rank] {
        const std::unique_ptr<KvClient> client = daemon_->NewClient();
        puts[rank] = PutAs(*client, kv, {.first = 2 * rank, .count = 2}, codec);
      });
    }
    for (std::thread& writer : writers) writer.join();
    int num_stored = 0;
    for (const absl::StatusOr<PutSummary>& put : puts) {
      ASSERT_TRUE(put.ok()) << put.status();
      EXPECT_EQ(put->num_refused, 0) << put->first_refusal;
      EXPECT_EQ(put->num_stored + put->num_shared + put->num_existing, 4);
      num_stored += put->num_stored;
    }
    EXPECT_EQ(num_stored, 4) << "each block is sealed once";
    const KvData want = kv.AfterCodec(ParseCodecChoice(codec).value().pair);
    for (const int num_readers : {2, 8}) {
      for (int rank = 0; rank < num_readers; ++rank) {
        EXPECT_EQ(CountHitsAs(want, *HeadsOfRank(kNumHeads, {rank, num_readers})), 4)
            << "rank " << rank << " of " << num_readers;
      }
    }
    EXPECT_EQ(CountHits(want), 4) << "and a reader of all";
  }
  EXPECT_EQ(daemon_->Stat().open_tickets(), 0u);
}

TEST_F(Ranks, ABlockOfWhichARankIsMissingIsNeverSeenAndForgotten) {
  StartDaemon({.dram = "128MiB",
               .extra_flags = {"--tickets.write_deadline=1s", "--tickets.reuse_delay=100ms"}},
              Spec());
  const KvData kv(model_.spec, 3, 2);
  for (int rank = 0; rank < 3; ++rank) {
    const absl::StatusOr<PutSummary> put =
        PutAs(*client_, kv, {.first = 2 * rank, .count = 2}, "raw");
    ASSERT_TRUE(put.ok()) << put.status();
    EXPECT_EQ(put->num_shared, 2) << put->first_refusal;
  }
  EXPECT_EQ(CountHitsAs(kv, {.first = 0, .count = 2}), 0);
  EXPECT_TRUE(Eventually([&] { return daemon_->Stat().open_tickets() == 0; }, absl::Seconds(20)));
  MustPut(kv, "raw");  // the keys are free again
  EXPECT_EQ(CountHits(kv), 2);
}

TEST_F(Ranks, AWriterWithOtherCodecsIsToldSoAndSpoilsNothing) {
  StartDaemon({.dram = "128MiB"}, Spec());
  const KvData kv(model_.spec, 4, 1);
  ASSERT_EQ(PutAs(*client_, kv, {.first = 0, .count = 4}, "raw")->num_shared, 1);
  const absl::StatusOr<PutSummary> other = PutAs(*client_, kv, {.first = 4, .count = 4}, "tq4");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->num_refused, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(other->first_refusal)) << other->first_refusal;
  EXPECT_EQ(PutAs(*client_, kv, {.first = 4, .count = 4}, "raw")->num_stored, 1);
  EXPECT_EQ(CountHits(kv), 1);
}

TEST_F(Ranks, AWriterAloneWithAKeyIsStillTheOnlyOne) {
  StartDaemon({.dram = "128MiB"}, Spec());
  const KvData kv(model_.spec, 5, 1);
  ASSERT_EQ(PutAs(*client_, kv, {.first = 0, .count = 4}, "raw")->num_shared, 1);
  const absl::StatusOr<PutSummary> whole = Put(kv, "raw");
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->num_existing, 1) << "it does not share";
  EXPECT_EQ(PutAs(*client_, kv, {.first = 4, .count = 4}, "raw")->num_stored, 1);
  EXPECT_EQ(CountHits(kv), 1);
}

}  // namespace
}  // namespace kvstow::testing
