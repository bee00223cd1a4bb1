// Calibrations over the wire, and blocks of the codecs that need them.
#include "kernels/codec/calibration.h"
#include "tests/service/server_fixture.h"

namespace kvstow::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string BytesOf(const Digest& digest) { return std::string(digest.AsStringView()); }

class ServerCalibration : public ServerFixture {
 protected:
  void SetUp() override {
    options_.store.nvme_path = dir_.path() + "/nvme";
    options_.store.nvme_bytes = int64_t{64} << 20;
    Start();
    model_ = Register(SmallSpec());
  }

  static Calibration Make(const ModelSpec& spec, uint64_t seed) {
    const BlockLayout layout = *BlockLayout::Create(spec);
    std::vector<Calibration::Entry> entries;
    for (const PlaneInfo& plane : layout.planes()) {
      entries.push_back({{plane.layer_idx, plane.role, plane.head_idx},
                         Rotation::Reflection(plane.dim, seed++).value()});
    }
    return Calibration::Create(spec.Fingerprint(), Sha256("samples"), std::move(entries)).value();
  }

  // Sends `bundle`, said to have `bundle_bytes`, in chunks.
  grpc::Status Send(const std::string& bundle, uint64_t bundle_bytes, v1::CalibrationInfo* info,
                    size_t chunk_bytes = 10000) {
    v1::PutCalibrationResponse response;
    grpc::ClientContext context;
    const auto writer = calibrations_->PutCalibration(&context, &response);
    v1::PutCalibrationRequest request;
    request.set_bundle_bytes(bundle_bytes);
    for (size_t at = 0; at < bundle.size(); at += chunk_bytes) {
      request.set_chunk(bundle.substr(at, chunk_bytes));
      if (!writer->Write(request)) break;
      request.Clear();
    }
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    if (info != nullptr) *info = response.info();
    return status;
  }
  grpc::Status Send(const std::string& bundle) { return Send(bundle, bundle.size(), nullptr); }

  grpc::Status Fetch(const Digest& id, std::string* bundle) {
    v1::GetCalibrationRequest request;
    request.set_id(BytesOf(id));
    grpc::ClientContext context;
    const auto reader = calibrations_->GetCalibration(&context, request);
    v1::GetCalibrationResponse response;
    uint64_t bundle_bytes = 0;
    while (reader->Read(&response)) {
      if (bundle->empty()) bundle_bytes = response.bundle_bytes();
      *bundle += response.chunk();
    }
    EXPECT_EQ(bundle->size(), bundle_bytes);
    return reader->Finish();
  }

  grpc::Status Delete(const Digest& id) {
    v1::DeleteCalibrationRequest request;
    request.set_id(BytesOf(id));
    v1::DeleteCalibrationResponse response;
    grpc::ClientContext context;
    return calibrations_->DeleteCalibration(&context, request, &response);
  }

  v1::ReserveResult ReserveWith(const Digest& id, const std::string& codec,
                                v1::Form form = v1::FORM_ROWS) {
    v1::ReserveRequest request;
    request.set_fingerprint(BytesOf(model_->fingerprint()));
    request.set_form(form);
    if (!id.is_zero()) request.set_calibration_id(BytesOf(id));
    v1::ReserveBlock* block = request.add_blocks();
    block->set_key(BytesOf(Key(77)));
    block->set_codec(codec);
    v1::ReserveResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(control_->Reserve(&context, request, &response).ok());
    return response.results(0);
  }

  ModelRef model_;
};

