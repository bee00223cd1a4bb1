// Put: frames, batches, refusals, repeats; and the same layer by layer.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "client/cpp/kv_client.h"
#include "proto/status.h"
#include "tests/client/kv_client_fixture.h"

namespace kvstow {
namespace {

using testing::EngineMemory;
using testing::IsUntouched;
using testing::kNumTokens;
using testing::kTokensPerBlock;
using testing::KvClientTest;
using testing::Tokens;
using testing::TokensOf;
using testing::ToySpec;

// --- frames ---

TEST_F(KvClientTest, ABlockIsSentInEvenFramesNearOneMebibyte) {
  ModelSpec spec = ToySpec();
  spec.groups = {{0, 10, LayerKind::kFull, 4, 128, 128}};  // 80 planes of 32 KiB: 2.5 MiB
  spec.tokens_per_block = 128;
  const Model model = *client_->RegisterModel(spec);
  EngineMemory memory(*model.layout, 128);
  const std::vector<int32_t> tokens = Tokens(128);
  ASSERT_EQ(
      client_
          ->Put(model,
                {.tokens = tokens, .layers = memory.layers, .codec = *ParseCodecChoice("raw")})
          ->num_stored,
      1);
  ASSERT_EQ(service_.put_payload_bytes.size(), 3u);
  for (const int64_t bytes : service_.put_payload_bytes) {
    EXPECT_GE(bytes, 26 * 32768);
    EXPECT_LE(bytes, 27 * 32768);
  }
}

TEST_F(KvClientTest, ManyTinyPlanesDoNotOverflowAFrameHeader) {
  ModelSpec spec = ToySpec();
  spec.kv_dtype = DType::kInt8;
  spec.groups = {{0, 5, LayerKind::kFull, 1000, 1, 1}};  // 10,000 planes of 32 bytes
  const Model model = *client_->RegisterModel(spec);
  EngineMemory memory(*model.layout, 32);
  memory.Fill(3);
  const std::vector<int32_t> tokens = Tokens(32);
  const absl::StatusOr<PutSummary> put = client_->Put(model, {.tokens = tokens,
                                                              .layers = memory.layers,
                                                              .codec = *ParseCodecChoice("raw"),
                                                              .compress_at = CompressAt::kWorker});
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_EQ(put->num_stored, 1);
  EXPECT_EQ(service_.put_payload_bytes.size(), 3u);
  service_.units_per_get_frame = 1000;
  EngineMemory back(*model.layout, 32);
  ASSERT_EQ(client_->Get(model, put->keys, back.layers)->num_leading, 1);
  EXPECT_EQ(back.memory, memory.memory);
}

TEST_F(KvClientTest, LongPromptsAreReservedInBatches) {
  ModelSpec spec = ToySpec();
  spec.kv_dtype = DType::kInt8;
  spec.groups = {{0, 1, LayerKind::kMla, 1, 1, 0}};
  const Model model = *client_->RegisterModel(spec);
  const int32_t num_blocks = 4097;
  EngineMemory memory(*model.layout, num_blocks * 32);
  const std::vector<int32_t> tokens = Tokens(num_blocks * 32);
  const PutRequest request{
      .tokens = tokens, .layers = memory.layers, .codec = *ParseCodecChoice("raw")};
  ASSERT_EQ(client_->Put(model, request)->num_stored, num_blocks);
  ASSERT_EQ(service_.reserves.size(), 2u);
  EXPECT_EQ(service_.reserves[0].blocks_size(), 4096);
  EXPECT_EQ(service_.reserves[1].blocks_size(), 1);
  EXPECT_EQ(service_.seals[0].tickets_size(), 4096);
}

// Blocks of 2 MiB, 20 of them: enough for a second stream.
class KvClientStreamsTest : public KvClientTest {
 protected:
  void SetUp() override {
    KvClientTest::SetUp();
    ModelSpec spec = ToySpec();
    spec.groups = {{0, 16, LayerKind::kFull, 8, 128, 128}};
    big_ = *client_->RegisterModel(spec);
    memory_ = std::make_unique<EngineMemory>(*big_.layout, kNumBlocks * kTokensPerBlock);
    memory_->FillBytes(5);
    tokens_ = Tokens(kNumBlocks * kTokensPerBlock);
    service_.units_per_get_frame = 64;
  }
  PutRequest BigRequest() {
    return {.tokens = tokens_, .layers = memory_->layers, .codec = *ParseCodecChoice("raw")};
  }
  static constexpr int32_t kNumBlocks = 20;
  Model big_;
  std::unique_ptr<EngineMemory> memory_;
};

TEST_F(KvClientStreamsTest, MuchKvIsSentAndFetchedOverSeveralStreams) {
  const absl::StatusOr<PutSummary> put = client_->Put(big_, BigRequest());
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_EQ(put->num_stored, kNumBlocks);
  EXPECT_EQ(put->sent_bytes, kNumBlocks * big_.layout->block_bytes());
  EXPECT_EQ(service_.num_puts, 2);
  EngineMemory back(*big_.layout, kNumBlocks * kTokensPerBlock);
  const absl::StatusOr<GetSummary> got = client_->Get(big_, put->keys, back.layers);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->num_leading, kNumBlocks);
  EXPECT_EQ(got->received_bytes, put->sent_bytes);
  EXPECT_TRUE(back.memory == memory_->memory);
}

TEST_F(KvClientStreamsTest, BlocksAreNamedByTheirPlaceInTheWholeRequest) {
  const absl::StatusOr<PutSummary> put = client_->Put(big_, BigRequest());
  ASSERT_TRUE(put.ok()) << put.status();
  service_.hooks.get_frame = [&](v1::GetFrame& frame, int) {
    if (frame.key() == put->keys[15].AsStringView()) frame.mutable_payload()->at(0) ^= 1;
    return true;
  };
  service_.blocks.erase(std::string(put->keys[17].AsStringView()));
  EngineMemory back(*big_.layout, kNumBlocks * kTokensPerBlock);
  const absl::StatusOr<GetSummary> got = client_->Get(big_, put->keys, back.layers);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->num_leading, 15);
  EXPECT_EQ(got->blocks[15], absl::DataLossError("block 15: unit 0: its checksum differs"));
  EXPECT_EQ(got->blocks[17], absl::NotFoundError("block 17: not stored"));
  EXPECT_TRUE(IsUntouched(back, 15 * kTokensPerBlock, kTokensPerBlock));
  EXPECT_TRUE(IsUntouched(back, 17 * kTokensPerBlock, kTokensPerBlock));
  for (const int block : {0, 14, 16, 18, 19}) {
    EXPECT_TRUE(TokensOf(back, block * kTokensPerBlock, kTokensPerBlock) ==
                TokensOf(*memory_, block * kTokensPerBlock, kTokensPerBlock))
        << block;
  }
  EXPECT_EQ(service_.verified, std::vector<std::string>{std::string(put->keys[15].AsStringView())});
}

TEST_F(KvClientStreamsTest, OneStreamOfSeveralMayBeShedOrCut) {
  service_.hooks.put_start = [](grpc::ServerContext*, int call) {
    return call == 0 ? grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "64 of 64 calls")
                     : grpc::Status::OK;
  };
  const absl::StatusOr<PutSummary> put = client_->Put(big_, BigRequest());
  ASSERT_TRUE(put.ok()) << put.status();
  // The shed half is asked for again after the other half is sealed.
  EXPECT_EQ(put->num_stored, kNumBlocks);
  EXPECT_EQ(put->num_refused, 0);
  service_.hooks.get_after_frame = [&](grpc::ServerContext*, int frame) {
    return frame == 25 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone") : grpc::Status::OK;
  };
  EngineMemory back(*big_.layout, kNumBlocks * kTokensPerBlock);
  const absl::StatusOr<GetSummary> got = client_->Get(big_, put->keys, back.layers);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->num_leading, 6);  // four frames a block: each stream was cut in its seventh
  EXPECT_TRUE(absl::IsUnavailable(got->blocks[6]));
  EXPECT_TRUE(got->blocks[15].ok());
  EXPECT_TRUE(absl::IsUnavailable(got->blocks[16]));
  EXPECT_TRUE(IsUntouched(back, 6 * kTokensPerBlock, 4 * kTokensPerBlock));
}

