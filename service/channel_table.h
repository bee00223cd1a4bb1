// ChannelTable: the windows of workers that this service is attached to, by the number that frames
// name them with.
//
//   KVSTOW_ASSIGN_OR_RETURN(uint64_t id, table.Open("shm", ticket, timeout));
//   KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<BulkChannel> channel, table.Find(id));
//   KVSTOW_ASSIGN_OR_RETURN(FramePayload payload, channel->Load(offset, bytes, timeout));
//
// A channel whose worker is gone is dropped within a second; calls that use it keep it until they
// end. Thread safety: all methods may be called at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/core/mutex.h"
#include "proto/frames.h"
#include "transport/transport.h"

namespace kvstow {

// A channel whose transfers a worker thread waits for. Every wait ends: by kTransferTimeout, or by
// the `timeout` of the call that it is for; a transfer that is late ends its channel.
class BulkChannel : public std::enable_shared_from_this<BulkChannel> {
 public:
  static constexpr absl::Duration kTransferTimeout = absl::Seconds(5);

  explicit BulkChannel(std::unique_ptr<Channel> channel) : channel_(std::move(channel)) {}
  PathKind path() const { return channel_->path(); }
  int64_t window_bytes() const { return channel_->window_bytes(); }
  bool is_alive() const { return channel_->is_alive(); }

  // kInvalidArgument: not within the window.
  absl::Status CheckRange(uint64_t offset, uint64_t bytes) const;
  // A range of the window: in place (then it is shared with the worker) or read into memory.
  //   kInvalidArgument  no such range;  kUnavailable: the worker is gone, or too slow
  absl::StatusOr<FramePayload> Load(uint64_t offset, uint64_t bytes, absl::Duration timeout);
  // Writes into the window; statuses as of Load. `owner` keeps `bytes`: beyond this call where a
  // path cannot show that it has let go of them.
  absl::Status Store(uint64_t offset, absl::Span<const std::byte> bytes,
                     std::shared_ptr<const void> owner, absl::Duration timeout);

 private:
  // Posts and waits. Where local memory may still be touched afterwards, `owner` never goes.
  absl::Status Run(const Transfer& transfer, std::shared_ptr<const void> owner);
  absl::Status WaitFor(TransferId id);

  const std::unique_ptr<Channel> channel_;
  Mutex mutex_;
  CondVar polled_;
  bool is_polling_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<TransferId, absl::Status> ended_ ABSL_GUARDED_BY(mutex_);
};

// A path of this service, or why it is not there.
struct ServedPath {
  PathKind path = PathKind::kShm;
  std::unique_ptr<Transport> transport;  // null: see `unavailable`
  std::string address;                   // for workers; as PathInfo of channels.proto
  std::string unavailable;
};

class ChannelTable {
 public:
  // `paths`: best first.
  ChannelTable(std::vector<ServedPath> paths, int32_t channels_max);
  ~ChannelTable();
  ChannelTable(const ChannelTable&) = delete;
  ChannelTable& operator=(const ChannelTable&) = delete;

  // Attaches; `path` by its name. As Transport::Attach; kFailedPrecondition: this service has no
  // such path.
  absl::StatusOr<uint64_t> Open(std::string_view path, std::string_view ticket,
                                absl::Duration timeout);
  // kNotFound: unknown, closed, or its worker is gone.
  absl::StatusOr<std::shared_ptr<BulkChannel>> Find(uint64_t id);
  absl::Status Close(uint64_t id);

  const std::vector<ServedPath>& paths() const { return paths_; }
  int64_t num_open() const;

 private:
  void DropDeadOnes();

  const std::vector<ServedPath> paths_;
  const int32_t channels_max_;
  mutable Mutex mutex_;
  CondVar stopped_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<uint64_t, std::shared_ptr<BulkChannel>> channels_ ABSL_GUARDED_BY(mutex_);
  std::thread reaper_;
};

}  // namespace kvstow
