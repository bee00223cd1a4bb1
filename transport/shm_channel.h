// ShmChannel: transfers as copies to and from a shared window, on the thread that posts them.
//
// A transfer has ended when Post returns, so Cancel finds nothing, no deadline passes, and Quiesce
// is always OK. The window stays mapped for as long as the channel lives, whatever its worker does.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "transport/completion_queue.h"
#include "transport/shm_mapping.h"
#include "transport/transport.h"

namespace kvstow {

class ShmChannel final : public Channel {
 public:
  // `is_alive` turns false when the worker is gone. `on_close` is called once, by the destructor,
  // after the mapping has been let go.
  ShmChannel(std::shared_ptr<ShmMapping> mapping, std::shared_ptr<const std::atomic<bool>> is_alive,
             std::function<void()> on_close)
      : mapping_(std::move(mapping)),
        is_alive_(std::move(is_alive)),
        on_close_(std::move(on_close)) {}
  ~ShmChannel() override;

  PathKind path() const override { return PathKind::kShm; }
  int64_t window_bytes() const override;
  absl::Span<std::byte> InPlace(int64_t window_offset, int64_t bytes) override;
  absl::StatusOr<TransferId> Post(const Transfer& transfer) override;
  size_t Poll(absl::Span<Completion> completions, absl::Duration timeout) override;
  void Cancel(TransferId) override {}
  absl::Status Quiesce(absl::Duration) override { return absl::OkStatus(); }
  // See ShmMapping.
  void Prefault(absl::Duration timeout) { mapping_->Prefault(timeout); }
  bool is_alive() override { return is_alive_->load(std::memory_order_acquire); }

 private:
  std::shared_ptr<ShmMapping> mapping_;
  const std::shared_ptr<const std::atomic<bool>> is_alive_;
  const std::function<void()> on_close_;
  CompletionQueue queue_;
};

}  // namespace kvstow