// --- refusals and repeats of Put ---

TEST_F(KvClientTest, ADamagedFrameIsSentOnceMore) {
  service_.hooks.put_frame = [](v1::PutFrame& frame, int call) {
    if (call == 0 && frame.ticket() == 1001) frame.mutable_payload()->at(5) ^= 1;
  };
  const PutSummary put = PutAll();
  EXPECT_EQ(put.num_stored, 3);
  EXPECT_EQ(service_.num_puts, 2);
  EXPECT_EQ(put.sent_bytes, 4 * model_.layout->block_bytes());  // one block twice
  ASSERT_EQ(client_->Get(model_, put.keys, target_->layers)->num_leading, 3);
  for (int32_t i = 0; i < 3; ++i) ExpectBlock(i);
}

TEST_F(KvClientTest, AFrameDamagedTwiceIsRefusedAndItsNeighboursAreNot) {
  service_.hooks.put_frame = [](v1::PutFrame& frame, int) {
    if (frame.ticket() == 1001) frame.mutable_payload()->at(5) ^= 1;
  };
  const PutSummary put = PutAll();
  EXPECT_EQ(put.num_stored, 2);
  EXPECT_EQ(put.num_refused, 1);
  EXPECT_EQ(put.first_refusal, absl::DataLossError("checksum"));
  EXPECT_EQ(service_.num_puts, 2);
  EXPECT_EQ(service_.aborted, (std::vector<uint64_t>{1001}));
}

TEST_F(KvClientTest, ADroppedStreamIsSentOnceMore) {
  service_.hooks.put_start = [](grpc::ServerContext*, int call) {
    return call == 0 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone") : grpc::Status::OK;
  };
  EXPECT_EQ(PutAll().num_stored, 3);
  EXPECT_EQ(service_.num_puts, 2);
}

TEST_F(KvClientTest, AStreamDroppedHalfwayIsSentOnceMore) {
  service_.hooks.put_after_frame = [](grpc::ServerContext*, int call, int frame) {
    return call == 0 && frame == 1 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone")
                                   : grpc::Status::OK;
  };
  const PutSummary put = PutAll();
  EXPECT_EQ(put.num_stored, 3);
  EXPECT_EQ(service_.num_puts, 2);
  ASSERT_EQ(client_->Get(model_, put.keys, target_->layers)->num_leading, 3);
  for (int32_t i = 0; i < 3; ++i) ExpectBlock(i);
}

TEST_F(KvClientTest, AStreamDroppedTwiceIsAnError) {
  service_.hooks.put_start = [](grpc::ServerContext*, int) {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  };
  EXPECT_EQ(client_->Put(model_, Request()).status(),
            absl::UnavailableError("kvstow service at " + server_.target() + ": gone"));
  EXPECT_EQ(service_.num_puts, 2);
  EXPECT_TRUE(service_.blocks.empty());
}

TEST_F(KvClientTest, AnErrorOfThePutCallAbortsItsTickets) {
  service_.hooks.put_start = [](grpc::ServerContext*, int) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "frame: cut short");
  };
  EXPECT_EQ(client_->Put(model_, Request()).status(),
            absl::InvalidArgumentError("frame: cut short"));
  EXPECT_EQ(service_.num_puts, 1);
  EXPECT_EQ(service_.aborted, (std::vector<uint64_t>{1000, 1001, 1002}));
}