TEST_F(ServerCalibration, ABundleGoesUpIsListedComesDownAndSurvivesARestart) {
  const Calibration calibration = Make(SmallSpec(), 1);
  const std::string bundle = calibration.Serialize();
  v1::CalibrationInfo info;
  ASSERT_TRUE(Send(bundle, bundle.size(), &info).ok());
  EXPECT_EQ(info.id(), BytesOf(calibration.id()));
  EXPECT_EQ(info.fingerprint(), BytesOf(model_->fingerprint()));
  EXPECT_EQ(info.source(), BytesOf(Sha256("samples")));
  EXPECT_EQ(info.num_rotations(), 8u);
  EXPECT_EQ(info.bundle_bytes(), bundle.size());
  EXPECT_TRUE(Send(bundle).ok()) << "again is fine";

  Restart();
  v1::ListCalibrationsResponse list;
  grpc::ClientContext context;
  ASSERT_TRUE(calibrations_->ListCalibrations(&context, {}, &list).ok());
  ASSERT_THAT(list.calibrations(), SizeIs(1));
  EXPECT_EQ(list.calibrations(0).SerializeAsString(), info.SerializeAsString());
  std::string fetched;
  ASSERT_TRUE(Fetch(calibration.id(), &fetched).ok());
  EXPECT_EQ(fetched, bundle);
  std::string nothing;
  EXPECT_EQ(Fetch(Sha256("none"), &nothing).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerCalibration, DamagedAndForeignBundlesAreRefusedAndSayWhy) {
  const std::string bundle = Make(SmallSpec(), 1).Serialize();
  struct Case {
    std::string bundle;
    uint64_t bundle_bytes;
    grpc::StatusCode code;
    std::string part;
  };
  std::string changed = bundle;
  changed[500] ^= 1;
  std::string skewed = bundle;
  skewed[384 + 1] = 0x7f;  // the first entry of the first matrix, hashed again
  skewed.replace(skewed.size() - 32, 32, BytesOf(Sha256(skewed.substr(0, skewed.size() - 32))));
  const std::vector<Case> cases = {
      {bundle.substr(0, 1000), 1000, grpc::StatusCode::DATA_LOSS, "1000 bytes, the bundle has"},
      {bundle.substr(0, 1000), bundle.size(), grpc::StatusCode::DATA_LOSS, "1000 bytes came"},
      {bundle, 1000, grpc::StatusCode::DATA_LOSS, "more than the 1000 bytes"},
      {bundle, 0, grpc::StatusCode::INVALID_ARGUMENT, "bundle_bytes: 0, want 1 to 134217728"},
      {bundle, uint64_t{1} << 40, grpc::StatusCode::INVALID_ARGUMENT, "want 1 to 134217728"},
      {"", 0, grpc::StatusCode::DATA_LOSS, "do not begin like a bundle"},
      {changed, changed.size(), grpc::StatusCode::DATA_LOSS, "hash"},
      {skewed, skewed.size(), grpc::StatusCode::INVALID_ARGUMENT, "is not orthogonal"},
      {Make(LargeSpec(), 1).Serialize(), Make(LargeSpec(), 1).Serialize().size(),
       grpc::StatusCode::FAILED_PRECONDITION, "which is not registered here"},
  };
  for (const Case& c : cases) {
    const grpc::Status status = Send(c.bundle, c.bundle_bytes, nullptr);
    EXPECT_EQ(status.error_code(), c.code) << c.part << ": " << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(c.part));
  }
  EXPECT_EQ(Send(bundle + std::string(2 << 20, 'x'), bundle.size() + (2 << 20), nullptr, 2 << 20)
                .error_code(),
            grpc::StatusCode::INVALID_ARGUMENT)
      << "a chunk over the limit";
  EXPECT_EQ(Stat().counters().at("calibrations_set_aside"), 0u);
}

