#include "proto/status.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/testing/rng.h"

namespace kvstow {
namespace {

TEST(Status, EveryCodeKeepsItsNumberAndText) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "why");
    const grpc::Status sent = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(sent.error_code()), code);
    EXPECT_EQ(FromGrpcStatus(sent), status);
    const v1::ItemStatus item = ToItemStatus(status);
    EXPECT_EQ(item.code(), code);
    EXPECT_EQ(item.retry_after_ms(), 0u);
    EXPECT_EQ(FromItemStatus(item), status);
  }
}

TEST(Status, ACodeNobodyKnowsIsUnknown) {
  v1::ItemStatus item;
  item.set_code(17);
  item.set_message("later");
  EXPECT_EQ(FromItemStatus(item), absl::UnknownError("later"));
  item.set_code(-1);
  EXPECT_EQ(FromItemStatus(item), absl::UnknownError("later"));
  EXPECT_EQ(FromGrpcStatus(grpc::Status(static_cast<grpc::StatusCode>(31), "later")),
            absl::UnknownError("later"));
}

TEST(Status, TheRetryHintSurvivesBothWays) {
  for (const int64_t ms : {1, 999, 1000, 1500, 60000, 3600000}) {
    absl::Status status = absl::ResourceExhaustedError("full");
    SetRetryAfter(status, absl::Milliseconds(ms));
    EXPECT_EQ(RetryAfter(FromGrpcStatus(ToGrpcStatus(status))), absl::Milliseconds(ms));
    EXPECT_EQ(ToItemStatus(status).retry_after_ms(), ms);
    EXPECT_EQ(RetryAfter(FromItemStatus(ToItemStatus(status))), absl::Milliseconds(ms));
  }
}

TEST(Status, TheRetryHintIsRoundedUpAndBounded) {
  absl::Status status = absl::ResourceExhaustedError("full");
  SetRetryAfter(status, absl::Microseconds(1));
  EXPECT_EQ(RetryAfter(status), absl::Milliseconds(1));
  SetRetryAfter(status, absl::InfiniteDuration());
  EXPECT_EQ(RetryAfter(status), absl::Hours(1));
}

TEST(Status, WithoutAHintThereIsNone) {
  absl::Status ok;
  SetRetryAfter(ok, absl::Seconds(1));
  EXPECT_TRUE(ok.ok());
  EXPECT_EQ(RetryAfter(ok), absl::ZeroDuration());
  absl::Status status = absl::UnavailableError("down");
  SetRetryAfter(status, -absl::Seconds(1));
  EXPECT_EQ(RetryAfter(status), absl::ZeroDuration());
  EXPECT_EQ(ToGrpcStatus(status).error_details(), "");
}

// The details of a failed call, byte by byte: google.rpc.Status with one google.rpc.RetryInfo.
TEST(Status, TheHintIsGoogleRpcRetryInfo) {
  absl::Status status = absl::ResourceExhaustedError("full");
  SetRetryAfter(status, absl::Milliseconds(1500));
  const std::string type_url = "type.googleapis.com/google.rpc.RetryInfo";
  const std::string delay("\x08\x01\x10\x80\xca\xb5\xee\x01", 8);  // 1 s, 500,000,000 ns
  const std::string info = std::string("\x0a\x08", 2) + delay;
  const std::string any = std::string("\x0a\x28", 2) + type_url + std::string("\x12\x0a", 2) + info;
  EXPECT_EQ(ToGrpcStatus(status).error_details(), std::string("\x08\x08\x12\x04", 4) + "full" +
                                                      std::string("\x1a", 1) +
                                                      static_cast<char>(any.size()) + any);
}

TEST(Status, BrokenDetailsGiveNoHintAndNoHarm) {
  absl::Status status = absl::ResourceExhaustedError("full");
  SetRetryAfter(status, absl::Milliseconds(1500));
  const std::string details = ToGrpcStatus(status).error_details();
  for (size_t cut = 0; cut < details.size(); ++cut) {
    const grpc::Status sent(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", details.substr(0, cut));
    EXPECT_EQ(RetryAfter(FromGrpcStatus(sent)), absl::ZeroDuration()) << cut;
  }
  testing::Rng rng(1);
  for (int round = 0; round < 5000; ++round) {
    std::string bytes = details;
    for (uint64_t i = 1 + rng.Below(4); i > 0; --i) {
      bytes[rng.Below(bytes.size())] = static_cast<char>(rng.Next());
    }
    const absl::Status read =
        FromGrpcStatus(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", bytes));
    EXPECT_EQ(read.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_LE(RetryAfter(read), absl::Seconds(3602));
  }
}

TEST(Status, LongTextsAreCutBetweenCharacters) {
  std::string text;
  while (text.size() < 3000) text += "\xc3\xa9";  // two bytes each
  const std::string sent = ToGrpcStatus(absl::InternalError(text)).error_message();
  EXPECT_EQ(sent, text.substr(0, 2044) + "...");
  EXPECT_EQ(ToItemStatus(absl::InternalError(text)).message(), sent);
}

}  // namespace
}  // namespace kvstow
