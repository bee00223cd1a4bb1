// Put: what a client can get wrong, each with its exact code and text, and what must work anyway.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <limits>

#include "absl/strings/str_format.h"
#include "tests/service/server_fixture.h"

namespace kvstow {
namespace {

using ::kvstow::testing::AsBytes;
using ::kvstow::testing::GotBlock;
using ::kvstow::testing::ScalarEncode;

class ServerPut : public ::kvstow::testing::ServerFixture {
 protected:
  void SetUp() override {
    Start();
    model_ = Register(SmallSpec());
    rows_ = MakeRows(*model_, 1);
  }

  void ExpectFault(const v1::PutResult& result, int code, const std::string& text) {
    EXPECT_EQ(result.status().code(), code);
    EXPECT_EQ(result.status().message(), text);
  }

  ModelRef model_;
  std::vector<std::string> rows_;
};

TEST_F(ServerPut, PlanesInAnyOrderOverSeveralCalls) {
  const uint64_t ticket = Reserve(model_, Key(1), "raw");
  for (uint32_t plane : {5u, 0u, 7u, 3u}) PutOne({RowsFrame(ticket, plane, {rows_[plane]})});
  const v1::PutResult result =
      PutOne({RowsFrame(ticket, 6, {rows_[6]}), RowsFrame(ticket, 1, {rows_[1], rows_[2]}),
              RowsFrame(ticket, 4, {rows_[4]})});
  EXPECT_EQ(result.num_units(), 4u);
  EXPECT_EQ(Seal(ticket).code(), 0);
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ENCODED)[0].units, rows_);
}

TEST_F(ServerPut, PlaneTwiceWithTheSameBytesIsFine) {
  const uint64_t ticket = Reserve(model_, Key(1), "int8");
  PutOne({RowsFrame(ticket, 0, rows_)});
  const v1::PutResult again = PutOne({RowsFrame(ticket, 2, {rows_[2], rows_[3]})});
  EXPECT_EQ(again.status().code(), 0);
  EXPECT_EQ(again.num_units(), 2u);
  EXPECT_EQ(Seal(ticket).code(), 0);
}

TEST_F(ServerPut, PlaneTwiceWithOtherBytesIsRefusedAndTheFirstStays) {
  const uint64_t ticket = Reserve(model_, Key(1), "raw");
  PutOne({RowsFrame(ticket, 0, rows_)});
  const v1::PutResult again = PutOne({RowsFrame(ticket, 2, {rows_[3]})});
  ExpectFault(again, grpc::StatusCode::INVALID_ARGUMENT,
              absl::StrCat("ticket ", ticket, ": unit 2 was written with XXH3 ",
                           absl::Hex(Xxh3(AsBytes(rows_[2]))), ", now it comes with ",
                           absl::Hex(Xxh3(AsBytes(rows_[3])))));
  EXPECT_EQ(again.num_units(), 0u);
  EXPECT_EQ(Seal(ticket).code(), 0);
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ENCODED)[0].units[2], rows_[2]);
}

