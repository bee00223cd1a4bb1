// The paths that bytes take between a client and a real daemon: chosen, explained, and left for
// gRPC when they break.
#include <grpcpp/channel.h>

#include <csignal>
#include <thread>

#include "absl/strings/strip.h"
#include "client/cli/relay.h"
#include "kvstow/v1/channels.grpc.pb.h"
#include "tests/e2e/store_fixture.h"
#include "transport/shm_window.h"

namespace kvstow::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class Paths : public RunningDaemon {
 protected:
  static KvClientOptions GrpcOnly() {
    KvClientOptions options;
    options.paths.clear();
    return options;
  }
};

TEST_F(Paths, SharedMemoryIsTakenByItselfAndCarriesEveryByte) {
  StartDaemon({});
  const KvData kv(model_.spec, 1, 8);
  MustPut(kv, "raw");
  EXPECT_EQ(client_->ExplainPath(), "shm");
  EXPECT_EQ(CountHits(kv), 8);
  const uint64_t bytes = 8 * static_cast<uint64_t>(model_.layout->block_bytes());
  EXPECT_EQ(Counter("put_channel_bytes"), bytes);
  EXPECT_EQ(Counter("get_channel_bytes"), bytes);
  EXPECT_EQ(daemon_->Stat().open_channels(), 1u);
}

TEST_F(Paths, BothPathsGiveTheSameBlocksWhereverTheyAreEncoded) {
  StartDaemon({});
  const std::unique_ptr<KvClient> grpc_client = daemon_->NewClient(GrpcOnly());
  const CodecPair codecs = ParseCodecChoice("k=tqm4,v=tq4").value().pair;
  int seed = 10;
  for (const CompressAt where : {CompressAt::kService, CompressAt::kWorker}) {
    for (KvClient* writer : {client_.get(), grpc_client.get()}) {
      const KvData kv(model_.spec, seed++, 4);
      const std::vector<LayerRows> layers = kv.layers();
      const absl::StatusOr<PutSummary> put = writer->Put(model_, {.tokens = kv.tokens(),
                                                                  .layers = layers,
                                                                  .codec = {.pair = codecs},
                                                                  .compress_at = where});
      ASSERT_TRUE(put.ok()) << put.status();
      ASSERT_EQ(put->num_stored, 4);
      const KvData want = kv.AfterCodec(codecs);
      EXPECT_EQ(CountHits(*client_, want), 4);
      EXPECT_EQ(CountHits(*grpc_client, want), 4);
    }
  }
  EXPECT_EQ(client_->ExplainPath(), "shm");
  EXPECT_EQ(grpc_client->ExplainPath(), "grpc");
}

TEST_F(Paths, MoreBlocksThanAnAreaHoldsGoInSeveralCalls) {
  StartDaemon({.dram = "64MiB"}, LargerModel());
  KvClientOptions options;
  options.window_bytes = int64_t{16} << 20;  // areas of 4 MiB: seven blocks
  client_ = daemon_->NewClient(options);
  const KvData kv(model_.spec, 2, 40);
  MustPut(kv, "raw");
  EXPECT_EQ(CountHits(kv), 40);
  EXPECT_EQ(client_->ExplainPath(), "shm");
  EXPECT_EQ(Counter("get_channel_bytes"), 40 * static_cast<uint64_t>(model_.layout->block_bytes()));
}

TEST_F(Paths, LargeBlocksGetALargerWindowAndTooLargeOnesGoByGrpc) {
  ModelSpec large = LargerModel();  // 16 layers: 512 KiB a block; now 8 MiB
  large.groups[0].num_kv_heads *= 16;
  StartDaemon({.dram = "128MiB"}, large);
  KvClientOptions options;
  options.window_bytes = int64_t{16} << 20;  // areas of 4 MiB
  const std::unique_ptr<KvClient> small_client = daemon_->NewClient(options);
  const KvData kv(model_.spec, 3, 3);
  MustPut(kv, "raw");
  EXPECT_EQ(CountHits(*small_client, kv), 3);
  EXPECT_EQ(Counter("get_channel_bytes"), 0u);
  EXPECT_EQ(CountHits(kv), 3);  // while one stream opens the window the other goes by gRPC
  const uint64_t before = Counter("get_channel_bytes");
  EXPECT_GT(before, 0u);
  EXPECT_EQ(CountHits(kv), 3);
  EXPECT_EQ(Counter("get_channel_bytes"),
            before + 3 * static_cast<uint64_t>(model_.layout->block_bytes()));
  EXPECT_EQ(client_->ExplainPath(), "shm");
}

