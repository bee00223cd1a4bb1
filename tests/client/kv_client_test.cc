// KvClient against an honest service: what goes in comes out, and bad input goes nowhere.
#include "client/cpp/kv_client.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "client/cpp/admin_client.h"
#include "proto/convert.h"
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

// --- the way in and out ---

TEST_F(KvClientTest, RawBlocksComeBackByteForByteAndTheTailStaysOut) {
  const PutSummary put = PutAll();
  EXPECT_EQ(put.num_stored, 3);
  EXPECT_EQ(put.num_existing, 0);
  EXPECT_EQ(put.num_refused, 0);
  EXPECT_EQ(put.num_leftover_tokens, 5);
  EXPECT_EQ(put.sent_bytes, 3 * model_.layout->block_bytes());
  const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target_->layers);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->num_leading, 3);
  EXPECT_EQ(got->blocks, std::vector<absl::Status>(3));
  for (int32_t i = 0; i < 3; ++i) ExpectBlock(i);
  EXPECT_TRUE(IsUntouched(*target_, 3 * kTokensPerBlock, 5));
  EXPECT_EQ(client_->corrupt_blocks(), 0);
}

TEST_F(KvClientTest, KeysAreTheChainOfTheContextAndTheModel) {
  PutRequest request = Request();
  request.context.tenant = "team-a";
  const absl::StatusOr<PutSummary> put = client_->Put(model_, request);
  ASSERT_TRUE(put.ok());
  KeyContext context{.fingerprint = model_.fingerprint, .tenant = "team-a"};
  EXPECT_EQ(put->keys, ChainKeys(context, tokens_, kTokensPerBlock));
  EXPECT_EQ(client_->Lookup(model_, request.context, tokens_)->num_leading, 3);
  EXPECT_EQ(client_->Lookup(model_, {}, tokens_)->num_leading, 0);
}

TEST_F(KvClientTest, EncodingHereAndThereGiveTheSameStoredBytes) {
  PutRequest request = Request("safe");
  ASSERT_EQ(client_->Put(model_, request)->num_stored, 3);
  const auto at_service = service_.blocks;
  service_.blocks.clear();
  request.compress_at = CompressAt::kWorker;
  const absl::StatusOr<PutSummary> put = client_->Put(model_, request);
  ASSERT_EQ(put->num_stored, 3);
  EXPECT_LT(put->sent_bytes, 3 * model_.layout->block_bytes() * 6 / 10);
  ASSERT_EQ(service_.blocks.size(), 3u);
  for (const auto& [key, block] : service_.blocks) {
    const testing::FakeBlock& other = at_service.at(key);
    EXPECT_EQ(block.form, v1::FORM_ENCODED);
    EXPECT_EQ(other.form, v1::FORM_ROWS);
    ASSERT_EQ(block.units.size(), static_cast<size_t>(model_.layout->num_planes()));
    for (const auto& [unit_idx, unit] : block.units) {
      EXPECT_EQ(unit.codec, other.units.at(unit_idx).codec) << unit_idx;
      EXPECT_EQ(unit.bytes, other.units.at(unit_idx).bytes) << unit_idx;
    }
  }
}

TEST_F(KvClientTest, TheFirstBlockOfAPromptIsRawWhereThePresetSaysSo) {
  const PutSummary put = PutAll("safe");
  ASSERT_EQ(service_.reserves.size(), 1u);
  const v1::ReserveRequest& reserve = service_.reserves[0];
  EXPECT_EQ(reserve.fingerprint(), model_.fingerprint.AsStringView());
  EXPECT_EQ(reserve.form(), v1::FORM_ROWS);
  ASSERT_EQ(reserve.blocks_size(), 3);
  EXPECT_EQ(reserve.blocks(0).codec(), "raw");
  EXPECT_EQ(reserve.blocks(1).codec(), "k=tqm4,v=tq4");
  EXPECT_EQ(reserve.blocks(2).codec(), "k=tqm4,v=tq4");
  ASSERT_TRUE(client_->Get(model_, put.keys, target_->layers).ok());
  ExpectBlock(0);  // exact; the others only nearly
}

TEST_F(KvClientTest, TheLastTokensOfAPutStayRawWhereTheChoiceSaysSo) {
  PutRequest request = Request("tiny");
  ASSERT_EQ(request.codec.num_raw_last_tokens, 2 * kTokensPerBlock);
  request.codec.num_raw_last_tokens = kTokensPerBlock;  // of three blocks the last
  ASSERT_EQ(client_->Put(model_, request)->num_stored, 3);
  const v1::ReserveRequest& reserve = service_.reserves.at(0);
  EXPECT_EQ(reserve.blocks(0).codec(), "raw");
  EXPECT_EQ(reserve.blocks(1).codec(), "k=tqm3,v=tq2");
  EXPECT_EQ(reserve.blocks(2).codec(), "raw");
}

