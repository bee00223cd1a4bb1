// BlockRef: a pinned, sealed record. While it lives, its bytes neither move nor change.
//
// Copying shares the pin. The last copy to go releases the memory (or the tier's own handle).
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/types/span.h"

namespace kvstow {

class BlockRef {
 public:
  BlockRef() = default;
  // `owner` keeps `bytes` valid; its destructor unpins.
  BlockRef(std::shared_ptr<const void> owner, absl::Span<const std::byte> bytes)
      : owner_(std::move(owner)), bytes_(bytes) {}

  absl::Span<const std::byte> bytes() const { return bytes_; }
  explicit operator bool() const { return owner_ != nullptr; }

 private:
  std::shared_ptr<const void> owner_;
  absl::Span<const std::byte> bytes_;
};

}  // namespace kvstow
