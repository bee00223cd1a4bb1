// The safetensors reader against any bytes: no crash, no read outside, and whatever it takes is
// whole: tensors cover the data without gap, and the writer writes them so that they read alike.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "client/cpp/safetensors.h"
#include "tests/testing/rng.h"

namespace kvstow {
namespace {

using testing::Rng;

constexpr uint64_t kSeed = 20261130;
constexpr int kRounds = 20000;

std::string WithLength(const std::string& header, const std::string& data) {
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(uint64_t{header.size()} >> (8 * i)));
  return out + header + data;
}

std::string SampleFile() {
  return WithLength(
      R"({"__metadata__":{"model":"m"},"token_ids":{"dtype":"I32","shape":[2],)"
      R"("data_offsets":[0,8]},"k.0":{"dtype":"BF16","shape":[2,1,3],"data_offsets":[8,20]},)"
      R"("v.0":{"dtype":"BF16","shape":[2,1,3],"data_offsets":[20,32]}}  )",
      std::string(32, 'd'));
}

// Bytes copied to the heap at exactly their size, so that the address sanitizer sees a read beyond.
// Returns whether they were taken.
bool Check(const std::string& bytes) {
  const std::vector<std::byte> exact(
      reinterpret_cast<const std::byte*>(bytes.data()),
      reinterpret_cast<const std::byte*>(bytes.data()) + bytes.size());
  const auto file = SafetensorsFile::Parse("fuzz", exact);
  if (!file.ok()) {
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
    return false;
  }
  int64_t num_bytes = 0;
  SafetensorsWriter writer;
  writer.SetMetadata(file->metadata());
  for (const Tensor& tensor : file->tensors()) {
    num_bytes += tensor.num_bytes;
    EXPECT_EQ(file->Find(tensor.name), &tensor);
    EXPECT_TRUE(writer.Add(tensor.name, tensor.type, tensor.shape, file->bytes(tensor)).ok());
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, exact.data(), sizeof(header_bytes));
  EXPECT_EQ(num_bytes, static_cast<int64_t>(exact.size() - 8 - header_bytes));
  const std::string again = writer.Serialize();
  const auto reread = SafetensorsFile::Parse(
      "again", {reinterpret_cast<const std::byte*>(again.data()), again.size()});
  EXPECT_TRUE(reread.ok()) << reread.status();
  if (reread.ok()) {
    EXPECT_EQ(reread->tensors().size(), file->tensors().size());
  }
  return true;
}

std::string Mutate(std::string bytes, Rng& rng) {
  static constexpr char kTelling[] = "{}[]\",:0123456789-.eE\\\x00\xff";
  for (uint64_t n = 1 + rng.Below(4); n > 0 && !bytes.empty(); --n) {
    const size_t at = rng.Below(bytes.size());
    switch (rng.Below(5)) {
      case 0:
        bytes[at] = static_cast<char>(rng.Next());
        break;
      case 1:
        bytes[at] = kTelling[rng.Below(sizeof(kTelling) - 1)];
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3:
        bytes.erase(at, 1 + rng.Below(8));
        break;
      default: {
        const size_t from = rng.Below(bytes.size());
        bytes.insert(at, bytes.substr(from, rng.Below(32)));
      }
    }
  }
  return bytes;
}

TEST(SafetensorsFuzz, TakesItsOwnSample) { EXPECT_TRUE(Check(SampleFile())); }

TEST(SafetensorsFuzz, SurvivesMutatedFiles) {
  Rng rng(kSeed);
  int num_taken = 0;
  for (int round = 0; round < kRounds && !::testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE(::testing::Message() << "seed " << kSeed << " round " << round);
    num_taken += Check(Mutate(SampleFile(), rng)) ? 1 : 0;
  }
  EXPECT_GT(num_taken, 0);  // else the mutations never get past the first check
}

TEST(SafetensorsFuzz, SurvivesMutatedHeadersOfRightLength) {
  Rng rng(kSeed + 1);
  const std::string sample = SampleFile();
  const std::string header = sample.substr(8, sample.size() - 8 - 32);
  for (int round = 0; round < kRounds && !::testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE(::testing::Message() << "seed " << kSeed + 1 << " round " << round);
    Check(WithLength(Mutate(header, rng), std::string(32, 'd')));
  }
}

TEST(SafetensorsFuzz, SurvivesNoise) {
  Rng rng(kSeed + 2);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes(rng.Below(200), '\0');
    for (char& c : bytes) c = static_cast<char>(rng.Next());
    if (bytes.size() > 8) std::memset(bytes.data() + 1, 0, 7);
    Check(bytes);
  }
}

TEST(SafetensorsFuzz, SurvivesDeepNesting) {
  const std::string deep(100'000, '[');
  EXPECT_FALSE(Check(WithLength("{\"a\":" + deep, "")));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_FALSE(Check(WithLength(objects, "")));
  std::string closed = objects + "1" + std::string(100'000, '}');
  EXPECT_FALSE(Check(WithLength(closed, "")));
}

}  // namespace
}  // namespace kvstow
