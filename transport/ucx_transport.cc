// The service's end of UCX windows: tickets, and the limit on channels.
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "transport/ucx.h"
#include "transport/ucx_channel.h"
#include "transport/ucx_engine.h"
#include "transport/ucx_ticket.h"

namespace kvstow {
namespace {

class UcxTransport final : public Transport {
 public:
  UcxTransport(std::shared_ptr<UcxEngine> engine, int32_t channels_max)
      : engine_(std::move(engine)), channels_max_(channels_max) {}

  PathKind path() const override { return PathKind::kUcx; }
  absl::StatusOr<std::unique_ptr<Channel>> Attach(std::string_view ticket,
                                                  absl::Duration timeout) override;

 private:
  // Windows attached or about to be: of two that bring one ticket at once, one is told so here.
  struct Attached {
    Mutex mutex;
    std::set<UcxWindowId> windows ABSL_GUARDED_BY(mutex);
  };

  const std::shared_ptr<UcxEngine> engine_;
  const int32_t channels_max_;
  const std::shared_ptr<Attached> attached_ = std::make_shared<Attached>();
};

absl::StatusOr<std::unique_ptr<Channel>> UcxTransport::Attach(std::string_view ticket,
                                                              absl::Duration timeout) {
  KVSTOW_ASSIGN_OR_RETURN(const UcxTicket window, DecodeUcxTicket(ticket));
  {
    MutexLock lock(&attached_->mutex);
    if (attached_->windows.count(window.window_id) > 0) {
      return absl::NotFoundError("the UCX window of this ticket was attached before");
    }
    if (static_cast<int64_t>(attached_->windows.size()) >= channels_max_) {
      return absl::ResourceExhaustedError(absl::StrCat(
          attached_->windows.size(), " UCX channels are open, at most ", channels_max_));
    }
    attached_->windows.insert(window.window_id);
  }
  return UcxChannel::Attach(engine_, window, timeout,
                            [attached = attached_, id = window.window_id] {
                              MutexLock lock(&attached->mutex);
                              attached->windows.erase(id);
                            });
}

}  // namespace

bool IsUcxBuilt() { return true; }

absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const UcxTransportOptions& options) {
  if (options.channels_max < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("channels_max of UCX is ", options.channels_max, ", at least 1"));
  }
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<UcxEngine> engine, UcxEngine::Open(options.network));
  engine->Start();
  return std::make_unique<UcxTransport>(std::move(engine), options.channels_max);
}

}  // namespace kvstow
