// KvClient against a service that lies, keeps silent or is gone: a miss or an error by the
// deadline, rows untouched, counter up.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "client/cpp/kv_client.h"
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

// --- a service that lies ---

struct Lie {
  const char* name;
  // Spoils frames 3, 4 and 5: those of block 1, of 3, 3 and 3 units.
  std::function<void(v1::GetFrame&, int frame)> spoil;
  std::string message;
};

void PrintTo(const Lie& lie, std::ostream* out) { *out << lie.name; }

class LyingService : public KvClientTest, public ::testing::WithParamInterface<Lie> {};

TEST_P(LyingService, IsNotBelievedAndTheRowsStayAsTheyWere) {
  const PutSummary put = PutAll("tq4");
  service_.hooks.get_frame = [](v1::GetFrame& frame, int frame_idx) {
    if (frame.block_idx() == 1) GetParam().spoil(frame, frame_idx - 3);
    return true;
  };
  const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target_->layers);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->num_leading, 1);
  EXPECT_TRUE(got->blocks[0].ok());
  EXPECT_EQ(got->blocks[1], absl::DataLossError("block 1: " + GetParam().message));
  EXPECT_TRUE(got->blocks[2].ok()) << got->blocks[2];
  EXPECT_TRUE(IsUntouched(*target_, kTokensPerBlock, kTokensPerBlock));
  EXPECT_FALSE(IsUntouched(*target_, 0, kTokensPerBlock));
  EXPECT_FALSE(IsUntouched(*target_, 2 * kTokensPerBlock, kTokensPerBlock));
  EXPECT_EQ(client_->corrupt_blocks(), 1);
  // The service is asked to look at the record.
  EXPECT_EQ(service_.verified, (std::vector<std::string>{std::string(put.keys[1].AsStringView())}));
  EXPECT_EQ(client_->breaker_state(), BreakerState::kClosed);
}

INSTANTIATE_TEST_SUITE_P(
    KvClient, LyingService,
    ::testing::Values(Lie{"FlippedBit",
                          [](auto& f, int i) {
                            if (i == 2) f.mutable_payload()->at(9) ^= 4;
                          },
                          "unit 6: its checksum differs"},
                      Lie{"FlippedLastByte",
                          [](auto& f, int i) {
                            if (i == 2) f.mutable_payload()->back() ^= 1;
                          },
                          "unit 8: its checksum differs"},
                      Lie{"OtherChecksum",
                          [](auto& f, int i) {
                            if (i == 1) f.set_unit_xxh3(1, f.unit_xxh3(1) + 1);
                          },
                          "unit 4: its checksum differs"},
                      Lie{"OtherKey",
                          [](auto& f, int i) {
                            if (i == 0) f.set_key(std::string(32, 'x'));
                          },
                          "its key is another one"},
                      Lie{"NoKey",
                          [](auto& f, int i) {
                            if (i == 0) f.clear_key();
                          },
                          "its key is another one"},
                      Lie{"OtherFingerprint",
                          [](auto& f, int i) {
                            if (i == 0) f.mutable_fingerprint()->back() ^= 1;
                          },
                          "it belongs to another model"},
                      Lie{"OtherNumUnits",
                          [](auto& f, int i) {
                            if (i == 0) f.set_num_units(8);
                          },
                          "8 units, want 9"},
                      Lie{"OtherNumTokens",
                          [](auto& f, int i) {
                            if (i == 0) f.set_num_tokens(64);
                          },
                          "64 tokens, want 32"},
                      Lie{"CutUnit",
                          [](auto& f, int i) {
                            if (i == 1) f.mutable_payload()->pop_back();
                          },
                          "unit 5: cut short"},
                      Lie{"NoPayload",
                          [](auto& f, int i) {
                            if (i == 1) f.clear_payload();
                          },
                          "unit 3: cut short"},
                      Lie{"BytesBehind",
                          [](auto& f, int i) {
                            if (i == 1) f.mutable_payload()->append(64, '\0');
                          },
                          "64 bytes follow the frame's last unit"},
                      Lie{"ShortLength",
                          [](auto& f, int i) {
                            if (i == 1) f.set_unit_bytes(0, 100);
                          },
                          "unit 3: 100 bytes, want 1088"},
                      Lie{"HugeLength",
                          [](auto& f, int i) {
                            if (i == 1) f.set_unit_bytes(0, 0xffffffffu);
                          },
                          "unit 3: 4294967295 bytes, want 1088"},
                      Lie{"UnknownCodec",
                          [](auto& f, int i) {
                            if (i == 1) f.set_unit_codec(2, 200);
                          },
                          "unit_codec: 200, want a codec of this build"},
                      Lie{"CodecOfOtherSize",
                          [](auto& f, int i) {
                            if (i == 1) f.set_unit_codec(0, 0);
                          },
                          "unit 3: 1088 bytes, want 4096"},
                      Lie{"CodecForKeysOnValues",
                          [](auto& f, int i) {
                            if (i == 1) f.set_unit_codec(0, 5);
                          },
                          "unit 3: codec tqm4 does not fit the plane"},
                      Lie{"UnitsSkipped",
                          [](auto& f, int i) {
                            if (i == 1) f.set_first_unit(4);
                          },
                          "unit 4 came, want unit 3"},
                      Lie{"UnitsRepeated",
                          [](auto& f, int i) {
                            if (i == 2) f.set_first_unit(3);
                          },
                          "unit 3 came, want unit 6"},
                      Lie{"ListsOfUnequalLength",
                          [](auto& f, int i) {
                            if (i == 1) f.add_unit_bytes(1);
                          },
                          "a frame of 3 checksums, 4 lengths and 3 codecs at unit 3"},
                      Lie{"NoUnits",
                          [](auto& f, int i) {
                            if (i != 1) return;
                            f.clear_unit_xxh3();
                            f.clear_unit_bytes();
                            f.clear_unit_codec();
                          },
                          "a frame of 0 checksums, 0 lengths and 0 codecs at unit 3"},
                      Lie{"MoreUnitsThanTheBlockHas",
                          [](auto& f, int i) {
                            if (i != 2) return;
                            f.add_unit_xxh3(1);
                            f.add_unit_bytes(0);
                            f.add_unit_codec(0);
                          },
                          "a frame of 4 checksums, 4 lengths and 4 codecs at unit 6"}),
    [](const auto& info) { return info.param.name; });