TEST_F(KvClientTest, EncodedBlocksAreDecodedAsTheCodecDefines) {
  const PutSummary put = PutAll("k=tqm4,v=tq4");
  ASSERT_EQ(client_->Get(model_, put.keys, target_->layers)->num_leading, 3);
  const BlockLayout& layout = *model_.layout;
  for (int32_t block = 0; block < 3; ++block) {
    for (int32_t i = 0; i < layout.num_planes(); ++i) {
      const PlaneInfo& plane = layout.plane(i);
      const testing::FakeUnit& unit =
          service_.blocks.at(std::string(put.keys[block].AsStringView())).units.at(i);
      std::vector<std::byte> want(plane.row_bytes), got(plane.row_bytes);
      const auto* bytes = reinterpret_cast<const std::byte*>(unit.bytes.data());
      const PlaneShape shape{kTokensPerBlock, plane.dim, plane.role, layout.dtype()};
      const Codec& codec = *FindCodec(static_cast<CodecId>(unit.codec));
      codec.host[0].decode(shape, bytes, want.data());
      const LayerRows& rows = target_->layers[plane.layer_idx];
      GatherPlane(layout, i, plane.role == Role::kKey ? rows.k : rows.v, block * kTokensPerBlock,
                  got.data());
      EXPECT_EQ(got, want) << "block " << block << " plane " << i;
    }
  }
}

TEST_F(KvClientTest, PlanesWithNanAreSentRawByAWorkerThatEncodes) {
  const uint16_t nan = 0x7fc1;
  std::memcpy(&source_->memory[0][kTokensPerBlock * 2 * 128], &nan,
              2);  // block 1, layer 0, K, head 0
  PutRequest request = Request("tq4");
  request.compress_at = CompressAt::kWorker;
  const absl::StatusOr<PutSummary> put = client_->Put(model_, request);
  ASSERT_EQ(put->num_stored, 3);
  const auto& units = service_.blocks.at(std::string(put->keys[1].AsStringView())).units;
  EXPECT_EQ(units.at(0).codec, static_cast<uint32_t>(CodecId::kRaw));
  EXPECT_EQ(units.at(1).codec, static_cast<uint32_t>(CodecId::kTq4));
  ASSERT_EQ(client_->Get(model_, put->keys, target_->layers)->num_leading, 3);
  uint16_t back = 0;
  std::memcpy(&back, &target_->memory[0][kTokensPerBlock * 2 * 128], 2);
  EXPECT_EQ(back, nan);
}

TEST_F(KvClientTest, RowsOfAnyStrideAreReadAndWritten) {
  // Heads outermost, and rows with a gap between them.
  EngineMemory wide(*model_.layout);
  std::vector<std::vector<std::byte>> memory;
  std::vector<LayerRows> layers;
  for (const LayerRows& rows : source_->layers) {
    const auto repack = [&](const RowsView& from, int64_t num_heads) -> RowsView {
      if (from.data == nullptr) return {};
      const int64_t row = from.head_stride_bytes;
      memory.emplace_back(num_heads * kNumTokens * (row + 16));
      RowsView to{memory.back().data(), row + 16, kNumTokens * (row + 16)};
      for (int64_t h = 0; h < num_heads; ++h) {
        for (int64_t t = 0; t < kNumTokens; ++t) {
          std::memcpy(to.data + h * to.head_stride_bytes + t * to.token_stride_bytes,
                      from.data + h * from.head_stride_bytes + t * from.token_stride_bytes, row);
        }
      }
      return to;
    };
    const int64_t num_heads = rows.k.token_stride_bytes / rows.k.head_stride_bytes;
    layers.push_back({repack(rows.k, num_heads), repack(rows.v, num_heads)});
  }
  PutRequest request = Request();
  request.layers = layers;
  const absl::StatusOr<PutSummary> put = client_->Put(model_, request);
  ASSERT_EQ(put->num_stored, 3);
  ASSERT_EQ(client_->Get(model_, put->keys, target_->layers)->num_leading, 3);
  for (int32_t i = 0; i < 3; ++i) ExpectBlock(i);
  for (auto& bytes : memory) std::fill(bytes.begin(), bytes.end(), std::byte{0});
  ASSERT_EQ(client_->Get(model_, put->keys, layers)->num_leading, 3);
  // What was scattered with strides is gathered again.
  service_.blocks.clear();
  EXPECT_EQ(client_->Put(model_, request)->num_stored, 3);
  ASSERT_EQ(client_->Get(model_, put->keys, target_->layers)->num_leading, 3);
  for (int32_t i = 0; i < 3; ++i) ExpectBlock(i);
}

