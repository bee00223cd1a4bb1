// What clients say of their conversations, and what Lookup says of loading.
#include <cmath>
#include <utility>

#include "tests/service/server_fixture.h"

namespace kvstow {
namespace {

using ::testing::HasSubstr;

class ServerTurns : public ::kvstow::testing::ServerFixture {
 protected:
  void SetUp() override {
    Start();
    model_ = Register(SmallSpec());
    rows_ = MakeRows(*model_, 1);
  }

  std::string Fingerprint() const { return std::string(model_->fingerprint().AsStringView()); }

  static void ExpectError(const grpc::Status& status, grpc::StatusCode code,
                          const std::string& text) {
    EXPECT_EQ(status.error_code(), code);
    EXPECT_EQ(status.error_message(), text);
  }

  grpc::Status CallLookup(const v1::LookupRequest& request, v1::LookupResponse* response) {
    grpc::ClientContext context;
    return control_->Lookup(&context, request, response);
  }

  grpc::Status CallReserve(const v1::ReserveRequest& request) {
    grpc::ClientContext context;
    v1::ReserveResponse response;
    return control_->Reserve(&context, request, &response);
  }

  ModelRef model_;
  std::vector<std::string> rows_;
};

TEST_F(ServerTurns, LookupEstimatesWhatLoadingIsWorth) {
  for (int i = 0; i < 3; ++i) Store(model_, Key(i), rows_, "raw");
  v1::LookupRequest request;
  request.set_keys(KeysToBytes(std::vector<BlockKey>{Key(0), Key(1), Key(2), Key(3)}));
  v1::LookupResponse response;
  ASSERT_TRUE(CallLookup(request, &response).ok());
  EXPECT_FALSE(response.has_estimate());
  request.set_prefill_tokens_per_s(1000);  // 96 tokens: 96 ms
  ASSERT_TRUE(CallLookup(request, &response).ok());
  EXPECT_NEAR(response.estimate().recompute_ms(), 96, 1e-9);
  EXPECT_GT(response.estimate().load_ms(), 0);
  EXPECT_GT(response.estimate().load_bytes(), 3u * model_->layout().block_bytes());
  EXPECT_EQ(response.estimate().num_worth_loading(), 3u);
  EXPECT_FALSE(response.estimate().is_measured());
  for (int i = 0; i < 5; ++i) (void)Get({Key(0), Key(1), Key(2)}, v1::FORM_ENCODED);
  ASSERT_TRUE(CallLookup(request, &response).ok());
  EXPECT_TRUE(response.estimate().is_measured());
  request.set_prefill_tokens_per_s(1e12);  // nothing is worth loading
  ASSERT_TRUE(CallLookup(request, &response).ok());
  EXPECT_EQ(response.estimate().num_worth_loading(), 0u);
  request.set_keys(KeysToBytes(std::vector<BlockKey>{Key(7)}));
  ASSERT_TRUE(CallLookup(request, &response).ok());
  EXPECT_FALSE(response.has_estimate());
  for (const double rate : {-1.0, 2e12, std::nan("")}) {
    request.set_prefill_tokens_per_s(rate);
    const grpc::Status status = CallLookup(request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("want 0 (no estimate) to 10^12"));
  }
}

TEST_F(ServerTurns, ReadingAndWritingOnePromptIsOneTurnAndHintsArrive) {
  const auto counter = [this](const char* name) { return Stat().counters().at(name); };
  v1::ReserveRequest request;
  request.set_fingerprint(Fingerprint());
  request.set_form(v1::FORM_ROWS);
  request.mutable_hints()->set_session("chat 1");
  request.mutable_hints()->set_turn(1);
  for (int i = 0; i < 3; ++i) {
    v1::ReserveBlock* block = request.add_blocks();
    block->set_key(std::string(Key(i).AsStringView()));
    block->set_codec("raw");
  }
  const auto reserve = [&] {
    grpc::ClientContext context;
    v1::ReserveResponse response;
    EXPECT_TRUE(control_->Reserve(&context, request, &response).ok());
    return response;
  };
  const v1::ReserveResponse first = reserve();
  for (const v1::ReserveResult& result : first.results()) {
    PutOne({RowsFrame(result.ticket(), 0, rows_)});
    EXPECT_EQ(Seal(result.ticket()).code(), 0);
  }
  (void)Get({Key(0), Key(1), Key(2)}, v1::FORM_ENCODED);
  EXPECT_EQ(counter("turns"), 1u);
  // The next turn of the same chat: two more blocks, sent apart, the second after the first.
  request.clear_blocks();
  request.mutable_hints()->set_turn(2);
  for (const int i : {4, 3}) {
    v1::ReserveBlock* block = request.add_blocks();
    block->set_key(std::string(Key(i).AsStringView()));
    block->set_codec("raw");
    block->set_after(std::string(Key(i - 1).AsStringView()));
  }
  std::swap(*request.mutable_blocks(0), *request.mutable_blocks(1));
  (void)reserve();
  EXPECT_EQ(counter("turns"), 2u);
  EXPECT_EQ(counter("follow_up_turns"), 1u);
  v1::LookupRequest over;
  over.set_keys(KeysToBytes(std::vector<BlockKey>{Key(0)}));
  over.mutable_hints()->set_session("chat 1");
  over.mutable_hints()->set_session_over(true);
  v1::LookupResponse response;
  ASSERT_TRUE(CallLookup(over, &response).ok());
  EXPECT_EQ(response.num_leading(), 1u);
  EXPECT_EQ(counter("sessions_over"), 1u);
  EXPECT_EQ(Stat().policy(), "rtv");
  EXPECT_GT(Stat().policy_bytes(), 0u);
}

TEST_F(ServerTurns, ASessionIsItsTenantsAlone) {
  const auto counter = [this](const char* name) { return Stat().counters().at(name); };
  const auto reserve = [this](int key, const char* tenant, uint32_t turn) {
    v1::ReserveRequest request;
    request.set_fingerprint(Fingerprint());
    request.set_form(v1::FORM_ROWS);
    request.mutable_hints()->set_session("chat 1");
    request.mutable_hints()->set_tenant(tenant);
    request.mutable_hints()->set_turn(turn);
    v1::ReserveBlock* block = request.add_blocks();
    block->set_key(std::string(Key(key).AsStringView()));
    block->set_codec("raw");
    EXPECT_TRUE(CallReserve(request).ok());
  };
  const auto end = [this](v1::LookupRequest request, const char* tenant) {
    request.mutable_hints()->set_session("chat 1");
    request.mutable_hints()->set_tenant(tenant);
    request.mutable_hints()->set_session_over(true);
    v1::LookupResponse response;
    EXPECT_TRUE(CallLookup(request, &response).ok());
  };
  v1::LookupRequest stranger;  // one who knows the session's name and none of its blocks
  stranger.set_keys(KeysToBytes(std::vector<BlockKey>{Key(9)}));
  reserve(0, "a", 1);
  reserve(1, "b", 2);
  EXPECT_EQ(counter("follow_up_turns"), 0u);
  reserve(2, "a", 2);
  EXPECT_EQ(counter("follow_up_turns"), 1u);
  end(stranger, "");
  end(stranger, "c");
  EXPECT_EQ(counter("sessions_over"), 0u);
  end(stranger, "b");
  EXPECT_EQ(counter("sessions_over"), 1u);
  // A prompt's tenant is the one of its keys, whatever its hints say.
  v1::LookupRequest prompt;
  prompt.mutable_prefix()->mutable_context()->set_fingerprint(Fingerprint());
  for (int i = 0; i < 32; ++i) prompt.mutable_prefix()->add_token_ids(i);
  prompt.mutable_prefix()->mutable_context()->set_tenant("c");
  end(prompt, "a");
  EXPECT_EQ(counter("sessions_over"), 1u);
  prompt.mutable_prefix()->mutable_context()->set_tenant("a");
  end(prompt, "c");
  EXPECT_EQ(counter("sessions_over"), 2u);
}

TEST_F(ServerTurns, BadHintsAreRefusedByField) {
  v1::LookupRequest lookup;
  lookup.set_keys(KeysToBytes(std::vector<BlockKey>{Key(0)}));
  lookup.mutable_hints()->set_session(std::string(65, 'x'));
  v1::LookupResponse response;
  ExpectError(CallLookup(lookup, &response), grpc::StatusCode::INVALID_ARGUMENT,
              "hints.session: 65 bytes, want at most 64");
  v1::ReserveRequest request;
  request.set_fingerprint(Fingerprint());
  request.set_form(v1::FORM_ROWS);
  v1::ReserveBlock* block = request.add_blocks();
  block->set_key(std::string(Key(1).AsStringView()));
  block->set_codec("raw");
  block->set_after("short");
  grpc::ClientContext context;
  v1::ReserveResponse reserved;
  ASSERT_TRUE(control_->Reserve(&context, request, &reserved).ok());
  EXPECT_EQ(reserved.results(0).status().message(), "after is 5 bytes, want 32");
  request.mutable_hints()->set_pin_ms(100'000'000);
  ExpectError(CallReserve(request), grpc::StatusCode::INVALID_ARGUMENT,
              "hints.pin_ms: 100000000, want at most 86400000, a day");
  v1::GetRequest get;
  get.set_keys(KeysToBytes(std::vector<BlockKey>{Key(0)}));
  get.mutable_hints()->set_session(std::string(65, 'x'));
  std::vector<v1::GetFrame> frames;
  ExpectError(GetFrames(get, &frames), grpc::StatusCode::INVALID_ARGUMENT,
              "hints.session: 65 bytes, want at most 64");
}

}  // namespace
}  // namespace kvstow
