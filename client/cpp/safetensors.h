// Safetensors: reads and writes the tensor files that models and their caches are exchanged in.
//
//   KVSTOW_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open("kv.safetensors"));
//   KVSTOW_ASSIGN_OR_RETURN(const Tensor* keys,
//                           file.Expect("k.0", TensorType::kBf16, {256, 3, 64}));
//   absl::Span<const std::byte> bytes = file.bytes(*keys);
//
// The format (https://github.com/huggingface/safetensors): eight bytes of little-endian header
// length, a JSON header, then the tensors' bytes. A file that opens is whole: every tensor's length
// is its shape times its type, tensors follow each other without gap or overlap, and the last one
// ends at the end of the file. Values are little-endian, row-major; a tensor's address has no
// alignment beyond that of a byte.
//
// Thread safety: a SafetensorsFile is immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvstow {

// Longest header that is read; the reference implementation has the same limit.
inline constexpr uint64_t kSafetensorsHeaderBytesMax = 100'000'000;

enum class TensorType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kU16,
  kI16,
  kF16,
  kBf16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
};

std::string_view TensorTypeName(TensorType type);  // as in the file: "BF16"
int64_t TensorTypeBytes(TensorType type);          // of one value
// kInvalidArgument names the known ones.
absl::StatusOr<TensorType> TensorTypeFromName(std::string_view name);

struct Tensor {
  std::string name;
  TensorType type = TensorType::kU8;
  std::vector<int64_t> shape;  // outermost first; empty for a single value
  int64_t offset = 0;          // from the first byte after the header
  int64_t num_bytes = 0;

  std::string ShapeText() const;  // "BF16 [256, 3, 64]"
};

using TensorMetadata = std::vector<std::pair<std::string, std::string>>;  // in file order

class SafetensorsFile {
 public:
  // Maps the file. It must not be cut short while this object lives.
  //   kNotFound, kPermissionDenied  the path, with the system's reason
  //   kInvalidArgument              not a whole safetensors file: which tensor, found and expected
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  // The same from memory, which is borrowed. `name` stands for the path in messages.
  static absl::StatusOr<SafetensorsFile> Parse(std::string name, absl::Span<const std::byte> bytes);

  const std::string& path() const { return path_; }
  absl::Span<const Tensor> tensors() const { return tensors_; }  // in the order of the header
  const TensorMetadata& metadata() const { return metadata_; }

  // nullptr where there is none.
  const Tensor* Find(std::string_view name) const;
  const std::string* FindMetadata(std::string_view name) const;
  // kNotFound names the nearest tensor; kInvalidArgument gives the type and shape found.
  absl::StatusOr<const Tensor*> Expect(std::string_view name, TensorType type,
                                       const std::vector<int64_t>& shape) const;

  absl::Span<const std::byte> file_bytes() const { return file_; }  // all, header too
  absl::Span<const std::byte> bytes(const Tensor& tensor) const {
    return data_.subspan(tensor.offset, tensor.num_bytes);
  }

 private:
  SafetensorsFile() = default;

  std::string path_;
  std::shared_ptr<const void> mapping_;  // unmaps at the last copy's end; null when borrowed
  absl::Span<const std::byte> file_;     // whole
  absl::Span<const std::byte> data_;     // after the header
  std::vector<Tensor> tensors_;
  std::vector<int32_t> by_name_;  // indexes of tensors_, sorted by name
  TensorMetadata metadata_;
};

// Collects tensors and writes them in the order in which they were added.
class SafetensorsWriter {
 public:
  void SetMetadata(TensorMetadata metadata) { metadata_ = std::move(metadata); }

  // `bytes` is borrowed until Write or Serialize has returned. kInvalidArgument: its size is not
  // that of the shape; kAlreadyExists: the name was added before.
  absl::Status Add(std::string name, TensorType type, std::vector<int64_t> shape,
                   absl::Span<const std::byte> bytes);

  // Writes beside `path` and renames, so that no reader sees half a file.
  absl::Status Write(const std::string& path) const;
  std::string Serialize() const;

 private:
  std::string Header() const;

  TensorMetadata metadata_;
  std::vector<Tensor> tensors_;
  std::vector<absl::Span<const std::byte>> bytes_;
};

}  // namespace kvstow
