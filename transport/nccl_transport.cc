// The service's end of NCCL windows: tickets, and the limit on channels.
#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "transport/nccl.h"
#include "transport/nccl_channel.h"
#include "transport/nccl_library.h"
#include "transport/nccl_wire.h"

namespace kvstow {
namespace {

class NcclTransport final : public Transport {
 public:
  NcclTransport(const NcclLibrary* library, const NcclTransportOptions& options)
      : library_(library), options_(options) {}

  PathKind path() const override { return PathKind::kNccl; }
  absl::StatusOr<std::unique_ptr<Channel>> Attach(std::string_view ticket,
                                                  absl::Duration timeout) override;

 private:
  const NcclLibrary* const library_;
  const NcclTransportOptions options_;
  const std::shared_ptr<std::atomic<int32_t>> num_channels_ =
      std::make_shared<std::atomic<int32_t>>(0);
};

absl::StatusOr<std::unique_ptr<Channel>> NcclTransport::Attach(std::string_view ticket,
                                                               absl::Duration timeout) {
  KVSTOW_ASSIGN_OR_RETURN(const NcclTicket window, DecodeNcclTicket(ticket));
  if (num_channels_->fetch_add(1) >= options_.channels_max) {
    num_channels_->fetch_sub(1);
    return absl::ResourceExhaustedError(
        absl::StrCat("NCCL channels are open up to the limit, at most ", options_.channels_max));
  }
  return NcclChannel::Attach(library_, options_.device.device_idx, window, timeout,
                             [count = num_channels_] { count->fetch_sub(1); });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> MakeNcclTransport(const NcclTransportOptions& options) {
  if (options.channels_max < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("channels_max of NCCL is ", options.channels_max, ", at least 1"));
  }
  KVSTOW_ASSIGN_OR_RETURN(const NcclLibrary* const library, LoadNccl(options.device));
  return std::make_unique<NcclTransport>(library, options);
}

}  // namespace kvstow