TEST_F(ServerCalibration, BlocksAreEncodedWithItNameItAndAreDecodedWithIt) {
  const Calibration calibration = Make(SmallSpec(), 1);
  ASSERT_TRUE(Send(calibration.Serialize()).ok());
  const std::vector<std::string> rows = MakeRows(*model_, 1);
  int i = 0;
  for (const std::string codec : {"olm4", "olm3", "osu2", "oscar2", "k=tqm4,v=olm3"}) {
    SCOPED_TRACE(codec);
    Store(model_, Key(++i), rows, codec, /*durable=*/true);
    const CodecPair pair = ParseCodecChoice(codec)->pair;
    const GotBlock encoded = Get({Key(i)}, v1::FORM_ENCODED)[0];
    const GotBlock decoded = Get({Key(i)}, v1::FORM_ROWS)[0];
    EXPECT_EQ(encoded.calibration_id, BytesOf(calibration.id()));
    ASSERT_THAT(encoded.units, SizeIs(rows.size()));
    ASSERT_THAT(decoded.units, SizeIs(rows.size()));
    for (int32_t plane = 0; plane < 8; ++plane) {
      const CodecId id = pair.of(model_->layout().plane(plane).role);
      EXPECT_EQ(encoded.codecs[plane], id);
      EXPECT_EQ(encoded.units[plane], ScalarEncode(*model_, plane, id, rows[plane], &calibration));
      EXPECT_EQ(decoded.units[plane],
                ScalarDecode(*model_, plane, id, encoded.units[plane], &calibration));
    }
  }
  // From disk, after a restart, with the bundle read from its file.
  const GotBlock before = Get({Key(1)}, v1::FORM_ROWS)[0];
  Restart();
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ROWS)[0].units, before.units);
}

TEST_F(ServerCalibration, ARecordWhoseBundleIsMissingIsAMissWithACountAndMakesRoomForANewOne) {
  const Calibration calibration = Make(SmallSpec(), 1);
  ASSERT_TRUE(Send(calibration.Serialize()).ok());
  const std::vector<std::string> rows = MakeRows(*model_, 1);
  Store(model_, Key(1), rows, "olm4");
  Store(model_, Key(2), rows, "olm4");
  Store(model_, Key(3), rows, "tq4");
  ASSERT_TRUE(Delete(calibration.id()).ok());
  EXPECT_EQ(Delete(calibration.id()).error_code(), grpc::StatusCode::NOT_FOUND);
  constexpr int kNotFound = static_cast<int>(absl::StatusCode::kNotFound);
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ROWS)[0].code, kNotFound);
  const std::vector<GotBlock> got = Get({Key(2), Key(3)}, v1::FORM_ENCODED);
  EXPECT_EQ(got[0].code, kNotFound);
  EXPECT_EQ(got[1].code, 0) << "others are not concerned";
  EXPECT_EQ(Stat().counters().at("calibration_misses"), 2u);
  Store(model_, Key(1), rows, "tq4");
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ROWS)[0].code, 0);
  EXPECT_EQ(Stat().counters().at("calibration_misses"), 2u);
}

TEST_F(ServerCalibration, WithoutOneOrWithSeveralTheCodecsAreRefusedUntilOneIsNamed) {
  const v1::ReserveResult none = ReserveWith({}, "k=tqm4,v=olm4");
  EXPECT_EQ(none.status().code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(none.status().message(), HasSubstr("has no calibration here"));
  const Calibration first = Make(SmallSpec(), 1);
  const Calibration second = Make(SmallSpec(), 50);
  ASSERT_TRUE(Send(first.Serialize()).ok());
  ASSERT_TRUE(Send(second.Serialize()).ok());
  EXPECT_THAT(ReserveWith({}, "olm4").status().message(), HasSubstr("has 2 calibrations"));
  EXPECT_THAT(ReserveWith(Sha256("x"), "olm4").status().message(), HasSubstr("is not here"));
  Register(LargeSpec());
  const Calibration foreign = Make(LargeSpec(), 1);
  ASSERT_TRUE(Send(foreign.Serialize()).ok());
  EXPECT_THAT(ReserveWith(foreign.id(), "olm4").status().message(), HasSubstr("is of model"));
  EXPECT_THAT(ReserveWith({}, "olm4", v1::FORM_ENCODED).status().message(),
              HasSubstr("calibration_id: none, want the one that the units"));
  const v1::ReserveResult named = ReserveWith(second.id(), "olm4");
  EXPECT_EQ(named.status().code(), 0) << named.status().message();
}

}  // namespace
}  // namespace kvstow::testing
