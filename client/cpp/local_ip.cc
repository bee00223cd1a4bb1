#include "client/cpp/local_ip.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "transport/owned_fd.h"

namespace kvstow {
namespace {

struct FreeInfo {
  void operator()(addrinfo* info) const { freeaddrinfo(info); }
};

absl::Status NoRoute(const std::string& target, const char* why) {
  return absl::UnavailableError(absl::StrCat("no way to ", target, ": ", why));
}

}  // namespace

absl::StatusOr<std::string> LocalIpTowards(const std::string& target) {
  if (absl::StartsWith(target, "unix:")) return "127.0.0.1";
  const size_t colon = target.rfind(':');
  if (colon == std::string::npos) return NoRoute(target, "it has no port");
  absl::string_view host = absl::string_view(target).substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(std::string(host).c_str(), target.c_str() + colon + 1, &hints, &found);
  if (error != 0) return NoRoute(target, gai_strerror(error));
  const std::unique_ptr<addrinfo, FreeInfo> owned(found);
  // Connecting a datagram socket only asks the routing table.
  const OwnedFd fd(socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own = {};
  socklen_t length = sizeof(own);
  auto* const any = reinterpret_cast<sockaddr*>(&own);
  if (!fd.is_open() || connect(fd.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      getsockname(fd.get(), any, &length) != 0) {
    return NoRoute(target, strerror(errno));
  }
  char ip[NI_MAXHOST] = {};
  const int named = getnameinfo(any, length, ip, sizeof(ip), nullptr, 0, NI_NUMERICHOST);
  if (named != 0) return NoRoute(target, gai_strerror(named));
  return std::string(ip);
}

}  // namespace kvstow
