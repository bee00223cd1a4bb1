// HttpPages: a few fixed pages over HTTP, for people and scrapers. The only file pair that includes
// civetweb.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto pages, HttpPages::Serve("metrics.address", "127.0.0.1:9400",
//                                                        {{"/metrics", "text/plain", body}}));
//   LOG(pages->port());
//
// GET and HEAD of the paths that are named, answered whole with their length; 404 and 405 for the
// rest. Nothing is read from a request but its path. Every answer forbids what the pages do not
// need: scripts, styles and connections from elsewhere, inline ones, frames, forms (CSP).
//
// Two threads; a client that sends or takes nothing for five seconds is cut off. Thread safety:
// bodies are made on those threads, at most two at once.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvstow {

class HttpPages {
 public:
  struct Page {
    std::string path;  // "/metrics"
    std::string content_type;
    std::function<std::string()> body;
  };

  // `field` names the address in errors. kUnavailable: it is in use or not ours.
  static absl::StatusOr<std::unique_ptr<HttpPages>> Serve(const std::string& field,
                                                          const std::string& address,
                                                          std::vector<Page> pages);
  // Waits for answers that are being made.
  ~HttpPages();

  int port() const;

 private:
  struct State;
  explicit HttpPages(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace kvstow
