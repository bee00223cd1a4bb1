// KV in memory that a client shares with its service: put and got in place, and what happens to it
// when the service goes.
#include "client/cpp/window_buffer.h"

#include <grpcpp/channel.h>

#include <csignal>
#include <cstring>

#include "kernels/layout/planes.h"
#include "kvstow/v1/channels.grpc.pb.h"
#include "proto/convert.h"
#include "tests/e2e/store_fixture.h"
#include "transport/shm_window.h"

namespace kvstow::testing {
namespace {

using ::testing::HasSubstr;

// Rows of some blocks in a buffer, those of each head one after the other.
class BufferRows {
 public:
  BufferRows(KvClient& client, const BlockLayout& layout, int num_blocks)
      : layout_(layout), num_blocks_(num_blocks) {
    absl::StatusOr<std::unique_ptr<WindowBuffer>> made =
        client.NewWindowBuffer(num_blocks * layout.block_bytes());
    EXPECT_TRUE(made.ok()) << made.status();
    if (!made.ok()) return;
    buffer_ = *std::move(made);
    std::memset(buffer_->memory().data(), 0xA5, buffer_->memory().size());
    layers_.resize(layout.num_layers());
    std::byte* next = buffer_->memory().data();
    for (const PlaneInfo& plane : layout.planes()) {
      LayerRows& layer = layers_[plane.layer_idx];
      RowsView& view = plane.role == Role::kKey ? layer.k : layer.v;
      if (plane.head_idx == 0) {
        view = {.data = next,
                .token_stride_bytes = plane.row_bytes / layout.tokens_per_block(),
                .head_stride_bytes = plane.row_bytes * num_blocks};
      }
      next += plane.row_bytes * num_blocks;
    }
  }

  void CopyFrom(const KvData& kv) {
    for (int block = 0; block < num_blocks_; ++block) {
      const std::vector<std::byte> rows = kv.RowForm(block);
      for (int32_t i = 0; i < layout_.num_planes(); ++i) {
        ScatterPlane(layout_, i, rows.data() + layout_.plane(i).row_offset, FirstToken(block),
                     ViewOf(i));
      }
    }
  }
  std::vector<std::byte> RowForm(int block) const {
    std::vector<std::byte> rows(layout_.block_bytes());
    for (int32_t i = 0; i < layout_.num_planes(); ++i) {
      GatherPlane(layout_, i, ViewOf(i), FirstToken(block),
                  rows.data() + layout_.plane(i).row_offset);
    }
    return rows;
  }
  absl::Span<const LayerRows> layers() const { return layers_; }
  WindowBuffer& buffer() { return *buffer_; }

 private:
  int64_t FirstToken(int block) const { return int64_t{block} * layout_.tokens_per_block(); }
  const RowsView& ViewOf(int32_t plane_idx) const {
    const PlaneInfo& plane = layout_.plane(plane_idx);
    const LayerRows& layer = layers_[plane.layer_idx];
    return plane.role == Role::kKey ? layer.k : layer.v;
  }

