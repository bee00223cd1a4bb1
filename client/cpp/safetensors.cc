#include "client/cpp/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

using Json = nlohmann::ordered_json;

struct TypeRow {
  TensorType type;
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<TypeRow, 15> kTypes = {{
    {TensorType::kBool, "BOOL", 1},
    {TensorType::kU8, "U8", 1},
    {TensorType::kI8, "I8", 1},
    {TensorType::kF8E4M3, "F8_E4M3", 1},
    {TensorType::kF8E5M2, "F8_E5M2", 1},
    {TensorType::kU16, "U16", 2},
    {TensorType::kI16, "I16", 2},
    {TensorType::kF16, "F16", 2},
    {TensorType::kBf16, "BF16", 2},
    {TensorType::kU32, "U32", 4},
    {TensorType::kI32, "I32", 4},
    {TensorType::kF32, "F32", 4},
    {TensorType::kU64, "U64", 8},
    {TensorType::kI64, "I64", 8},
    {TensorType::kF64, "F64", 8},
}};

constexpr int64_t kLengthBytes = 8;     // of the header's length field
constexpr size_t kHeaderAlignment = 8;  // of the tensors' first byte; the reference writer pads so

absl::Status Bad(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

absl::Status SystemError(int error, const std::string& path, std::string_view action) {
  return absl::ErrnoToStatus(error, absl::StrCat(path, ": ", ToAbsl(action)));
}

// Bytes of a shape, or -1 where they do not fit 63 bits.
int64_t ShapeBytes(TensorType type, const std::vector<int64_t>& shape) {
  int64_t bytes = TensorTypeBytes(type);
  for (int64_t dim : shape) {
    if (__builtin_mul_overflow(bytes, dim, &bytes)) return -1;
  }
  return bytes;
}

// The header as JSON. Keys that appear twice in an object are refused: the format forbids them, and
// readers disagree on which one counts.
absl::StatusOr<Json> ParseHeader(const std::string& path, std::string_view text) {
  std::string twice;
  std::vector<std::set<std::string>> keys;  // of each open object
  const auto watch = [&](int /*depth*/, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == Json::parse_event_t::key) {
      std::string key = parsed.get<std::string>();
      if (!keys.back().insert(key).second) twice = std::move(key);
    }
    return true;
  };
  Json header = Json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
  if (header.is_discarded() || !header.is_object()) {
    return Bad(path, absl::StrCat("the header of ", text.size(), " bytes is not a JSON object"));
  }
  if (!twice.empty()) return Bad(path, absl::StrCat("the header has \"", twice, "\" twice"));
  return header;
}

absl::Status ParseMetadata(const std::string& path, const Json& object, TensorMetadata& metadata) {
  if (!object.is_object()) return Bad(path, "__metadata__ is not an object of strings");
  for (const auto& [key, value] : object.items()) {
    if (!value.is_string()) {
      return Bad(path, absl::StrCat("__metadata__ \"", key, "\" is not a string"));
    }
    metadata.emplace_back(key, value.get<std::string>());
  }
  return absl::OkStatus();
}

// Non-negative integers that fit int64; anything else is a fault of `field`.
absl::Status ParseSizes(const std::string& where, std::string_view field, const Json& tensor,
                        std::vector<int64_t>& sizes) {
  const auto found = tensor.find(std::string(field));
  if (found == tensor.end() || !found->is_array()) {
    return Bad(where, absl::StrCat(ToAbsl(field), " is missing or not a list"));
  }
  for (const Json& value : *found) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{INT64_MAX}) {
      return Bad(where, absl::StrCat(ToAbsl(field), " holds ",
                                     value.dump(-1, ' ', true, Json::error_handler_t::replace),
                                     ", want a whole number of at most 63 bits"));
    }
    sizes.push_back(value.get<int64_t>());
  }
  return absl::OkStatus();
}

absl::StatusOr<Tensor> ParseTensor(const std::string& path, const std::string& name,
                                   const Json& json, int64_t data_bytes) {
  const std::string where = absl::StrCat(path, ": tensor \"", name, "\"");
  if (!json.is_object()) return Bad(where, "its entry is not an object");
  const auto type_name = json.find("dtype");
  if (type_name == json.end() || !type_name->is_string()) {
    return Bad(where, "dtype is missing or not a string");
  }
  Tensor tensor{.name = name};
  const absl::StatusOr<TensorType> type = TensorTypeFromName(type_name->get<std::string>());
  if (!type.ok()) return Bad(where, std::string(type.status().message()));
  tensor.type = *type;
  std::vector<int64_t> offsets;
  KVSTOW_RETURN_IF_ERROR(ParseSizes(where, "shape", json, tensor.shape));
  KVSTOW_RETURN_IF_ERROR(ParseSizes(where, "data_offsets", json, offsets));
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes) {
    return Bad(where, absl::StrCat("data_offsets are [", absl::StrJoin(offsets, ", "),
                                   "], want [begin, end] inside the file's ", data_bytes,
                                   " bytes of data"));
  }
  tensor.offset = offsets[0];
  tensor.num_bytes = offsets[1] - offsets[0];
  const int64_t want = ShapeBytes(tensor.type, tensor.shape);
  if (tensor.num_bytes != want) {
    return Bad(where,
               absl::StrCat("data_offsets give ", tensor.num_bytes, " bytes, ", tensor.ShapeText(),
                            " needs ", want < 0 ? "more than 63 bits" : absl::StrCat(want)));
  }
  return tensor;
}

