#include "service/calibration_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/service/temp_dir.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;
using ::kvstow::testing::TempDir;
using ::testing::HasSubstr;
using ::testing::SizeIs;

ModelSpec Spec(const std::string& name = "model") {
  ModelSpec spec;
  spec.name = name;
  spec.weights = "sha256:1";
  spec.groups = {{.first_layer = 0,
                  .num_layers = 1,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 1,
                  .k_dim = 16,
                  .v_dim = 16}};
  return spec;
}

Calibration MakeCalibration(const ModelSpec& spec, uint64_t seed, bool with_values = true) {
  std::vector<Calibration::Entry> entries;
  entries.push_back({{.role = Role::kKey}, Rotation::Reflection(16, seed).value()});
  if (with_values) {
    entries.push_back({{.role = Role::kValue}, Rotation::Reflection(16, seed + 1000).value()});
  }
  return Calibration::Create(spec.Fingerprint(), Sha256(absl::StrCat(seed)), std::move(entries))
      .value();
}

class CalibrationStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    models_ = *ModelRegistry::Open("");
    ASSERT_TRUE(models_->Register(Spec()).ok());
    Reopen();
  }
  void Reopen() {
    absl::StatusOr<std::unique_ptr<CalibrationStore>> store = CalibrationStore::Open(path());
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  std::string path() const { return dir_.path() + "/calibrations"; }
  std::string FileOf(const Digest& id) const {
    return absl::StrCat(path(), "/", id.ToHex(), ".kvc");
  }
  Digest MustPut(uint64_t seed) {
    const Calibration calibration = MakeCalibration(Spec(), seed);
    const absl::StatusOr<CalibrationRef> kept = store_->Put(calibration.Serialize(), *models_);
    EXPECT_TRUE(kept.ok()) << kept.status();
    return calibration.id();
  }
  int64_t Counter(std::string_view name) const {
    for (const auto& [counter, value] : store_->Counters()) {
      if (counter == name) return value;
    }
    return -1;
  }

  const TempDir dir_;
  std::unique_ptr<ModelRegistry> models_;
  std::unique_ptr<CalibrationStore> store_;
};

TEST_F(CalibrationStoreTest, WhatWasPutIsFoundNowAndAfterARestart) {
  const Digest id = MustPut(1);
  EXPECT_EQ(MustPut(1), id) << "again is fine";
  EXPECT_THAT(store_->List(Digest()), SizeIs(1));
  Reopen();
  const CalibrationRef found = store_->Find(id);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->Serialize(), MakeCalibration(Spec(), 1).Serialize());
  EXPECT_EQ(store_->num_bytes(), static_cast<int64_t>(fs::file_size(FileOf(id))));
  EXPECT_EQ(store_->Find(Sha256("another")), nullptr);
}

TEST_F(CalibrationStoreTest, DamagedFilesAreSetAsideAndCounted) {
  const Digest cut = MustPut(1);
  const Digest changed = MustPut(2);
  const Digest sound = MustPut(3);
  fs::resize_file(FileOf(cut), fs::file_size(FileOf(cut)) - 1);
  {
    std::fstream file(FileOf(changed), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(200);
    file.put('\x55');
  }
  fs::copy_file(FileOf(sound), FileOf(Sha256("wrong name")));
  std::ofstream(FileOf(sound) + ".tmp7") << "of a writer that died";
  Reopen();
  EXPECT_EQ(store_->Find(cut), nullptr);
  EXPECT_EQ(store_->Find(changed), nullptr);
  EXPECT_NE(store_->Find(sound), nullptr);
  EXPECT_EQ(Counter("calibrations_set_aside"), 3);
  EXPECT_TRUE(fs::exists(FileOf(cut) + ".broken"));
  EXPECT_TRUE(fs::exists(FileOf(changed) + ".broken"));
  EXPECT_FALSE(fs::exists(FileOf(sound) + ".tmp7"));
}

TEST_F(CalibrationStoreTest, BundlesThatDoNotFitAModelHereAreRefused) {
  const absl::Status unknown =
      store_->Put(MakeCalibration(Spec("other"), 1).Serialize(), *models_).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(unknown.message()),
              HasSubstr(Spec("other").Fingerprint().ToHex() + ", which is not registered here"));
  const absl::Status partial =
      store_->Put(MakeCalibration(Spec(), 1, /*with_values=*/false).Serialize(), *models_).status();
  EXPECT_EQ(partial.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(partial.message()),
              HasSubstr("layer 0, values, head 0 has no rotation, want one of dim 16"));
  EXPECT_THAT(store_->List(Digest()), SizeIs(0));
  EXPECT_TRUE(fs::is_empty(path()));
}

TEST_F(CalibrationStoreTest, TheNumberIsBoundedAndDeletingMakesRoom) {
  std::vector<Digest> ids;
  for (int64_t i = 0; i < CalibrationStore::kMaxCalibrations; ++i) ids.push_back(MustPut(i));
  const std::string one_more = MakeCalibration(Spec(), 999).Serialize();
  const absl::Status full = store_->Put(one_more, *models_).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("64 of 64 are kept"));
  ASSERT_TRUE(store_->Delete(ids[5]).ok());
  EXPECT_EQ(store_->Find(ids[5]), nullptr);
  EXPECT_FALSE(fs::exists(FileOf(ids[5])));
  EXPECT_EQ(store_->Delete(ids[5]).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(store_->Put(one_more, *models_).ok());
}

TEST_F(CalibrationStoreTest, TheOnlyOneOfAModelNeedsNoName) {
  const Digest model = Spec().Fingerprint();
  const auto refusal = [&](const Digest& fingerprint, const Digest& id) {
    const absl::Status status = store_->Choose(fingerprint, id).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal(model, {}), HasSubstr("has no calibration here: kvstow calibrate"));
  const Digest first = MustPut(1);
  EXPECT_EQ((*store_->Choose(model, {}))->id(), first);
  const Digest second = MustPut(2);
  EXPECT_THAT(refusal(model, {}), HasSubstr("has 2 calibrations, say which"));
  EXPECT_EQ((*store_->Choose(model, second))->id(), second);
  EXPECT_THAT(refusal(model, Sha256("x")), HasSubstr("is not here: upload it"));
  EXPECT_THAT(refusal(Spec("other").Fingerprint(), first),
              HasSubstr("is of model " + model.ToHex() + ", want one of"));
}

TEST_F(CalibrationStoreTest, ADirectoryThatCannotBeUsedIsNamed) {
  std::ofstream(dir_.path() + "/file") << "x";
  const absl::Status status = CalibrationStore::Open(dir_.path() + "/file").status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(dir_.path() + "/file"));
}

}  // namespace
}  // namespace kvstow
