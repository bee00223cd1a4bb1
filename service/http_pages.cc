#include "service/http_pages.h"

#include <civetweb.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"
#include "service/listen_address.h"

namespace kvstow {
namespace {

constexpr std::string_view kHeaders =
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cache-Control: no-store\r\n"
    "Connection: close\r\n\r\n";

void Answer(mg_connection* connection, const std::string& status, const HttpPages::Page* page,
            bool has_body) {
  const std::string body = page != nullptr ? page->body() : absl::StrCat(status, "\n");
  const std::string head =
      absl::StrCat("HTTP/1.1 ", status,
                   "\r\nContent-Type: ", page != nullptr ? page->content_type : "text/plain",
                   "; charset=utf-8\r\nContent-Length: ", body.size(), "\r\n", ToAbsl(kHeaders));
  mg_write(connection, head.data(), head.size());
  if (has_body) mg_write(connection, body.data(), body.size());
}

}  // namespace

struct HttpPages::State {
  explicit State(std::vector<Page> served) : pages(std::move(served)) {}
  ~State() {
    if (server != nullptr) mg_stop(server);
  }

  // A handler of civetweb's: the status of what it has answered.
  static int Handle(mg_connection* connection, void* state);

  const std::vector<Page> pages;
  mg_context* server = nullptr;
};

int HttpPages::State::Handle(mg_connection* connection, void* state) {
  const mg_request_info& request = *mg_get_request_info(connection);
  const std::string_view method = request.request_method;
  const bool is_head = method == "HEAD";
  if (method != "GET" && !is_head) {
    Answer(connection, "405 Method Not Allowed", nullptr, true);
    return 405;
  }
  const std::string_view path = request.local_uri != nullptr ? request.local_uri : "";
  const std::vector<Page>& pages = static_cast<State*>(state)->pages;
  const auto page = std::find_if(pages.begin(), pages.end(),
                                 [&](const Page& served) { return served.path == path; });
  if (page == pages.end()) {
    Answer(connection, "404 Not Found", nullptr, !is_head);
    return 404;
  }
  Answer(connection, "200 OK", &*page, !is_head);
  return 200;
}

HttpPages::HttpPages(std::unique_ptr<State> state) : state_(std::move(state)) {}

HttpPages::~HttpPages() = default;

absl::StatusOr<std::unique_ptr<HttpPages>> HttpPages::Serve(const std::string& field,
                                                            const std::string& address,
                                                            std::vector<Page> pages) {
  // The library says only that it could not bind; we say why.
  KVSTOW_RETURN_IF_ERROR(CheckTcpAddressIsFree(field, address));
  static const unsigned is_initialized = mg_init_library(0);
  static_cast<void>(is_initialized);
  auto state = std::make_unique<State>(std::move(pages));
  const char* options[] = {"listening_ports",
                           address.c_str(),
                           "num_threads",
                           "2",
                           "request_timeout_ms",
                           "5000",
                           "enable_keep_alive",
                           "no",
                           nullptr};
  state->server = mg_start(nullptr, nullptr, options);
  if (state->server == nullptr) {
    return absl::UnavailableError(absl::StrCat(field, " ", address, ": cannot listen there"));
  }
  mg_set_request_handler(state->server, "**", &State::Handle, state.get());
  return std::unique_ptr<HttpPages>(new HttpPages(std::move(state)));
}

int HttpPages::port() const {
  std::array<mg_server_port, 1> ports = {};
  const int num_ports = mg_get_server_ports(state_->server, ports.size(), ports.data());
  return num_ports < 1 ? 0 : ports[0].port;
}

}  // namespace kvstow