TEST_F(Paths, MoreThreadsThanAreasStillGetTheirOwnBytes) {
  StartDaemon({});
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 5; ++i) {
        const KvData kv(model_.spec, 100 * t + i, 4);
        MustPut(kv, "raw");
        EXPECT_EQ(CountHits(kv), 4);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(client_->ExplainPath(), "shm");
}

TEST_F(Paths, AServiceWithoutSharedMemoryIsUsedByGrpcAndSaysWhy) {
  StartDaemon({.extra_flags = {"--channels.shm_socket="}});
  const KvData kv(model_.spec, 4, 2);
  MustPut(kv, "raw");
  EXPECT_EQ(CountHits(kv), 2);
  EXPECT_THAT(client_->ExplainPath(), StartsWith("grpc ("));
  EXPECT_THAT(client_->ExplainPath(), HasSubstr("channels.shm_socket is empty"));
}

TEST_F(Paths, UcxCarriesEveryByteOverTcp) {
  if (!IsUcxBuilt()) GTEST_SKIP() << "built without UCX";
  StartDaemon({.extra_flags = {"--channels.shm_socket=", "--channels.ucx=true",
                               "--channels.ucx_tls=tcp", "--channels.ucx_devices=lo"}});
  KvClientOptions options;
  options.ucx = {.tls = "tcp", .net_devices = "lo"};
  client_ = daemon_->NewClient(options);
  const CodecPair codecs = ParseCodecChoice("k=tqm4,v=tq4").value().pair;
  const KvData raw(model_.spec, 20, 8);
  MustPut(raw, "raw");
  const KvData encoded(model_.spec, 21, 8);
  MustPut(encoded, "k=tqm4,v=tq4");
  EXPECT_EQ(CountHits(raw), 8);
  EXPECT_EQ(CountHits(encoded.AfterCodec(codecs)), 8);
  EXPECT_EQ(client_->ExplainPath(), "ucx");
  EXPECT_EQ(Counter("put_channel_bytes"), 16 * static_cast<uint64_t>(model_.layout->block_bytes()));
  daemon_->Kill();
  Restart();
  MustPut(raw, "raw");
  EXPECT_EQ(CountHits(raw), 8) << "by whatever path";
}

TEST_F(Paths, AClientGoesOnWhenItsDaemonIsKilledAndStartedAgain) {
  StartDaemon({.nvme = "64MiB"});
  const KvData kv(model_.spec, 5, 4);
  MustPut(kv, "raw", /*durable=*/true);
  EXPECT_EQ(CountHits(kv), 4);
  ASSERT_EQ(client_->ExplainPath(), "shm");
  daemon_->Kill();
  Restart();
  EXPECT_EQ(CountHits(kv), 4) << "by whatever path";
  const KvData more(model_.spec, 6, 4);
  MustPut(more, "raw");
  EXPECT_EQ(CountHits(more), 4);
}

TEST_F(Paths, AStoppedDaemonCostsTheDeadline) {
  StartDaemon({});
  KvClientOptions options;
  options.data_timeout = absl::Seconds(2);
  client_ = daemon_->NewClient(options);
  const KvData kv(model_.spec, 7, 4);
  MustPut(kv, "raw");
  ASSERT_EQ(CountHits(kv), 4);
  daemon_->Signal(SIGSTOP);
  const KvData got = KvData::Empty(model_.spec, 4);
  const std::vector<LayerRows> layers = got.layers();
  const absl::Time start = absl::Now();
  const absl::StatusOr<GetSummary> summary = client_->Get(model_, KeysOf(kv), layers);
  EXPECT_FALSE(summary.ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
  for (int block = 0; block < 4; ++block) EXPECT_TRUE(got.IsUntouched(block));
  daemon_->Signal(SIGCONT);
  // The window that the service may still have been writing to is not used again.
  EXPECT_TRUE(Eventually([&] { return CountHits(kv) == 4; }, absl::Seconds(20)));
}

TEST_F(Paths, TenThousandChannelsAreRefusedAndThoseThatAreOpenGoOn) {
  StartDaemon({.extra_flags = {"--channels.max=4"}});
  const KvData kv(model_.spec, 9, 4);
  MustPut(kv, "raw");  // opens the first one
  ASSERT_EQ(client_->ExplainPath(), "shm");
  const auto channels = v1::Channels::NewStub(daemon_->channel());
  const std::string socket = daemon_->target().substr(5) + ".shm";
  std::vector<std::unique_ptr<Window>> windows;
  int num_refused = 0;
  for (int i = 0; i < 10000; ++i) {
    v1::OpenChannelRequest request;
    v1::WindowOffer* const offer = request.add_offers();
    offer->set_path("shm");
    // The handshake has the same limit; a few more tries there are as good as thousands.
    if (windows.size() < 3 || i % 100 == 0) {
      absl::StatusOr<std::unique_ptr<Window>> window =
          OpenShmWindow({.socket_path = socket, .bytes = 4096});
      EXPECT_EQ(window.ok(), windows.size() < 3) << window.status();
      if (window.ok()) {
        offer->set_ticket((*window)->ticket());
        windows.push_back(*std::move(window));
      } else {
        EXPECT_TRUE(absl::IsResourceExhausted(window.status())) << window.status();
      }
    }
    v1::OpenChannelResponse response;
    const grpc::Status status = channels->OpenChannel(Deadline().get(), request, &response);
    EXPECT_EQ(status.ok(), !offer->ticket().empty()) << status.error_message();
    if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) ++num_refused;
  }
  EXPECT_EQ(num_refused, 10000 - 3);
  EXPECT_EQ(daemon_->Stat().open_channels(), 4u);
  const uint64_t before = Counter("get_channel_bytes");
  EXPECT_EQ(CountHits(kv), 4);
  EXPECT_GT(Counter("get_channel_bytes"), before) << "through the window that was there first";
  windows.clear();
  EXPECT_TRUE(Eventually([&] { return daemon_->Stat().open_channels() == 1; }, absl::Seconds(20)));
  EXPECT_TRUE(OpenShmWindow({.socket_path = socket, .bytes = 4096}).ok());
}

