// Rotations and the bundles they come in: what is refused, and how it is said.
#include "kernels/codec/calibration.h"

#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

const Digest kModel = Sha256("a model");
const Digest kSource = Sha256("samples");

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

bool Contains(const absl::Status& status, std::string_view part) {
  return MessageOf(status).find(part) != std::string::npos;
}

Calibration SmallCalibration() {
  std::vector<Calibration::Entry> entries;
  for (int layer : {1, 0}) {
    for (Role role : {Role::kValue, Role::kKey}) {
      for (int head : {0, 1}) {
        const int dim = role == Role::kKey ? 16 : 8;
        const uint64_t seed = static_cast<uint64_t>(layer) * 4 + head * 2 + (dim == 8 ? 1 : 0);
        entries.push_back({{.layer_idx = layer, .role = role, .head_idx = head},
                           Rotation::Reflection(dim, seed).value()});
      }
    }
  }
  return Calibration::Create(kModel, kSource, std::move(entries)).value();
}

// Puts the right hash under changed bytes.
void Rehash(std::string& bytes) {
  bytes.resize(bytes.size() - 32);
  bytes.append(Sha256(bytes).AsStringView());
}

std::vector<int16_t> Identity(int dim) {
  std::vector<int16_t> matrix(dim * dim);
  for (int i = 0; i < dim; ++i) matrix[i * dim + i] = 1 << 14;
  return matrix;
}

TEST(Rotation, KeepsItsMatrixInEveryOrder) {
  const Rotation rotation = Rotation::Reflection(24, 5).value();
  ASSERT_EQ(rotation.dim(), 24);
  for (int row = 0; row < 24; ++row) {
    for (int column = 0; column < 24; ++column) {
      const int factor = rotation.matrix()[row * 24 + column];
      EXPECT_EQ(rotation.at(row, column), factor);
      EXPECT_EQ(rotation.forward_pairs()[(column / 2 * 24 + row) * 2 + column % 2], factor);
      EXPECT_EQ(rotation.inverse_pairs()[(row / 2 * 24 + column) * 2 + row % 2], factor);
    }
  }
}

TEST(Rotation, RefusesWhatIsNotOrthogonalAndNamesTheRows) {
  EXPECT_TRUE(Rotation::Create(16, Identity(16)).ok());
  std::vector<int16_t> matrix = Identity(16);
  matrix[3 * 16 + 5] = 64;  // 2^20 off the diagonal: just allowed
  EXPECT_TRUE(Rotation::Create(16, matrix).ok());
  matrix[3 * 16 + 5] = 65;
  absl::Status status = Rotation::Create(16, matrix).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MessageOf(status),
            "rotation of dim 16 is not orthogonal: the product of rows 3 and 5 is 1064960, want 0 "
            "+- 1048576");
  matrix = Identity(16);
  matrix[0] = 16000;  // too short a row
  EXPECT_TRUE(Contains(Rotation::Create(16, matrix).status(), "rows 0 and 0"));
  EXPECT_FALSE(Rotation::Create(16, std::vector<int16_t>(256)).ok());
  EXPECT_FALSE(Rotation::Create(16, Identity(8)).ok());
  for (int dim : {-8, 0, 4, 12, 1032}) {
    status = Rotation::Create(dim, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << dim;
    EXPECT_FALSE(Rotation::Reflection(dim, 1).ok()) << dim;
  }
}

TEST(Calibration, ComesBackAsItWas) {
  const Calibration calibration = SmallCalibration();
  const std::string bytes = calibration.Serialize();
  const absl::StatusOr<Calibration> back = Calibration::Parse(bytes, kModel);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->Serialize(), bytes);
  EXPECT_EQ(back->id(), calibration.id());
  EXPECT_EQ(back->id(), Sha256(std::string_view(bytes).substr(0, bytes.size() - 32)));
  EXPECT_EQ(back->fingerprint(), kModel);
  EXPECT_EQ(back->source(), kSource);
  EXPECT_EQ(back->num_rotations(), 8);
  const Rotation* rotation = back->Find({.layer_idx = 1, .role = Role::kKey, .head_idx = 1});
  ASSERT_NE(rotation, nullptr);
  EXPECT_EQ(rotation->dim(), 16);
  const Rotation want = Rotation::Reflection(16, 6).value();
  EXPECT_TRUE(std::equal(want.matrix().begin(), want.matrix().end(), rotation->matrix().begin()));
  EXPECT_EQ(back->Find({.layer_idx = 2}), nullptr);
  EXPECT_EQ(back->Find({.layer_idx = 0, .role = Role::kKey, .head_idx = 2}), nullptr);
}

