// UcxListener: where a worker takes the connections of services to its window, and what it does for
// the one that is attached.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto listener, UcxListener::Open(worker, "127.0.0.1", &window));
//   ... listener->address() goes into the ticket ...
//
// Why a listener, where UCX can also connect to a worker's address: then the two workers connect to
// each other, and when the service dies meanwhile, UCX 1.13 ends the *worker's process*. A
// connection to a listener is one endpoint here with an error handler of ours.
//
// Everything runs on the thread of the engine, or before there is one.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <list>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/ucx_message.h"
#include "transport/ucx_ticket.h"

struct ucp_ep;  // of UCX
struct ucp_listener;
struct ucp_worker;

namespace kvstow {

// "IP:PORT", "[IP]:PORT" for IPv6. kInvalidArgument: neither.
absl::StatusOr<sockaddr_storage> ParseSocketAddress(const std::string& text);
std::string FormatSocketAddress(const sockaddr_storage& address);

// What a listener gives access to.
struct UcxServedWindow {
  enum class State { kOffered, kAttached, kClosed };

  absl::Span<std::byte> memory;
  UcxWindowId id{};
  std::atomic<State> state{State::kOffered};
};

class UcxListener {
 public:
  static constexpr size_t kConnectionsMax = 16;  // one is used; others try their luck or are dying

  // `ip`: an address of this machine; the port is a free one. `window` must outlive the listener.
  //   kInvalidArgument  no IP address
  //   kUnavailable      cannot be listened on
  static absl::StatusOr<std::unique_ptr<UcxListener>> Open(ucp_worker* worker,
                                                           const std::string& ip,
                                                           UcxServedWindow* window);
  ~UcxListener();

  const std::string& address() const { return address_; }
  // Gives up connections that broke.
  void Tick();
  // What a service says over `endpoint`.
  void OnMessage(const ucp_ep* endpoint, const UcxMessage& message, UcxData& data);
  // Takes no more connections, and gives up all of them by force.
  void Close();
  // After Close: nothing of them is left in UCX.
  bool IsFinished() const { return connections_.empty() && num_requests_ == 0; }

 private:
  friend struct UcxListenerCallbacks;  // what UCX calls
  struct Connection {
    UcxListener* listener = nullptr;
    uint64_t number = 0;
    ucp_ep* endpoint = nullptr;
    bool is_attached = false;
    bool is_broken = false;
    bool is_closing = false;
    bool is_closed = false;
  };

  UcxListener(ucp_worker* worker, UcxServedWindow* window) : worker_(worker), window_(window) {}
  void Accept(void* request);
  absl::StatusCode Attach(Connection& connection, absl::Span<const std::byte> window_id);
  void Read(const Connection& connection, const UcxMessage& message);
  void Write(const Connection& connection, const UcxMessage& message, UcxData& data);
  void Answer(uint64_t connection_number, const UcxMessage& message);
  void CloseConnection(Connection& connection);

  ucp_worker* const worker_;
  UcxServedWindow* const window_;
  ucp_listener* listener_ = nullptr;
  std::string address_;
  std::list<Connection> connections_;  // UCX holds their addresses
  uint64_t num_accepted_ = 0;
  int num_requests_ = 0;  // that UCX has not given back
};

}  // namespace kvstow
