// BufferPool: memory for the payloads of frames, used again and again so that its pages are touched
// once. Private to the client library.
//
//   BufferPool::Buffer buffer = pool.Take(1 << 20);
//   ... fill buffer.bytes() ...
//   grpc::Slice slice = std::move(buffer).ToSlice(used_bytes);  // back in the pool with the slice
//
// A buffer may outlive the pool's owner: gRPC drops a slice when the transport is done with it.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/types/span.h"

namespace kvstow {

class BufferPool {
 public:
  class Buffer {
   public:
    Buffer(Buffer&&) noexcept;
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer();
    absl::Span<std::byte> bytes() const;
    // The first `used_bytes`, without a copy.
    grpc::Slice ToSlice(int64_t used_bytes) &&;

   private:
    friend class BufferPool;
    struct Memory;
    explicit Buffer(std::unique_ptr<Memory> memory);
    std::unique_ptr<Memory> memory_;
  };

  // Keeps at most `free_bytes_max` that nobody uses.
  explicit BufferPool(int64_t free_bytes_max);
  ~BufferPool();

  // At least `bytes`, aligned to 64, contents undefined.
  Buffer Take(int64_t bytes);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace kvstow
