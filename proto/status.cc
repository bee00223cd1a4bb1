#include "proto/status.h"

#include <google/protobuf/any.pb.h>
#include <google/protobuf/duration.pb.h>
#include <google/protobuf/io/coded_stream.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr char kRetryPayload[] = "kvstow.v1/retry_after_ms";
constexpr char kRetryInfoType[] = "type.googleapis.com/google.rpc.RetryInfo";
constexpr uint32_t kRetryDelayMsMax = 3'600'000;  // an hour: a longer hint is no hint

using google::protobuf::io::CodedInputStream;

// The text cut to what a header may carry, at the start of a character.
std::string BoundedText(std::string_view text) {
  if (text.size() <= kMaxStatusTextBytes) return std::string(text);
  size_t end = kMaxStatusTextBytes - 3;
  while (end > 0 && (static_cast<uint8_t>(text[end]) & 0xc0) == 0x80) --end;
  return std::string(text.substr(0, end)) + "...";
}

std::string_view MessageOf(const absl::Status& status) {
  return {status.message().data(), status.message().size()};
}

bool IsKnownCode(int code) { return code >= 0 && code <= 16; }

absl::Status MakeStatus(int code, const std::string& message, uint32_t retry_after_ms) {
  if (code == 0) return absl::OkStatus();
  absl::Status status(
      IsKnownCode(code) ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
      message);
  if (retry_after_ms > 0) SetRetryAfter(status, absl::Milliseconds(retry_after_ms));
  return status;
}

uint32_t RetryAfterMs(const absl::Status& status) {
  return static_cast<uint32_t>(absl::ToInt64Milliseconds(RetryAfter(status)));
}

// A field of length-delimited bytes, as protobuf writes it. Lengths here are far below 2^21.
void AppendBytes(std::string& out, int field, const std::string& bytes) {
  out.push_back(static_cast<char>(field << 3 | 2));
  size_t length = bytes.size();
  for (; length >= 128; length >>= 7) out.push_back(static_cast<char>(length | 128));
  out.push_back(static_cast<char>(length));
  out += bytes;
}

// google.rpc.Status {code = 1, message = 2, details = 3} with one RetryInfo {retry_delay = 1}.
// Written by hand: the googleapis protos are not packaged with gRPC.
std::string RetryDetails(int code, const std::string& message, uint32_t retry_after_ms) {
  google::protobuf::Duration delay;
  delay.set_seconds(retry_after_ms / 1000);
  delay.set_nanos(static_cast<int32_t>(retry_after_ms % 1000 * 1'000'000));
  google::protobuf::Any any;
  any.set_type_url(kRetryInfoType);
  AppendBytes(*any.mutable_value(), 1, delay.SerializeAsString());
  std::string out;
  out.push_back(static_cast<char>(1 << 3));
  out.push_back(static_cast<char>(code));
  AppendBytes(out, 2, message);
  AppendBytes(out, 3, any.SerializeAsString());
  return out;
}

// Calls `visit` with each length-delimited field `wanted` of a message. Stops at the first fault.
template <typename Visit>
void ForEachBytesField(const std::string& message, uint32_t wanted, const Visit& visit) {
  CodedInputStream in(reinterpret_cast<const uint8_t*>(message.data()),
                      static_cast<int>(message.size()));
  while (const uint32_t tag = in.ReadTag()) {
    uint32_t length = 0;
    uint64_t number = 0;
    if ((tag & 7) == 0) {
      if (!in.ReadVarint64(&number)) return;
    } else if ((tag & 7) == 2) {
      std::string bytes;
      if (!in.ReadVarint32(&length) || length > message.size() ||
          !in.ReadString(&bytes, static_cast<int>(length))) {
        return;
      }
      if (tag >> 3 == wanted) visit(bytes);
    } else {
      return;
    }
  }
}

// 0 where the details hold no hint; they come from a peer, so anything may be in them.
uint32_t RetryAfterMsOfDetails(const std::string& details) {
  uint32_t result = 0;
  ForEachBytesField(details, 3, [&](const std::string& any) {
    // Field by field, not as google.protobuf.Any: that logs every type_url that is not UTF-8.
    bool is_retry_info = false;
    ForEachBytesField(any, 1,
                      [&](const std::string& url) { is_retry_info = url == kRetryInfoType; });
    if (!is_retry_info) return;
    ForEachBytesField(any, 2, [&](const std::string& info) {
      ForEachBytesField(info, 1, [&](const std::string& delay_bytes) {
        google::protobuf::Duration delay;
        if (!delay.ParseFromString(delay_bytes) || delay.seconds() < 0 || delay.nanos() < 0) return;
        const int64_t seconds = std::min<int64_t>(delay.seconds(), kRetryDelayMsMax / 1000);
        result = static_cast<uint32_t>(seconds * 1000 + delay.nanos() / 1'000'000);
      });
    });
  });
  return result;
}

}  // namespace

void SetRetryAfter(absl::Status& status, absl::Duration delay) {
  if (status.ok() || delay <= absl::ZeroDuration()) return;
  const int64_t ms = std::min<int64_t>(
      absl::ToInt64Milliseconds(absl::Ceil(delay, absl::Milliseconds(1))), kRetryDelayMsMax);
  status.SetPayload(kRetryPayload, absl::Cord(absl::StrCat(ms)));
}

absl::Duration RetryAfter(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryPayload);
  int64_t ms = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &ms)) {
    return absl::ZeroDuration();
  }
  return absl::Milliseconds(ms);
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.raw_code());
  const std::string message = BoundedText(MessageOf(status));
  const uint32_t retry_after_ms = RetryAfterMs(status);
  if (retry_after_ms == 0) return grpc::Status(code, message);
  return grpc::Status(code, message, RetryDetails(code, message, retry_after_ms));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  return MakeStatus(status.error_code(), status.error_message(),
                    RetryAfterMsOfDetails(status.error_details()));
}

v1::ItemStatus ToItemStatus(const absl::Status& status) {
  v1::ItemStatus item;
  if (status.ok()) return item;
  item.set_code(status.raw_code());
  item.set_message(BoundedText(MessageOf(status)));
  item.set_retry_after_ms(RetryAfterMs(status));
  return item;
}

absl::Status FromItemStatus(const v1::ItemStatus& item) {
  return MakeStatus(item.code(), item.message(), std::min(item.retry_after_ms(), kRetryDelayMsMax));
}

}  // namespace kvstow