TEST_F(KvClientTest, BlocksThatExistAreNotSentAgain) {
  const PutSummary first = PutAll();
  service_.blocks.erase(std::string(first.keys[1].AsStringView()));
  const PutSummary second = PutAll();
  EXPECT_EQ(second.num_stored, 1);
  EXPECT_EQ(second.num_existing, 2);
  EXPECT_EQ(second.sent_bytes, model_.layout->block_bytes());
  const PutSummary third = PutAll();
  EXPECT_EQ(third.num_existing, 3);
  EXPECT_EQ(third.sent_bytes, 0);
  EXPECT_EQ(service_.num_puts, 2);  // the third made no data call
}

TEST_F(KvClientTest, AMissLeavesItsRowsAndCountsAsTheEndOfThePrefix) {
  const PutSummary put = PutAll();
  service_.blocks.erase(std::string(put.keys[1].AsStringView()));
  const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target_->layers);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->num_leading, 1);
  EXPECT_EQ(got->blocks[1], absl::NotFoundError("block 1: not stored"));
  EXPECT_TRUE(got->blocks[2].ok());
  ExpectBlock(0);
  EXPECT_TRUE(IsUntouched(*target_, kTokensPerBlock, kTokensPerBlock));
  ExpectBlock(2);
  EXPECT_EQ(client_->corrupt_blocks(), 0);
  EXPECT_EQ(client_->breaker_state(), BreakerState::kClosed);
}

TEST_F(KvClientTest, GetWritesWhereItIsTold) {
  const PutSummary put = PutAll();
  const absl::StatusOr<GetSummary> got =
      client_->Get(model_, {&put.keys[2], 1}, target_->layers, 3 + kTokensPerBlock);
  ASSERT_EQ(got->num_leading, 1);
  EXPECT_EQ(TokensOf(*target_, 3 + kTokensPerBlock, kTokensPerBlock),
            TokensOf(*source_, 2 * kTokensPerBlock, kTokensPerBlock));
  EXPECT_TRUE(IsUntouched(*target_, 0, 3 + kTokensPerBlock));
  EXPECT_TRUE(IsUntouched(*target_, 3 + 2 * kTokensPerBlock, 34));
}

TEST_F(KvClientTest, GetEncodedReturnsTheStoredUnits) {
  const PutSummary put = PutAll("tq4");
  std::vector<BlockKey> keys = put.keys;
  keys.insert(keys.begin() + 1, BlockKey{});
  const absl::StatusOr<std::vector<EncodedBlock>> blocks = client_->GetEncoded(model_, keys);
  ASSERT_TRUE(blocks.ok());
  ASSERT_EQ(blocks->size(), 4u);
  EXPECT_EQ((*blocks)[1].status, absl::NotFoundError("block 1: not stored"));
  EXPECT_TRUE((*blocks)[1].units.empty());
  for (const int i : {0, 2, 3}) {
    const auto& stored = service_.blocks.at(std::string(keys[i].AsStringView())).units;
    ASSERT_EQ((*blocks)[i].units.size(), stored.size());
    for (const auto& [unit_idx, unit] : stored) {
      const EncodedUnit& got = (*blocks)[i].units[unit_idx];
      EXPECT_EQ(static_cast<uint32_t>(got.codec), unit.codec);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(got.bytes.data()), got.bytes.size()),
                unit.bytes);
    }
  }
}

TEST_F(KvClientTest, DeleteTellsHowManyWereThere) {
  const PutSummary put = PutAll();
  std::vector<BlockKey> keys = {put.keys[0], put.keys[2], BlockKey{}};
  EXPECT_EQ(*client_->Delete(keys), 2);
  EXPECT_EQ(client_->Lookup(put.keys)->locations, (std::vector<uint8_t>{0, 1, 0}));
}

TEST_F(KvClientTest, LookupCountsTheBlocksBeforeTheFirstMiss) {
  const PutSummary put = PutAll();
  service_.blocks.erase(std::string(put.keys[1].AsStringView()));
  const absl::StatusOr<LookupSummary> found = client_->Lookup(put.keys);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->num_leading, 1);
  EXPECT_EQ(found->locations, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(found->keys, put.keys);
}

