#include "client/cpp/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace kvstow {
namespace {

using ::testing::HasSubstr;

const char kFixture[] = KVSTOW_TEST_DATA "/smollm2_kv.safetensors";

std::string WithLength(const std::string& header, const std::string& data) {
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(uint64_t{header.size()} >> (8 * i)));
  return out + header + data;
}

absl::Span<const std::byte> AsBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

absl::Status ParseStatus(const std::string& header, const std::string& data) {
  const std::string file = WithLength(header, data);
  return SafetensorsFile::Parse("f", AsBytes(file)).status();
}

std::string Message(const std::string& header, const std::string& data) {
  return std::string(ParseStatus(header, data).message());
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class ScratchFile {
 public:
  explicit ScratchFile(const std::string& text) {
    std::string path = ::testing::TempDir() + "/safetensors_test_XXXXXX";
    const int fd = mkstemp(path.data());
    close(fd);
    path_ = path;
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~ScratchFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Safetensors, ReadsTheFixture) {
  const auto file = SafetensorsFile::Open(kFixture);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors().size(), 61u);
  EXPECT_EQ(file->tensors()[0].name, "token_ids");  // the order of the header
  ASSERT_NE(file->FindMetadata("model"), nullptr);
  EXPECT_EQ(*file->FindMetadata("model"), "SmolLM2-135M-Instruct");
  EXPECT_EQ(file->FindMetadata("nothing"), nullptr);
  const auto k7 = file->Expect("k.7", TensorType::kBf16, {256, 3, 64});
  ASSERT_TRUE(k7.ok()) << k7.status();
  EXPECT_EQ(file->bytes(**k7).size(), 256u * 3 * 64 * 2);
  const Tensor* ids = file->Find("token_ids");
  ASSERT_NE(ids, nullptr);
  int32_t first = 0;
  std::memcpy(&first, file->bytes(*ids).data(), sizeof(first));
  EXPECT_EQ(first, 1);  // <|im_start|>
}

TEST(Safetensors, WritesTheFixtureAgainByteForByte) {
  const auto file = SafetensorsFile::Open(kFixture);
  ASSERT_TRUE(file.ok()) << file.status();
  SafetensorsWriter writer;
  writer.SetMetadata(file->metadata());
  for (const Tensor& tensor : file->tensors()) {
    ASSERT_TRUE(writer.Add(tensor.name, tensor.type, tensor.shape, file->bytes(tensor)).ok());
  }
  const std::string want = ReadFile(kFixture);
  EXPECT_TRUE(writer.Serialize() == want);
  const ScratchFile out("");
  ASSERT_TRUE(writer.Write(out.path()).ok());
  EXPECT_TRUE(ReadFile(out.path()) == want);
}

TEST(Safetensors, RoundTripsScalarsEmptyTensorsAndOddAddresses) {
  const std::string one = "x";
  const std::string words(12, 'y');
  SafetensorsWriter writer;
  ASSERT_TRUE(writer.Add("scalar", TensorType::kU8, {}, AsBytes(one)).ok());
  ASSERT_TRUE(writer.Add("empty", TensorType::kF32, {3, 0, 2}, {}).ok());
  ASSERT_TRUE(writer.Add("words \"quoted\" \xc3\xa4", TensorType::kI32, {3}, AsBytes(words)).ok());
  const std::string bytes = writer.Serialize();
  const auto file = SafetensorsFile::Parse("f", AsBytes(bytes));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Find("scalar")->num_bytes, 1);
  EXPECT_EQ(file->Find("empty")->num_bytes, 0);
  const Tensor* odd = file->Find("words \"quoted\" \xc3\xa4");
  ASSERT_NE(odd, nullptr);
  EXPECT_EQ(odd->offset, 1);
  EXPECT_EQ(std::memcmp(file->bytes(*odd).data(), words.data(), words.size()), 0);
}

TEST(Safetensors, TakesTensorsInAnyOrderOfTheHeader) {
  EXPECT_TRUE(ParseStatus(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
                          R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                          "xyz")
                  .ok());
}

TEST(Safetensors, RefusesAFileCutShortAndSaysByHowMuch) {
  const std::string whole = ReadFile(kFixture);
  for (size_t size : {size_t{0}, size_t{7}, size_t{8}, size_t{100}, whole.size() - 1}) {
    const ScratchFile cut(whole.substr(0, size));
    const absl::Status status = SafetensorsFile::Open(cut.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << size << " " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(cut.path()));
  }
  const ScratchFile cut(whole.substr(0, whole.size() - 1));
  const std::string message(SafetensorsFile::Open(cut.path()).status().message());
  EXPECT_THAT(message, HasSubstr("v.29"));
  EXPECT_THAT(message, HasSubstr("5899263"));
}

