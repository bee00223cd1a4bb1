#include "proto/frames.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status_macros.h"

namespace kvstow {
namespace {

// Protobuf's wire types.
enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

constexpr uint32_t kPayloadField = 15;

int64_t VarintBytes(uint64_t value) {
  int64_t bytes = 1;
  while (value >= 128) {
    value >>= 7;
    ++bytes;
  }
  return bytes;
}

// int32 goes over the wire sign-extended to 64 bits.
uint64_t SignExtended(int32_t value) { return static_cast<uint64_t>(int64_t{value}); }

template <typename T>
int64_t PackedVarintBytes(const std::vector<T>& values) {
  int64_t bytes = 0;
  for (const T value : values) bytes += VarintBytes(value);
  return bytes;
}

// Fields as the generated classes write them: in number order, zero and empty ones left out. The
// same walk counts the bytes (Out = Counter) and writes them (Out = Writer).
struct Counter {
  int64_t bytes = 0;
  void Varint(uint64_t value) { bytes += VarintBytes(value); }
  void Fixed64(uint64_t) { bytes += 8; }
  void Text(std::string_view text) { bytes += static_cast<int64_t>(text.size()); }
};

struct Writer {
  uint8_t* at;
  void Varint(uint64_t value) {
    while (value >= 128) {
      *at++ = static_cast<uint8_t>(value | 128);
      value >>= 7;
    }
    *at++ = static_cast<uint8_t>(value);
  }
  void Fixed64(uint64_t value) {
    for (int i = 0; i < 8; ++i) *at++ = static_cast<uint8_t>(value >> (8 * i));
  }
  void Text(std::string_view text) {
    std::memcpy(at, text.data(), text.size());
    at += text.size();
  }
};

template <typename Out>
class FieldWriter {
 public:
  explicit FieldWriter(Out& out) : out_(out) {}
  void Varint(uint32_t field, uint64_t value) {
    if (value == 0) return;
    Tag(field, kVarint);
    out_.Varint(value);
  }
  void Fixed64(uint32_t field, uint64_t value) {
    if (value == 0) return;
    Tag(field, kFixed64);
    out_.Fixed64(value);
  }
  void Text(uint32_t field, std::string_view text) {
    if (text.empty()) return;
    Length(field, static_cast<int64_t>(text.size()));
    out_.Text(text);
  }
  void PackedFixed64(uint32_t field, const std::vector<uint64_t>& values) {
    if (values.empty()) return;
    Length(field, static_cast<int64_t>(8 * values.size()));
    for (const uint64_t value : values) out_.Fixed64(value);
  }
  void PackedVarint(uint32_t field, const std::vector<uint32_t>& values) {
    if (values.empty()) return;
    Length(field, PackedVarintBytes(values));
    for (const uint32_t value : values) out_.Varint(value);
  }
  // Tag and length of bytes that follow.
  void Length(uint32_t field, int64_t bytes) {
    Tag(field, kBytes);
    out_.Varint(static_cast<uint64_t>(bytes));
  }

 private:
  void Tag(uint32_t field, WireType type) { out_.Varint(field << 3 | type); }
  Out& out_;
};

template <typename Out>
void WriteFields(const PutFrameHeader& header, Out& out) {
  FieldWriter<Out> fields(out);
  fields.Fixed64(1, header.ticket);
  fields.Varint(2, header.first_unit);
  fields.PackedFixed64(3, header.unit_xxh3);
  fields.PackedVarint(4, header.unit_bytes);
  fields.PackedVarint(5, header.unit_codec);
  fields.Fixed64(6, header.channel);
  fields.Varint(7, header.window_offset);
  fields.Varint(8, header.window_bytes);
  fields.PackedFixed64(9, header.unit_offset);
}

template <typename Out>
void WriteFields(const GetFrameHeader& header, Out& out) {
  FieldWriter<Out> fields(out);
  fields.Varint(1, header.block_idx);
  fields.Varint(2, SignExtended(header.code));
  fields.Varint(3, header.first_unit);
  fields.PackedFixed64(4, header.unit_xxh3);
  fields.PackedVarint(5, header.unit_bytes);
  fields.PackedVarint(6, header.unit_codec);
  fields.Text(7, header.key);
  fields.Text(8, header.fingerprint);
  fields.Varint(9, header.num_units);
  fields.Varint(10, header.num_tokens);
  fields.Varint(11, header.window_offset);
  fields.Varint(12, header.window_bytes);
  fields.Text(13, header.calibration_id);
  fields.Varint(14, header.is_placed ? 1 : 0);
}

template <typename Header, typename Out>
void WriteAll(const Header& header, int64_t payload_bytes, Out& out) {
  WriteFields(header, out);
  if (payload_bytes > 0) FieldWriter<Out>(out).Length(kPayloadField, payload_bytes);
}

template <typename Header>
grpc::ByteBuffer Build(const Header& header, std::vector<grpc::Slice> payload) {
  int64_t payload_bytes = 0;
  for (const grpc::Slice& slice : payload) payload_bytes += static_cast<int64_t>(slice.size());
  Counter counter;
  WriteAll(header, payload_bytes, counter);
  KVSTOW_CHECK(counter.bytes + payload_bytes <= kMaxFrameBytes);
  grpc::Slice prefix(static_cast<size_t>(counter.bytes));
  Writer writer{const_cast<uint8_t*>(prefix.begin())};
  WriteAll(header, payload_bytes, writer);
  KVSTOW_CHECK(writer.at == prefix.end());
  payload.insert(payload.begin(), std::move(prefix));
  return grpc::ByteBuffer(payload.data(), payload.size());
}

absl::Status BadFrame(const std::string& found) {
  return absl::InvalidArgumentError(absl::StrCat("frame: ", found));
}

}  // namespace

// Reads a message from the slices of a buffer. After the first fault every read gives zeros.
class FrameParser {
 public:
  explicit FrameParser(std::vector<grpc::Slice> slices) : slices_(std::move(slices)) {
    for (const grpc::Slice& slice : slices_) rest_ += static_cast<int64_t>(slice.size());
    SkipEmpty();
  }

