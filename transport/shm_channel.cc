#include "transport/shm_channel.h"

#include <cstring>

#include "kernels/core/status_macros.h"

namespace kvstow {

ShmChannel::~ShmChannel() {
  mapping_ = nullptr;
  on_close_();
}

int64_t ShmChannel::window_bytes() const { return static_cast<int64_t>(mapping_->memory().size()); }

absl::Span<std::byte> ShmChannel::InPlace(int64_t window_offset, int64_t bytes) {
  if (!IsInsideWindow(window_offset, bytes, window_bytes())) return {};
  return mapping_->memory().subspan(static_cast<size_t>(window_offset), static_cast<size_t>(bytes));
}

absl::StatusOr<TransferId> ShmChannel::Post(const Transfer& transfer) {
  KVSTOW_RETURN_IF_ERROR(CheckTransfer(transfer, window_bytes()));
  if (!is_alive()) return absl::UnavailableError("the window's worker is gone");
  KVSTOW_ASSIGN_OR_RETURN(const TransferId id, queue_.Begin());
  const size_t bytes = transfer.local.size();
  std::byte* const window = mapping_->memory().data() + transfer.window_offset;
  if (bytes > 0 && transfer.op == TransferOp::kRead) {
    std::memcpy(transfer.local.data(), window, bytes);
  } else if (bytes > 0) {
    std::memcpy(window, transfer.local.data(), bytes);
  }
  queue_.Complete(id, absl::OkStatus());
  return id;
}

size_t ShmChannel::Poll(absl::Span<Completion> completions, absl::Duration timeout) {
  return queue_.Take(completions, timeout);
}

}  // namespace kvstow
