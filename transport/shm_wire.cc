#include "transport/shm_wire.h"

#include <errno.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr std::string_view kHelloMagic = "KVSTOWSH";
constexpr std::string_view kReplyMagic = "KVSTOWSR";
constexpr size_t kReasonOffset = 32;
constexpr size_t kMaxFds = 8;  // of which one is wanted; the kernel closes what is over

void PutLittle(std::byte* to, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

uint64_t GetLittle(const std::byte* from, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(from[i]) << (8 * i);
  return value;
}

bool HasMagic(absl::Span<const std::byte> bytes, std::string_view magic) {
  return bytes.size() >= magic.size() && std::memcmp(bytes.data(), magic.data(), magic.size()) == 0;
}

void TakeFds(const msghdr& message, std::vector<OwnedFd>& fds) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(const_cast<msghdr*>(&message), part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
}

}  // namespace

std::string ShmSocketPath(std::string_view grpc_socket_path) {
  return absl::StrCat(ToAbsl(grpc_socket_path), ".shm");
}

std::array<std::byte, kShmHelloBytes> EncodeShmHello(const ShmHello& hello) {
  std::array<std::byte, kShmHelloBytes> bytes{};
  std::memcpy(bytes.data(), kHelloMagic.data(), kHelloMagic.size());
  PutLittle(bytes.data() + 8, hello.version, 4);
  PutLittle(bytes.data() + 16, hello.window_bytes, 8);
  return bytes;
}

absl::StatusOr<ShmHello> DecodeShmHello(absl::Span<const std::byte> bytes) {
  if (!HasMagic(bytes, kHelloMagic)) {
    return absl::InvalidArgumentError("no hello of a kvstow worker");
  }
  // A version of the future may be longer: it is named before the length is judged.
  if (bytes.size() >= 12) {
    const auto version = static_cast<uint32_t>(GetLittle(bytes.data() + 8, 4));
    if (version < 1 || version > kShmVersion) {
      return absl::InvalidArgumentError(
          absl::StrCat("shared window of version ", version, "; known are 1 to ", kShmVersion));
    }
  }
  if (bytes.size() != kShmHelloBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("hello is ", bytes.size() > kShmHelloBytes ? "longer than " : "cut short of ",
                     kShmHelloBytes, " bytes"));
  }
  if (GetLittle(bytes.data() + 12, 4) != 0) {
    return absl::InvalidArgumentError("hello: bytes 12 to 15 are not zero");
  }
  return ShmHello{.version = static_cast<uint32_t>(GetLittle(bytes.data() + 8, 4)),
                  .window_bytes = GetLittle(bytes.data() + 16, 8)};
}

std::array<std::byte, kShmReplyBytes> EncodeShmReply(const absl::Status& status,
                                                     const ShmToken& token) {
  std::array<std::byte, kShmReplyBytes> bytes{};
  std::memcpy(bytes.data(), kReplyMagic.data(), kReplyMagic.size());
  PutLittle(bytes.data() + 8, kShmVersion, 4);
  PutLittle(bytes.data() + 12, static_cast<uint32_t>(status.code()), 4);
  if (status.ok()) {
    std::memcpy(bytes.data() + 16, token.data(), token.size());
  } else {
    const size_t length = std::min(status.message().size(), kShmReplyBytes - kReasonOffset - 1);
    std::memcpy(bytes.data() + kReasonOffset, status.message().data(), length);
  }
  return bytes;
}

absl::StatusOr<ShmToken> DecodeShmReply(absl::Span<const std::byte> bytes) {
  if (bytes.size() != kShmReplyBytes || !HasMagic(bytes, kReplyMagic)) {
    return absl::UnavailableError(
        absl::StrCat("the answer of ", bytes.size(), " bytes is not that of a kvstow service"));
  }
  const uint64_t code = GetLittle(bytes.data() + 12, 4);
  if (code != 0) {
    std::string reason;
    for (size_t i = kReasonOffset; i < bytes.size() && bytes[i] != std::byte{0}; ++i) {
      const char letter = static_cast<char>(bytes[i]);
      reason += letter >= ' ' && letter <= '~' ? letter : '?';
    }
    constexpr auto kLastCode = static_cast<uint64_t>(absl::StatusCode::kUnauthenticated);
    return absl::Status(
        code <= kLastCode ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
        reason);
  }
  ShmToken token;
  std::memcpy(token.data(), bytes.data() + 16, token.size());
  return token;
}

absl::StatusOr<ShmPacket> ReceiveShmPacket(int socket, size_t max_bytes) {
  ShmPacket packet;
  packet.bytes.resize(max_bytes + 1);
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
  iovec part = {packet.bytes.data(), packet.bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t received = -1;
  do {
    received = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  packet.would_block = received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  if (received < 0 && !packet.would_block) {
    return absl::UnavailableError(absl::StrCat("receiving: ", std::strerror(errno)));
  }
  if (received >= 0) TakeFds(message, packet.fds);
  packet.bytes.resize(static_cast<size_t>(std::max<ssize_t>(received, 0)));
  return packet;
}

absl::Status SendShmPacket(int socket, absl::Span<const std::byte> bytes, int fd) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  iovec part = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &fd, sizeof(int));
  }
  ssize_t sent = -1;
  do {
    sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent == static_cast<ssize_t>(bytes.size())) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("sending: ", std::strerror(errno)));
}

absl::StatusOr<sockaddr_un> ShmSocketAddress(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path \"", path, "\" has ", path.size(),
                                                   " bytes; 1 to ", sizeof(address.sun_path) - 1,
                                                   " are allowed"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

}  // namespace kvstow