  template <typename Header>
  absl::Status Parse(Header& header, FramePayload& payload) {
    header = Header();
    payload = FramePayload();
    if (rest_ > kMaxFrameBytes) {
      return BadFrame(absl::StrCat(rest_, " bytes, want at most ", kMaxFrameBytes));
    }
    const int64_t all_bytes = rest_;
    while (status_.ok() && rest_ > 0) {
      const uint64_t tag = Varint(5);
      const uint64_t field = tag >> 3;
      if (tag > UINT32_MAX || field == 0) Fail(absl::StrCat("tag ", tag, " is none"));
      if (!status_.ok()) break;
      const auto type = static_cast<WireType>(tag & 7);
      if (field == kPayloadField && type == kBytes) {
        TakePayload(payload);
      } else if (!ReadField(static_cast<uint32_t>(field), type, header)) {
        Skip(static_cast<uint32_t>(field), type);
      }
      if (all_bytes - rest_ - payload.size_ > kMaxFrameHeaderBytes) {
        Fail(absl::StrCat("the header is over ", kMaxFrameHeaderBytes, " bytes"));
      }
    }
    return status_;
  }

 private:
  void Fail(const std::string& found) {
    if (status_.ok()) status_ = BadFrame(found);
  }

  void SkipEmpty() {
    while (slice_idx_ < slices_.size() && at_ == slices_[slice_idx_].size()) {
      ++slice_idx_;
      at_ = 0;
    }
  }

  void Advance(size_t bytes) {
    at_ += bytes;
    rest_ -= static_cast<int64_t>(bytes);
    SkipEmpty();
  }

  uint8_t Byte() {
    if (rest_ <= 0) {
      Fail("cut short");
      return 0;
    }
    const uint8_t byte = slices_[slice_idx_].begin()[at_];
    Advance(1);
    return byte;
  }

  // Tags and lengths have at most 5 bytes, numbers 10.
  uint64_t Varint(int bytes_max = 10) {
    uint64_t value = 0;
    for (int shift = 0; shift < 7 * bytes_max; shift += 7) {
      const uint8_t byte = Byte();
      value |= uint64_t{byte & 127u} << (shift < 64 ? shift : 63);
      if (byte < 128) {
        if (shift == 63 && byte > 1) break;
        return value;
      }
    }
    Fail("a number with too many bytes");
    return 0;
  }

  uint64_t Fixed64() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= uint64_t{Byte()} << (8 * i);
    return value;
  }

  // The length of bytes that follow and are there; 0 and a fault otherwise.
  int64_t Length() {
    const uint64_t bytes = Varint(5);
    if (status_.ok() && bytes > static_cast<uint64_t>(rest_)) {
      Fail(absl::StrCat("cut short: a field of ", bytes, " bytes where ", rest_, " are left"));
    }
    return status_.ok() ? static_cast<int64_t>(bytes) : 0;
  }

  // True where `type` is one that the field may have; it is read then.
  bool Number(WireType type, uint64_t& value) {
    if (type != kVarint) return false;
    value = Varint();
    return true;
  }

  bool Numbers(WireType type, std::vector<uint32_t>& values) {
    if (type == kVarint) {
      values.push_back(static_cast<uint32_t>(Varint()));
      return true;
    }
    if (type != kBytes) return false;
    const int64_t bytes = HeaderLength();
    const int64_t end = rest_ - bytes;
    while (status_.ok() && rest_ > end) values.push_back(static_cast<uint32_t>(Varint()));
    if (rest_ < end) Fail("a list's last number runs over its end");
    return true;
  }

