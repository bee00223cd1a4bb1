// The handshake of shared windows: one packet each way over the service's side socket (unix,
// SOCK_SEQPACKET), all numbers little-endian. README.md has the bytes.
//
//   worker -> service: hello, with the window's memfd (SCM_RIGHTS)
//   service -> worker: reply, with the token that the worker then hands over by gRPC
//
// After that nothing is sent: the open socket is the window's life, at both ends.
#pragma once

#include <sys/un.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/owned_fd.h"

namespace kvstow {

inline constexpr uint32_t kShmVersion = 1;  // the newest; all from 1 on are known
inline constexpr uint8_t kShmTicketVersion = 1;
inline constexpr size_t kShmHelloBytes = 24;
inline constexpr size_t kShmReplyBytes = 192;
inline constexpr size_t kShmTokenBytes = 16;

using ShmToken = std::array<char, kShmTokenBytes>;

// The side socket that belongs to a gRPC socket.
std::string ShmSocketPath(std::string_view grpc_socket_path);

struct ShmHello {
  uint32_t version = kShmVersion;
  uint64_t window_bytes = 0;
};
std::array<std::byte, kShmHelloBytes> EncodeShmHello(const ShmHello& hello);
// kInvalidArgument says what is wrong; sizes are judged elsewhere.
absl::StatusOr<ShmHello> DecodeShmHello(absl::Span<const std::byte> bytes);

// `status` loses what is over 159 bytes of its message. `token` counts where it is OK.
std::array<std::byte, kShmReplyBytes> EncodeShmReply(const absl::Status& status,
                                                     const ShmToken& token);
// The token, or the status that the service gave. kUnavailable: no reply of a service of ours.
absl::StatusOr<ShmToken> DecodeShmReply(absl::Span<const std::byte> bytes);

// One packet. Neither call waits: kUnavailable "try again" is told by `would_block`.
struct ShmPacket {
  std::vector<std::byte> bytes;  // empty: the peer has closed
  std::vector<OwnedFd> fds;
  bool would_block = false;
};
// A packet longer than `max_bytes` is cut to max_bytes + 1. Errors are kUnavailable.
absl::StatusOr<ShmPacket> ReceiveShmPacket(int socket, size_t max_bytes);
// `fd` < 0: none.
absl::Status SendShmPacket(int socket, absl::Span<const std::byte> bytes, int fd = -1);

// kInvalidArgument: longer than a socket's path may be, or empty.
absl::StatusOr<sockaddr_un> ShmSocketAddress(const std::string& path);

}  // namespace kvstow