  const BlockLayout& layout_;
  const int num_blocks_;
  std::unique_ptr<WindowBuffer> buffer_;
  std::vector<LayerRows> layers_;
};

class WindowBuffers : public RunningDaemon {
 protected:
  absl::StatusOr<PutSummary> PutFrom(const BufferRows& rows, const KvData& kv,
                                     std::string_view codec) {
    return client_->Put(
        model_,
        {.tokens = kv.tokens(), .layers = rows.layers(), .codec = ParseCodecChoice(codec).value()});
  }
  absl::StatusOr<GetSummary> GetInto(const BufferRows& rows, const KvData& kv,
                                     const GetOptions& options = {}) {
    return client_->Get(model_, KeysOf(kv), rows.layers(), /*first_token=*/0, options);
  }
  // Blocks that came; their bytes must be those of `want`.
  int NumRight(const absl::StatusOr<GetSummary>& summary, const BufferRows& got,
               const KvData& want) {
    EXPECT_TRUE(summary.ok()) << summary.status();
    if (!summary.ok()) return -1;
    int num_right = 0;
    for (int block = 0; block < want.num_blocks(); ++block) {
      if (!summary->blocks[block].ok()) continue;
      EXPECT_TRUE(got.RowForm(block) == want.RowForm(block)) << "WRONG BYTES in block " << block;
      ++num_right;
    }
    return num_right;
  }
};

TEST_F(WindowBuffers, ArePutAndGotInPlaceByWhicheverPartOfABlock) {
  StartDaemon({.dram = "128MiB"}, LargerModel());
  const KvData kv(model_.spec, 1, 40);
  BufferRows source(*client_, *model_.layout, 40);
  BufferRows whole(*client_, *model_.layout, 40);
  BufferRows layerwise(*client_, *model_.layout, 40);
  source.CopyFrom(kv);
  const absl::StatusOr<PutSummary> put = PutFrom(source, kv, "raw");
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_EQ(put->num_stored, 40);
  EXPECT_EQ(NumRight(GetInto(whole, kv), whole, kv), 40);
  int num_layers = 0;
  const GetOptions options{.on_layers = [&](const LayersReady& ready) {
    EXPECT_EQ(ready.first_layer, num_layers);
    num_layers += ready.num_layers;
  }};
  EXPECT_EQ(NumRight(GetInto(layerwise, kv, options), layerwise, kv), 40);
  EXPECT_EQ(num_layers, 16);
  const uint64_t bytes = 40 * static_cast<uint64_t>(model_.layout->block_bytes());
  EXPECT_EQ(Counter("put_channel_bytes"), bytes);
  EXPECT_EQ(Counter("get_channel_bytes"), 2 * bytes);
  // No window to copy through was ever opened: only those of the buffers.
  EXPECT_EQ(daemon_->Stat().open_channels(), 3u);
  EXPECT_EQ(CountHits(kv), 40) << "into other memory";
}

TEST_F(WindowBuffers, HoldWhatTheCodecsMakeOfEncodedBlocks) {
  StartDaemon({});
  const KvData kv(model_.spec, 2, 6);
  BufferRows source(*client_, *model_.layout, 6);
  BufferRows result(*client_, *model_.layout, 6);
  source.CopyFrom(kv);
  // The first block raw, the others encoded: some come in place, some do not.
  CodecChoice codec = ParseCodecChoice("k=tqm4,v=tq4").value();
  codec.raw_first_block = true;
  const absl::StatusOr<PutSummary> put =
      client_->Put(model_, {.tokens = kv.tokens(), .layers = source.layers(), .codec = codec});
  ASSERT_TRUE(put.ok()) << put.status();
  ASSERT_EQ(put->num_stored, 6);
  EXPECT_GT(Counter("put_channel_bytes"), 0u);
  KvData want = kv.AfterCodec(codec.pair);
  want.SetBlock(0, kv.RowForm(0));
  EXPECT_EQ(NumRight(GetInto(result, kv), result, want), 6);
  EXPECT_EQ(Counter("get_channel_bytes"), static_cast<uint64_t>(model_.layout->block_bytes()));
}

TEST_F(WindowBuffers, BlocksThatAreNotThereLeaveTheirRowsAlone) {
  StartDaemon({});
  const KvData kv(model_.spec, 3, 6);
  MustPut(kv, "raw");
  ASSERT_TRUE(client_->Delete({KeysOf(kv)[2]}).ok());
  BufferRows result(*client_, *model_.layout, 6);
  const absl::StatusOr<GetSummary> summary = GetInto(result, kv);
  EXPECT_EQ(NumRight(summary, result, kv), 5);
  EXPECT_TRUE(absl::IsNotFound(summary->blocks[2])) << summary->blocks[2];
  EXPECT_EQ(result.RowForm(2), KvData::Empty(model_.spec, 6).RowForm(2));
}

TEST_F(WindowBuffers, AreOrdinaryMemoryWhenTheServiceIsAnother) {
  StartDaemon({.nvme = "64MiB"});
  const KvData kv(model_.spec, 4, 4);
  BufferRows source(*client_, *model_.layout, 4);
  BufferRows result(*client_, *model_.layout, 4);
  source.CopyFrom(kv);
  ASSERT_TRUE(source.buffer().is_in_place());
  daemon_->Kill();
  Restart();
  EXPECT_TRUE(Eventually([&] { return !source.buffer().is_in_place(); }, absl::Seconds(20)));
  const absl::StatusOr<PutSummary> put = PutFrom(source, kv, "raw");
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_EQ(put->num_stored, 4);
  EXPECT_EQ(NumRight(GetInto(result, kv), result, kv), 4);
}

TEST_F(WindowBuffers, TakeNoFurtherGetWhileALateServiceMayWriteThere) {
  StartDaemon({});
  KvClientOptions options;
  options.data_timeout = absl::Seconds(1);
  client_ = daemon_->NewClient(options);
  const KvData kv(model_.spec, 5, 4);
  const std::unique_ptr<KvClient> writer = daemon_->NewClient();
  const auto put = [&] {
    const std::vector<LayerRows> layers = kv.layers();
    return writer->Put(model_, {.tokens = kv.tokens(), .layers = layers}).ok();
  };
  ASSERT_TRUE(put());
  BufferRows result(*client_, *model_.layout, 4);
  daemon_->Signal(SIGSTOP);
  // It may answer a little longer.
  ASSERT_TRUE(Eventually([&] { return !GetInto(result, kv).ok(); }, absl::Seconds(20)));
  EXPECT_FALSE(result.buffer().is_in_place());
  const absl::Status refused = GetInto(result, kv).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("layers[0]"));
  daemon_->Signal(SIGCONT);
  EXPECT_TRUE(absl::IsFailedPrecondition(GetInto(result, kv).status())) << "it is still there";
  // Nor are rows taken from there that it may change under our hands, from wherever they are told.
  const KvData other(model_.spec, 6, 4);
  EXPECT_TRUE(absl::IsFailedPrecondition(PutFrom(result, other, "raw").status()));
  std::vector<LayerRows> behind(result.layers().begin(), result.layers().end());
  const int64_t block_tokens = model_.layout->tokens_per_block();
  for (LayerRows& layer : behind) {
    layer.k.data -= block_tokens * layer.k.token_stride_bytes;
    layer.v.data -= block_tokens * layer.v.token_stride_bytes;
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(
      client_->Get(model_, KeysOf(kv), behind, /*first_token=*/block_tokens).status()));
  const absl::StatusOr<std::unique_ptr<PutSession>> session =
      client_->StartPut(model_, {.tokens = other.tokens()});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_TRUE(absl::IsFailedPrecondition((*session)->PutLayer(0, result.layers()[0])));
  daemon_->Kill();
  ASSERT_TRUE(daemon_->Start()) << daemon_->log();
  ASSERT_TRUE(Eventually([&] { return writer->RegisterModel(model_.spec).ok() && put(); },
                         absl::Seconds(20)));
  // Nobody else can write there now.
  EXPECT_TRUE(Eventually(
      [&] {
        const absl::StatusOr<GetSummary> got = GetInto(result, kv);
        return got.ok() && NumRight(got, result, kv) == 4;
      },
      absl::Seconds(20)));
}

// What a client of ours never sends.
TEST_F(WindowBuffers, PlacesThatAreNoneOfTheWindowAreRefused) {
  StartDaemon({});
  const KvData kv(model_.spec, 6, 1);
  MustPut(kv, "raw");
  absl::StatusOr<std::unique_ptr<Window>> window = OpenShmWindow(
      {.socket_path = daemon_->target().substr(5) + ".shm", .bytes = int64_t{1} << 20});
  ASSERT_TRUE(window.ok()) << window.status();
  const auto channels = v1::Channels::NewStub(daemon_->channel());
  v1::OpenChannelRequest open;
  open.add_offers()->set_path("shm");
  open.mutable_offers(0)->set_ticket((*window)->ticket());
  v1::OpenChannelResponse opened;
  ASSERT_TRUE(channels->OpenChannel(Deadline().get(), open, &opened).ok());

  uint64_t flipped = 0;
  const auto get = [&](uint64_t channel, int num_places, uint64_t place) {
    v1::GetRequest request;
    request.set_keys(PackKeys(KeysOf(kv)));
    request.set_channel(channel);
    for (int i = 0; i < num_places; ++i) request.add_unit_place(place);
    request.set_place_xxh3(PlaceXxh3(request) ^ flipped);
    const auto context = Deadline();
    const auto reader = daemon_->data().Get(context.get(), request);
    for (v1::GetFrame frame; reader->Read(&frame);) {
    }
    return reader->Finish();
  };
  const int num_planes = model_.layout->num_planes();
  EXPECT_TRUE(get(opened.channel(), num_planes, 0).ok());
  for (const uint64_t place : {(uint64_t{1} << 20) - 1, uint64_t{1} << 40, UINT64_MAX}) {
    EXPECT_EQ(get(opened.channel(), num_planes, place).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_THAT(get(opened.channel(), num_planes - 1, 0).error_message(), HasSubstr("unit_place"));
  EXPECT_THAT(get(0, num_planes, 0).error_message(), HasSubstr("without a channel"));
  std::memset((*window)->memory().data(), 0xA5, (*window)->memory().size());
  flipped = 1;
  EXPECT_EQ(get(opened.channel(), num_planes, 0).error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(static_cast<uint8_t>((*window)->memory()[0]), 0xA5) << "nothing was written";

  v1::PutFrame frame = FrameOf(kv, 0, 0, 1);
  frame.set_ticket(calls_->ReserveOne(Sha256("another"), "raw").ticket());
  frame.clear_payload();
  frame.set_channel(opened.channel());
  frame.set_window_bytes(static_cast<uint64_t>(model_.layout->plane(0).row_bytes));
  for (const uint64_t offset : {(uint64_t{1} << 20) - 1, UINT64_MAX}) {
    frame.clear_unit_offset();
    frame.add_unit_offset(offset);
    EXPECT_EQ(calls_->PutFrames({&frame, 1}).status().code(),
              static_cast<int>(absl::StatusCode::kInvalidArgument));
  }
  // What a frame says that it holds is what calls are admitted by.
  frame.clear_unit_offset();
  frame.add_unit_offset(0);
  frame.set_window_bytes(frame.window_bytes() - 1);
  EXPECT_THAT(calls_->PutFrames({&frame, 1}).status().message(), HasSubstr("window_bytes"));
}

TEST_F(WindowBuffers, CannotBeHadWithoutSharedMemoryAndTheReasonIsTold) {
  StartDaemon({.extra_flags = {"--channels.shm_socket="}});
  const absl::Status status = client_->NewWindowBuffer(4096).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("channels.shm_socket is empty"));
  EXPECT_TRUE(absl::IsInvalidArgument(client_->NewWindowBuffer(0).status()));
}

}  // namespace
}  // namespace kvstow::testing