TEST_F(KvClientTest, ABlockWithoutItsLastFrameIsCorrupt) {
  const PutSummary put = PutAll();
  service_.hooks.get_frame = [](v1::GetFrame&, int frame) { return frame != 5 && frame != 8; };
  const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target_->layers);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->num_leading, 1);
  EXPECT_EQ(got->blocks[1], absl::DataLossError("block 1: the service sent no end of it"));
  EXPECT_EQ(got->blocks[2], absl::DataLossError("block 2: the service sent no end of it"));
  EXPECT_TRUE(IsUntouched(*target_, kTokensPerBlock, 2 * kTokensPerBlock));
  EXPECT_EQ(client_->corrupt_blocks(), 2);
}

TEST_F(KvClientTest, ABlockOfWhichNothingCameIsNotOk) {
  const PutSummary put = PutAll();
  service_.hooks.get_frame = [](v1::GetFrame& frame, int) { return frame.block_idx() == 1; };
  const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target_->layers);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->num_leading, 0);
  EXPECT_EQ(got->blocks[0], absl::DataLossError("block 0: the service sent nothing of it"));
  EXPECT_TRUE(got->blocks[1].ok());
  EXPECT_EQ(got->blocks[2], absl::DataLossError("block 2: the service sent nothing of it"));
  EXPECT_TRUE(IsUntouched(*target_, 0, kTokensPerBlock));
}

TEST_F(KvClientTest, FramesOfBlocksThatWereNotAskedForEndTheCall) {
  const PutSummary put = PutAll();
  // Outlives the test, and is set once: a service goes on a little after its client has gone.
  static std::atomic<uint32_t> wrong_idx{0};
  service_.hooks.get_frame = [](v1::GetFrame& frame, int) {
    const uint32_t wrong = wrong_idx;
    if (frame.block_idx() == 1) frame.set_block_idx(wrong == 0 ? 2 : wrong);
    if (frame.block_idx() == 2 && wrong == 0 && frame.first_unit() == 3) frame.set_block_idx(0);
    return true;
  };
  for (const uint32_t wrong : {0u, 3u, 0xffffffffu}) {
    wrong_idx = wrong;
    EngineMemory target(*model_.layout);
    const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target.layers);
    ASSERT_TRUE(got.ok());
    EXPECT_EQ(got->num_leading, 1);
    EXPECT_TRUE(absl::IsDataLoss(got->blocks[1])) << got->blocks[1];
    EXPECT_TRUE(absl::IsDataLoss(got->blocks[2])) << got->blocks[2];
    EXPECT_TRUE(IsUntouched(target, kTokensPerBlock, 2 * kTokensPerBlock));
  }
}

