// WindowBuffer: memory that a client shares with its service, for KV that Put and Get leave where
// it is.
//
//   KVSTOW_ASSIGN_OR_RETURN(auto buffer, client->NewWindowBuffer(bytes));
//   ... rows of KV in buffer->memory(), LayerRows that point there ...
//   client->Put(model, {.layers = layers, ...});   // the service reads them in place
//   client->Get(model, keys, layers);              // the service writes them in place
//
// In place are planes whose rows stand one after the other (token_stride_bytes is a row) and that
// lie in one buffer as a whole; of a Put those that the service encodes or keeps raw
// (CompressAt::kService), of a Get those that are stored raw. All else is copied, as from and to
// any memory. Every byte is checked as ever: in a Put by the service, in the copy that it keeps; in
// a Get by the client, where it stands.
//
// The service may write to the destination of a Get until the call has ended. Where a Get ends
// badly (its deadline passes, the connection breaks) the service may do so a little longer: as long
// as it lives, Put and Get of this client refuse the memory (kFailedPrecondition). Use it for
// nothing, not with another client either, and make another one. When the service is gone, the
// buffer is ordinary memory.
//
// A block that misses leaves its rows as they were, but for a Get into a buffer: units that came in
// place before it failed have been written.
//
// Thread safety: all methods may be called at once.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/types/span.h"

namespace kvstow {

class BulkArea;  // private to the library

class WindowBuffer {
 public:
  // No call may still use the memory.
  ~WindowBuffer();

  absl::Span<std::byte> memory() const;  // page-aligned, populated, zero at first
  // False: calls copy, as the service is gone or a call ended badly.
  bool is_in_place() const;

 private:
  friend class KvClient;
  explicit WindowBuffer(std::shared_ptr<BulkArea> area);
  const std::shared_ptr<BulkArea> area_;
};

}  // namespace kvstow
