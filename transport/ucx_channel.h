// UcxChannel: the transfers of one channel, handed to the engine's thread and counted until their
// memory is released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "transport/completion_queue.h"
#include "transport/held_memory.h"
#include "transport/transport.h"
#include "transport/ucx_engine.h"
#include "transport/ucx_link.h"
#include "transport/ucx_ticket.h"

namespace kvstow {

class UcxChannel final : public Channel {
 public:
  // Connects, looks whether the ticket's window is there and has not been attached, and attaches.
  // `on_close` is called once, by the destructor or where this is not OK.
  //   kNotFound     another window is there, it was attached before, or it has been closed
  //   kUnavailable, kDeadlineExceeded
  static absl::StatusOr<std::unique_ptr<UcxChannel>> Attach(std::shared_ptr<UcxEngine> engine,
                                                            const UcxTicket& ticket,
                                                            absl::Duration timeout,
                                                            std::function<void()> on_close);
  ~UcxChannel() override;

  PathKind path() const override { return PathKind::kUcx; }
  int64_t window_bytes() const override { return window_bytes_; }
  absl::StatusOr<TransferId> Post(const Transfer& transfer) override;
  size_t Poll(absl::Span<Completion> completions, absl::Duration timeout) override;
  void Cancel(TransferId id) override;
  absl::Status Quiesce(absl::Duration timeout) override;
  bool is_alive() override { return link_->is_alive(); }

 private:
  UcxChannel(std::shared_ptr<UcxEngine> engine, const UcxTicket& ticket,
             std::function<void()> on_close);
  absl::Status Open(const UcxTicket& ticket, absl::Duration timeout);

  const std::shared_ptr<UcxEngine> engine_;
  const std::shared_ptr<UcxLink> link_ = std::make_shared<UcxLink>();
  const int64_t window_bytes_;
  const std::function<void()> on_close_;
  const std::shared_ptr<CompletionQueue> queue_ = std::make_shared<CompletionQueue>();
  const std::shared_ptr<HeldMemory> memory_ = std::make_shared<HeldMemory>();
};

}  // namespace kvstow