TEST_F(Paths, AReaderThatNeverReadsHoldsALittleUntilItsDeadline) {
  StartDaemon({.dram = "128MiB", .with_metrics = true}, LargerModel());
  const KvData kv(model_.spec, 11, 80);  // 40 MiB
  MustPut(kv, "raw");
  const KvData other(model_.spec, 12, 1);
  MustPut(other, "raw");
  v1::GetRequest request;
  request.set_keys(PackKeys(KeysOf(kv)));
  constexpr absl::Duration kDeadline = absl::Seconds(2);
  const auto context = Deadline(kDeadline);
  const absl::Time start = absl::Now();
  const auto deaf = daemon_->data().Get(context.get(), request);
  const auto held = [&] { return daemon_->Metric("kvstow_bytes_in_flight"); };
  ASSERT_TRUE(Eventually([&] { return held() > 0; }, kDeadline)) << "it is being answered";
  double most_held = 0;
  int num_others = 0;
  EXPECT_TRUE(Eventually(
      [&] {
        most_held = std::max(most_held, held());
        num_others += CountHits(other);
        return held() == 0;
      },
      kDeadline + absl::Seconds(1)));
  EXPECT_LT(absl::Now() - start, kDeadline + absl::Seconds(2));
  EXPECT_LT(most_held, 24.0 * (1 << 20)) << "its frames ahead, not its blocks";
  EXPECT_GT(num_others, 1) << "others are served meanwhile";
  EXPECT_FALSE(deaf->Finish().ok());
}

TEST_F(Paths, ADaemonDropsTheWindowOfAClientThatGoes) {
  StartDaemon({});
  const KvData kv(model_.spec, 8, 1);
  MustPut(kv, "raw");
  EXPECT_EQ(daemon_->Stat().open_channels(), 1u);
  client_.reset();
  EXPECT_TRUE(Eventually([&] { return daemon_->Stat().open_channels() == 0; }, absl::Seconds(20)));
}

// As after a flipped bit in the length of an HTTP/2 frame: the service waits for bytes that the
// client never sends, and swallows all that it does.
TEST_F(Paths, AConnectionThatFellSilentIsLeftForAnother) {
  StartDaemon({});
  const TempFolder folder;
  const std::unique_ptr<Relay> relay = Relay::Listen(folder.path() + "/wire").value();
  relay->SetTarget(std::string(absl::StripPrefix(daemon_->target(), "unix:")));
  std::thread wire([&] { relay->Run(); });
  KvClientOptions options = GrpcOnly();
  options.target = "unix:" + folder.path() + "/wire";
  options.silence = absl::Milliseconds(300);
  options.control_timeout = absl::Milliseconds(500);
  options.breaker.cool_down = absl::Milliseconds(10);
  const std::unique_ptr<KvClient> client = KvClient::Create(options).value();
  EXPECT_TRUE(client->RegisterModel(model_.spec).ok());
  relay->Freeze();
  EXPECT_TRUE(absl::IsDeadlineExceeded(client->RegisterModel(model_.spec).status()));
  EXPECT_TRUE(
      Eventually([&] { return client->RegisterModel(model_.spec).ok(); }, absl::Seconds(20)));
  relay->Stop();
  wire.join();
}

}  // namespace
}  // namespace kvstow::testing