TEST_F(KvClientTest, AnotherCodeOfABlockIsPassedOn) {
  const PutSummary put = PutAll();
  service_.hooks.get_frame = [](v1::GetFrame& frame, int frame_idx) {
    if (frame.block_idx() == 0 && frame_idx == 1) frame.set_code(15);
    if (frame.block_idx() == 1) frame.set_code(-7);
    return true;
  };
  const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target_->layers);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->blocks[0], absl::DataLossError("block 0: the service answered code 15"));
  EXPECT_EQ(got->blocks[1], absl::UnknownError("block 1: the service answered code -7"));
  EXPECT_TRUE(got->blocks[2].ok());
  EXPECT_TRUE(IsUntouched(*target_, 0, 2 * kTokensPerBlock));
}

// --- a service that keeps silent ---

// Until the client gives up.
grpc::Status Hang(grpc::ServerContext* context) {
  Mutex mutex;
  CondVar never;
  while (!context->IsCancelled()) {
    MutexLock lock(&mutex);
    never.WaitFor(&mutex, absl::Milliseconds(5));
  }
  return grpc::Status::CANCELLED;
}

constexpr absl::Duration kShort = absl::Milliseconds(150);
constexpr absl::Duration kLate = absl::Seconds(5);  // far beyond any deadline of these tests

TEST_F(KvClientTest, AGetThatHangsEndsByItsDeadline) {
  const PutSummary put = PutAll();
  UseTimeouts(kLate, kShort);
  service_.hooks.get_after_frame = [](grpc::ServerContext* context, int) { return Hang(context); };
  service_.hooks.get_frame = [](v1::GetFrame&, int) { return false; };
  const absl::Time start = absl::Now();
  EXPECT_EQ(client_->Get(model_, put.keys, target_->layers).status(),
            absl::DeadlineExceededError("kvstow service at " + server_.target() +
                                        ": no answer within 150ms"));
  EXPECT_LT(absl::Now() - start, kLate);
  EXPECT_TRUE(IsUntouched(*target_, 0, kNumTokens));
}

TEST_F(KvClientTest, AGetThatHangsHalfwayKeepsWhatWasComplete) {
  const PutSummary put = PutAll();
  UseTimeouts(kLate, kShort);
  service_.hooks.get_after_frame = [](grpc::ServerContext* context, int frame) {
    return frame == 4 ? Hang(context) : grpc::Status::OK;
  };
  const absl::Time start = absl::Now();
  const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target_->layers);
  EXPECT_LT(absl::Now() - start, kLate);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->num_leading, 1);
  ExpectBlock(0);
  EXPECT_TRUE(absl::IsDeadlineExceeded(got->blocks[1]));
  EXPECT_TRUE(absl::IsDeadlineExceeded(got->blocks[2]));
  EXPECT_TRUE(IsUntouched(*target_, kTokensPerBlock, 2 * kTokensPerBlock));
  EXPECT_EQ(client_->corrupt_blocks(), 0);  // late is not wrong
}

TEST_F(KvClientTest, AGetThatTricklesEndsByItsDeadline) {
  const PutSummary put = PutAll();
  UseTimeouts(kLate, kShort);
  service_.units_per_get_frame = 1;
  service_.hooks.get_after_frame = [](grpc::ServerContext* context, int) {
    Mutex mutex;
    CondVar never;
    MutexLock lock(&mutex);
    never.WaitFor(&mutex, absl::Milliseconds(60));
    return context->IsCancelled() ? grpc::Status::CANCELLED : grpc::Status::OK;
  };
  const absl::Time start = absl::Now();
  const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target_->layers);
  EXPECT_LT(absl::Now() - start, kLate);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->num_leading, 0);
  EXPECT_TRUE(absl::IsDeadlineExceeded(got->blocks[0])) << got->blocks[0];
  EXPECT_TRUE(IsUntouched(*target_, 0, kNumTokens));
}

TEST_F(KvClientTest, APutThatHangsEndsByItsDeadline) {
  UseTimeouts(kLate, kShort);
  service_.hooks.put_start = [](grpc::ServerContext* context, int) { return Hang(context); };
  const absl::Time start = absl::Now();
  EXPECT_TRUE(absl::IsDeadlineExceeded(client_->Put(model_, Request()).status()));
  EXPECT_LT(absl::Now() - start, kLate);
  EXPECT_EQ(service_.num_puts, 1);  // its time was up: no second try
}

TEST_F(KvClientTest, ALookupThatHangsEndsByItsDeadline) {
  UseTimeouts(kShort, kLate);
  service_.hooks.lookup = [](grpc::ServerContext* context) { return Hang(context); };
  const absl::Time start = absl::Now();
  EXPECT_EQ(client_->Lookup({{BlockKey{}}}).status(),
            absl::DeadlineExceededError("kvstow service at " + server_.target() +
                                        ": no answer within 150ms"));
  EXPECT_LT(absl::Now() - start, kLate);
}

