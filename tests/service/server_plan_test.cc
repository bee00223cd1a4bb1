// Plans over the wire: a model whose keys are biased in one layer, as any client would meet it.
#include "tests/service/server_fixture.h"
#include "tests/testing/biased_kv.h"

namespace kvstow {
namespace {

using ::kvstow::testing::AsBytes;
using ::kvstow::testing::BiasedKv;
using ::kvstow::testing::GotBlock;
using ::kvstow::testing::ScalarEncode;
using ::testing::HasSubstr;

class ServerPlan : public ::kvstow::testing::ServerFixture {
 protected:
  void SetUp() override {
    Start();
    model_ = Register(SmallSpec());
  }

  // Rows of block `block_idx`; layer 0 has biased keys.
  std::vector<std::string> Rows(int block_idx) const {
    std::vector<std::string> planes;
    for (const PlaneInfo& plane : model_->layout().planes()) {
      const auto rows =
          kv_.PlaneRows(plane.layer_idx, plane.role, plane.head_idx, 32 * block_idx, 32);
      planes.emplace_back(reinterpret_cast<const char*>(rows.data()), rows.size());
    }
    return planes;
  }

  v1::ReserveResponse ReserveCall(const BlockKey& key, const std::string& codec) {
    v1::ReserveRequest request;
    request.set_fingerprint(std::string(model_->fingerprint().AsStringView()));
    request.set_form(v1::FORM_ENCODED);
    v1::ReserveBlock* block = request.add_blocks();
    block->set_key(std::string(key.AsStringView()));
    block->set_codec(codec);
    v1::ReserveResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(control_->Reserve(&context, request, &response).ok());
    return response;
  }

  grpc::Status SetPlan(const std::string& plan, bool derive = false) {
    v1::SetPlanRequest request;
    request.set_fingerprint(std::string(model_->fingerprint().AsStringView()));
    request.set_plan(plan);
    request.set_derive(derive);
    v1::SetPlanResponse response;
    grpc::ClientContext context;
    return models_->SetPlan(&context, request, &response);
  }

  // Of the model; an empty message where there is none.
  v1::ModelPlan PlanNow() {
    v1::GetModelRequest request;
    request.set_fingerprint(std::string(model_->fingerprint().AsStringView()));
    v1::GetModelResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(models_->GetModel(&context, request, &response).ok());
    return response.plan();
  }

  std::vector<CodecId> StoredCodecs(const BlockKey& key) {
    return Get({key}, v1::FORM_ENCODED)[0].codecs;
  }

