// Peers that lie, damage, dawdle or hang up: what they spoil is a miss, or comes from another peer;
// never a wrong byte, and never later than the peers' timeout.
#include <functional>
#include <thread>

#include "client/cli/relay.h"
#include "kernels/core/check.h"
#include "tests/client/fake_service.h"
#include "tests/e2e/store_fixture.h"

namespace kvstow::testing {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(1);
constexpr int kNumBlocks = 4;
constexpr int kSpoiltBlock = 1;

struct Lie {
  const char* name;
  std::function<void(v1::GetFrame&)> spoil;  // every frame of block kSpoiltBlock
  bool hangs = false;                        // after the frames of the blocks before it
  WireRule wire;                             // between the two services
  int num_hits = kNumBlocks - 1;             // without another peer
  const char* counter = "peer_refused";      // that tells of it; null: nothing to tell
};

void PrintTo(const Lie& lie, std::ostream* out) { *out << lie.name; }

// `daemon_` asks a service of the test's own, over a wire of the test's own.
class LyingPeer : public RunningDaemon, public ::testing::WithParamInterface<Lie> {
 protected:
  LyingPeer() {
    absl::StatusOr<std::unique_ptr<Relay>> relay = Relay::Listen(peer_folder_.path() + "/wire");
    KVSTOW_CHECK(relay.ok());
    relay_ = *std::move(relay);
    relay_->SetTarget(peer_folder_.path() + "/liar");
    wire_ = std::thread([this] { relay_->Run(); });
  }
  ~LyingPeer() override {
    daemon_.reset();
    relay_->Stop();
    wire_.join();
  }

  void Start(const std::string& other_peer = "") {
    StartDaemon({.extra_flags = {"--peers.timeout=1s", "--peers.list=unix:" + peer_folder_.path() +
                                                           "/wire" + other_peer}});
  }

  void PutAt(const std::string& target, const KvData& kv, std::string_view codec) {
    const absl::StatusOr<std::unique_ptr<KvClient>> client =
        KvClient::Create({.target = target, .paths = {}});
    ASSERT_TRUE(client.ok()) << client.status();
    ASSERT_TRUE((*client)->RegisterModel(model_.spec).ok());
    const std::vector<LayerRows> layers = kv.layers();
    const absl::StatusOr<PutSummary> put = (*client)->Put(
        model_,
        {.tokens = kv.tokens(), .layers = layers, .codec = ParseCodecChoice(codec).value()});
    ASSERT_TRUE(put.ok()) << put.status();
    ASSERT_EQ(put->num_stored, kv.num_blocks());
  }

  // From now on the peer does what the parameter says.
  void StartToLie() {
    const Lie& lie = GetParam();
    relay_->SetRule(lie.wire);
    liar_.service.hooks.get_frame = [&lie](v1::GetFrame& frame, int) {
      if (frame.block_idx() != kSpoiltBlock) return true;
      if (lie.spoil) lie.spoil(frame);
      return !lie.hangs;
    };
    if (!lie.hangs) return;
    const size_t per_frame = liar_.service.units_per_get_frame;
    const size_t frames_of_block = (model_.layout->num_planes() + per_frame - 1) / per_frame;
    const auto first_spoilt = static_cast<int>(kSpoiltBlock * frames_of_block);
    liar_.service.hooks.get_after_frame = [first_spoilt](grpc::ServerContext* context, int frame) {
      if (frame < first_spoilt) return grpc::Status::OK;
      Eventually([context] { return context->IsCancelled(); }, absl::Seconds(20));
      return grpc::Status::CANCELLED;
    };
  }

  const TempFolder peer_folder_;
  FakeServer liar_{peer_folder_.path() + "/liar"};
  std::unique_ptr<Relay> relay_;
  std::thread wire_;
};

TEST_P(LyingPeer, CostsAMissNoWrongByteAndNoMoreThanTheTimeout) {
  Start();
  for (const char* codec : {"raw", "k=tqm4,v=tq4"}) {
    const KvData kv(model_.spec, codec[0] == 'r' ? 1 : 2, kNumBlocks);
    PutAt(liar_.target(), kv, codec);
    StartToLie();
    const absl::Time start = absl::Now();
    EXPECT_EQ(CountHits(kv.AfterCodec(ParseCodecChoice(codec).value().pair)), GetParam().num_hits);
    EXPECT_LT(absl::Now() - start, kTimeout + absl::Seconds(1));
    relay_->SetRule({});
    liar_.service.hooks = {};
    if (GetParam().counter != nullptr) {
      EXPECT_GE(Counter(GetParam().counter), 1u);
    }
  }
}

TEST_P(LyingPeer, AnHonestPeerBringsWhatItSpoils) {
  const TempFolder folder;
  Daemon honest(folder, {});
  ASSERT_TRUE(honest.Start()) << honest.log();
  Start("," + honest.target());
  const KvData kv(model_.spec, 3, kNumBlocks);
  PutAt(liar_.target(), kv, "raw");
  PutAt(honest.target(), kv, "raw");
  StartToLie();
  const absl::Time start = absl::Now();
  EXPECT_EQ(CountHits(kv), kNumBlocks);
  EXPECT_LT(absl::Now() - start, kTimeout + absl::Seconds(1));
}

INSTANTIATE_TEST_SUITE_P(
    Peers, LyingPeer,
    ::testing::Values(
        Lie{.name = "FlippedBit", .spoil = [](auto& f) { f.mutable_payload()->at(9) ^= 4; }},
        Lie{.name = "OtherChecksums",
            .spoil = [](auto& f) { f.set_unit_xxh3(0, f.unit_xxh3(0) + 1); }},
        Lie{.name = "PayloadCutShort",
            .spoil = [](auto& f) { f.mutable_payload()->resize(f.payload().size() / 2); }},
        Lie{.name = "OtherKey",
            .spoil =
                [](auto& f) {
                  if (!f.key().empty()) f.set_key(std::string(32, 'x'));
                }},
        Lie{.name = "OtherModel",
            .spoil =
                [](auto& f) {
                  if (!f.key().empty()) f.set_fingerprint(std::string(32, 'x'));
                }},
        Lie{.name = "OtherCodec", .spoil = [](auto& f) { f.set_unit_codec(0, 1); }},
        Lie{.name = "OtherPlanes", .spoil = [](auto& f) { f.set_first_unit(f.first_unit() + 1); }},
        Lie{.name = "DeniesWhatItHas",
            .spoil =
                [](auto& f) {
                  f.Clear();
                  f.set_block_idx(kSpoiltBlock);
                  f.set_code(5);
                },
            .counter = nullptr},
        Lie{.name = "NeverAnswers",
            .hangs = true,
            .num_hits = kSpoiltBlock,
            .counter = "peer_failures"},
        // Enough for a lookup, not for a block.
        Lie{.name = "Trickles",
            .wire = {.bytes_per_s = 4000, .piece_bytes = 7},
            .num_hits = 0,
            .counter = "peer_failures"},
        Lie{.name = "HangsUpWithinAFrame",
            .wire = {.cut_after = 20000},
            .num_hits = 0,
            .counter = "peer_failures"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvstow::testing