TEST_F(KvClientTest, AStreamThatIsDroppedEndsTheBlocksThatWereNotThere) {
  const PutSummary put = PutAll();
  service_.hooks.get_after_frame = [](grpc::ServerContext*, int frame) {
    return frame == 4 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone") : grpc::Status::OK;
  };
  const absl::StatusOr<GetSummary> got = client_->Get(model_, put.keys, target_->layers);
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->num_leading, 1);
  const absl::Status gone =
      absl::UnavailableError("kvstow service at " + server_.target() + ": gone");
  EXPECT_EQ(got->blocks[1], gone);
  EXPECT_EQ(got->blocks[2], gone);
  EXPECT_TRUE(IsUntouched(*target_, kTokensPerBlock, 2 * kTokensPerBlock));
  EXPECT_EQ(client_->corrupt_blocks(), 0);
}

// --- the breaker ---

TEST_F(KvClientTest, TheBreakerOpensAnswersAtOnceAndHealsByItself) {
  options_.breaker = {.errors_to_open = 2, .cool_down = absl::Hours(1)};
  client_ = *KvClient::Create(options_);
  const PutSummary put = PutAll();
  server_.Stop();
  EXPECT_TRUE(absl::IsUnavailable(client_->Lookup(put.keys).status()));
  EXPECT_EQ(client_->breaker_state(), BreakerState::kClosed);
  EXPECT_TRUE(absl::IsUnavailable(client_->Get(model_, put.keys, target_->layers).status()));
  EXPECT_EQ(client_->breaker_state(), BreakerState::kOpen);
  const absl::Status open = absl::UnavailableError("kvstow service at " + server_.target() +
                                                   ": the breaker is open, no call was made");
  EXPECT_EQ(client_->Lookup(put.keys).status(), open);
  EXPECT_EQ(client_->Get(model_, put.keys, target_->layers).status(), open);
  EXPECT_EQ(client_->Put(model_, Request()).status(), open);
  EXPECT_EQ(client_->Delete(put.keys).status(), open);
  EXPECT_EQ(client_->RegisterModel(ToySpec()).status(), open);
}

TEST_F(KvClientTest, OneClientSurvivesARestartOfTheService) {
  options_.breaker = {.errors_to_open = 1, .cool_down = absl::ZeroDuration()};
  client_ = *KvClient::Create(options_);
  const PutSummary put = PutAll();
  server_.Stop();
  EXPECT_TRUE(absl::IsUnavailable(client_->Lookup(put.keys).status()));
  EXPECT_EQ(client_->breaker_state(), BreakerState::kOpen);
  server_.Start();
  // Each try is a probe; gRPC connects again at its own pace.
  const absl::Time give_up = absl::Now() + absl::Seconds(20);
  absl::StatusOr<GetSummary> got = absl::UnavailableError("not tried");
  while (!got.ok() && absl::Now() < give_up) {
    got = client_->Get(model_, put.keys, target_->layers);
  }
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->num_leading, 3);
  EXPECT_EQ(client_->breaker_state(), BreakerState::kClosed);
}

TEST_F(KvClientTest, AnswersThatAreNotOkDoNotOpenTheBreaker) {
  options_.breaker = {.errors_to_open = 1};
  client_ = *KvClient::Create(options_);
  EXPECT_TRUE(absl::IsNotFound(client_->GetModel(Digest{}).status()));
  EXPECT_EQ(client_->Get(model_, {{BlockKey{}}}, target_->layers)->num_leading, 0);
  for (const grpc::StatusCode code :
       {grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::RESOURCE_EXHAUSTED,
        grpc::StatusCode::FAILED_PRECONDITION}) {
    service_.hooks.lookup = [&](grpc::ServerContext*) { return grpc::Status(code, "no"); };
    EXPECT_EQ(client_->Lookup({{BlockKey{}}}).status().code(), static_cast<absl::StatusCode>(code));
  }
  EXPECT_EQ(client_->breaker_state(), BreakerState::kClosed);
}

TEST_F(KvClientTest, SlowAnswersOpenTheBreaker) {
  options_.breaker = {.slow_to_open = 1, .slow_call = absl::Nanoseconds(1)};
  client_ = *KvClient::Create(options_);
  EXPECT_TRUE(client_->Lookup({{BlockKey{}}}).ok());
  EXPECT_EQ(client_->breaker_state(), BreakerState::kOpen);
}

}  // namespace
}  // namespace kvstow
