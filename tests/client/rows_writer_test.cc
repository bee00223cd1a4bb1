// Rows out of memory that another process may still write: what is checked is what was read.
#include "client/cpp/rows_writer.h"

#include <gtest/gtest.h>

#include "kernels/core/checksum.h"
#include "tests/client/kv_client_fixture.h"

namespace kvstow {
namespace {

using testing::EngineMemory;
using testing::Rng;
using testing::ToySpec;

// A block whose planes all came with `codec`, not checked, as through a window.
struct SharedBlock {
  SharedBlock(const BlockLayout& layout, CodecId codec) {
    Rng rng(1);
    for (int32_t i = 0; i < layout.num_planes(); ++i) {
      const PlaneInfo& plane = layout.plane(i);
      std::vector<std::byte> rows(plane.row_bytes);
      for (size_t at = 0; at + 1 < rows.size(); at += 2) {
        const uint16_t bits = FloatToBf16(static_cast<float>(rng.Gaussian()));
        std::memcpy(&rows[at], &bits, 2);
      }
      const PlaneShape shape = CalibratedShape(layout, plane, nullptr);
      const Codec& known = *FindCodec(EffectiveCodec(codec, shape));
      std::vector<std::byte> unit = rows;
      if (known.id != CodecId::kRaw) {
        unit.resize(known.plane_bytes(shape));
        BestBackend(known).encode(shape, rows.data(), unit.data());
      }
      planes.push_back(i);
      units.push_back(std::move(unit));
      block.units.push_back({.codec = known.id, .xxh3 = Xxh3(units[i]), .is_checked = false});
    }
    for (size_t i = 0; i < units.size(); ++i) block.units[i].bytes = units[i];
  }
  std::vector<int32_t> planes;
  std::vector<std::vector<std::byte>> units;
  ReceivedBlock block;
};

class RowsWriterTest : public ::testing::TestWithParam<CodecId> {
 protected:
  RowsWriterTest() {
    model_.spec = ToySpec();
    model_.layout = std::make_shared<const BlockLayout>(BlockLayout::Create(ToySpec()).value());
  }
  Model model_;
};

TEST_P(RowsWriterTest, AUnitThatChangedAfterItWasAnnouncedIsRefused) {
  const EngineMemory memory(*model_.layout);
  SharedBlock shared(*model_.layout, GetParam());
  const RowsPlace place{.layers = memory.layers};
  RowsWriter writer(model_, shared.planes, place);
  EXPECT_EQ(writer.Write(shared.block), absl::OkStatus());
  // The planes of layers with heads have their rows apart, those of the last one in one piece.
  for (const size_t unit : {size_t{2}, shared.units.size() - 1}) {
    shared.units[unit].back() ^= std::byte{1};
    EXPECT_EQ(writer.Write(shared.block),
              absl::DataLossError(absl::StrCat("unit ", unit, ": its checksum differs")));
    shared.units[unit].back() ^= std::byte{1};
  }
  EXPECT_EQ(writer.Write(shared.block), absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(RowsWriter, RowsWriterTest,
                         ::testing::Values(CodecId::kRaw, CodecId::kInt8),
                         [](const auto& info) { return std::string(FindCodec(info.param)->name); });

}  // namespace
}  // namespace kvstow
