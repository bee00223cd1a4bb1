// RawStream: one streaming call of raw messages, driven by the calling thread through a completion
// queue of its own. Every wait ends: by the call's deadline, or by a shorter limit on one wait.
// Private to the client library.
//
//   RawStream stream(connection.NextDataStub(), {.method = "/kvstow.v1.Data/Put", .timeout = t});
//   while (... && stream.Write(frame)) {}
//   stream.WritesDone();
//   if (stream.Read(response)) ...
//   absl::Status status = stream.Finish();
//
// Thread safety: none. The destructor cancels a call that was not finished.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>

#include <array>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/core/check.h"
#include "kernels/core/clock.h"

namespace kvstow {

// A generated message as a call of raw messages sends it, and back. kInternal for bytes that are no
// such message; `name` is in the text.
template <typename Message>
grpc::ByteBuffer ToByteBuffer(const Message& message) {
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  const grpc::Status status =
      grpc::SerializationTraits<Message>::Serialize(message, &bytes, &own_buffer);
  KVSTOW_CHECK(status.ok());  // our own message, into memory
  return bytes;
}
template <typename Message>
absl::Status FromByteBuffer(grpc::ByteBuffer bytes, const char* name, Message& message) {
  if (grpc::SerializationTraits<Message>::Deserialize(&bytes, &message).ok()) {
    return absl::OkStatus();
  }
  return absl::InternalError(std::string("the service's answer is not a ") + name);
}

struct RawStreamOptions {
  std::string method;
  absl::Duration timeout;                                // of the whole call
  absl::Duration wait_limit = absl::InfiniteDuration();  // of each wait for the peer
};

class RawStream {
 public:
  RawStream(grpc::GenericStub& stub, const RawStreamOptions& options);
  ~RawStream();
  RawStream(const RawStream&) = delete;
  RawStream& operator=(const RawStream&) = delete;

  // Hands a message to the transport; waits for the message before it. False: the call is over,
  // Finish() says why.
  bool Write(const grpc::ByteBuffer& message);
  // No more messages will be written.
  void WritesDone();

  // The next message of the peer; false at the end. StartRead() before other work lets the message
  // arrive meanwhile; Read() starts it where that was not done.
  void StartRead();
  bool Read(grpc::ByteBuffer& message);

  // Gives the call up: what follows ends soon.
  void Cancel();
  // Waits for the call's status. Once.
  absl::Status Finish();

  // The longest wait for the peer so far.
  absl::Duration longest_wait() const { return longest_wait_; }

 private:
  enum Op { kStart, kWrite, kWritesDone, kRead, kFinish, kNumOps };
  void* Begin(Op op);
  bool Wait(Op op);
  void WaitForEnd();
  void Drain();

  const RawStreamOptions options_;
  const RealClock clock_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  std::array<bool, kNumOps> is_pending_{};
  std::array<bool, kNumOps> was_ok_{};
  grpc::ByteBuffer read_message_;
  grpc::Status status_;
  bool writes_done_ = false;
  bool is_finished_ = false;
  bool gave_up_waiting_ = false;
  absl::Duration longest_wait_ = absl::ZeroDuration();
};

}  // namespace kvstow
