// The worker's end of UCX windows: memory, its registration, and the thread that answers for it.
#include <sys/random.h>
#include <ucp/api/ucp.h>

#include <atomic>
#include <cstring>
#include <new>
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
  ~UcxWindow() override {
    // In this order: no more traffic, then the registration, then the memory.
    engine_->Stop();
    if (handle_ != nullptr) ucp_mem_unmap(engine_->context(), handle_);
    engine_ = nullptr;
  }

  absl::Status Register();
  void Serve() { engine_->Start(); }

  PathKind path() const override { return PathKind::kUcx; }
  absl::Span<std::byte> memory() override { return mapping_->memory().subspan(kUcxControlBytes); }
  const std::string& ticket() const override { return ticket_; }
  // The service writes the state, so it is read anew each time.
  bool is_alive() override {
    const std::atomic_ref<UcxWindowState> state(control()->state);
    return state.load(std::memory_order_acquire) != UcxWindowState::kClosed;
  }

 private:
  UcxControl* control() { return reinterpret_cast<UcxControl*>(mapping_->memory().data()); }

  const std::shared_ptr<ShmMapping> mapping_;
  std::shared_ptr<UcxEngine> engine_;
  ucp_mem_h handle_ = nullptr;
  std::string ticket_;
};

absl::Status UcxWindow::Register() {
  const absl::Span<std::byte> all = mapping_->memory();
  ucp_mem_map_params_t params = {};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = all.data();
  params.length = all.size();
  ucs_status_t status = ucp_mem_map(engine_->context(), &params, &handle_);
  if (status != UCS_OK) {
    handle_ = nullptr;
    return absl::ResourceExhaustedError(
        absl::StrCat("UCX, registering ", all.size(), " bytes: ", ucs_status_string(status)));
  }
  void* rkey = nullptr;
  size_t rkey_bytes = 0;
  status = ucp_rkey_pack(engine_->context(), handle_, &rkey, &rkey_bytes);
  if (status != UCS_OK) {
    return absl::UnavailableError(
        absl::StrCat("UCX, packing the window's key: ", ucs_status_string(status)));
  }
  UcxControl* const control = new (all.data()) UcxControl;
  // Sixteen bytes are never split, and once the kernel's pool is up the call does not fail.
  KVSTOW_CHECK(getrandom(control->window_id.data(), control->window_id.size(), 0) ==
               static_cast<ssize_t>(control->window_id.size()));
  UcxTicket ticket;
  ticket.window_id = control->window_id;
  ticket.address = reinterpret_cast<uintptr_t>(all.data()) + uint64_t{kUcxControlBytes};
  ticket.bytes = all.size() - size_t{kUcxControlBytes};
  ticket.worker_address = engine_->worker_address();
  ticket.rkey.assign(static_cast<const char*>(rkey), rkey_bytes);
  ucp_rkey_buffer_release(rkey);
  KVSTOW_ASSIGN_OR_RETURN(ticket_, EncodeUcxTicket(ticket));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Window>> OpenUcxWindow(const UcxWindowOptions& options) {
  if (options.bytes < 1 || options.bytes > kMaxWindowBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a window of ", options.bytes, " bytes; 1 to ",
                                                   kMaxWindowBytes, " are allowed"));
  }
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<UcxEngine> engine, UcxEngine::Open(options.network));
  const int64_t all_bytes = options.bytes + kUcxControlBytes;
  KVSTOW_ASSIGN_OR_RETURN(const OwnedFd fd, CreateWindowFd(all_bytes));
  KVSTOW_ASSIGN_OR_RETURN(std::shared_ptr<ShmMapping> mapping,
                          ShmMapping::MapOwn(fd.get(), all_bytes));
  auto window = std::make_unique<UcxWindow>(std::move(mapping), std::move(engine));
  KVSTOW_RETURN_IF_ERROR(window->Register());
  window->Serve();
  return window;
}

}  // namespace kvstow