  const BiasedKv kv_{{.num_layers = 2, .biased_layers = {0}}};
  ModelRef model_;
};

// The planes of SmallSpec: layer 0 K K V V, layer 1 K K V V.
const std::vector<CodecId> kGuarded = {CodecId::kRaw, CodecId::kRaw,  CodecId::kTq4,
                                       CodecId::kTq4, CodecId::kTqm4, CodecId::kTqm4,
                                       CodecId::kTq4, CodecId::kTq4};

TEST_F(ServerPlan, FirstBlockOfAModelMakesThePlanAndIsSentAgain) {
  const uint64_t ticket = Reserve(model_, Key(0), "k=tqm4,v=tq4");
  EXPECT_FALSE(Stat().models(0).has_plan());
  EXPECT_EQ(PutOne({RowsFrame(ticket, 0, Rows(0))}).status().code(), 0);
  const v1::ItemStatus sealed = Seal(ticket);
  EXPECT_EQ(sealed.code(), grpc::StatusCode::ABORTED);
  EXPECT_THAT(sealed.message(), HasSubstr("put the block again"));
  EXPECT_EQ(Stat().counters().at("plan_refusals"), 1u);
  EXPECT_EQ(Stat().open_tickets(), 0u);
  EXPECT_EQ(Lookup({Key(0)}).num_leading(), 0u) << "what is not guarded is not kept";
  // Again, at once: the plan is there.
  Store(model_, Key(0), Rows(0), "k=tqm4,v=tq4");
  EXPECT_EQ(StoredCodecs(Key(0)), kGuarded);
  EXPECT_EQ(Stat().models(0).plan().plan(), "layer0.k=raw");
  EXPECT_EQ(Stat().counters().at("raw_fallback_units"), 0u) << "raw as planned is no fallback";
  EXPECT_EQ(Get({Key(0)}, v1::FORM_ROWS)[0].units[0], Rows(0)[0]);
}

TEST_F(ServerPlan, RawBlockMakesThePlanForThoseAfterIt) {
  Store(model_, Key(0), Rows(0), "raw");
  EXPECT_EQ(PlanNow().plan(), "layer0.k=raw");
  EXPECT_TRUE(PlanNow().is_derived());
  ASSERT_EQ(PlanNow().reasons_size(), 1);
  EXPECT_THAT(PlanNow().reasons(0), HasSubstr("layer 0 keys: "));
  EXPECT_EQ(PlanNow().plan_id(), CodecPlan::Parse("layer0.k=raw")->Id().AsStringView());
  Store(model_, Key(1), Rows(1), "k=tqm4,v=tq4");
  EXPECT_EQ(StoredCodecs(Key(1)), kGuarded);
  EXPECT_EQ(Stat().counters().at("plan_refusals"), 0u);
}

TEST_F(ServerPlan, WorkerLearnsThePlanAtReserveAndIsHeldToIt) {
  Store(model_, Key(0), Rows(0), "raw");
  const v1::ReserveResponse response = ReserveCall(Key(1), "k=tqm4,v=tq4");
  EXPECT_EQ(response.plan(), "layer0.k=raw");
  const uint64_t ticket = response.results(0).ticket();
  const std::vector<std::string> rows = Rows(1);
  const std::string tqm4 = ScalarEncode(*model_, 0, CodecId::kTqm4, rows[0]);
  const v1::PutResult refused = PutOne({EncodedFrame(ticket, 0, {tqm4}, {CodecId::kTqm4})});
  EXPECT_EQ(refused.status().code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.status().message(), HasSubstr("unit 0: codec tqm4, reserved is raw"));
  std::vector<std::string> units;
  for (int i = 0; i < 8; ++i) {
    units.push_back(kGuarded[i] == CodecId::kRaw ? rows[i]
                                                 : ScalarEncode(*model_, i, kGuarded[i], rows[i]));
  }
  EXPECT_EQ(PutOne({EncodedFrame(ticket, 0, units, kGuarded)}).status().code(), 0);
  EXPECT_EQ(Seal(ticket).code(), 0);
  EXPECT_EQ(StoredCodecs(Key(1)), kGuarded);
}

TEST_F(ServerPlan, WorkerThatSendsNoRowsIsCoveredToo) {
  const uint64_t ticket = Reserve(model_, Key(0), "k=tqm4,v=tq4", v1::FORM_ENCODED);
  const std::vector<std::string> rows = Rows(0);
  std::vector<std::string> units;
  std::vector<CodecId> codecs;
  for (int i = 0; i < 8; ++i) {
    codecs.push_back(i % 4 < 2 ? CodecId::kTqm4 : CodecId::kTq4);
    units.push_back(ScalarEncode(*model_, i, codecs[i], rows[i]));
  }
  EXPECT_EQ(PutOne({EncodedFrame(ticket, 0, units, codecs)}).status().code(), 0);
  EXPECT_EQ(Seal(ticket).code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(PlanNow().plan(), "layer0.k=raw");
}

TEST_F(ServerPlan, OrdinaryModelsGetAPlanWithoutExceptionsAndNothingIsSentTwice) {
  Store(model_, Key(0), MakeRows(*model_, 1), "k=tqm4,v=tq4");
  ASSERT_TRUE(Stat().models(0).has_plan());
  EXPECT_EQ(Stat().models(0).plan().plan(), "");
  EXPECT_EQ(Stat().models(0).name(), "small");
  EXPECT_EQ(ReserveCall(Key(1), "k=tqm4,v=tq4").plan(), "");
}

TEST_F(ServerPlan, SetPlanHoldsFromNowOnAndCanBeDerivedAgain) {
  Store(model_, Key(0), Rows(0), "raw");
  ASSERT_TRUE(SetPlan("").ok());
  EXPECT_FALSE(PlanNow().is_derived());
  Store(model_, Key(1), Rows(1), "k=tqm4,v=tq4");
  EXPECT_EQ(StoredCodecs(Key(1))[0], CodecId::kTqm4) << "the operator's word holds";
  ASSERT_TRUE(SetPlan("# mine\nlayer0.k=int8\nlayer1.v=tq2\n").ok());
  Store(model_, Key(2), Rows(2), "k=tqm4,v=tq4");
  EXPECT_EQ(StoredCodecs(Key(2))[0], CodecId::kInt8);
  EXPECT_EQ(StoredCodecs(Key(2))[7], CodecId::kTq2);
  ASSERT_TRUE(SetPlan("", /*derive=*/true).ok());
  EXPECT_FALSE(Stat().models(0).has_plan());
  Store(model_, Key(3), Rows(3), "raw");
  EXPECT_EQ(PlanNow().plan(), "layer0.k=raw");
}

TEST_F(ServerPlan, BadPlansAreRefusedAndNameTheItem) {
  const grpc::Status unknown = SetPlan("layer0.k=tqm9");
  EXPECT_EQ(unknown.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(unknown.error_message(), HasSubstr("plan item \"layer0.k=tqm9\""));
  EXPECT_THAT(SetPlan("layer2=raw").error_message(), HasSubstr("layers 0 to 1"));
  EXPECT_THAT(SetPlan("layer0=raw", true).error_message(), HasSubstr("want one of them"));
  model_ = *RegisteredModel::Create(LargeSpec());
  EXPECT_EQ(SetPlan("").error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerPlan, TicketsFromBeforeAChangeAreGivenBackAtSeal) {
  Store(model_, Key(0), MakeRows(*model_, 1), "raw");
  const uint64_t ticket = Reserve(model_, Key(1), "k=tqm4,v=tq4");
  ASSERT_TRUE(SetPlan("layer1=int8").ok());
  EXPECT_EQ(PutOne({RowsFrame(ticket, 0, MakeRows(*model_, 2))}).status().code(), 0);
  EXPECT_EQ(Seal(ticket).code(), grpc::StatusCode::ABORTED);
}

TEST_F(ServerPlan, LayersOfAReserveAreStoredAsAskedFor) {
  Store(model_, Key(0), MakeRows(*model_, 1), "raw");
  Store(model_, Key(1), MakeRows(*model_, 2), "k=tqm4,v=tq3,layer1=raw,layer0.k=int8");
  EXPECT_EQ(StoredCodecs(Key(1)),
            (std::vector<CodecId>{CodecId::kInt8, CodecId::kInt8, CodecId::kTq3, CodecId::kTq3,
                                  CodecId::kRaw, CodecId::kRaw, CodecId::kRaw, CodecId::kRaw}));
  const v1::ReserveResult bad = ReserveItem(model_, Key(2), "k=tqm4,v=tq3,layer7=raw");
  EXPECT_EQ(bad.status().code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(bad.status().message(), HasSubstr("layer 7, the model has layers 0 to 1"));
}

TEST_F(ServerPlan, SurvivesARestartOfAServiceWithADisk) {
  options_.store.nvme_path = dir_.path() + "/nvme";
  options_.store.nvme_bytes = int64_t{256} << 20;
  Restart();
  model_ = Register(SmallSpec());
  Store(model_, Key(0), Rows(0), "raw");
  const std::string id = PlanNow().plan_id();
  Restart();
  EXPECT_EQ(PlanNow().plan_id(), id);
  EXPECT_EQ(PlanNow().reasons_size(), 1);
}

TEST_F(ServerPlan, GuardThatIsOffStoresAsAskedFor) {
  options_.guard_derives = false;
  Restart();
  model_ = Register(SmallSpec());
  Store(model_, Key(0), Rows(0), "k=tqm4,v=tq4");
  EXPECT_EQ(StoredCodecs(Key(0))[0], CodecId::kTqm4);
  EXPECT_FALSE(Stat().models(0).has_plan());
}

}  // namespace
}  // namespace kvstow
