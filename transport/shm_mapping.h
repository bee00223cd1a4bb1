// ShmMapping: the memory of a shared window in this process's address space.
//
// It is a memfd whose size is sealed: whoever maps it can rely on every byte being there, whatever
// the other end does with its descriptor. Not inherited by forked children (MADV_DONTFORK).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "transport/owned_fd.h"

namespace kvstow {

class ShmMapping {
 public:
  ~ShmMapping();
  ShmMapping(const ShmMapping&) = delete;
  ShmMapping& operator=(const ShmMapping&) = delete;

  // Maps what a peer sent, after looking that it cannot be cut under our feet.
  //   kInvalidArgument    no memfd of ordinary pages, not sealed against shrinking, not writable,
  //                       not of `bytes`, or not populated (who touches a page first pays for it)
  //   kResourceExhausted  no address space
  static absl::StatusOr<std::shared_ptr<ShmMapping>> MapOffered(int fd, int64_t bytes);

  // Maps a memfd of our own and allocates its pages, about a second per GiB.
  // kResourceExhausted: no memory.
  static absl::StatusOr<std::shared_ptr<ShmMapping>> MapOwn(int fd, int64_t bytes);

  absl::Span<std::byte> memory() { return {address_, bytes_}; }

  // Enters pages that exist into this process's page table, so that the first copy does not pay for
  // it; stops at the time-out, which does no harm.
  void Prefault(absl::Duration timeout);

 private:
  ShmMapping(std::byte* address, size_t bytes) : address_(address), bytes_(bytes) {}
  static absl::StatusOr<std::shared_ptr<ShmMapping>> Map(int fd, int64_t bytes);

  std::byte* const address_;
  const size_t bytes_;
};

// A memfd of `bytes`, sealed against any change of its size.
absl::StatusOr<OwnedFd> CreateWindowFd(int64_t bytes);

}  // namespace kvstow
