// The worker's end of UCX windows: memory, and the thread that answers for it.
#include <sys/random.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"
#include "transport/shm_mapping.h"
#include "transport/ucx.h"
#include "transport/ucx_engine.h"
#include "transport/ucx_ticket.h"

namespace kvstow {
namespace {

class UcxWindow final : public Window {
 public:
  UcxWindow(std::shared_ptr<ShmMapping> mapping, std::shared_ptr<UcxEngine> engine)
      : mapping_(std::move(mapping)), engine_(std::move(engine)) {}
  // The engine ends before the memory.
  ~UcxWindow() override { engine_ = nullptr; }

  absl::Status Serve(const std::string& ip);

  PathKind path() const override { return PathKind::kUcx; }
  absl::Span<std::byte> memory() override { return mapping_->memory(); }
  const std::string& ticket() const override { return ticket_; }
  bool is_alive() override { return served_.state != UcxServedWindow::State::kClosed; }

 private:
  const std::shared_ptr<ShmMapping> mapping_;
  UcxServedWindow served_;
  std::shared_ptr<UcxEngine> engine_;
  std::string ticket_;
};

absl::Status UcxWindow::Serve(const std::string& ip) {
  served_.memory = mapping_->memory();
  // Sixteen bytes are never split, and once the kernel's pool is up the call does not fail.
  KVSTOW_CHECK(getrandom(served_.id.data(), served_.id.size(), 0) ==
               static_cast<ssize_t>(served_.id.size()));
  UcxTicket ticket{.window_id = served_.id, .bytes = served_.memory.size(), .listener = {}};
  KVSTOW_ASSIGN_OR_RETURN(ticket.listener, engine_->Listen(ip, &served_));
  KVSTOW_ASSIGN_OR_RETURN(ticket_, EncodeUcxTicket(ticket));
  engine_->Start();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Window>> OpenUcxWindow(const UcxWindowOptions& options) {
  if (options.bytes < 1 || options.bytes > kMaxWindowBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a window of ", options.bytes, " bytes; 1 to ",
                                                   kMaxWindowBytes, " are allowed"));
  }
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<UcxEngine> engine, UcxEngine::Open(options.network));
  KVSTOW_ASSIGN_OR_RETURN(const OwnedFd fd, CreateWindowFd(options.bytes));
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<ShmMapping> mapping,
                          ShmMapping::MapOwn(fd.get(), options.bytes));
  auto window = std::make_unique<UcxWindow>(std::move(mapping), std::move(engine));
  KVSTOW_RETURN_IF_ERROR(window->Serve(options.ip));
  return window;
}

}  // namespace kvstow