TEST_F(ServerPut, MissingPlaneIsNamedAtSealAndMayBeSentThen) {
  const uint64_t ticket = Reserve(model_, Key(1), "raw");
  PutOne({RowsFrame(ticket, 0, {rows_.begin(), rows_.begin() + 5}),
          RowsFrame(ticket, 6, {rows_[6], rows_[7]})});
  const v1::ItemStatus refused = Seal(ticket);
  EXPECT_EQ(refused.code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(refused.message(),
            absl::StrCat("ticket ", ticket, ": 1 of 8 units are missing, first unit 5"));
  EXPECT_EQ(Lookup({Key(1)}).num_leading(), 0u) << "nothing is visible before the seal";
  PutOne({RowsFrame(ticket, 5, {rows_[5]})});
  EXPECT_EQ(Seal(ticket).code(), 0);
  EXPECT_EQ(Lookup({Key(1)}).num_leading(), 1u);
}

TEST_F(ServerPut, WrongChecksumDropsThePlaneAndMayBeSentAgain) {
  for (const std::string codec : {"raw", "int8"}) {
    const BlockKey key = Key(codec == "raw" ? 1 : 2);
    const uint64_t ticket = Reserve(model_, key, codec);
    v1::PutFrame bad = RowsFrame(ticket, 0, rows_);
    (*bad.mutable_payload())[3 * 4096 + 17] ^= 1;  // in plane 3
    const v1::PutResult result = PutOne({bad});
    std::string changed = rows_[3];
    changed[17] ^= 1;
    ExpectFault(result, grpc::StatusCode::DATA_LOSS,
                absl::StrFormat("ticket %u: unit 3: XXH3 of the bytes is %016x, %016x was sent",
                                ticket, Xxh3(AsBytes(changed)), Xxh3(AsBytes(rows_[3]))));
    EXPECT_EQ(result.num_units(), 3u);
    EXPECT_EQ(Seal(ticket).code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_EQ(PutOne({RowsFrame(ticket, 0, rows_)}).status().code(), 0);
    EXPECT_EQ(Seal(ticket).code(), 0);
  }
  EXPECT_EQ(Stat().counters().at("bad_checksums"), 2u);
}

// At each byte of a frame that a client sends by hand, the call or the ticket is told so.
TEST_F(ServerPut, FramesCutAtEveryByteStoreNothing) {
  const uint64_t ticket = Reserve(model_, Key(1), "raw");
  const std::string whole = RowsFrame(ticket, 0, {rows_[0]}).SerializeAsString();
  grpc::GenericStub stub(channel_);
  int num_taken = 0;
  for (size_t cut = 0; cut <= whole.size(); ++cut) {
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const grpc::Slice slice(whole.data(), cut);
    const grpc::ByteBuffer frame(&slice, 1);
    const auto call = stub.PrepareUnaryCall(&context, "/kvstow.v1.Data/Put", frame, &queue);
    grpc::ByteBuffer answer;
    grpc::Status status;
    call->StartCall();
    call->Finish(&answer, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    v1::PutResponse response;
    if (status.ok()) {
      ASSERT_TRUE(grpc::SerializationTraits<v1::PutResponse>::Deserialize(&answer, &response).ok());
    }
    for (const v1::PutResult& result : response.results()) num_taken += result.num_units();
    const bool is_refused = !status.ok() || response.results(0).status().code() != 0;
    EXPECT_EQ(is_refused, cut < whole.size()) << "cut at " << cut << " of " << whole.size();
  }
  EXPECT_EQ(num_taken, 1);
  PutOne({RowsFrame(ticket, 1, {rows_.begin() + 1, rows_.end()})});
  EXPECT_EQ(Seal(ticket).code(), 0);
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ENCODED)[0].units, rows_);
}

TEST_F(ServerPut, UnitsOutOfRangeAreRefused) {
  const uint64_t ticket = Reserve(model_, Key(1), "raw");
  ExpectFault(PutOne({RowsFrame(ticket, 7, {rows_[7], rows_[7]})}),
              grpc::StatusCode::INVALID_ARGUMENT,
              absl::StrCat("ticket ", ticket, ": units 7 to 8 of a block of 8 units"));
  ExpectFault(PutOne({RowsFrame(ticket, 8, {rows_[0]})}), grpc::StatusCode::INVALID_ARGUMENT,
              absl::StrCat("ticket ", ticket, ": units 8 to 8 of a block of 8 units"));
  ExpectFault(PutOne({RowsFrame(ticket, UINT32_MAX, {rows_[0]})}),
              grpc::StatusCode::INVALID_ARGUMENT,
              absl::StrCat("ticket ", ticket,
                           ": units 4294967295 to 4294967295 of a block of 8 "
                           "units"));
  ExpectFault(PutOne({RowsFrame(ticket, 0, {})}), grpc::StatusCode::INVALID_ARGUMENT,
              absl::StrCat("ticket ", ticket, ": a frame without units"));
}

TEST_F(ServerPut, RowsOfAnotherShapeOrDtypeAreRefused) {
  const uint64_t ticket = Reserve(model_, Key(1), "int8");
  const std::string f32_rows(2 * 4096, '\0');  // float32 where the model is bf16
  ExpectFault(
      PutOne({RowsFrame(ticket, 1, {f32_rows})}), grpc::StatusCode::INVALID_ARGUMENT,
      absl::StrCat("ticket ", ticket, ": units 1 to 1 take 4096 bytes, the payload has 8192"));
  const std::string short_rows(4096 - 128, '\0');  // one token fewer
  ExpectFault(
      PutOne({RowsFrame(ticket, 0, {rows_[0], short_rows})}), grpc::StatusCode::INVALID_ARGUMENT,
      absl::StrCat("ticket ", ticket, ": units 0 to 1 take 8192 bytes, the payload has 8064"));
}

TEST_F(ServerPut, UnknownTicketIsNotFound) {
  ExpectFault(PutOne({RowsFrame(42, 0, rows_)}), grpc::StatusCode::NOT_FOUND, "no ticket 42");
}

TEST_F(ServerPut, TicketThatDiedIsDeadlineExceededAndAnotherWriterMayCome) {
  const uint64_t ticket = Reserve(model_, Key(1), "raw");
  PutOne({RowsFrame(ticket, 0, {rows_[0]})});
  clock_.Advance(options_.store.write_deadline + absl::Milliseconds(1));
  const std::string text =
      absl::StrCat("ticket ", ticket, " has died: its write deadline has passed");
  ExpectFault(PutOne({RowsFrame(ticket, 1, {rows_[1]})}), grpc::StatusCode::DEADLINE_EXCEEDED,
              text);
  EXPECT_EQ(Seal(ticket).code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(Lookup({Key(1)}).num_leading(), 0u);
  Store(model_, Key(1), rows_, "raw");
}

TEST_F(ServerPut, SealedOrAbortedTicketTakesNothing) {
  const uint64_t sealed = Reserve(model_, Key(1), "raw");
  PutOne({RowsFrame(sealed, 0, rows_)});
  Seal(sealed);
  EXPECT_EQ(PutOne({RowsFrame(sealed, 0, rows_)}).status().code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  const uint64_t aborted = Reserve(model_, Key(2), "raw");
  Abort(aborted);
  const v1::PutResult late = PutOne({RowsFrame(aborted, 0, rows_)});
  ExpectFault(late, grpc::StatusCode::FAILED_PRECONDITION,
              absl::StrCat("ticket ", aborted, " was aborted"));
}

TEST_F(ServerPut, BadTicketDoesNotFailItsNeighbours) {
  const uint64_t good = Reserve(model_, Key(1), "raw");
  v1::PutResponse response;
  ASSERT_TRUE(Put({RowsFrame(42, 0, rows_), RowsFrame(good, 0, rows_)}, &response).ok());
  ASSERT_EQ(response.results_size(), 2);
  EXPECT_EQ(response.results(0).ticket(), 42u);
  EXPECT_EQ(response.results(0).status().code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(response.results(1).ticket(), good);
  EXPECT_EQ(response.results(1).status().code(), 0);
  EXPECT_EQ(response.results(1).num_units(), 8u);
}

TEST_F(ServerPut, FrameThatCannotBeReadEndsTheCall) {
  v1::PutFrame lists_differ = RowsFrame(1, 0, rows_);
  lists_differ.add_unit_bytes(7);
  v1::PutResponse response;
  const grpc::Status status = Put({lists_differ}, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(),
            "frame: 8 checksums, 1 lengths and 0 codecs, want as many of each (rows: checksums "
            "only)");
}

TEST_F(ServerPut, StreamWithoutFramesIsAnEmptyAnswer) {
  v1::PutResponse response;
  EXPECT_TRUE(Put({}, &response).ok());
  EXPECT_EQ(response.results_size(), 0);
}

TEST_F(ServerPut, RowsThatAreNotFiniteAreKeptBitForBitAndCounted) {
  const uint16_t nan = FloatToBf16(std::numeric_limits<float>::quiet_NaN());
  const uint16_t infinity = FloatToBf16(-std::numeric_limits<float>::infinity());
  std::memcpy(rows_[1].data() + 100, &nan, 2);
  std::memcpy(rows_[6].data() + 4094, &infinity, 2);
  Store(model_, Key(1), rows_, "k=tqm4,v=tq4");
  const GotBlock encoded = Get({Key(1)}, v1::FORM_ENCODED)[0];
  const GotBlock decoded = Get({Key(1)}, v1::FORM_ROWS)[0];
  for (int32_t i = 0; i < 8; ++i) {
    const bool is_raw = i == 1 || i == 6;
    EXPECT_EQ(encoded.codecs[i] == CodecId::kRaw, is_raw) << i;
    if (is_raw) {
      EXPECT_EQ(encoded.units[i], rows_[i]);
      EXPECT_EQ(decoded.units[i], rows_[i]);
    } else {
      EXPECT_EQ(encoded.units[i], ScalarEncode(*model_, i, encoded.codecs[i], rows_[i]));
    }
  }
  const v1::StatResponse stat = Stat();
  EXPECT_EQ(stat.counters().at("raw_fallback_planes"), 2u);
  EXPECT_EQ(stat.counters().at("raw_fallback_units"), 2u);
}

TEST_F(ServerPut, EncodedUnitsMustBeOfTheReservedCodecAndSize) {
  const uint64_t ticket = Reserve(model_, Key(1), "k=int8,v=tq4", v1::FORM_ENCODED);
  const std::string int8 = ScalarEncode(*model_, 0, CodecId::kInt8, rows_[0]);
  const std::string tq4 = ScalarEncode(*model_, 0, CodecId::kTq4, rows_[0]);
  ExpectFault(
      PutOne({EncodedFrame(ticket, 0, {tq4}, {CodecId::kTq4})}), grpc::StatusCode::INVALID_ARGUMENT,
      absl::StrCat("ticket ", ticket, ": unit 0: codec tq4, reserved is int8, want that or raw"));
  ExpectFault(PutOne({EncodedFrame(ticket, 0, {int8 + "x"}, {CodecId::kInt8})}),
              grpc::StatusCode::INVALID_ARGUMENT,
              absl::StrCat("ticket ", ticket, ": unit 0: ", int8.size() + 1,
                           " bytes of int8, want ", int8.size()));
  ExpectFault(
      PutOne({EncodedFrame(ticket, 0, {int8}, {static_cast<CodecId>(200)})}),
      grpc::StatusCode::INVALID_ARGUMENT,
      absl::StrCat("ticket ", ticket, ": unit 0: unit_codec: 200, want a codec of this build"));
  v1::PutFrame bad = EncodedFrame(ticket, 0, {int8}, {CodecId::kInt8});
  bad.set_unit_xxh3(0, 1);
  EXPECT_EQ(PutOne({bad}).status().code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(PutOne({EncodedFrame(ticket, 0, {int8}, {CodecId::kInt8})}).status().code(), 0);
}

TEST_F(ServerPut, EncodedFormMayFallBackToRawUnits) {
  const uint64_t ticket = Reserve(model_, Key(1), "int8", v1::FORM_ENCODED);
  std::vector<std::string> units;
  std::vector<CodecId> codecs;
  for (int32_t i = 0; i < 8; ++i) {
    codecs.push_back(i == 3 ? CodecId::kRaw : CodecId::kInt8);
    units.push_back(i == 3 ? rows_[i] : ScalarEncode(*model_, i, CodecId::kInt8, rows_[i]));
  }
  EXPECT_EQ(PutOne({EncodedFrame(ticket, 0, units, codecs)}).num_units(), 8u);
  EXPECT_EQ(Seal(ticket).code(), 0);
  const GotBlock block = Get({Key(1)}, v1::FORM_ENCODED)[0];
  EXPECT_EQ(block.units, units);
  EXPECT_EQ(block.codecs, codecs);
  EXPECT_EQ(Stat().counters().at("raw_fallback_units"), 1u);
}

// Many frames of one stream at once: bounded work, nothing lost.
TEST_F(ServerPut, LongStreamOfSmallFramesLosesNothing) {
  std::vector<v1::PutFrame> frames;
  std::vector<uint64_t> tickets;
  for (int block = 0; block < 40; ++block) {
    tickets.push_back(Reserve(model_, Key(block), "int8"));
    for (uint32_t i = 0; i < 8; ++i) frames.push_back(RowsFrame(tickets.back(), i, {rows_[i]}));
  }
  v1::PutResponse response;
  ASSERT_TRUE(Put(frames, &response).ok());
  ASSERT_EQ(response.results_size(), 40);
  for (int block = 0; block < 40; ++block) {
    EXPECT_EQ(response.results(block).ticket(), tickets[block]);
    EXPECT_EQ(response.results(block).num_units(), 8u);
    EXPECT_EQ(Seal(tickets[block]).code(), 0);
  }
}

TEST_F(ServerPut, ClientThatGoesAwayLeavesNothingVisibleAndNoBytesInFlight) {
  const uint64_t ticket = Reserve(model_, Key(1), "raw");
  {
    grpc::ClientContext context;
    v1::PutResponse response;
    const auto writer = data_->Put(&context, &response);
    ASSERT_TRUE(writer->Write(RowsFrame(ticket, 0, {rows_[0]})));
    context.TryCancel();
    EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_EQ(Lookup({Key(1)}).num_leading(), 0u);
  clock_.Advance(options_.store.write_deadline + options_.store.reuse_delay + absl::Seconds(1));
  server_->store().RunMaintenance();
  const v1::StatResponse stat = Stat();
  EXPECT_EQ(stat.tiers(0).reserved_bytes(), 0u);
  EXPECT_EQ(stat.open_tickets(), 0u);
}

}  // namespace
}  // namespace kvstow
