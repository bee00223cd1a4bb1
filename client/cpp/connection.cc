#include "client/cpp/connection.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "proto/status.h"

namespace kvstow {
namespace {

constexpr int kMaxChannels = 16;
constexpr int kMaxMessageBytes = 16 << 20;  // a page of a list; frames stay below 4 MiB
constexpr size_t kMaxUnixPathBytes = 107;   // of sockaddr_un, without the final zero
constexpr int64_t kPooledBytesMax = int64_t{16} << 20;
constexpr int64_t kMinWindowBytes = int64_t{16} << 20;
constexpr absl::Duration kMinSilence = absl::Milliseconds(200);
constexpr absl::Duration kMaxSilence = absl::Hours(1);
constexpr char kUnixPrefix[] = "unix:";

absl::Status BadOption(std::string_view field, const std::string& found, std::string_view want) {
  return absl::InvalidArgumentError(
      absl::StrCat(ToAbsl(field), ": ", found, ", want ", ToAbsl(want)));
}

absl::Status CheckTarget(const std::string& target) {
  const std::string found = absl::StrCat("\"", target, "\"");
  if (absl::StartsWith(target, kUnixPrefix)) {
    const size_t path_bytes = target.size() - (sizeof(kUnixPrefix) - 1);
    if (path_bytes >= 1 && path_bytes <= kMaxUnixPathBytes) return absl::OkStatus();
    return BadOption("target", absl::StrCat("a path of ", path_bytes, " bytes"),
                     absl::StrCat("1 to ", kMaxUnixPathBytes));
  }
  const size_t colon = target.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(target.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return BadOption("target", found, "unix:PATH or HOST:PORT");
  }
  return absl::OkStatus();
}

absl::Status CheckPositive(std::string_view field, absl::Duration duration) {
  if (duration > absl::ZeroDuration() && duration < absl::InfiniteDuration()) {
    return absl::OkStatus();
  }
  return BadOption(field, absl::FormatDuration(duration), "a positive, finite duration");
}

std::shared_ptr<grpc::Channel> MakeChannel(const KvClientOptions& options, int channel_idx) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(kMaxMessageBytes);
  args.SetMaxSendMessageSize(kMaxMessageBytes);
  // Channels of equal arguments share one socket.
  args.SetInt("kvstow.channel", channel_idx);
  // The service is a neighbour: no proxy of the environment, and soon another try after a restart.
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  const auto silence_ms = static_cast<int>(absl::ToInt64Milliseconds(options.silence));
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, silence_ms);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, silence_ms);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no limit: a call may wait for long
  return grpc::CreateCustomChannel(options.target, grpc::InsecureChannelCredentials(), args);
}

}  // namespace

void TuneMallocForBulkTransfers() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

std::chrono::system_clock::time_point GrpcDeadline(absl::Duration timeout) {
  timeout = std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24));
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(
             absl::ToChronoNanoseconds(timeout));
}

absl::Status KvClientOptions::Validate() const {
  KVSTOW_RETURN_IF_ERROR(CheckTarget(target));
  if (num_channels < 1 || num_channels > kMaxChannels) {
    return BadOption("num_channels", absl::StrCat(num_channels),
                     absl::StrCat("1 to ", kMaxChannels));
  }
  for (const PathKind path : paths) {
    if (path == PathKind::kShm || path == PathKind::kUcx) continue;
    return BadOption("paths", std::string(PathName(path)), "shm or ucx; gRPC is always there");
  }
  if (window_bytes < kMinWindowBytes || window_bytes > kMaxWindowBytes) {
    return BadOption("window_bytes", absl::StrCat(window_bytes),
                     absl::StrCat(kMinWindowBytes, " to ", kMaxWindowBytes));
  }
  KVSTOW_RETURN_IF_ERROR(CheckPositive("control_timeout", control_timeout));
  KVSTOW_RETURN_IF_ERROR(CheckPositive("data_timeout", data_timeout));
  KVSTOW_RETURN_IF_ERROR(CheckPositive("breaker.slow_call", breaker.slow_call));
  if (silence < kMinSilence || silence > kMaxSilence) {
    return BadOption("silence", absl::FormatDuration(silence), "200ms to 1h");
  }
  if (breaker.errors_to_open < 1) {
    return BadOption("breaker.errors_to_open", absl::StrCat(breaker.errors_to_open), "at least 1");
  }
  if (breaker.slow_to_open < 1) {
    return BadOption("breaker.slow_to_open", absl::StrCat(breaker.slow_to_open), "at least 1");
  }
  if (breaker.cool_down < absl::ZeroDuration() || breaker.cool_down == absl::InfiniteDuration()) {
    return BadOption("breaker.cool_down", absl::FormatDuration(breaker.cool_down),
                     "a finite duration, not negative");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Connection>> Connection::Create(const KvClientOptions& options) {
  KVSTOW_RETURN_IF_ERROR(options.Validate());
  return std::unique_ptr<Connection>(new Connection(options));
}

Connection::Connection(const KvClientOptions& options)
    : options_(options), breaker_(options_.breaker, &clock_), buffers_(kPooledBytesMax) {
  for (int i = 0; i < options_.num_channels; ++i) {
    std::shared_ptr<grpc::Channel> channel = MakeChannel(options_, i);
    if (i == 0) {
      control_ = v1::Control::NewStub(channel);
      models_ = v1::Models::NewStub(channel);
      channels_ = v1::Channels::NewStub(channel);
      calibrations_ = v1::Calibrations::NewStub(channel);
    }
    data_stubs_.push_back(std::make_unique<grpc::GenericStub>(std::move(channel)));
  }
}

grpc::GenericStub& Connection::NextDataStub() {
  return *data_stubs_[next_data_stub_.fetch_add(1, std::memory_order_relaxed) % data_stubs_.size()];
}

absl::Status Connection::Allow() {
  if (breaker_.Allow()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("kvstow service at ", options_.target,
                                             ": the breaker is open, no call was made"));
}

void Connection::Record(const absl::Status& status, absl::Duration longest_wait) {
  const bool is_failure = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  breaker_.Record(!is_failure, longest_wait);
}

absl::Status Connection::WithTarget(const absl::Status& status, absl::Duration timeout) const {
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
  std::string text = absl::StrCat("kvstow service at ", options_.target, ": ");
  // gRPC's own word for a call that it gave up; a service says what it waited for.
  if (status.message() == "Deadline Exceeded") {
    absl::StrAppend(&text, "no answer within ", absl::FormatDuration(timeout));
  } else {
    absl::StrAppend(&text, status.message());
  }
  absl::Status result(status.code(), text);
  SetRetryAfter(result, RetryAfter(status));
  return result;
}

absl::Status Connection::Call(absl::Duration timeout, const CallFn& call) {
  KVSTOW_RETURN_IF_ERROR(Allow());
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(timeout));
  const absl::Time start = clock_.Now();
  const absl::Status status = WithTarget(FromGrpcStatus(call(&context)), timeout);
  Record(status, clock_.Now() - start);
  return status;
}

}  // namespace kvstow
