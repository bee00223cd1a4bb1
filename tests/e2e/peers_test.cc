// Peers: what a daemon does not have it fetches from another, whole and checked; and whatever a
// peer does costs no more than its timeout.
#include <csignal>

#include "tests/e2e/store_fixture.h"

namespace kvstow::testing {
namespace {

// Two daemons: `daemon_` asks `other_`.
class Peers : public RunningDaemon {
 protected:
  void StartBoth(const std::vector<std::string>& flags = {}) {
    other_ = std::make_unique<Daemon>(other_folder_, DaemonOptions{});
    ASSERT_TRUE(other_->Start()) << other_->log();
    other_client_ = other_->NewClient();
    ASSERT_TRUE(other_client_->RegisterModel(SmallModel()).ok());
    DaemonOptions options{.extra_flags = {"--peers.list=" + other_->target()}};
    options.extra_flags.insert(options.extra_flags.end(), flags.begin(), flags.end());
    StartDaemon(options);
  }

  void PutAtOther(const KvData& kv, std::string_view codec) {
    const std::vector<LayerRows> layers = kv.layers();
    const absl::StatusOr<PutSummary> put = other_client_->Put(
        model_,
        {.tokens = kv.tokens(), .layers = layers, .codec = ParseCodecChoice(codec).value()});
    ASSERT_TRUE(put.ok()) << put.status();
    ASSERT_EQ(put->num_stored, kv.num_blocks());
  }

  const TempFolder other_folder_;
  std::unique_ptr<Daemon> other_;
  std::unique_ptr<KvClient> other_client_;
};

TEST_F(Peers, BlocksOfAPeerAreFoundFetchedOnceAndKept) {
  StartBoth();
  const KvData kv(model_.spec, 1, 4);
  PutAtOther(kv, "k=tqm4,v=tq4");
  const absl::StatusOr<LookupSummary> lookup = client_->Lookup(model_, {}, kv.tokens());
  ASSERT_TRUE(lookup.ok()) << lookup.status();
  EXPECT_EQ(lookup->num_leading, 4);
  EXPECT_EQ(lookup->locations, std::vector<uint8_t>(4, 4)) << "at a peer";
  EXPECT_EQ(Counter("peer_hits"), 4u);

  const KvData want = kv.AfterCodec(ParseCodecChoice("k=tqm4,v=tq4").value().pair);
  EXPECT_EQ(CountHits(want), 4);
  EXPECT_EQ(Counter("peer_fetched"), 4u);
  other_->Kill();
  EXPECT_EQ(CountHits(want), 4) << "from our own memory now";
  EXPECT_EQ(Counter("peer_fetched"), 4u);
  // As they were sealed: the codec has come along, nothing was encoded twice.
  for (const v1::BlockInfo& block : daemon_->List()) EXPECT_EQ(block.codec(), "k=tqm4,v=tq4");
}

TEST_F(Peers, WhatIsHereAndWhatIsThereComeInOneAnswer) {
  StartBoth();
  const KvData kv(model_.spec, 2, 6);
  PutAtOther(kv, "raw");
  MustPut(kv, "raw");
  const std::vector<BlockKey> keys = KeysOf(kv);
  ASSERT_TRUE(client_->Delete({keys[1], keys[4]}).ok());
  EXPECT_EQ(CountHits(kv), 6);
  EXPECT_EQ(Counter("peer_fetched"), 2u);
}

TEST_F(Peers, AMissAtBothIsAMiss) {
  StartBoth();
  const KvData kv(model_.spec, 3, 4);
  EXPECT_EQ(CountHits(kv), 0);
  EXPECT_EQ(client_->Lookup(model_, {}, kv.tokens())->num_leading, 0);
}

TEST_F(Peers, AModelThatNobodyRegisteredHereComesWithItsBlocks) {
  StartBoth();
  const absl::StatusOr<Model> other_model = other_client_->RegisterModel(LargerModel());
  ASSERT_TRUE(other_model.ok()) << other_model.status();
  const KvData kv(other_model->spec, 9, 2);
  const std::vector<LayerRows> layers = kv.layers();
  const absl::StatusOr<PutSummary> put =
      other_client_->Put(*other_model, {.tokens = kv.tokens(), .layers = layers, .codec = {}});
  ASSERT_TRUE(put.ok()) << put.status();
  KvData got = KvData::Empty(other_model->spec, 2);
  const std::vector<LayerRows> rows = got.layers();
  const absl::StatusOr<GetSummary> summary = client_->Get(*other_model, put->keys, rows);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->num_leading, 2) << summary->blocks[0];
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(got.EqualsBlock(kv, i)) << i;
  EXPECT_EQ(Counter("peer_fetched"), 2u);
  EXPECT_TRUE(client_->GetModel(other_model->fingerprint).ok()) << "known here from now on";
}

TEST_F(Peers, BlocksOfAModelThatNobodyKnowsAreMisses) {
  StartBoth();
  const KvData kv = KvData::Empty(LargerModel(), 1);
  const std::vector<LayerRows> layers = kv.layers();
  Model unknown = model_;
  unknown.spec = LargerModel();
  unknown.fingerprint = unknown.spec.Fingerprint();
  unknown.layout = std::make_shared<const BlockLayout>(BlockLayout::Create(unknown.spec).value());
  const absl::StatusOr<GetSummary> summary = client_->Get(unknown, {Sha256("a key")}, layers);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_TRUE(absl::IsNotFound(summary->blocks[0]));
}

TEST_F(Peers, TwoDaemonsThatAskEachOtherDoNotAskInCircles) {
  // The other way round as well: the second daemon's socket is known before it is started.
  const TempFolder folder;
  other_ = std::make_unique<Daemon>(
      other_folder_,
      DaemonOptions{.extra_flags = {"--peers.list=unix:" + folder_.path() + "/kvstow.sock"}});
  ASSERT_TRUE(other_->Start()) << other_->log();
  StartDaemon({.extra_flags = {"--peers.list=" + other_->target()}});
  const KvData kv(model_.spec, 4, 4);
  EXPECT_EQ(CountHits(kv), 0);
  EXPECT_EQ(client_->Lookup(model_, {}, kv.tokens())->num_leading, 0);
}

TEST_F(Peers, ADeadPeerIsAMiss) {
  StartBoth();
  const KvData kv(model_.spec, 5, 4);
  PutAtOther(kv, "raw");
  other_->Kill();
  EXPECT_EQ(CountHits(kv), 0);
  EXPECT_GE(Counter("peer_failures"), 1u);
  ASSERT_TRUE(other_->Start()) << other_->log();
}

TEST_F(Peers, AStoppedPeerCostsItsTimeoutAndThenNothing) {
  StartBoth({"--peers.timeout=500ms"});
  const KvData kv(model_.spec, 6, 4);
  PutAtOther(kv, "raw");
  other_->Signal(SIGSTOP);
  const absl::Time start = absl::Now();
  EXPECT_EQ(CountHits(kv), 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
  EXPECT_EQ(CountHits(kv), 0);
  other_->Signal(SIGCONT);
  EXPECT_TRUE(Eventually([&] { return CountHits(kv) == 4; }, absl::Seconds(20)));
}

}  // namespace
}  // namespace kvstow::testing
