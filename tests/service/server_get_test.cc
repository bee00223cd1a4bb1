// Get: whole round trips in both forms, and frames as data.proto promises them.
#include <algorithm>
#include <array>
#include <filesystem>
#include <thread>

#include "tests/service/server_fixture.h"

namespace kvstow {
namespace {

using ::kvstow::testing::AsBytes;
using ::kvstow::testing::GotBlock;
using ::kvstow::testing::ScalarDecode;
using ::kvstow::testing::ScalarEncode;

class ServerGet : public ::kvstow::testing::ServerFixture {
 protected:
  void SetUp() override { Start(); }
};

struct Choice {
  std::string codec;
  CodecPair pair;
};

class RoundTrip : public ServerGet, public ::testing::WithParamInterface<Choice> {};

// The bytes that come back are those of the scalar reference, whichever side encoded and decoded.
TEST_P(RoundTrip, BothFormsGiveWhatTheScalarReferenceGives) {
  const ModelRef model = Register(LargeSpec());
  const std::vector<std::string> rows = MakeRows(*model, 7);
  std::vector<std::string> units;
  std::vector<std::string> decoded;
  std::vector<CodecId> codecs;
  for (int32_t i = 0; i < model->layout().num_planes(); ++i) {
    codecs.push_back(GetParam().pair.of(model->layout().plane(i).role));
    units.push_back(codecs[i] == CodecId::kRaw ? rows[i]
                                               : ScalarEncode(*model, i, codecs[i], rows[i]));
    ASSERT_FALSE(units[i].empty());
    decoded.push_back(codecs[i] == CodecId::kRaw ? rows[i]
                                                 : ScalarDecode(*model, i, codecs[i], units[i]));
  }
  Store(model, Key(1), rows, GetParam().codec);
  const uint64_t ticket = Reserve(model, Key(2), GetParam().codec, v1::FORM_ENCODED);
  for (size_t i = 0; i < units.size(); i += 16) {
    const auto first = static_cast<int64_t>(i);
    PutOne({EncodedFrame(ticket, static_cast<uint32_t>(i),
                         {units.begin() + first, units.begin() + first + 16},
                         {codecs.begin() + first, codecs.begin() + first + 16})});
  }
  ASSERT_EQ(Seal(ticket).code(), 0);
  const std::vector<GotBlock> encoded = Get({Key(1), Key(2)}, v1::FORM_ENCODED);
  const std::vector<GotBlock> as_rows = Get({Key(1), Key(2)}, v1::FORM_ROWS);
  for (int b = 0; b < 2; ++b) {
    EXPECT_EQ(encoded[b].code, 0);
    EXPECT_TRUE(encoded[b].units == units);
    EXPECT_EQ(encoded[b].codecs, codecs);
    EXPECT_TRUE(as_rows[b].units == decoded);
    EXPECT_EQ(as_rows[b].codecs, std::vector<CodecId>(units.size(), CodecId::kRaw));
    for (const GotBlock& block : {encoded[b], as_rows[b]}) {
      EXPECT_EQ(block.key, std::string(Key(b + 1).AsStringView()));
      EXPECT_EQ(block.fingerprint, std::string(model->fingerprint().AsStringView()));
      EXPECT_EQ(block.num_units, units.size());
      EXPECT_EQ(block.num_tokens, 64u);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, RoundTrip,
                         ::testing::Values(Choice{"raw", {CodecId::kRaw, CodecId::kRaw}},
                                           Choice{"int8", {CodecId::kInt8, CodecId::kInt8}},
                                           Choice{"k=tqm4,v=tq4", {CodecId::kTqm4, CodecId::kTq4}},
                                           Choice{"k=raw,v=tq4", {CodecId::kRaw, CodecId::kTq4}}),
                         [](const auto& info) {
                           std::string name = info.param.codec;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return c == '=' || c == ','; }, '_');
                           return name;
                         });

TEST_F(ServerGet, FramesOfLargeBlocksHoldAboutOneMebibyte) {
  const ModelRef model = Register(LargeSpec());
  Store(model, Key(1), MakeRows(*model, 1), "raw");
  v1::GetRequest request;
  request.set_keys(KeysToBytes(std::vector<BlockKey>{Key(1)}));
  std::vector<v1::GetFrame> frames;
  ASSERT_TRUE(GetFrames(request, &frames).ok());
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(frames[0].payload().size(), size_t{1} << 20);
  EXPECT_EQ(frames[1].payload().size(), size_t{1} << 20);
  EXPECT_EQ(frames[1].first_unit(), 64u);
}

TEST_F(ServerGet, MissesAreAnswersInTheirPlace) {
  const ModelRef model = Register(SmallSpec());
  const std::vector<std::string> rows = MakeRows(*model, 1);
  Store(model, Key(1), rows, "raw");
  Store(model, Key(3), rows, "int8");
  const std::vector<GotBlock> blocks =
      Get({Key(0), Key(1), Key(2), Key(3), Key(1)}, v1::FORM_ENCODED);
  EXPECT_EQ(blocks[0].code, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(blocks[0].num_frames, 1);
  EXPECT_EQ(blocks[1].units, rows);
  EXPECT_EQ(blocks[2].code, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(blocks[3].codecs[0], CodecId::kInt8);
  EXPECT_EQ(blocks[4].units, rows);
}

TEST_F(ServerGet, EncodedIsTheDefaultForm) {
  const ModelRef model = Register(SmallSpec());
  Store(model, Key(1), MakeRows(*model, 1), "int8");
  EXPECT_EQ(Get({Key(1)}, v1::FORM_UNSPECIFIED)[0].codecs[0], CodecId::kInt8);
}

TEST_F(ServerGet, BadRequestsAreRefusedWithNumbers) {
  struct Case {
    std::string keys;
    int form;
    std::string text;
  };
  const std::vector<Case> cases = {
      {"", 0, "keys: 0 keys, want 1 to 65536"},
      {std::string(33, 'k'), 0, "keys: 33 bytes, want a multiple of 32"},
      {std::string(65537 * 32, 'k'), 0, "keys: 65537 keys, want 1 to 65536"},
      {std::string(32, 'k'), 9, "form: 9, want rows (1) or encoded (2)"},
  };
  for (const Case& c : cases) {
    v1::GetRequest request;
    request.set_keys(c.keys);
    request.set_form(static_cast<v1::Form>(c.form));
    std::vector<v1::GetFrame> frames;
    const grpc::Status status = GetFrames(request, &frames);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(), c.text);
    EXPECT_TRUE(frames.empty());
  }
}

TEST_F(ServerGet, RangesOfUnitsAreAllThatComesInBothForms) {
  const ModelRef model = Register(SmallSpec());  // 8 units
  const std::vector<std::string> rows = MakeRows(*model, 1);
  Store(model, Key(1), rows, "k=tqm4,v=tq4");
  Store(model, Key(2), MakeRows(*model, 2), "raw");
  for (const v1::Form form : {v1::FORM_ENCODED, v1::FORM_ROWS}) {
    const std::vector<GotBlock> whole = Get({Key(1), Key(2)}, form);
    v1::GetRequest request;
    request.set_keys(KeysToBytes(std::vector<BlockKey>{Key(1), Key(2)}));
    request.set_form(form);
    for (const auto& [first, count] : {std::pair{1u, 2u}, std::pair{5u, 1u}, std::pair{6u, 2u}}) {
      v1::UnitRange* const range = request.add_ranges();
      range->set_first(first);
      range->set_count(count);
    }
    std::vector<v1::GetFrame> frames;
    ASSERT_TRUE(GetFrames(request, &frames).ok());
    ASSERT_EQ(frames.size(), 6u) << "a frame for each range of each block";
    for (size_t i = 0; i < frames.size(); ++i) {
      const v1::GetFrame& frame = frames[i];
      EXPECT_EQ(frame.block_idx(), i / 3);
      EXPECT_EQ(frame.first_unit(), (std::array<uint32_t, 3>{1, 5, 6})[i % 3]);
      EXPECT_EQ(frame.unit_bytes_size(), (std::array<int, 3>{2, 1, 2})[i % 3]);
      EXPECT_EQ(frame.num_units(), i % 3 == 0 ? 8u : 0u) << "told once a block";
      EXPECT_EQ(frame.key().empty(), i % 3 != 0);
      const std::string& unit = whole[i / 3].units[frame.first_unit()];
      EXPECT_EQ(frame.payload().substr(0, unit.size()), unit);
    }
  }
}

TEST_F(ServerGet, RangesThatNoBlockHasAreRefused) {
  const ModelRef model = Register(SmallSpec());
  Store(model, Key(1), MakeRows(*model, 1), "raw");
  v1::GetRequest request;
  request.set_keys(std::string(Key(1).AsStringView()));
  v1::UnitRange* const range = request.add_ranges();
  std::vector<v1::GetFrame> frames;
  EXPECT_EQ(GetFrames(request, &frames).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  for (const auto& [first, count] :
       {std::pair{7u, 2u}, std::pair{8u, 1u}, std::pair{0u, 1u << 31}}) {
    range->set_first(first);
    range->set_count(count);
    frames.clear();
    ASSERT_TRUE(GetFrames(request, &frames).ok());
    ASSERT_EQ(frames.size(), 1u);
    EXPECT_EQ(frames[0].code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
  }
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ENCODED)[0].code, 0) << "the block is as it was";
}

TEST_F(ServerGet, AsManyKeysAsAllowedAreAnswered) {
  v1::GetRequest request;
  request.set_keys(std::string(65536 * 32, 'k'));
  std::vector<v1::GetFrame> frames;
  ASSERT_TRUE(GetFrames(request, &frames).ok());
  ASSERT_EQ(frames.size(), 65536u);
  EXPECT_EQ(frames.back().block_idx(), 65535u);
}

// Workers and gRPC's threads hand frames to each other: many calls at once, of many frames.
TEST_F(ServerGet, ManyReadersAtOnceGetTheirOwnBytes) {
  const ModelRef model = Register(SmallSpec());
  std::vector<BlockKey> keys;
  std::vector<std::vector<std::string>> rows;
  for (int i = 0; i < 32; ++i) {
    keys.push_back(Key(i));
    rows.push_back(MakeRows(*model, static_cast<uint64_t>(i)));
    Store(model, keys[i], rows[i], "raw");
  }
  // Every block 16 times in one call.
  std::vector<BlockKey> wanted;
  for (int i = 0; i < 512; ++i) wanted.push_back(keys[i % 32]);
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 4; ++reader) {
    readers.emplace_back([&, reader] {
      const v1::Form form = reader % 2 == 0 ? v1::FORM_ENCODED : v1::FORM_ROWS;
      for (int round = 0; round < 5; ++round) {
        const std::vector<GotBlock> blocks = Get(wanted, form);
        for (int i = 0; i < 512; ++i) EXPECT_TRUE(blocks[i].units == rows[i % 32]);
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
}

// A client that stops reading and goes away: nothing stays pinned.
TEST_F(ServerGet, CancelledCallUnpinsWhatItHeld) {
  const ModelRef model = Register(LargeSpec());
  std::vector<BlockKey> keys;
  for (int i = 0; i < 8; ++i) {
    keys.push_back(Key(i));
    Store(model, Key(i), MakeRows(*model, i), "raw");
  }
  for (const v1::Form form : {v1::FORM_ENCODED, v1::FORM_ROWS}) {
    grpc::ClientContext context;
    v1::GetRequest request;
    request.set_keys(KeysToBytes(keys));
    request.set_form(form);
    const auto reader = data_->Get(&context, request);
    v1::GetFrame frame;
    ASSERT_TRUE(reader->Read(&frame));
    context.TryCancel();
    while (reader->Read(&frame)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  // The drain inside waits until no slice is left, or ends the process.
  server_.reset();
}

TEST_F(ServerGet, BlockThatIsDeletedWhileItIsReadIsReadToItsEnd) {
  const ModelRef model = Register(LargeSpec());
  std::vector<BlockKey> keys;
  for (int i = 0; i < 14; ++i) keys.push_back(Key(i));
  const std::vector<std::string> rows = MakeRows(*model, 1);
  for (const BlockKey& key : keys) Store(model, key, rows, "raw");
  grpc::ClientContext context;
  v1::GetRequest request;
  request.set_keys(KeysToBytes(keys));
  const auto reader = data_->Get(&context, request);
  v1::GetFrame frame;
  ASSERT_TRUE(reader->Read(&frame));
  for (const BlockKey& key : keys) server_->store().Delete(key).IgnoreError();
  // New blocks want the memory of the old ones.
  const std::vector<std::string> others = MakeRows(*model, 2);
  for (int i = 100; i < 108; ++i) Store(model, Key(i), others, "raw");
  do {
    if (frame.code() != 0) continue;  // deleted before it was pinned: a miss
    for (int i = 0; i < frame.unit_bytes_size(); ++i) {
      const std::string unit = frame.payload().substr(static_cast<size_t>(i) * 16384, 16384);
      EXPECT_TRUE(unit == rows[frame.first_unit() + static_cast<uint32_t>(i)]);
    }
  } while (reader->Read(&frame));
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(ServerGet, RowsOfAModelThatIsGoneAreFailedPreconditionAndEncodedStillWork) {
  options_.store.nvme_path = dir_.path() + "/nvme";
  options_.store.nvme_bytes = int64_t{64} << 20;
  Restart();
  const ModelRef model = Register(SmallSpec());
  const std::vector<std::string> rows = MakeRows(*model, 1);
  Store(model, Key(1), rows, "raw", /*durable=*/true);
  server_.reset();
  std::filesystem::remove_all(dir_.path() + "/nvme/models");
  Start();
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ROWS)[0].code, grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ENCODED)[0].units, rows);
}

TEST_F(ServerGet, BlocksAndModelsComeBackFromDiskAfterARestart) {
  options_.store.nvme_path = dir_.path() + "/nvme";
  options_.store.nvme_bytes = int64_t{64} << 20;
  Restart();
  const ModelRef model = Register(SmallSpec());
  const std::vector<std::string> rows = MakeRows(*model, 1);
  Store(model, Key(1), rows, "raw", /*durable=*/true);
  Store(model, Key(2), rows, "int8");
  Restart();
  EXPECT_EQ(Lookup({Key(1), Key(2)}).locations(), std::string(2, v1::LOCATION_NVME));
  const std::vector<GotBlock> blocks = Get({Key(1), Key(2)}, v1::FORM_ROWS);
  EXPECT_EQ(blocks[0].units, rows);
  ASSERT_EQ(blocks[1].units.size(), 8u);
  for (int32_t i = 0; i < 8; ++i) {
    EXPECT_EQ(blocks[1].units[i], ScalarDecode(*model, i, CodecId::kInt8,
                                               ScalarEncode(*model, i, CodecId::kInt8, rows[i])));
  }
}

TEST_F(ServerGet, FlippedByteInMemoryIsDataLossInRowsAndAMissAfterwards) {
  const ModelRef model = Register(SmallSpec());
  Store(model, Key(1), MakeRows(*model, 1), "int8");
  {
    const BlockRef block = *server_->store().Get(Key(1));
    const RecordView view = *RecordView::Parse(block.bytes());
    // A test plays bad memory; nothing else may write here.
    const_cast<std::byte&>(view.unit(3)[5]) ^= std::byte{1};
  }
  const GotBlock block = Get({Key(1)}, v1::FORM_ROWS)[0];
  EXPECT_EQ(block.code, grpc::StatusCode::DATA_LOSS);
  EXPECT_TRUE(block.units.empty());
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ROWS)[0].code, grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Stat().counters().at("corrupt_blocks"), 1u);
}

}  // namespace
}  // namespace kvstow
