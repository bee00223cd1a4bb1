// BulkWindows: the client's share of a path past gRPC: one window that the service is attached to,
// cut into areas. A transfer takes an area, says in its frames where the bytes are, and gives the
// area back. Private to the client library.
//
//   if (std::optional<BulkArea> area = windows.Take(bytes, deadline)) {
//     ... area->memory(), area->channel() ...
//   }
//   else { ... the bytes go in the messages ... }
//
// Opens lazily, and again a few seconds after something failed: never an error, at most a detour.
// Thread safety: all methods may be called at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/connection.h"
#include "kernels/core/mutex.h"
#include "transport/transport.h"

namespace kvstow {

// What one call puts through an area, where a block is not larger: the bytes are still in the
// processor's cache when the other process reads them.
inline constexpr int64_t kBulkCallBytes = int64_t{4} << 20;

// A stretch of the window that belongs to one transfer.
class BulkArea {
 public:
  BulkArea(BulkArea&& other) noexcept = default;
  BulkArea& operator=(BulkArea&&) = delete;
  ~BulkArea();

  uint64_t channel() const;
  absl::Span<std::byte> memory() const { return memory_; }
  uint64_t window_offset() const { return window_offset_; }
  // Keeps the window's memory: for payloads that point into it.
  std::shared_ptr<const void> owner() const { return open_; }
  // A call ended badly: the service may still write here. The window is used no more.
  void Abandon();

  // --- of a buffer that is a window by itself ---

  // Where `bytes` are in the window; -1: not within.
  int64_t OffsetOf(absl::Span<const std::byte> bytes) const;
  // The service can be told of places in it.
  bool IsUsable() const;
  // A call that ended badly, and whose service is still there, had the service write here.
  void AbandonWritten();
  bool MayBeWritten() const;
  bool Overlaps(absl::Span<const std::byte> bytes) const;

 private:
  friend class BulkWindows;
  struct Open;
  BulkArea(std::shared_ptr<Open> open, int area_idx);

  std::shared_ptr<Open> open_;
  int area_idx_ = 0;
  absl::Span<std::byte> memory_;
  uint64_t window_offset_ = 0;
};

class BulkWindows {
 public:
  static constexpr int kNumAreas = 4;
  static constexpr absl::Duration kRetryAfter = absl::Seconds(5);
  // Of a transfer that finds all areas taken: by gRPC it would cost more than that.
  static constexpr absl::Duration kPatience = absl::Milliseconds(50);

  // `connection` must outlive this.
  explicit BulkWindows(Connection* connection) : connection_(connection) {}

  // An area of at least `bytes`; waits for one at most kPatience. Nothing: all areas stay taken,
  // there is no path, or the window would be larger than KvClientOptions::window_bytes. May open a
  // window first, which takes a control call or two, none of them beyond `deadline` (by the
  // connection's clock); it is as large as it must be, and a larger one replaces it when one is
  // needed.
  std::optional<BulkArea> Take(int64_t bytes, absl::Time deadline);
  // A window that is one area, kept by the caller; over shared memory only. As OpenShmWindow, and
  // kUnavailable: there is no such path, the text says why.
  absl::StatusOr<std::shared_ptr<BulkArea>> OpenBuffer(int64_t bytes, absl::Time deadline);
  // The buffer that `at` points into, usable or not; null: none.
  std::shared_ptr<BulkArea> BufferAt(const std::byte* at) const;
  // Those of OpenBuffer that MayBeWritten.
  std::vector<std::shared_ptr<BulkArea>> WrittenBuffers() const;
  // Which path the last transfers took, and why not a better one; for people.
  std::string Explain() const;

 private:
  struct Size {
    int num_areas = kNumAreas;
    int64_t area_bytes = 0;
    int64_t bytes() const { return num_areas * area_bytes; }
  };

  // The first of the paths that can be had, or why the last one cannot.
  absl::StatusOr<std::shared_ptr<BulkArea::Open>> OpenOne(absl::Span<const PathKind> paths,
                                                          const Size& size, absl::Time deadline);
  absl::StatusOr<std::shared_ptr<BulkArea::Open>> OpenPath(PathKind path,
                                                           const std::string& address,
                                                           const Size& size, absl::Time deadline);
  std::shared_ptr<BulkArea::Open> Current(int64_t area_bytes, absl::Time deadline);
  // Of the next control call.
  absl::Duration Timeout(absl::Time deadline) const;

  Connection* const connection_;
  mutable Mutex mutex_;
  std::shared_ptr<BulkArea::Open> open_ ABSL_GUARDED_BY(mutex_);
  bool is_opening_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t failed_area_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the last attempt, until next_try_
  absl::Time next_try_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::string why_not_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<BulkArea>> buffers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvstow
