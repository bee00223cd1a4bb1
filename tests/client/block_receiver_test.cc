// Units that a service has put into shared memory itself: each is checked where it stands.
#include "client/cpp/block_receiver.h"

#include <gtest/gtest.h>

#include "client/cpp/connection.h"
#include "kernels/core/checksum.h"
#include "tests/client/kv_client_fixture.h"

namespace kvstow {
namespace {

using testing::Rng;
using testing::ToySpec;

// A window that holds the planes of two blocks, those of each plane one after the other.
class PlacedBlocks : public ::testing::Test {
 protected:
  PlacedBlocks() {
    model_.spec = ToySpec();
    model_.fingerprint = model_.spec.Fingerprint();
    model_.layout = std::make_shared<const BlockLayout>(BlockLayout::Create(ToySpec()).value());
    window_.resize(2 * model_.layout->block_bytes());
    Rng rng(1);
    for (std::byte& b : window_) b = static_cast<std::byte>(rng.Next());
    uint64_t offset = 0;
    for (int32_t i = 0; i < model_.layout->num_planes(); ++i) {
      planes_.push_back(i);
      placed_.offsets.push_back(offset);
      offset += 2 * model_.layout->plane(i).row_bytes;
    }
    placed_.memory = absl::MakeSpan(window_);
    receiver_ = std::make_unique<BlockReceiver>(model_, calibrations_, planes_, keys_, places_);
    receiver_->ExpectPlaced(&placed_);
  }

  // One frame with all units of a block.
  GetFrameHeader Frame(uint32_t block_idx) const {
    GetFrameHeader header{.block_idx = block_idx,
                          .key = std::string(keys_[block_idx].AsStringView()),
                          .fingerprint = std::string(model_.fingerprint.AsStringView()),
                          .num_units = static_cast<uint32_t>(planes_.size()),
                          .num_tokens = testing::kTokensPerBlock,
                          .is_placed = true};
    for (const int32_t i : planes_) {
      const int64_t bytes = model_.layout->plane(i).row_bytes;
      header.unit_bytes.push_back(static_cast<uint32_t>(bytes));
      header.unit_codec.push_back(0);
      header.unit_xxh3.push_back(
          Xxh3(placed_.memory.subspan(placed_.OffsetOf(i, block_idx, bytes), bytes)));
    }
    return header;
  }

  Model model_;
  std::vector<std::byte> window_;
  std::vector<int32_t> planes_;
  PlacedUnits placed_;
  const std::vector<BlockKey> keys_ = {Sha256("a"), Sha256("b")};
  const std::vector<int32_t> places_ = {0, 1};
  std::unique_ptr<Connection> connection_ = Connection::Create({}).value();  // never connects
  CalibrationCache calibrations_{connection_.get()};
  std::unique_ptr<BlockReceiver> receiver_;
};

TEST_F(PlacedBlocks, AreTakenWhereTheyStand) {
  for (uint32_t block = 0; block < 2; ++block) {
    const absl::StatusOr<const ReceivedBlock*> got = receiver_->OnFrame(Frame(block), {});
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_NE(*got, nullptr);
    for (size_t i = 0; i < planes_.size(); ++i) {
      const ReceivedBlock::Unit& unit = (*got)->units[i];
      const auto bytes = static_cast<int64_t>(unit.bytes.size());
      EXPECT_EQ(unit.bytes.data(), window_.data() + placed_.OffsetOf(i, block, bytes));
    }
  }
  receiver_->OnEnd(absl::OkStatus());
  EXPECT_EQ(receiver_->received_bytes(), static_cast<int64_t>(window_.size()));
}

TEST_F(PlacedBlocks, AreRefusedWhereTheWindowHoldsOtherBytes) {
  const GetFrameHeader frame = Frame(1);
  const int64_t bytes = model_.layout->plane(4).row_bytes;
  window_[placed_.OffsetOf(4, 1, bytes) + bytes - 1] ^= std::byte{1};
  EXPECT_NE(*receiver_->OnFrame(Frame(0), {}), nullptr);
  EXPECT_EQ(*receiver_->OnFrame(frame, {}), nullptr);
  receiver_->OnEnd(absl::OkStatus());
  EXPECT_TRUE(receiver_->statuses()[0].ok());
  EXPECT_EQ(receiver_->statuses()[1], absl::DataLossError("block 1: unit 4: its checksum differs"));
  EXPECT_EQ(receiver_->corrupt_keys(), (std::vector<BlockKey>{keys_[1]}));
}

TEST_F(PlacedBlocks, AreRefusedWhereNobodyAskedForThem) {
  receiver_->ExpectPlaced(nullptr);
  EXPECT_EQ(*receiver_->OnFrame(Frame(0), {}), nullptr);
  receiver_->OnEnd(absl::OkStatus());
  EXPECT_EQ(receiver_->statuses()[0], absl::DataLossError("block 0: unit 0: placed, but nowhere"));
}

}  // namespace
}  // namespace kvstow