TEST(Safetensors, RefusesAHeaderLongerThanTheLimitBeforeReadingIt) {
  std::string file(16, '\0');
  file[3] = 0x7f;  // 2 GB of header
  const absl::Status status = SafetensorsFile::Parse("f", AsBytes(file)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is this a safetensors file?"));
}

TEST(Safetensors, RefusesOffsetsThatDoNotFitTheShape) {
  const std::string message =
      Message(R"({"k.0":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,10]}})", "0123456789");
  EXPECT_THAT(message, HasSubstr("k.0"));
  EXPECT_THAT(message, HasSubstr("10 bytes"));
  EXPECT_THAT(message, HasSubstr("BF16 [2, 3] needs 12"));
}

TEST(Safetensors, RefusesOverlapGapAndRest) {
  const auto two = [](const std::string& a, const std::string& b) {
    return R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + a +
           R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + b + "}}";
  };
  EXPECT_TRUE(ParseStatus(two("[0,2]", "[2,4]"), "wxyz").ok());
  EXPECT_THAT(Message(two("[0,2]", "[1,3]"), "wxy"), HasSubstr("overlaps"));
  EXPECT_THAT(Message(two("[0,2]", "[3,5]"), "vwxyz"), HasSubstr("gap"));
  EXPECT_THAT(Message(two("[0,2]", "[2,4]"), "vwxyz"), HasSubstr("belongs to none"));
  EXPECT_THAT(Message(two("[1,3]", "[3,5]"), "vwxyz"), HasSubstr("gap"));
  EXPECT_THAT(Message(two("[0,2]", "[2,9]"), "wxyz"), HasSubstr("data_offsets"));
  EXPECT_THAT(Message(two("[0,2]", "[4,2]"), "wxyz"), HasSubstr("data_offsets"));
}

TEST(Safetensors, RefusesShapesThatOverflow) {
  EXPECT_THAT(Message(R"({"a":{"dtype":"F64","shape":[4294967296,4294967296],)"
                      R"("data_offsets":[0,0]}})",
                      ""),
              HasSubstr("more than 63 bits"));
  EXPECT_THAT(Message(R"({"a":{"dtype":"U8","shape":[18446744073709551615],)"
                      R"("data_offsets":[0,0]}})",
                      ""),
              HasSubstr("63 bits"));
}

TEST(Safetensors, RefusesWhatIsNoHeader) {
  const std::string tensor = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_THAT(Message("", ""), HasSubstr("not a JSON object"));
  EXPECT_THAT(Message("[]", ""), HasSubstr("not a JSON object"));
  EXPECT_THAT(Message("{\"a\":" + tensor, "x"), HasSubstr("not a JSON object"));
  EXPECT_THAT(Message("{\"a\":" + tensor + ",\"a\":" + tensor + "}", "x"), HasSubstr("twice"));
  EXPECT_THAT(Message(R"({"a":1})", ""), HasSubstr("not an object"));
  EXPECT_THAT(Message(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", "x"), HasSubstr("dtype"));
  EXPECT_THAT(Message(R"({"a":{"dtype":"F12","shape":[1],"data_offsets":[0,1]}})", "x"),
              HasSubstr("F12"));
  EXPECT_THAT(Message(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "x"),
              HasSubstr("-1"));
  EXPECT_THAT(Message(R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", "x"),
              HasSubstr("1.5"));
  EXPECT_THAT(Message(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", "x"),
              HasSubstr("data_offsets"));
  EXPECT_THAT(Message(R"({"__metadata__":{"n":1}})", ""), HasSubstr("\"n\" is not a string"));
}

TEST(Safetensors, OpenNamesThePathAndTheReason) {
  const absl::Status missing = SafetensorsFile::Open("/nonexistent/kv").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("/nonexistent/kv"));
  EXPECT_THAT(std::string(SafetensorsFile::Open("/dev").status().message()),
              HasSubstr("not a regular file"));
}

TEST(Safetensors, ExpectNamesTheNearestTensorAndTheShapeFound) {
  const auto file = SafetensorsFile::Open(kFixture);
  ASSERT_TRUE(file.ok());
  const absl::Status missing = file->Expect("k.300", TensorType::kBf16, {1}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("nearest name is \"k."));
  const absl::Status other = file->Expect("k.0", TensorType::kF16, {256, 3, 64}).status();
  EXPECT_THAT(std::string(other.message()), HasSubstr("BF16 [256, 3, 64], want F16"));
}

TEST(SafetensorsWriter, RefusesWrongSizesAndEqualNames) {
  SafetensorsWriter writer;
  const std::string four = "abcd";
  EXPECT_EQ(writer.Add("a", TensorType::kF32, {2}, AsBytes(four)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(writer.Add("a", TensorType::kF32, {1}, AsBytes(four)).ok());
  EXPECT_EQ(writer.Add("a", TensorType::kF32, {1}, AsBytes(four)).code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(SafetensorsWriter, LeavesTheOldFileWhenItCannotWrite) {
  SafetensorsWriter writer;
  const absl::Status status = writer.Write("/nonexistent/dir/out.safetensors");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nonexistent/dir/out.safetensors"));
}

}  // namespace
}  // namespace kvstow
