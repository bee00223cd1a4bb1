#include "service/listen_address.h"

#include <errno.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>

#include "absl/strings/str_cat.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

// A file descriptor that closes itself.
class Socket {
 public:
  Socket(int family, int type) : fd_(socket(family, type | SOCK_CLOEXEC, 0)) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

absl::Status AddressError(std::string_view field, const std::string& address, int error) {
  return absl::UnavailableError(
      absl::StrCat(ToAbsl(field), " ", address, ": ",
                   error == EADDRINUSE ? "address in use" : std::strerror(error)));
}

// Does a server accept connections there?
bool IsLive(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path, path.data(), path.size());
  const Socket probe(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK);
  if (connect(probe.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return true;
  }
  return errno == EAGAIN;  // alive, with a full backlog
}

}  // namespace

absl::Status CheckTcpAddressIsFree(std::string_view field, const std::string& address) {
  const size_t colon = address.rfind(':');
  const bool has_brackets = colon >= 2 && address.front() == '[' && address[colon - 1] == ']';
  const std::string host = has_brackets ? address.substr(1, colon - 2) : address.substr(0, colon);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat(ToAbsl(field), " ", address, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  const Socket probe(found->ai_family, found->ai_socktype);
  if (probe.fd() < 0) return AddressError(field, address, errno);
  // As gRPC and civetweb do: connections of an earlier server in TIME_WAIT are no obstacle.
  const int on = 1;
  setsockopt(probe.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(probe.fd(), found->ai_addr, found->ai_addrlen) != 0 || listen(probe.fd(), 1) != 0) {
    return AddressError(field, address, errno);
  }
  return absl::OkStatus();
}

absl::Status FreeUnixSocket(const std::string& path) {
  struct stat info = {};
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat("listen.unix_socket ", path, ": a file that is no socket is in the way"));
    }
    if (IsLive(path)) return AddressError("listen.unix_socket", path, EADDRINUSE);
    if (unlink(path.c_str()) != 0) {
      return absl::PermissionDeniedError(absl::StrCat(
          "listen.unix_socket ", path, ": stale socket cannot be removed: ", std::strerror(errno)));
    }
  }
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  if (access(folder.c_str(), F_OK) != 0) {
    return absl::NotFoundError(
        absl::StrCat("listen.unix_socket ", path, ": folder ", folder, " does not exist"));
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("listen.unix_socket ", path, ": folder ", folder, " cannot be written"));
  }
  return absl::OkStatus();
}

}  // namespace kvstow
