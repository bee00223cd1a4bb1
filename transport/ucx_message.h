// UcxMessage: what the two ends of a UCX window say to each other: headers of active messages.
//
//   service -> worker   kAttach (data: the window's id)      kAttached (code)
//                       kRead   (transfer, offset, bytes)    kData... (transfer, offset; data)
//                       kWrite... (transfer, offset; data)   kDone... (transfer, bytes, code)
//
// A transfer is cut into pieces; each is a message of its own, answered on its own. The worker
// looks at every range before it touches memory.
//
// Everything here runs on the thread of an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/types/span.h"

struct ucp_ep;  // of UCX
struct ucp_worker;

namespace kvstow {

enum class UcxVerb : uint32_t {
  kAttach = 1,
  kAttached = 2,
  kRead = 3,
  kData = 4,
  kWrite = 5,
  kDone = 6,
};

// As it is in memory: both ends are little-endian.
struct UcxMessage {
  UcxVerb verb = UcxVerb::kAttach;
  uint32_t code = 0;      // of an answer: an absl::StatusCode
  uint64_t transfer = 0;  // as the service numbers them
  uint64_t offset = 0;    // kRead, kWrite: in the window; kData: in the transfer
  uint64_t bytes = 0;     // kRead: wanted; kDone: arrived
};

inline constexpr uint32_t kUcxMessageId = 1;  // of UCX's active messages
// One segment of UCX over TCP holds a piece with its header.
inline constexpr size_t kUcxPieceBytes = size_t{192} << 10;

// Data that came with a message: there already, or still to be fetched.
class UcxData {
 public:
  UcxData(ucp_worker* worker, void* data, size_t bytes, bool is_announced)
      : worker_(worker), data_(data), bytes_(bytes), is_announced_(is_announced) {}

  size_t size() const { return bytes_; }
  // Empty for data still to be fetched.
  absl::Span<const std::byte> here() const {
    return {static_cast<const std::byte*>(data_), is_announced_ ? 0 : bytes_};
  }
  // Copies to `to`, of as many bytes. Calls `on_taken` once, now or later; until then UCX may write
  // there. At most once.
  void Take(absl::Span<std::byte> to, std::function<void(const absl::Status&)> on_taken);
  bool is_taken() const { return is_taken_; }

 private:
  ucp_worker* worker_;
  void* data_;
  size_t bytes_;
  bool is_announced_;
  bool is_taken_ = false;
};

// Calls `on_sent` once, now or later: then `data` is not read any more, which does not mean that it
// arrived.
void SendUcxMessage(ucp_ep* endpoint, const UcxMessage& message, absl::Span<const std::byte> data,
                    std::function<void(const absl::Status&)> on_sent);

}  // namespace kvstow