// Without gaps and overlaps, from the first byte of the data to the last.
absl::Status CheckCover(const std::string& path, absl::Span<const Tensor> tensors,
                        int64_t data_bytes) {
  std::vector<const Tensor*> order;
  for (const Tensor& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const Tensor* a, const Tensor* b) {
    return std::pair(a->offset, a->num_bytes) < std::pair(b->offset, b->num_bytes);
  });
  int64_t end = 0;
  for (const Tensor* tensor : order) {
    if (tensor->offset != end) {
      return Bad(path, absl::StrCat("tensor \"", tensor->name, "\" begins at byte ", tensor->offset,
                                    " of the data, want ", end,
                                    tensor->offset < end ? " (it overlaps another tensor)"
                                                         : " (there is a gap before it)"));
    }
    end += tensor->num_bytes;
  }
  if (end != data_bytes) {
    return Bad(path, absl::StrCat("tensors end at byte ", end, " of ", data_bytes,
                                  " bytes of data; the rest belongs to none"));
  }
  return absl::OkStatus();
}

absl::Status WriteAll(int fd, const std::string& path, absl::Span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return SystemError(errno, path, "write");
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Span<const std::byte> AsBytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace

std::string_view TensorTypeName(TensorType type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row.name;
  }
  return "unknown";
}

int64_t TensorTypeBytes(TensorType type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row.bytes;
  }
  return 0;
}

absl::StatusOr<TensorType> TensorTypeFromName(std::string_view name) {
  for (const TypeRow& row : kTypes) {
    if (row.name == name) return row.type;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "dtype is \"", ToAbsl(name), "\", want one of ",
      absl::StrJoin(kTypes, ", ", [](std::string* out, const TypeRow& row) { *out += row.name; })));
}

std::string Tensor::ShapeText() const {
  return absl::StrCat(ToAbsl(TensorTypeName(type)), " [", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return SystemError(errno, path, "open");
  struct stat info = {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return Bad(path, "not a regular file");
  }
  const size_t size = static_cast<size_t>(info.st_size);
  if (size < kLengthBytes) {
    close(fd);
    return Bad(path, absl::StrCat("the file has ", size, " bytes, a header length alone has 8"));
  }
  void* const mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  close(fd);  // the mapping keeps the file
  if (mapped == MAP_FAILED) return SystemError(error, path, "mmap");
  std::shared_ptr<const void> mapping(
      mapped, [size](const void* base) { munmap(const_cast<void*>(base), size); });
  KVSTOW_ASSIGN_OR_RETURN(SafetensorsFile file,
                          Parse(path, {static_cast<const std::byte*>(mapped), size}));
  file.mapping_ = std::move(mapping);
  return file;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Parse(std::string name,
                                                       absl::Span<const std::byte> bytes) {
  if (bytes.size() < kLengthBytes) {
    return Bad(name,
               absl::StrCat("the file has ", bytes.size(), " bytes, a header length alone has 8"));
  }
  uint64_t header_bytes = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) {
    header_bytes = (header_bytes << 8) | std::to_integer<uint64_t>(bytes[i]);
  }
  const uint64_t room = std::min<uint64_t>(bytes.size() - kLengthBytes, kSafetensorsHeaderBytesMax);
  if (header_bytes > room) {
    return Bad(
        name,
        absl::StrCat("the header says it has ", header_bytes, " bytes, want at most ", room,
                     header_bytes > kSafetensorsHeaderBytesMax ? " (is this a safetensors file?)"
                                                               : " (the file is cut short)"));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes,
                              header_bytes);
  KVSTOW_ASSIGN_OR_RETURN(const Json header, ParseHeader(name, text));
  SafetensorsFile file;
  file.path_ = std::move(name);
  file.file_ = bytes;
  file.data_ = bytes.subspan(kLengthBytes + header_bytes);
  const int64_t data_bytes = static_cast<int64_t>(file.data_.size());
  for (const auto& [key, value] : header.items()) {
    if (key == "__metadata__") {
      KVSTOW_RETURN_IF_ERROR(ParseMetadata(file.path_, value, file.metadata_));
      continue;
    }
    KVSTOW_ASSIGN_OR_RETURN(Tensor tensor, ParseTensor(file.path_, key, value, data_bytes));
    file.tensors_.push_back(std::move(tensor));
  }
  KVSTOW_RETURN_IF_ERROR(CheckCover(file.path_, file.tensors_, data_bytes));
  file.by_name_.resize(file.tensors_.size());
  std::iota(file.by_name_.begin(), file.by_name_.end(), 0);
  std::sort(file.by_name_.begin(), file.by_name_.end(),
            [&](int32_t a, int32_t b) { return file.tensors_[a].name < file.tensors_[b].name; });
  return file;
}

const Tensor* SafetensorsFile::Find(std::string_view name) const {
  const auto found =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](int32_t idx, std::string_view n) { return tensors_[idx].name < n; });
  if (found == by_name_.end() || tensors_[*found].name != name) return nullptr;
  return &tensors_[*found];
}