TEST(Calibration, IdSaysWhatItHolds) {
  const Calibration calibration = SmallCalibration();
  EXPECT_EQ(SmallCalibration().id(), calibration.id());
  std::vector<Calibration::Entry> one;
  one.push_back({{}, Rotation::Reflection(8, 1).value()});
  const Digest id = Calibration::Create(kModel, kSource, one)->id();
  EXPECT_NE(Calibration::Create(Sha256("another"), kSource, one)->id(), id);
  EXPECT_NE(Calibration::Create(kModel, Sha256("others"), one)->id(), id);
  one[0].rotation = Rotation::Reflection(8, 2).value();
  EXPECT_NE(Calibration::Create(kModel, kSource, one)->id(), id);
}

TEST(Calibration, RefusesPlacesThatCannotBe) {
  const auto create = [](std::vector<Calibration::Entry> entries) {
    return Calibration::Create(kModel, kSource, std::move(entries)).status();
  };
  const Rotation rotation = Rotation::Reflection(8, 1).value();
  EXPECT_EQ(create({}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Contains(create({{{.layer_idx = -1}, rotation}}), "negative"));
  EXPECT_TRUE(Contains(create({{{.head_idx = -1}, rotation}}), "negative"));
  EXPECT_TRUE(Contains(create({{{.layer_idx = 3}, rotation}, {{.layer_idx = 3}, rotation}}),
                       "layer 3, keys, head 0 is given twice"));
}

TEST(Calibration, CutBundlesAreDamaged) {
  const std::string bytes = SmallCalibration().Serialize();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const absl::Status status = Calibration::Parse(bytes.substr(0, size), kModel).status();
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << size << " " << status;
  }
  EXPECT_EQ(Calibration::Parse(bytes + '\0', kModel).status().code(), absl::StatusCode::kDataLoss);
}

TEST(Calibration, EveryFlippedBitIsFound) {
  const std::string bytes = SmallCalibration().Serialize();
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = bytes;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      const absl::Status status = Calibration::Parse(bad, kModel).status();
      const bool is_version = at >= 8 && at < 12;
      ASSERT_EQ(status.code(),
                is_version ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kDataLoss)
          << "byte " << at << " bit " << bit;
    }
  }
}

TEST(Calibration, OtherModelsAreRefused) {
  const std::string bytes = SmallCalibration().Serialize();
  const absl::Status status = Calibration::Parse(bytes, Sha256("another model")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Contains(status, kModel.ToHex())) << status;
}

// Whole and hashed, and wrong all the same: what a faulty writer might leave.
TEST(Calibration, WholeBundlesOfWrongContentAreRefused) {
  const std::string good = SmallCalibration().Serialize();
  const auto refused = [&](size_t at, char value, std::string_view part) {
    std::string bad = good;
    bad[at] = value;
    Rehash(bad);
    const absl::Status status = Calibration::Parse(bad, kModel).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(Contains(status, part)) << status << ", want " << part;
  };
  refused(12, 0, "0 rotations");
  refused(14, 1, "rotations in");       // more than there is room for
  refused(24, 1, "where they belong");  // a reserved byte of the header
  refused(96 + 8, 2, "role 2");
  refused(96 + 9, 1, "rotation kind 1");
  refused(96 + 10, 1, "reserved");
  refused(96 + 12, 9, "dim is 9");
  refused(96 + 12, 4, "dim is 4");
  refused(96 + 16, 1, "a matrix of dim");    // not aligned
  refused(96 + 19, 1, "a matrix of dim");    // far behind the end
  refused(96 + 32, 7, "where they belong");  // order of the table
  size_t first_matrix = 0;
  std::memcpy(&first_matrix, good.data() + 96 + 16, sizeof(first_matrix));
  refused(first_matrix + 1, 0x7f, "layer 0, keys, head 0: rotation of dim 16 is not orthogonal");
}

TEST(Calibration, CheckCoversNamesThePlaneThatIsMissing) {
  ModelSpec spec;
  spec.name = "small";
  spec.weights = "none";
  spec.groups = {{.first_layer = 0,
                  .num_layers = 2,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 2,
                  .k_dim = 16,
                  .v_dim = 8}};
  const Calibration calibration = SmallCalibration();
  EXPECT_TRUE(calibration.CheckCovers(BlockLayout::Create(spec).value()).ok());
  spec.groups[0].v_dim = 16;
  absl::Status status = calibration.CheckCovers(BlockLayout::Create(spec).value());
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(
      Contains(status, "layer 0, values, head 0 has a rotation of dim 8, want one of dim 16"))
      << status;
  spec.groups[0].v_dim = 8;
  spec.groups[0].num_layers = 3;
  status = calibration.CheckCovers(BlockLayout::Create(spec).value());
  EXPECT_TRUE(Contains(status, "layer 2, keys, head 0 has no rotation")) << status;
}

}  // namespace
}  // namespace kvstow
