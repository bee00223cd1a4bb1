// Frames: PutFrame and GetFrame as a small hand-written protobuf header followed by payload slices
// that are never copied. The bytes on the wire are a valid message of data.proto, which any
// generated stub reads and writes; tests/proto/frames_test.cc holds the two to each other.
//
// In the payload each unit starts at a multiple of 64 bytes; `payload` (field 15) comes last.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvstow {

inline constexpr int64_t kMaxFrameBytes = (int64_t{4} << 20) - (int64_t{64} << 10);
inline constexpr int64_t kTargetPayloadBytes = int64_t{1} << 20;  // where throughput levels off
inline constexpr int64_t kMaxFrameHeaderBytes = int64_t{64} << 10;
inline constexpr int64_t kPayloadAlignment = 64;

// Where a unit that would start at `offset` of a payload does start.
constexpr int64_t AlignPayload(int64_t offset) {
  return (offset + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

// Everything of a frame but its payload. Fields as in data.proto.
struct PutFrameHeader {
  uint64_t ticket = 0;
  uint32_t first_unit = 0;
  std::vector<uint64_t> unit_xxh3;
  std::vector<uint32_t> unit_bytes;
  std::vector<uint32_t> unit_codec;
  uint64_t channel = 0;
  uint64_t window_offset = 0;
  uint64_t window_bytes = 0;
  std::vector<uint64_t> unit_offset;
};

struct GetFrameHeader {
  uint32_t block_idx = 0;
  int32_t code = 0;
  uint32_t first_unit = 0;
  std::vector<uint64_t> unit_xxh3;
  std::vector<uint32_t> unit_bytes;
  std::vector<uint32_t> unit_codec;
  std::string key;
  std::string fingerprint;
  uint32_t num_units = 0;
  uint32_t num_tokens = 0;
  uint64_t window_offset = 0;
  uint64_t window_bytes = 0;
  std::string calibration_id;
  bool is_placed = false;
};

// One buffer: header and payload. The slices are shared, not copied. CHECKs kMaxFrameBytes.
grpc::ByteBuffer BuildFrame(const PutFrameHeader& header, std::vector<grpc::Slice> payload);
grpc::ByteBuffer BuildFrame(const GetFrameHeader& header, std::vector<grpc::Slice> payload);

// A slice over memory that `owner` keeps. gRPC lets go of the owner exactly once, with the last
// piece of the slice: only then is the memory no longer read. The end of a write is too early for
// that.
grpc::Slice OwnedSlice(std::shared_ptr<const void> owner, absl::Span<const std::byte> bytes);

// The payload of a received frame: pieces of memory that live as long as this object.
class FramePayload {
 public:
  FramePayload() = default;
  // A payload that did not come in the message. `is_shared`: another process may change it at any
  // time, so what is used must be a copy that was checked.
  FramePayload(grpc::Slice payload, bool is_shared);

  int64_t size() const { return size_; }
  bool is_shared() const { return is_shared_; }
  // Copies [offset, offset + out.size()) to `out`. CHECKs the range.
  void CopyTo(int64_t offset, absl::Span<std::byte> out) const;
  // The same range in place when it lies in one piece, else an empty span.
  absl::Span<const std::byte> Contiguous(int64_t offset, int64_t bytes) const;

 private:
  friend class FrameParser;
  size_t PieceAt(int64_t offset) const;

  std::vector<grpc::Slice> slices_;  // the payload and nothing else; keeps the memory
  std::vector<int64_t> starts_;      // offset of each slice in the payload
  int64_t size_ = 0;
  bool is_shared_ = false;
};

// kInvalidArgument for bytes that are no such message, more than kMaxFrameBytes, a header over 64
// KiB, a payload that is not last, or (Put) lists of unequal length. Unknown fields are skipped.
absl::Status ParseFrame(const grpc::ByteBuffer& buffer, PutFrameHeader& header,
                        FramePayload& payload);
absl::Status ParseFrame(const grpc::ByteBuffer& buffer, GetFrameHeader& header,
                        FramePayload& payload);

}  // namespace kvstow
