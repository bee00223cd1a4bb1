// SegmentDevice: what a database must do for SegmentStore. RocksDB does it in nvme_tier.cc.
//
// A segment is a named part of the database that is made, filled and deleted as a whole. It holds,
// per record, the record and a small meta entry, written together or not at all.
//
// Thread safety: Read may be called at any time; the others by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/block_key.h"
#include "storage/block_ref.h"

namespace kvstow {

// A segment, as its device sees it. Alive while a reader uses it; files of a deleted segment go
// with the last user.
class Segment {
 public:
  virtual ~Segment() = default;
};

class SegmentDevice {
 public:
  virtual ~SegmentDevice() = default;

  // All writing methods: kUnavailable where the disk fails.
  virtual absl::StatusOr<std::shared_ptr<Segment>> Create(uint32_t segment_idx) = 0;
  // Into memory; Flush brings it to disk.
  virtual absl::Status Write(Segment& segment, const BlockKey& key, std::string_view meta,
                             absl::Span<const std::byte> record) = 0;
  // Removes the meta entry, without which a record is not found again.
  virtual absl::Status Erase(Segment& segment, const BlockKey& key) = 0;
  virtual absl::Status Flush(Segment& segment) = 0;
  virtual absl::Status Delete(Segment& segment) = 0;
  // After a failure: can the device write again?
  virtual absl::Status Resume() = 0;

  // kNotFound; kDataLoss: there is something, but it cannot be read; kUnavailable.
  virtual absl::StatusOr<BlockRef> Read(const Segment& segment, const BlockKey& key) const = 0;
  // Calls `visit` with each meta entry, in any order. kDataLoss: some could not be reached.
  virtual absl::Status Scan(
      const Segment& segment,
      const std::function<void(const BlockKey& key, std::string_view meta)>& visit) const = 0;
  // Of the segment's files.
  virtual int64_t FileBytes(const Segment& segment) const = 0;
};

}  // namespace kvstow
