#include "service/plan_book.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/service/temp_dir.h"
#include "tests/testing/biased_kv.h"

namespace kvstow {
namespace {

using ::kvstow::testing::BiasedKv;
using ::kvstow::testing::TempDir;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kTokens = 32;

ModelRef ModelLike(const BiasedKv& kv, DType dtype = DType::kBf16) {
  ModelSpec spec;
  spec.name = "biased";
  spec.weights = "w";
  spec.kv_dtype = dtype;
  spec.groups = {{.first_layer = 0,
                  .num_layers = kv.options().num_layers,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = kv.options().num_heads,
                  .k_dim = kv.options().dim,
                  .v_dim = kv.options().dim}};
  spec.tokens_per_block = kTokens;
  return *RegisteredModel::Create(spec);
}

void ObservePlane(PlanBook& book, const RegisteredModel& model, const BiasedKv& kv, int plane_idx,
                  int first_token = 0) {
  const PlaneInfo& plane = model.layout().plane(plane_idx);
  const auto rows = kv.PlaneRows(plane.layer_idx, plane.role, plane.head_idx, first_token, kTokens);
  book.Observe(model, plane_idx, CodecId::kRaw, rows);
}

void ObserveAll(PlanBook& book, const RegisteredModel& model, const BiasedKv& kv) {
  for (int i = 0; i < model.layout().num_planes(); ++i) ObservePlane(book, model, kv, i);
}

RecordMeta MetaOf(const RegisteredModel& model, const PlanRef& plan,
                  CodecPair codecs = {CodecId::kTqm4, CodecId::kTq4}) {
  return {.fingerprint = model.fingerprint(),
          .plan_id = plan == nullptr ? Digest() : plan->id,
          .codecs = codecs};
}

std::string FileOf(const TempDir& directory, const RegisteredModel& model) {
  return absl::StrCat(directory.path(), "/", model.fingerprint().ToHex(), ".plan");
}

class PlanBookTest : public ::testing::Test {
 protected:
  const BiasedKv kv_{{.num_layers = 6, .biased_layers = {0, 5}}};
  const ModelRef model_ = ModelLike(kv_);
  const Digest fingerprint_ = model_->fingerprint();
};

TEST_F(PlanBookTest, PlanComesWithTheLastPlaneOfTheModel) {
  auto book = *PlanBook::Open("", true);
  const int num_planes = model_->layout().num_planes();
  for (int i = num_planes - 1; i > 0; --i) {
    ObservePlane(*book, *model_, kv_, i);
    EXPECT_EQ(book->Current(fingerprint_), nullptr);
  }
  EXPECT_TRUE(book->IsWatching(fingerprint_));
  ObservePlane(*book, *model_, kv_, 0);
  const PlanRef plan = book->Current(fingerprint_);
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(plan->codecs.Text(), "layer0.k=raw,layer5.k=raw");
  EXPECT_EQ(plan->origin, PlanOrigin::kDerived);
  EXPECT_EQ(plan->reasons.size(), 2u);
  EXPECT_FALSE(book->IsWatching(fingerprint_));
}

TEST_F(PlanBookTest, UnitsThatAWorkerEncodedTellTheSame) {
  auto book = *PlanBook::Open("", true);
  for (int i = 0; i < model_->layout().num_planes(); ++i) {
    const PlaneInfo& plane = model_->layout().plane(i);
    const CodecId codec = plane.role == Role::kKey ? CodecId::kTqm3 : CodecId::kTq2;
    const auto rows = kv_.PlaneRows(plane.layer_idx, plane.role, plane.head_idx, 0, kTokens);
    std::vector<std::byte> unit(model_->unit_bytes(i, codec));
    BestBackend(*FindCodec(codec)).encode(model_->shape(i), rows.data(), unit.data());
    book->Observe(*model_, i, codec, unit);
  }
  ASSERT_NE(book->Current(fingerprint_), nullptr);
  EXPECT_EQ(book->Current(fingerprint_)->codecs.Text(), "layer0.k=raw,layer5.k=raw");
}

TEST_F(PlanBookTest, TwoWritersAtOnceMakeOnePlan) {
  for (int round = 0; round < 20; ++round) {
    auto book = *PlanBook::Open("", true);
    std::vector<PlanRef> seen(2);
    std::vector<std::thread> writers;
    for (int w = 0; w < 2; ++w) {
      writers.emplace_back([&, w] {
        for (int i = 0; i < model_->layout().num_planes(); ++i) {
          ObservePlane(*book, *model_, kv_, i, w * kTokens);
        }
        // All planes of this writer's block have been seen: it could be sealed now.
        seen[w] = book->Current(fingerprint_);
      });
    }
    for (std::thread& writer : writers) writer.join();
    ASSERT_NE(seen[0], nullptr) << "round " << round;
    ASSERT_EQ(seen[0], seen[1]) << "round " << round;
  }
}

TEST_F(PlanBookTest, PlanIsTheSameAfterARestart) {
  const TempDir directory;
  PlanRef before;
  {
    auto book = *PlanBook::Open(directory.path(), true);
    ObserveAll(*book, *model_, kv_);
    before = book->Current(fingerprint_);
  }
  auto book = *PlanBook::Open(directory.path(), true);
  const PlanRef after = book->Current(fingerprint_);
  ASSERT_NE(after, nullptr);
  EXPECT_EQ(after->id, before->id);
  EXPECT_EQ(after->codecs, before->codecs);
  EXPECT_EQ(after->origin, PlanOrigin::kDerived);
  EXPECT_EQ(after->reasons, before->reasons);
}

TEST_F(PlanBookTest, OperatorsPlanHoldsAndSurvives) {
  const TempDir directory;
  {
    auto book = *PlanBook::Open(directory.path(), true);
    ObserveAll(*book, *model_, kv_);
    ASSERT_TRUE(book->Set(*model_, *CodecPlan::Parse("layer1=int8")).ok());
    EXPECT_EQ(book->Current(fingerprint_)->codecs.Text(), "layer1.k=int8,layer1.v=int8");
    ObserveAll(*book, *model_, kv_);  // changes nothing
  }
  auto book = *PlanBook::Open(directory.path(), true);
  EXPECT_EQ(book->Current(fingerprint_)->codecs.Text(), "layer1.k=int8,layer1.v=int8");
  EXPECT_EQ(book->Current(fingerprint_)->origin, PlanOrigin::kSet);
  // Cleared: the guard derives one again.
  ASSERT_TRUE(book->Clear(fingerprint_).ok());
  EXPECT_FALSE(std::filesystem::exists(FileOf(directory, *model_)));
  ObserveAll(*book, *model_, kv_);
  EXPECT_EQ(book->Current(fingerprint_)->codecs.Text(), "layer0.k=raw,layer5.k=raw");
}

TEST_F(PlanBookTest, PlanThatDoesNotFitTheModelIsRefusedAndChangesNothing) {
  auto book = *PlanBook::Open("", true);
  const absl::Status status = book->Set(*model_, *CodecPlan::Parse("layer6=raw")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("layer 6, the model has layers 0 to 5"));
  EXPECT_EQ(book->Current(fingerprint_), nullptr);
}

TEST_F(PlanBookTest, GuardThatIsOffDerivesNothingAndKeepsWhatIsSet) {
  auto book = *PlanBook::Open("", false);
  ObserveAll(*book, *model_, kv_);
  EXPECT_EQ(book->Current(fingerprint_), nullptr);
  ASSERT_TRUE(book->Set(*model_, *CodecPlan::Parse("layer0=raw")).ok());
  EXPECT_NE(book->Current(fingerprint_), nullptr);
}

TEST_F(PlanBookTest, FileThatIsNoPlanIsSetAside) {
  const TempDir directory;
  std::ofstream(FileOf(directory, *model_)) << "layer0.k=nonsense\n";
  auto book = *PlanBook::Open(directory.path(), true);
  EXPECT_EQ(book->Current(fingerprint_), nullptr);
  EXPECT_TRUE(std::filesystem::exists(FileOf(directory, *model_) + ".broken"));
}

TEST_F(PlanBookTest, FileIsAPlanThatPeopleCanRead) {
  const TempDir directory;
  auto book = *PlanBook::Open(directory.path(), true);
  ObserveAll(*book, *model_, kv_);
  std::stringstream text;
  text << std::ifstream(FileOf(directory, *model_)).rdbuf();
  EXPECT_THAT(text.str(), HasSubstr("# derived by the guard\n# raw: layer 0 keys: 4 bits would"));
  EXPECT_THAT(text.str(), HasSubstr("\nlayer0.k=raw\nlayer5.k=raw\n"));
}

TEST_F(PlanBookTest, PlanesThatTellNothingAreWaitedForButNotForEver) {
  auto book = *PlanBook::Open("", true);
  const std::vector<std::byte> zeros(model_->layout().plane(0).row_bytes);
  for (int i = 1; i < model_->layout().num_planes(); ++i) ObservePlane(*book, *model_, kv_, i);
  for (int i = 1; i < PlanBook::kUselessPlanesMax; ++i) {
    book->Observe(*model_, 0, CodecId::kRaw, zeros);
  }
  EXPECT_EQ(book->Current(fingerprint_), nullptr);
  book->Observe(*model_, 0, CodecId::kRaw, zeros);
  ASSERT_NE(book->Current(fingerprint_), nullptr);
}

TEST_F(PlanBookTest, ModelsThatAreNeverQuantizedGetAnEmptyPlan) {
  auto book = *PlanBook::Open("", true);
  const ModelRef model = ModelLike(kv_, DType::kF8E4M3);
  for (int i = 0; i < model->layout().num_planes(); ++i) {
    const std::vector<std::byte> rows(model->layout().plane(i).row_bytes, std::byte{0x40});
    book->Observe(*model, i, CodecId::kRaw, rows);
  }
  ASSERT_NE(book->Current(model->fingerprint()), nullptr);
  EXPECT_TRUE(book->Current(model->fingerprint())->codecs.empty());
}

TEST_F(PlanBookTest, BlocksFromBeforeThePlanAreSealedOnlyWhereItChangesNothing) {
  auto book = *PlanBook::Open("", true);
  EXPECT_TRUE(book->CheckSeal(*model_, MetaOf(*model_, nullptr)).ok()) << "no plan yet";
  ObserveAll(*book, *model_, kv_);
  const absl::Status refused = book->CheckSeal(*model_, MetaOf(*model_, nullptr));
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(refused.message(), HasSubstr("stores layer 0 otherwise: put the block again"));
  EXPECT_TRUE(book->CheckSeal(*model_, MetaOf(*model_, nullptr, CodecPair{})).ok()) << "raw";
  EXPECT_TRUE(book->CheckSeal(*model_, MetaOf(*model_, book->Current(fingerprint_))).ok());
  // Layers of a request that say what the plan says.
  const CodecPlan layers = *CodecPlan::Parse("layer0.k=raw,layer5.k=raw,layer2.v=tq2");
  const PlanRef asked = book->ForRequest(fingerprint_, nullptr, layers);
  EXPECT_TRUE(book->CheckSeal(*model_, MetaOf(*model_, asked)).ok());
}

TEST_F(PlanBookTest, ModelsPlanGoesOverWhatAWriterAsksFor) {
  auto book = *PlanBook::Open("", true);
  ObserveAll(*book, *model_, kv_);
  const PlanRef current = book->Current(fingerprint_);
  const PlanRef plan =
      book->ForRequest(fingerprint_, current, *CodecPlan::Parse("layer0.k=tqm2,layer3=int8"));
  EXPECT_EQ(plan->codecs.Text(), "layer0.k=raw,layer3.k=int8,layer5.k=raw,layer3.v=int8");
  EXPECT_EQ(*book->Find(fingerprint_, plan->id), plan) << "tickets name it";
  EXPECT_EQ(book->ForRequest(fingerprint_, current, CodecPlan()), current);
}

TEST_F(PlanBookTest, PlansThatAreLongGoneAreAborted) {
  auto book = *PlanBook::Open("", true);
  const PlanRef first = *book->Set(*model_, *CodecPlan::Parse("layer0.k=raw"));
  for (size_t i = 0; i <= PlanBook::kPlansKept; ++i) {
    book->ForRequest(fingerprint_, nullptr, *CodecPlan::Parse(absl::StrCat("layer", i, ".v=tq2")));
    EXPECT_TRUE(book->Find(fingerprint_, first->id).ok()) << "the current one stays";
  }
  ASSERT_TRUE(book->Set(*model_, CodecPlan()).ok());
  EXPECT_TRUE(book->Find(fingerprint_, first->id).ok()) << "the one before it too";
  const Digest gone = CodecPlan::Parse("layer0.v=tq2")->Id();
  EXPECT_EQ(book->Find(fingerprint_, gone).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(*book->Find(fingerprint_, Digest()), nullptr);
}

TEST_F(PlanBookTest, PlannedBlockHasTheSizesOfItsCodecs) {
  auto book = *PlanBook::Open("", true);
  ObserveAll(*book, *model_, kv_);
  const CodecPair safe = {CodecId::kTqm4, CodecId::kTq4};
  const RegisteredModel::Plan plain = PlannedBlock(*model_, safe, nullptr);
  const RegisteredModel::Plan block =
      PlannedBlock(*model_, safe, book->Current(fingerprint_).get());
  EXPECT_EQ(block.codecs, safe);
  for (int i = 0; i < model_->layout().num_planes(); ++i) {
    const PlaneInfo& plane = model_->layout().plane(i);
    const bool is_guarded =
        plane.role == Role::kKey && (plane.layer_idx == 0 || plane.layer_idx == 5);
    EXPECT_EQ((*block.unit_bytes)[i],
              is_guarded ? static_cast<uint32_t>(plane.row_bytes) : (*plain.unit_bytes)[i])
        << "plane " << i;
  }
}

}  // namespace
}  // namespace kvstow
