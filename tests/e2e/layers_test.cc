// Parts of blocks: layer by layer, and the heads of one tensor-parallel rank.
#include <cstring>

#include "tests/e2e/store_fixture.h"

namespace kvstow::testing {
namespace {

using ::testing::HasSubstr;

class Layers : public RunningDaemon, public ::testing::WithParamInterface<PathKind> {
 protected:
  void StartOverPath(const ModelSpec& spec) {
    DaemonOptions options{.dram = "128MiB"};
    KvClientOptions client;
    client.paths.clear();
    if (GetParam() != PathKind::kGrpc) client.paths = {GetParam()};
    if (GetParam() == PathKind::kUcx) {
      if (!IsUcxBuilt()) GTEST_SKIP() << "built without UCX";
      options.extra_flags = {"--channels.ucx=true", "--channels.ucx_tls=tcp",
                             "--channels.ucx_devices=lo"};
      client.ucx = {.tls = "tcp", .net_devices = "lo"};
    }
    StartDaemon(options, spec);
    client_ = daemon_->NewClient(client);
  }

  // Layer `layer` of a block holds what `want` holds.
  bool LayerIs(KvData& got, KvData& want, int layer, int block) {
    for (const auto of : {&KvData::k, &KvData::v}) {
      const std::vector<std::byte>& bytes = (got.*of)(layer);
      const std::vector<std::byte>& wanted = (want.*of)(layer);
      const size_t block_bytes = bytes.size() / got.num_blocks();
      const size_t begin = block * block_bytes;
      for (size_t i = begin; i < begin + block_bytes; ++i) {
        if (bytes[i] != wanted[i]) return false;
      }
    }
    return true;
  }
};

TEST_P(Layers, ComeInOrderEachOfAllBlocksBeforeTheNext) {
  StartOverPath(LargerModel());
  for (const char* codec : {"raw", "k=tqm4,v=tq4"}) {
    const KvData kv(model_.spec, codec[0] == 'r' ? 1 : 2, 40);  // 1.25 MiB a layer
    MustPut(kv, codec);
    KvData want = kv.AfterCodec(ParseCodecChoice(codec).value().pair);
    KvData got = KvData::Empty(model_.spec, kv.num_blocks());
    const std::vector<LayerRows> rows = got.layers();
    int num_layers = 0;
    GetOptions options;
    options.on_layers = [&](const LayersReady& ready) {
      EXPECT_EQ(ready.first_layer, num_layers) << "in order, none left out";
      if (num_layers == 0) {
        EXPECT_EQ(ready.num_layers, 1) << "the first one as soon as can be";
      }
      num_layers += ready.num_layers;
      for (const int layer : {0, ready.first_layer, num_layers - 1}) {
        for (const int block : {0, 17, 39}) {
          EXPECT_TRUE(LayerIs(got, want, layer, block))
              << "layer " << layer << " of block " << block << " after " << num_layers;
        }
      }
    };
    const absl::StatusOr<GetSummary> summary =
        client_->Get(model_, KeysOf(kv), rows, /*first_token=*/0, options);
    ASSERT_TRUE(summary.ok()) << summary.status();
    EXPECT_EQ(summary->num_leading, kv.num_blocks());
    EXPECT_EQ(num_layers, 16);
    for (int block = 0; block < kv.num_blocks(); ++block) {
      EXPECT_TRUE(got.EqualsBlock(want, block)) << block;
    }
  }
  EXPECT_EQ(client_->ExplainPath(), PathName(GetParam()));
}

TEST_P(Layers, ABlockThatGoesHalfwayIsNotOkFromThenOn) {
  StartOverPath(LargerModel());
  const KvData kv(model_.spec, 3, 40);
  MustPut(kv, "raw");
  const std::vector<BlockKey> keys = KeysOf(kv);
  KvData want = kv.AfterCodec({});
  KvData got = KvData::Empty(model_.spec, kv.num_blocks());
  const std::vector<LayerRows> rows = got.layers();
  GetOptions options;
  options.on_layers = [&](const LayersReady& ready) {
    // Of the layers behind it a few are on their way, but not the last ones.
    if (ready.first_layer == 0) {
      EXPECT_TRUE(ready.blocks[20].ok());
      EXPECT_TRUE(client_->Delete({keys[20]}).ok());
    }
    if (ready.first_layer + ready.num_layers == 16) {
      EXPECT_FALSE(ready.blocks[20].ok());
    }
    EXPECT_TRUE(ready.blocks[21].ok());
  };
  const absl::StatusOr<GetSummary> summary =
      client_->Get(model_, keys, rows, /*first_token=*/0, options);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->num_leading, 20);
  EXPECT_TRUE(absl::IsNotFound(summary->blocks[20]));
  EXPECT_TRUE(LayerIs(got, want, 0, 20));
  EXPECT_TRUE(got.EqualsBlock(want, 19));
  EXPECT_TRUE(got.EqualsBlock(want, 21));
}

// As a decode rank of tensor parallelism 4 reads what was put by one rank.
TEST_P(Layers, EachRankReadsItsOwnHeadsOnly) {
  ModelSpec spec = LargerModel();
  spec.groups[0].num_kv_heads = 8;
  StartOverPath(spec);
  const KvData kv(model_.spec, 4, 3);
  MustPut(kv, "k=tqm4,v=tq4");
  const KvData want = kv.AfterCodec(ParseCodecChoice("k=tqm4,v=tq4").value().pair);
  ModelSpec part = spec;
  part.groups[0].num_kv_heads = 2;
  uint64_t received = 0;
  for (int rank = 0; rank < 4; ++rank) {
    KvData got = KvData::Empty(part, kv.num_blocks());
    const std::vector<LayerRows> rows = got.layers();
    const absl::StatusOr<GetSummary> summary = client_->Get(
        model_, KeysOf(kv), rows, /*first_token=*/0, {.heads = {.first = 2 * rank, .count = 2}});
    ASSERT_TRUE(summary.ok()) << summary.status();
    ASSERT_EQ(summary->num_leading, 3) << summary->blocks[0];
    received += summary->received_bytes;
    for (int block = 0; block < kv.num_blocks(); ++block) {
      const std::vector<std::byte> whole = want.RowForm(block);
      const std::vector<std::byte> ours = got.RowForm(block);
      for (const PlaneInfo& plane : got.layout().planes()) {
        const int32_t whole_idx =
            want.layout().plane_idx(plane.layer_idx, plane.role, 2 * rank + plane.head_idx);
        EXPECT_EQ(std::memcmp(ours.data() + plane.row_offset,
                              whole.data() + want.layout().plane(whole_idx).row_offset,
                              static_cast<size_t>(plane.row_bytes)),
                  0)
            << "rank " << rank << " block " << block << " layer " << plane.layer_idx;
      }
    }
  }
  EXPECT_LT(received, static_cast<uint64_t>(3 * model_.layout->block_bytes()) / 3)
      << "a quarter each, and encoded";
}

TEST_P(Layers, HeadsThatTheModelDoesNotHaveAreRefused) {
  StartOverPath(SmallModel());
  const KvData kv = KvData::Empty(model_.spec, 1);
  const std::vector<LayerRows> rows = kv.layers();
  const std::vector<BlockKey> keys = {Sha256("a key")};
  for (const HeadRange heads : {HeadRange{1, 2}, HeadRange{2, 1}, HeadRange{-1, 1}, HeadRange{0, 3},
                                HeadRange{1, 0}, HeadRange{INT32_MAX, INT32_MAX}}) {
    const absl::Status status = client_->Get(model_, keys, rows, 0, {.heads = heads}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("layer 0 has 2"));
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, Layers,
                         ::testing::Values(PathKind::kShm, PathKind::kUcx, PathKind::kGrpc),
                         [](const auto& info) { return std::string(PathName(info.param)); });

}  // namespace
}  // namespace kvstow::testing