  bool Fixed64s(WireType type, std::vector<uint64_t>& values) {
    if (type == kFixed64) {
      values.push_back(Fixed64());
      return true;
    }
    if (type != kBytes) return false;
    const int64_t bytes = HeaderLength();
    if (bytes % 8 != 0) Fail(absl::StrCat("a list of 8-byte numbers has ", bytes, " bytes"));
    for (int64_t i = 0; status_.ok() && i < bytes / 8; ++i) values.push_back(Fixed64());
    return true;
  }

  bool Text(WireType type, std::string& text) {
    if (type != kBytes) return false;
    text.clear();
    for (int64_t left = HeaderLength(); left > 0;) {
      const size_t here = std::min(slices_[slice_idx_].size() - at_, static_cast<size_t>(left));
      text.append(reinterpret_cast<const char*>(slices_[slice_idx_].begin() + at_), here);
      Advance(here);
      left -= static_cast<int64_t>(here);
    }
    return true;
  }

  // Length of a field that is part of the header: bounded before memory is spent on it.
  int64_t HeaderLength() {
    const int64_t bytes = Length();
    if (bytes > kMaxFrameHeaderBytes) {
      Fail(absl::StrCat("the header is over ", kMaxFrameHeaderBytes, " bytes"));
    }
    return status_.ok() ? bytes : 0;
  }

  void Skip(uint32_t field, WireType type) {
    int64_t bytes = 0;
    switch (type) {
      case kVarint:
        Varint();
        return;
      case kFixed64:
        bytes = 8;
        break;
      case kFixed32:
        bytes = 4;
        break;
      case kBytes:
        bytes = HeaderLength();
        break;
      default:
        Fail(absl::StrCat("field ", field, " has wire type ", static_cast<uint32_t>(type)));
        return;
    }
    if (bytes > rest_) Fail("cut short");
    while (status_.ok() && bytes > 0) {
      const size_t here = std::min(slices_[slice_idx_].size() - at_, static_cast<size_t>(bytes));
      Advance(here);
      bytes -= static_cast<int64_t>(here);
    }
  }

  void TakePayload(FramePayload& payload) {
    const int64_t bytes = Length();
    if (!status_.ok()) return;
    if (bytes != rest_) {
      Fail(absl::StrCat("the payload is not last: ", rest_ - bytes, " bytes follow it"));
      return;
    }
    for (; rest_ > 0; SkipEmpty()) {
      grpc::Slice& slice = slices_[slice_idx_];
      const size_t here = slice.size() - at_;
      payload.starts_.push_back(payload.size_);
      payload.slices_.push_back(at_ == 0 ? slice : slice.sub(at_, slice.size()));
      payload.size_ += static_cast<int64_t>(here);
      at_ += here;
      rest_ -= static_cast<int64_t>(here);
    }
  }

  bool ReadField(uint32_t field, WireType type, PutFrameHeader& header);
  bool ReadField(uint32_t field, WireType type, GetFrameHeader& header);

  std::vector<grpc::Slice> slices_;
  size_t slice_idx_ = 0;
  size_t at_ = 0;  // in the current slice
  int64_t rest_ = 0;
  absl::Status status_;
};

bool FrameParser::ReadField(uint32_t field, WireType type, PutFrameHeader& header) {
  uint64_t number = 0;
  switch (field) {
    case 1:
      if (type != kFixed64) return false;
      header.ticket = Fixed64();
      return true;
    case 2:
      if (!Number(type, number)) return false;
      header.first_unit = static_cast<uint32_t>(number);
      return true;
    case 3:
      return Fixed64s(type, header.unit_xxh3);
    case 4:
      return Numbers(type, header.unit_bytes);
    case 5:
      return Numbers(type, header.unit_codec);
    case 6:
      if (type != kFixed64) return false;
      header.channel = Fixed64();
      return true;
    case 7:
      return Number(type, header.window_offset);
    case 8:
      return Number(type, header.window_bytes);
    case 9:
      return Fixed64s(type, header.unit_offset);
    default:
      return false;
  }
}

