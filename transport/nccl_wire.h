// The control connection of an NCCL window: TCP, from the service to the worker, one kind of
// message of fixed size. README.md has the order in which they come.
#pragma once

#include <netinet/in.h>

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/nccl_library.h"
#include "transport/owned_fd.h"

namespace kvstow {

static_assert(std::endian::native == std::endian::little,
              "messages are sent as they lie in memory");

enum class NcclMessageKind : uint32_t {
  kGreeting = 1,  // worker: status, NCCL's version
  kHello = 2,     // service: secret, NCCL's version
  kAccept = 3,    // worker: the communicator's id
  kRequest = 4,   // service: id, op (TransferOp), offset, bytes
  kDone = 5,      // worker: id
};

using NcclSecret = std::array<char, 16>;

struct NcclMessage {
  std::array<char, 8> magic{'K', 'V', 'S', 'T', 'O', 'W', 'N', 'C'};
  NcclMessageKind kind = NcclMessageKind::kGreeting;
  uint32_t status = 0;  // as gRPC numbers them
  uint64_t id = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
  uint32_t op = 0;
  int32_t version = 0;
  NcclSecret secret{};
  NcclUniqueId unique_id{};
};
static_assert(sizeof(NcclMessage) == 192);

inline constexpr uint8_t kNcclTicketVersion = 1;

struct NcclTicket {
  NcclSecret secret{};
  in_addr host{};
  uint16_t port = 0;
  int64_t bytes = 0;
};
std::string EncodeNcclTicket(const NcclTicket& ticket);
absl::StatusOr<NcclTicket> DecodeNcclTicket(std::string_view bytes);

class NcclSocket {
 public:
  explicit NcclSocket(OwnedFd fd);
  static absl::StatusOr<NcclSocket> Connect(in_addr host, uint16_t port, absl::Time deadline);

  int fd() const { return fd_.get(); }
  void Close() { fd_.Reset(); }
  absl::Status Send(const NcclMessage& message, absl::Time deadline);
  // Nothing: none is there yet. kUnavailable: the peer closed, or what it sends is no message.
  absl::StatusOr<std::optional<NcclMessage>> TryReceive();
  // kUnavailable also where it is not of this kind.
  absl::StatusOr<NcclMessage> Receive(NcclMessageKind kind, absl::Time deadline);

 private:
  OwnedFd fd_;
  std::array<char, sizeof(NcclMessage)> buffer_{};
  size_t num_buffered_ = 0;
};

}  // namespace kvstow