TEST_F(KvClientTest, AFullServiceRefusesAtOnceWithItsHint) {
  service_.hooks.reserve = [](const v1::ReserveBlock&) {
    absl::Status status = absl::ResourceExhaustedError("dram: 0 bytes free");
    SetRetryAfter(status, absl::Milliseconds(250));
    return status;
  };
  const PutSummary put = PutAll();
  EXPECT_EQ(put.num_stored, 0);
  EXPECT_EQ(put.num_refused, 3);
  EXPECT_EQ(put.first_refusal.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(put.first_refusal.message(), "dram: 0 bytes free");
  EXPECT_EQ(RetryAfter(put.first_refusal), absl::Milliseconds(250));
  EXPECT_EQ(service_.reserves.size(), 1u);
  EXPECT_EQ(service_.num_puts, 0);
}

TEST_F(KvClientTest, RefusedBlocksAreAskedForAgainOnceOthersAreSealed) {
  // Room for one block between two seals.
  service_.hooks.reserve = [&](const v1::ReserveBlock&) {
    return service_.tickets.empty() ? absl::OkStatus() : absl::ResourceExhaustedError("full");
  };
  const PutSummary put = PutAll();
  EXPECT_EQ(put.num_stored, 3);
  EXPECT_EQ(put.num_refused, 0);
  EXPECT_EQ(service_.reserves.size(), 3u);
  EXPECT_EQ(service_.reserves[1].blocks(0).key(), put.keys[1].AsStringView());
}

TEST_F(KvClientTest, ACallThatIsShedRefusesItsBlocks) {
  service_.hooks.put_start = [](grpc::ServerContext*, int) {
    absl::Status status = absl::ResourceExhaustedError("64 of 64 calls in flight");
    SetRetryAfter(status, absl::Milliseconds(20));
    return ToGrpcStatus(status);
  };
  const PutSummary put = PutAll();
  EXPECT_EQ(put.num_refused, 3);
  EXPECT_EQ(RetryAfter(put.first_refusal), absl::Milliseconds(20));
  EXPECT_EQ(service_.aborted.size(), 3u);
}

TEST_F(KvClientTest, WhatDoesNotSealIsRefusedAndAborted) {
  service_.hooks.seal = [](uint64_t ticket) {
    return ticket == 1001 ? absl::DeadlineExceededError("the ticket died") : absl::OkStatus();
  };
  const PutSummary put = PutAll();
  EXPECT_EQ(put.num_stored, 2);
  EXPECT_EQ(put.num_refused, 1);
  EXPECT_EQ(put.first_refusal, absl::DeadlineExceededError("the ticket died"));
  EXPECT_EQ(service_.aborted, (std::vector<uint64_t>{1001}));
  EXPECT_EQ(client_->breaker_state(), BreakerState::kClosed);
}

TEST_F(KvClientTest, TicketsThatTheServiceForgotAreRefused) {
  service_.hooks.put_start = [&](grpc::ServerContext*, int) {
    service_.tickets.clear();
    return grpc::Status::OK;
  };
  const PutSummary put = PutAll();
  EXPECT_EQ(put.num_stored, 0);
  EXPECT_EQ(put.num_refused, 3);
  EXPECT_EQ(put.first_refusal, absl::NotFoundError("unknown ticket"));
  EXPECT_TRUE(service_.seals.empty() || service_.seals[0].tickets_size() == 0);
}

TEST_F(KvClientTest, DurableIsPassedOn) {
  PutAll();
  EXPECT_FALSE(service_.seals.back().durable());
  service_.blocks.clear();
  PutRequest request = Request();
  request.durable = true;
  ASSERT_TRUE(client_->Put(model_, request).ok());
  EXPECT_TRUE(service_.seals.back().durable());
}

// --- layer by layer ---

TEST_F(KvClientTest, ASessionStoresWhatPutStores) {
  PutAll("safe");
  const auto want = service_.blocks;
  service_.blocks.clear();
  for (const CompressAt where : {CompressAt::kService, CompressAt::kWorker}) {
    service_.blocks.clear();
    PutRequest request = Request("safe");
    request.layers = {};
    request.compress_at = where;
    absl::StatusOr<std::unique_ptr<PutSession>> session = client_->StartPut(model_, request);
    ASSERT_TRUE(session.ok());
    for (const int32_t layer : {1, 0, 2}) {
      ASSERT_TRUE((*session)->PutLayer(layer, source_->layers[layer]).ok());
      EXPECT_TRUE(service_.blocks.empty());  // nothing is visible before the end
    }
    const absl::StatusOr<PutSummary> put = (*session)->Finish();
    ASSERT_TRUE(put.ok()) << put.status();
    EXPECT_EQ(put->num_stored, 3);
    EXPECT_EQ(put->num_leftover_tokens, 5);
    ASSERT_EQ(service_.blocks.size(), 3u);
    for (const auto& [key, block] : service_.blocks) {
      for (const auto& [unit_idx, unit] : want.at(key).units) {
        EXPECT_EQ(block.units.at(unit_idx).bytes, unit.bytes);
      }
    }
  }
}

TEST_F(KvClientTest, EarlierBlocksAreLeftAlone) {
  PutRequest request = Request();
  request.first_block = 2;
  const PutSummary put = *client_->Put(model_, request);
  EXPECT_EQ(put.keys.size(), 3u);
  EXPECT_EQ(put.num_stored, 1);
  request.first_block = 1;
  const std::unique_ptr<PutSession> session = *client_->StartPut(model_, request);
  for (int32_t l = 0; l < 3; ++l) {
    ASSERT_TRUE(session->PutLayer(l, source_->layers[l]).ok());
  }
  const PutSummary second = *session->Finish();
  EXPECT_EQ(second.num_stored, 1);
  EXPECT_EQ(second.num_existing, 1);
  const GetSummary got = *client_->Get(model_, put.keys, target_->layers);
  EXPECT_TRUE(absl::IsNotFound(got.blocks[0]));
  ExpectBlock(1);
  ExpectBlock(2);
  for (const int32_t wrong : {-1, 3}) {
    request.first_block = wrong;
    EXPECT_TRUE(absl::IsInvalidArgument(client_->Put(model_, request).status())) << wrong;
    EXPECT_TRUE(absl::IsInvalidArgument(client_->StartPut(model_, request).status())) << wrong;
  }
}

TEST_F(KvClientTest, ASessionWithoutAllLayersDoesNotSeal) {
  auto session = *client_->StartPut(model_, Request());
  ASSERT_TRUE(session->PutLayer(0, source_->layers[0]).ok());
  ASSERT_TRUE(session->PutLayer(2, source_->layers[2]).ok());
  EXPECT_EQ(session->Finish().status(),
            absl::FailedPreconditionError("layers are missing, the first is 1 of 3"));
  EXPECT_TRUE(service_.seals.empty());
  ASSERT_TRUE(session->PutLayer(1, source_->layers[1]).ok());
  EXPECT_EQ(session->Finish()->num_stored, 3);
  EXPECT_EQ(session->Finish().status(), absl::FailedPreconditionError("the session is finished"));
}

TEST_F(KvClientTest, ASessionLeftUnfinishedIsAborted) {
  {
    auto session = *client_->StartPut(model_, Request());
    ASSERT_TRUE(session->PutLayer(0, source_->layers[0]).ok());
  }
  EXPECT_EQ(service_.aborted, (std::vector<uint64_t>{1000, 1001, 1002}));
  EXPECT_TRUE(service_.tickets.empty());
}

TEST_F(KvClientTest, ASessionRefusesALayerTwiceAndOnesThatAreNot) {
  auto session = *client_->StartPut(model_, Request());
  ASSERT_TRUE(session->PutLayer(0, source_->layers[0]).ok());
  EXPECT_EQ(session->PutLayer(0, source_->layers[0]),
            absl::InvalidArgumentError("layer_idx: 0 was put before, want each layer once"));
  EXPECT_EQ(session->PutLayer(3, source_->layers[0]),
            absl::InvalidArgumentError("layer_idx: 3, want 0 to 2"));
  EXPECT_EQ(session->PutLayer(-1, source_->layers[0]),
            absl::InvalidArgumentError("layer_idx: -1, want 0 to 2"));
}

TEST_F(KvClientTest, ASessionThatFailedSendsNothingMore) {
  auto session = *client_->StartPut(model_, Request());
  service_.hooks.put_start = [](grpc::ServerContext*, int) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "frame: cut short");
  };
  const absl::Status failure = session->PutLayer(0, source_->layers[0]);
  EXPECT_EQ(failure, absl::InvalidArgumentError("frame: cut short"));
  service_.hooks.put_start = nullptr;
  EXPECT_EQ(session->PutLayer(1, source_->layers[1]), failure);
  EXPECT_EQ(session->Finish().status(), failure);
  EXPECT_EQ(service_.num_puts, 1);
}

}  // namespace
}  // namespace kvstow