TEST_F(KvClientTest, APromptShorterThanABlockLooksUpNothing) {
  const absl::StatusOr<LookupSummary> found = client_->Lookup(model_, {}, Tokens(31));
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->num_leading, 0);
  EXPECT_TRUE(found->keys.empty());
  EXPECT_EQ(service_.num_lookups, 0);
}

TEST_F(KvClientTest, GetModelReturnsWhatWasRegistered) {
  const absl::StatusOr<Model> model = client_->GetModel(model_.fingerprint);
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->spec, ToySpec());
  EXPECT_EQ(client_->GetModel(Digest{}).status(), absl::NotFoundError("model not registered"));
  Digest other = model_.fingerprint;
  other.bytes[0] ^= std::byte{1};
  service_.models[std::string(other.AsStringView())] = ModelSpecToProto(ToySpec());
  EXPECT_EQ(client_->GetModel(other).status(),
            absl::FailedPreconditionError("get model: the service answered another model, " +
                                          model_.fingerprint.ToHex()));
}

TEST_F(KvClientTest, AServiceThatLaysBlocksOutOtherwiseIsRefusedAtRegistration) {
  service_.hooks.registered = [](v1::RegisterModelResponse& response) {
    response.set_num_planes(response.num_planes() + 1);
  };
  EXPECT_EQ(client_->RegisterModel(ToySpec()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  service_.hooks.registered = [](v1::RegisterModelResponse& response) {
    response.set_fingerprint(std::string(32, 'x'));
  };
  EXPECT_EQ(client_->RegisterModel(ToySpec()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

// --- bad input: nothing is sent ---

TEST_F(KvClientTest, PromptsShorterThanABlockAreRefused) {
  for (const int32_t count : {0, 1, 31}) {
    const std::vector<int32_t> tokens = Tokens(count);
    PutRequest request = Request();
    request.tokens = tokens;
    const absl::Status want = absl::InvalidArgumentError("tokens: " + std::to_string(count) +
                                                         " tokens, want at least one block of 32");
    EXPECT_EQ(client_->Put(model_, request).status(), want);
    EXPECT_EQ(client_->StartPut(model_, request).status(), want);
  }
  EXPECT_EQ(client_->Lookup(model_, {}, {}).status(),
            absl::InvalidArgumentError("tokens: 0 tokens, want 1 to 1048576"));
  EXPECT_TRUE(service_.reserves.empty());
}

TEST_F(KvClientTest, TooManyKeysAreRefusedBeforeAnythingIsSent) {
  const std::vector<BlockKey> keys(10'000'000);
  const absl::Status want = absl::InvalidArgumentError("keys: 10000000 keys, want 1 to 65536");
  EXPECT_EQ(client_->Lookup(keys).status(), want);
  EXPECT_EQ(client_->Get(model_, keys, target_->layers).status(), want);
  EXPECT_EQ(client_->GetEncoded(model_, keys).status(), want);
  EXPECT_EQ(client_->Delete(keys).status(), want);
  const absl::Status none = absl::InvalidArgumentError("keys: 0 keys, want 1 to 65536");
  EXPECT_EQ(client_->Lookup({}).status(), none);
  EXPECT_EQ(client_->Get(model_, {}, target_->layers).status(), none);
  EXPECT_EQ(client_->Lookup(model_, {}, std::vector<int32_t>(1048577)).status(),
            absl::InvalidArgumentError("tokens: 1048577 tokens, want 1 to 1048576"));
  EXPECT_EQ(service_.num_lookups, 0);
  EXPECT_EQ(client_->breaker_state(), BreakerState::kClosed);
}

TEST_F(KvClientTest, ALookupOfTheMostKeysIsOneCall) {
  const std::vector<BlockKey> keys(65536);
  const absl::StatusOr<LookupSummary> found = client_->Lookup(keys);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->locations.size(), 65536u);
  EXPECT_EQ(service_.num_lookups, 1);
}

TEST_F(KvClientTest, RowsThatDoNotFitTheModelAreRefused) {
  const auto expect = [&](const std::vector<LayerRows>& layers, const std::string& message) {
    PutRequest request = Request();
    request.layers = layers;
    EXPECT_EQ(client_->Put(model_, request).status(), absl::InvalidArgumentError(message));
    EXPECT_EQ(client_->Get(model_, {{BlockKey{}}}, layers).status(),
              absl::InvalidArgumentError(message));
  };
  std::vector<LayerRows> layers = source_->layers;
  layers.pop_back();
  expect(layers, "layers: 2, want 3 as the model has");
  expect({}, "layers: 0, want 3 as the model has");
  layers = source_->layers;
  layers[1].k.data = nullptr;
  expect(layers, "layers[1].k: null pointer, want the layer's rows");
  layers = source_->layers;
  layers[0].v.data = nullptr;
  expect(layers, "layers[0].v: null pointer, want the layer's rows");
  layers = source_->layers;
  layers[0].v.token_stride_bytes = 127;
  expect(layers, "layers[0].v.token_stride_bytes: 127 bytes, want at least a row of 128");
  layers = source_->layers;
  layers[2].k.head_stride_bytes = -192;
  expect(layers, "layers[2].k.head_stride_bytes: -192 bytes, want at least a row of 192");
  EXPECT_TRUE(service_.reserves.empty());
  EXPECT_EQ(client_->Get(model_, {{BlockKey{}}}, target_->layers, -1).status(),
            absl::InvalidArgumentError("first_token: -1, want 0 or more"));
}

TEST_F(KvClientTest, AContextOverItsLimitsIsRefused) {
  PutRequest request = Request();
  request.context.tenant = std::string(1025, 't');
  const absl::Status want = absl::InvalidArgumentError("tenant: 1025 bytes, want at most 1024");
  EXPECT_EQ(client_->Put(model_, request).status(), want);
  EXPECT_EQ(client_->Lookup(model_, request.context, tokens_).status(), want);
}

TEST(KvClientOptions, BadOnesAreRefusedByName) {
  const auto expect = [](const KvClientOptions& options, const std::string& message) {
    EXPECT_EQ(KvClient::Create(options).status(), absl::InvalidArgumentError(message));
  };
  expect({.target = ""}, "target: \"\", want unix:PATH or HOST:PORT");
  expect({.target = "localhost"}, "target: \"localhost\", want unix:PATH or HOST:PORT");
  expect({.target = "localhost:70000"}, "target: \"localhost:70000\", want unix:PATH or HOST:PORT");
  expect({.target = "unix:"}, "target: a path of 0 bytes, want 1 to 107");
  expect({.target = "unix:" + std::string(108, 'p')}, "target: a path of 108 bytes, want 1 to 107");
  expect({.num_channels = 0}, "num_channels: 0, want 1 to 16");
  expect({.num_channels = 17}, "num_channels: 17, want 1 to 16");
  expect({.control_timeout = absl::ZeroDuration()},
         "control_timeout: 0, want a positive, finite duration");
  expect({.data_timeout = absl::InfiniteDuration()},
         "data_timeout: inf, want a positive, finite duration");
  expect({.breaker = {.errors_to_open = 0}}, "breaker.errors_to_open: 0, want at least 1");
  EXPECT_TRUE(KvClient::Create({.target = "127.0.0.1:7070"}).ok());
}

// --- the admin client's streams ---

TEST_F(KvClientTest, VerifyReportsProgressAndBadKeys) {
  const PutSummary put = PutAll();
  const auto admin = *AdminClient::Create(options_);
  std::vector<uint64_t> checked;
  size_t num_bad = 0;
  const absl::StatusOr<VerifySummary> verified = admin->Verify(
      put.keys, [&](uint64_t num_checked, uint64_t num_total, absl::Span<const BlockKey> bad) {
        checked.push_back(num_checked);
        EXPECT_EQ(num_total, 3u);
        num_bad += bad.size();
      });
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(checked, (std::vector<uint64_t>{1, 2, 3, 3}));
  EXPECT_EQ(num_bad, 1u);
  EXPECT_EQ(verified->num_checked, 3u);
  ASSERT_EQ(verified->bad_keys.size(), 1u);
  EXPECT_EQ(verified->bad_keys[0].AsStringView(), std::string(32, 'b'));
}

TEST_F(KvClientTest, ListModelsReturnsWhatWasRegistered) {
  const auto admin = *AdminClient::Create(options_);
  EXPECT_EQ(*admin->ListModels(), std::vector<ModelSpec>{ToySpec()});
}

TEST_F(KvClientTest, PingSaysThatNobodyIsThere) {
  const auto admin = *AdminClient::Create(options_);
  server_.Stop();
  const absl::Status status = admin->Ping(absl::Seconds(1)).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
}

}  // namespace
}  // namespace kvstow
