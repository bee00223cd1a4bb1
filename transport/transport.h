// Transport: how the bytes of blocks get from a worker's memory to the service and back without
// passing through gRPC. The worker opens a Window, memory that the service may read and write; the
// service attaches to it and moves ranges of it through a Channel. What is in the window and
// when is agreed over gRPC (data.proto), whatever the path.
//
//   worker:   KVSTOW_ASSIGN_OR_RETURN(auto window, OpenShmWindow({...}));   // shm_window.h
//             ... send window->ticket() in OpenChannel, fill window->memory(), call Put ...
//   service:  KVSTOW_ASSIGN_OR_RETURN(auto channel, transport.Attach(ticket, timeout));
//             KVSTOW_ASSIGN_OR_RETURN(TransferId id, channel->Post({.op = TransferOp::kRead,
//             ...})); channel->Poll(completions, timeout);
//
// A transfer completes exactly once: done, failed, cancelled, or late (kDeadlineExceeded). Local
// memory of a transfer that did not end OK may still be written or read until Quiesce says that it
// is not. Nothing here checks contents: whoever reads from a window checks what was read (XXH3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace kvstow {

enum class PathKind { kShm, kUcx, kNccl, kGrpc };
std::string_view PathName(PathKind path);  // "shm", "ucx", "nccl", "grpc"

inline constexpr int64_t kMaxWindowBytes = int64_t{4} << 30;
inline constexpr int32_t kMaxTransfersInFlight = 256;  // of one channel

// The worker's end. Destruction ends the channel.
class Window {
 public:
  virtual ~Window() = default;
  virtual PathKind path() const = 0;
  // Page-aligned, populated, zero at first.
  virtual absl::Span<std::byte> memory() = 0;
  // Opaque; lets a service attach, once.
  virtual const std::string& ticket() const = 0;
  // False once the service's end is known to be gone: open another window.
  virtual bool is_alive() = 0;
};

using TransferId = uint64_t;
enum class TransferOp {
  kRead,   // window -> local
  kWrite,  // local -> window
};

struct Transfer {
  TransferOp op = TransferOp::kRead;
  int64_t window_offset = 0;    // bytes from the window's start
  absl::Span<std::byte> local;  // kWrite does not change it. May be empty: completes OK
  absl::Duration timeout = absl::Seconds(5);  // from Post; positive
};

// Without overflow, whatever the numbers.
bool IsInsideWindow(int64_t window_offset, int64_t bytes, int64_t window_bytes);
// The kInvalidArgument of Channel::Post.
absl::Status CheckTransfer(const Transfer& transfer, int64_t window_bytes);

struct Completion {
  TransferId id = 0;
  // kCancelled, kDeadlineExceeded, kUnavailable (the peer is gone), kDataLoss (the path itself saw
  // damage).
  absl::Status status;
};

// The service's end. Thread safety: all methods may be called at once; Poll by one thread.
class Channel {
 public:
  // Waits until nothing touches local memory, at most a second; what cannot be stopped by then
  // keeps its memory registered and is logged.
  virtual ~Channel() = default;
  virtual PathKind path() const = 0;
  virtual int64_t window_bytes() const = 0;

  // The range in this process's address space, where the path has one (shm); else empty. The peer
  // may change it at any time: copy first, then check the copy. CHECKs nothing: a range outside the
  // window is empty too.
  virtual absl::Span<std::byte> InPlace(int64_t window_offset, int64_t bytes) { return {}; }

  // Transfers posted on one channel may complete in any order; bytes of two that overlap are
  // undefined until both are done.
  //   kInvalidArgument    outside the window, or a timeout that is not positive
  //   kResourceExhausted  kMaxTransfersInFlight are posted and not yet taken by Poll
  //   kUnavailable        the peer is gone
  virtual absl::StatusOr<TransferId> Post(const Transfer& transfer) = 0;
  // Completions, at least one unless the timeout passes first. Returns how many.
  virtual size_t Poll(absl::Span<Completion> completions, absl::Duration timeout) = 0;
  // The transfer completes soon, kCancelled or otherwise. Unknown ids: nothing happens.
  virtual void Cancel(TransferId id) = 0;
  // OK: no transfer that has completed touches local memory any more. kDeadlineExceeded: one may.
  virtual absl::Status Quiesce(absl::Duration timeout) = 0;
  virtual bool is_alive() = 0;
};

// A path of the service. Thread safety: all methods may be called at once.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual PathKind path() const = 0;
  // A window that a worker offers. Tickets are untrusted bytes.
  //   kInvalidArgument    no ticket of this path, a version from the future, a window too large
  //   kNotFound           no such window, or attached before
  //   kResourceExhausted  too many channels or bytes of windows
  //   kUnavailable, kDeadlineExceeded
  virtual absl::StatusOr<std::unique_ptr<Channel>> Attach(std::string_view ticket,
                                                          absl::Duration timeout) = 0;
};

}  // namespace kvstow