const std::string* SafetensorsFile::FindMetadata(std::string_view name) const {
  for (const auto& [key, value] : metadata_) {
    if (key == name) return &value;
  }
  return nullptr;
}

absl::StatusOr<const Tensor*> SafetensorsFile::Expect(std::string_view name, TensorType type,
                                                      const std::vector<int64_t>& shape) const {
  const Tensor* tensor = Find(name);
  if (tensor == nullptr) {
    std::vector<std::string> names;
    for (const Tensor& known : tensors_) names.push_back(known.name);
    const std::string nearest = NearestName(name, names);
    return absl::NotFoundError(absl::StrCat(
        path_, ": there is no tensor \"", ToAbsl(name), "\"",
        nearest.empty() ? "" : absl::StrCat("; the nearest name is \"", nearest, "\"")));
  }
  if (tensor->type != type || tensor->shape != shape) {
    return Bad(path_, absl::StrCat("tensor \"", ToAbsl(name), "\" is ", tensor->ShapeText(),
                                   ", want ", Tensor{.type = type, .shape = shape}.ShapeText()));
  }
  return tensor;
}

absl::Status SafetensorsWriter::Add(std::string name, TensorType type, std::vector<int64_t> shape,
                                    absl::Span<const std::byte> bytes) {
  Tensor tensor{.name = std::move(name), .type = type, .shape = std::move(shape)};
  const int64_t want = ShapeBytes(type, tensor.shape);
  if (want != static_cast<int64_t>(bytes.size())) {
    return absl::InvalidArgumentError(absl::StrCat("tensor \"", tensor.name, "\" ",
                                                   tensor.ShapeText(), " needs ", want,
                                                   " bytes, got ", bytes.size()));
  }
  for (const Tensor& other : tensors_) {
    if (other.name == tensor.name) {
      return absl::AlreadyExistsError(absl::StrCat("tensor \"", tensor.name, "\" is added twice"));
    }
  }
  tensor.offset = tensors_.empty() ? 0 : tensors_.back().offset + tensors_.back().num_bytes;
  tensor.num_bytes = want;
  tensors_.push_back(std::move(tensor));
  bytes_.push_back(bytes);
  return absl::OkStatus();
}

std::string SafetensorsWriter::Header() const {
  Json header = Json::object();
  if (!metadata_.empty()) {
    Json& metadata = header["__metadata__"] = Json::object();
    for (const auto& [key, value] : metadata_) metadata[key] = value;
  }
  for (const Tensor& tensor : tensors_) {
    header[tensor.name] = {{"dtype", std::string(TensorTypeName(tensor.type))},
                           {"shape", tensor.shape},
                           {"data_offsets", {tensor.offset, tensor.offset + tensor.num_bytes}}};
  }
  std::string text = header.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  text.append((kHeaderAlignment - text.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
  std::string out;
  for (int i = 0; i < kLengthBytes; ++i) {
    out.push_back(static_cast<char>(uint64_t{text.size()} >> (8 * i)));
  }
  return out + text;
}

std::string SafetensorsWriter::Serialize() const {
  std::string out = Header();
  for (absl::Span<const std::byte> bytes : bytes_) {
    out.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return out;
}

absl::Status SafetensorsWriter::Write(const std::string& path) const {
  std::string partial = absl::StrCat(path, ".XXXXXX");
  const int fd = mkostemp(partial.data(), O_CLOEXEC);
  if (fd < 0) return SystemError(errno, path, "create");
  absl::Status status = WriteAll(fd, path, AsBytes(Header()));
  for (size_t i = 0; status.ok() && i < bytes_.size(); ++i) status = WriteAll(fd, path, bytes_[i]);
  const mode_t mask = umask(0);  // mkostemp makes the file private; give it what open would
  umask(mask);
  if (status.ok() && fchmod(fd, 0666 & ~mask) != 0) status = SystemError(errno, path, "chmod");
  if (close(fd) != 0 && status.ok()) status = SystemError(errno, path, "close");
  if (status.ok() && rename(partial.c_str(), path.c_str()) != 0) {
    status = SystemError(errno, path, "rename");
  }
  if (!status.ok()) unlink(partial.c_str());
  return status;
}

}  // namespace kvstow