bool FrameParser::ReadField(uint32_t field, WireType type, GetFrameHeader& header) {
  uint64_t number = 0;
  switch (field) {
    case 1:
      if (!Number(type, number)) return false;
      header.block_idx = static_cast<uint32_t>(number);
      return true;
    case 2:
      if (!Number(type, number)) return false;
      header.code = static_cast<int32_t>(number);
      return true;
    case 3:
      if (!Number(type, number)) return false;
      header.first_unit = static_cast<uint32_t>(number);
      return true;
    case 4:
      return Fixed64s(type, header.unit_xxh3);
    case 5:
      return Numbers(type, header.unit_bytes);
    case 6:
      return Numbers(type, header.unit_codec);
    case 7:
      return Text(type, header.key);
    case 8:
      return Text(type, header.fingerprint);
    case 9:
      if (!Number(type, number)) return false;
      header.num_units = static_cast<uint32_t>(number);
      return true;
    case 10:
      if (!Number(type, number)) return false;
      header.num_tokens = static_cast<uint32_t>(number);
      return true;
    case 11:
      return Number(type, header.window_offset);
    case 12:
      return Number(type, header.window_bytes);
    case 13:
      return Text(type, header.calibration_id);
    case 14:
      if (!Number(type, number)) return false;
      header.is_placed = number != 0;
      return true;
    default:
      return false;
  }
}

namespace {

template <typename Header>
absl::Status ParseInto(const grpc::ByteBuffer& buffer, Header& header, FramePayload& payload) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Valid()) return BadFrame("no bytes");
  if (!buffer.Dump(&slices).ok()) return BadFrame("its compression is not known");
  return FrameParser(std::move(slices)).Parse(header, payload);
}

}  // namespace

grpc::ByteBuffer BuildFrame(const PutFrameHeader& header, std::vector<grpc::Slice> payload) {
  return Build(header, std::move(payload));
}

grpc::ByteBuffer BuildFrame(const GetFrameHeader& header, std::vector<grpc::Slice> payload) {
  return Build(header, std::move(payload));
}

absl::Status ParseFrame(const grpc::ByteBuffer& buffer, PutFrameHeader& header,
                        FramePayload& payload) {
  KVSTOW_RETURN_IF_ERROR(ParseInto(buffer, header, payload));
  const size_t num_units = header.unit_xxh3.size();
  const size_t num_bytes = header.unit_bytes.size();
  if (num_bytes != header.unit_codec.size() || (num_bytes != 0 && num_bytes != num_units)) {
    return BadFrame(absl::StrCat(num_units, " checksums, ", num_bytes, " lengths and ",
                                 header.unit_codec.size(),
                                 " codecs, want as many of each (rows: checksums only)"));
  }
  if (!header.unit_offset.empty() && header.unit_offset.size() != num_units) {
    return BadFrame(absl::StrCat(num_units, " checksums and ", header.unit_offset.size(),
                                 " offsets, want as many of each or no offsets"));
  }
  return absl::OkStatus();
}

absl::Status ParseFrame(const grpc::ByteBuffer& buffer, GetFrameHeader& header,
                        FramePayload& payload) {
  return ParseInto(buffer, header, payload);
}

grpc::Slice OwnedSlice(std::shared_ptr<const void> owner, absl::Span<const std::byte> bytes) {
  auto* kept = new std::shared_ptr<const void>(std::move(owner));
  // gRPC does not write through the pointer; its type is that of C.
  return grpc::Slice(
      const_cast<std::byte*>(bytes.data()), bytes.size(),
      [](void* user) { delete static_cast<std::shared_ptr<const void>*>(user); }, kept);
}

FramePayload::FramePayload(grpc::Slice payload, bool is_shared)
    : starts_({0}), size_(static_cast<int64_t>(payload.size())), is_shared_(is_shared) {
  slices_.push_back(std::move(payload));
}

size_t FramePayload::PieceAt(int64_t offset) const {
  return static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), offset) -
                             starts_.begin()) -
         1;
}

void FramePayload::CopyTo(int64_t offset, absl::Span<std::byte> out) const {
  KVSTOW_CHECK(offset >= 0 && static_cast<int64_t>(out.size()) <= size_ - offset);
  if (out.empty()) return;
  for (size_t piece = PieceAt(offset); !out.empty(); ++piece) {
    const grpc::Slice& slice = slices_[piece];
    const auto skip = static_cast<size_t>(offset - starts_[piece]);
    const size_t here = std::min(slice.size() - skip, out.size());
    std::memcpy(out.data(), slice.begin() + skip, here);
    out.remove_prefix(here);
    offset += static_cast<int64_t>(here);
  }
}

absl::Span<const std::byte> FramePayload::Contiguous(int64_t offset, int64_t bytes) const {
  KVSTOW_CHECK(offset >= 0 && bytes >= 0 && bytes <= size_ - offset);
  if (bytes == 0) return {};
  const size_t piece = PieceAt(offset);
  const int64_t skip = offset - starts_[piece];
  if (skip + bytes > static_cast<int64_t>(slices_[piece].size())) return {};
  return {reinterpret_cast<const std::byte*>(slices_[piece].begin()) + skip,
          static_cast<size_t>(bytes)};
}

}  // namespace kvstow
