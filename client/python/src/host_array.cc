#include "client/python/src/host_array.h"

#include <cstring>
#include <limits>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/python/src/errors.h"
#include "kernels/core/text.h"

namespace kvstow::python {

namespace py = pybind11;

namespace {

constexpr char kCapsuleName[] = "dltensor";
constexpr char kUsedCapsuleName[] = "used_dltensor";

ValueKind KindOfFormat(char code) {
  constexpr std::string_view kInts = "bhilqn";
  constexpr std::string_view kUInts = "BHILQNc";
  constexpr std::string_view kFloats = "efd";
  if (kInts.find(code) != std::string_view::npos) return ValueKind::kInt;
  if (kUInts.find(code) != std::string_view::npos) return ValueKind::kUInt;
  if (kFloats.find(code) != std::string_view::npos) return ValueKind::kFloat;
  return ValueKind::kOther;
}

ValueKind KindOfDlpack(const DLDataType& type) {
  switch (type.code) {
    case kDLInt:
      return ValueKind::kInt;
    case kDLUInt:
      return ValueKind::kUInt;
    case kDLFloat:
      return ValueKind::kFloat;
    case kDLBfloat:
      return ValueKind::kBfloat;
    default:
      return type.code >= kDLFirstFloat8 && type.code <= kDLLastFloat8 ? ValueKind::kFloat8
                                                                       : ValueKind::kOther;
  }
}

bool IsInteger(ValueKind kind) { return kind == ValueKind::kInt || kind == ValueKind::kUInt; }

// The KV type itself, or integers of the same width that carry its bits.
bool Carries(const HostArray& array, DType dtype) {
  const int64_t width =
      dtype == DType::kNvfp4 || dtype == DType::kOpaque ? 1 : DTypeBytes(dtype, 1);
  if (array.item_bytes() != width) return false;
  if (IsInteger(array.kind())) return true;
  switch (dtype) {
    case DType::kBf16:
      return array.kind() == ValueKind::kBfloat;
    case DType::kF16:
    case DType::kF32:
      return array.kind() == ValueKind::kFloat;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      return array.kind() == ValueKind::kFloat8;
    default:
      return false;
  }
}

int64_t ReadInteger(const std::byte* at, int64_t item_bytes, bool is_signed) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, item_bytes);  // little-endian
  const int unused = 64 - 8 * static_cast<int>(item_bytes);
  if (is_signed) return static_cast<int64_t>(bits << unused) >> unused;
  return bits > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
             ? std::numeric_limits<int64_t>::max()
             : static_cast<int64_t>(bits);
}

int32_t CheckToken(int64_t token, size_t i) {
  if (token < std::numeric_limits<int32_t>::min() || token > std::numeric_limits<int32_t>::max()) {
    RaiseInvalidArgument(absl::StrCat("tokens[", i, "]: ", token, ", want 32-bit integers"));
  }
  return static_cast<int32_t>(token);
}

std::vector<int32_t> TokensOfSequence(py::handle object) {
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(object.ptr(), ""));
  if (!items) {
    PyErr_Clear();
    RaiseInvalidArgument(absl::StrCat("tokens: ", Py_TYPE(object.ptr())->tp_name,
                                      ", want an array or a sequence of integers"));
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
  std::vector<int32_t> tokens(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const item = PySequence_Fast_GET_ITEM(items.ptr(), i);
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(item));
    const long long value = index ? PyLong_AsLongLong(index.ptr()) : -1;
    if (PyErr_Occurred() != nullptr) {
      RaiseInvalidArgument(absl::StrCat("tokens[", i, "]: ", TakePythonErrorText()));
    }
    tokens[i] = CheckToken(value, i);
  }
  return tokens;
}

}  // namespace

std::shared_ptr<HostArray> HostArray::Open(py::handle object, const std::string& name,
                                           bool is_written) {
  std::shared_ptr<HostArray> array(new HostArray(name));
  const bool has_dlpack = py::hasattr(object, "__dlpack__");
  std::string reason;
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &array->buffer_, flags) == 0) {
      array->has_buffer_ = true;
      array->FromBuffer();
      return array;
    }
    reason = TakePythonErrorText();
    // Types that the buffer protocol does not know may still be known to DLPack; a read-only array
    // stays one.
    if (!has_dlpack || absl::StrContains(reason, "read-only") ||
        absl::StrContains(reason, "not writable")) {
      RaiseInvalidArgument(absl::StrCat(name, ": ", reason,
                                        is_written ? ", want an array that can be written" : ""));
    }
  }
  if (!has_dlpack) {
    RaiseInvalidArgument(absl::StrCat(name, ": ", Py_TYPE(object.ptr())->tp_name,
                                      ", want an array with the buffer protocol or DLPack"));
  }
  array->FromDlpack(object);
  return array;
}

void HostArray::FromBuffer() {
  data_ = static_cast<std::byte*>(buffer_.buf);
  item_bytes_ = buffer_.itemsize;
  shape_.assign(buffer_.shape, buffer_.shape + buffer_.ndim);
  strides_.assign(buffer_.strides, buffer_.strides + buffer_.ndim);
  std::string_view format = buffer_.format == nullptr ? "B" : buffer_.format;
  if (!format.empty() && (format[0] == '>' || format[0] == '!') && item_bytes_ > 1) {
    RaiseInvalidArgument(absl::StrCat(name_, ": big-endian values, want little-endian ones"));
  }
  if (!format.empty() && std::string_view("@=<>!").find(format[0]) != std::string_view::npos) {
    format.remove_prefix(1);
  }
  kind_ = format.size() == 1 ? KindOfFormat(format[0]) : ValueKind::kOther;
}

void HostArray::FromDlpack(py::handle object) {
  try {
    const auto device = py::cast<std::pair<int, int>>(object.attr("__dlpack_device__")());
    if (device.first != kDLCPU && device.first != kDLCUDAHost) {
      RaiseInvalidArgument(absl::StrCat(name_, ": memory of device type ", device.first,
                                        " (DLPack), want host memory: copy it to the CPU first"));
    }
    const auto capsule = py::reinterpret_borrow<py::object>(object.attr("__dlpack__")());
    tensor_ = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kCapsuleName));
    if (tensor_ == nullptr) RaisePythonError();
    PyCapsule_SetName(capsule.ptr(), kUsedCapsuleName);  // ours from here
  } catch (py::error_already_set& error) {
    if (error.matches(py::module_::import("kvstow.errors").attr("Error"))) {
      error.restore();
      RaisePythonError();
    }
    RaiseInvalidArgument(absl::StrCat(name_, ": DLPack refused: ", error.what()));
  }
  const DLTensor& tensor = tensor_->dl_tensor;
  data_ = static_cast<std::byte*>(tensor.data);
  if (data_ != nullptr) data_ += tensor.byte_offset;
  item_bytes_ = tensor.dtype.bits % 8 == 0 && tensor.dtype.lanes == 1 ? tensor.dtype.bits / 8 : 0;
  kind_ = KindOfDlpack(tensor.dtype);
  shape_.assign(tensor.shape, tensor.shape + tensor.ndim);
  strides_.resize(tensor.ndim);
  int64_t next = item_bytes_;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    strides_[i] = tensor.strides == nullptr ? next : tensor.strides[i] * item_bytes_;
    next *= shape_[i];
  }
}

HostArray::~HostArray() {
  if (has_buffer_) PyBuffer_Release(&buffer_);
  if (tensor_ != nullptr && tensor_->deleter != nullptr) tensor_->deleter(tensor_);
}

std::string HostArray::TypeText() const {
  const int64_t bits = item_bytes_ * 8;
  switch (kind_) {
    case ValueKind::kInt:
      return absl::StrCat("int", bits);
    case ValueKind::kUInt:
      return absl::StrCat("uint", bits);
    case ValueKind::kFloat:
      return absl::StrCat("float", bits);
    case ValueKind::kBfloat:
      return absl::StrCat("bfloat", bits);
    case ValueKind::kFloat8:
      return "float8";
    case ValueKind::kOther:
      break;
  }
  return absl::StrCat("values of ", item_bytes_, " bytes of an unknown kind");
}

std::string HostArray::ShapeText() const {
  return absl::StrCat("[", absl::StrJoin(shape_, ", "), "]");
}

RowsView RowsOf(const HostArray& array, const RowsWanted& wanted) {
  const auto bad = [&](const std::string& found) {
    RaiseInvalidArgument(absl::StrCat(array.name(), ": ", found, ", want ",
                                      ToAbsl(DTypeName(wanted.dtype)), " [at least ",
                                      wanted.min_tokens, " tokens, ", wanted.num_heads, " heads, ",
                                      wanted.dim, "] with contiguous rows"));
  };
  const std::vector<int64_t>& shape = array.shape();
  if (shape.size() != 3 || shape[0] < wanted.min_tokens || shape[1] != wanted.num_heads ||
      shape[2] != wanted.dim) {
    bad(absl::StrCat("shape ", array.ShapeText()));
  }
  if (!Carries(array, wanted.dtype)) bad(array.TypeText());
  if (array.data() == nullptr) bad("no memory (was its storage freed?)");
  const std::vector<int64_t>& strides = array.strides();
  const int64_t row_bytes = array.item_bytes() * wanted.dim;
  if (wanted.dim > 1 && strides[2] != array.item_bytes()) {
    bad(absl::StrCat("rows whose values are ", strides[2], " bytes apart"));
  }
  // The stride of a dimension of one has no meaning.
  const int64_t head_stride = wanted.num_heads == 1 ? row_bytes : strides[1];
  const int64_t token_stride = shape[0] == 1 ? row_bytes : strides[0];
  if (head_stride < row_bytes || token_stride < row_bytes) {
    bad(absl::StrCat("strides of ", token_stride, " and ", head_stride, " bytes between rows of ",
                     row_bytes));
  }
  const bool is_token_major = token_stride >= head_stride * wanted.num_heads;
  if (wanted.is_written && wanted.num_heads > 1 && !is_token_major &&
      head_stride < token_stride * shape[0]) {
    bad(absl::StrCat("strides of ", token_stride, " and ", head_stride,
                     " bytes, by which rows overlap"));
  }
  return {
      .data = array.data(), .token_stride_bytes = token_stride, .head_stride_bytes = head_stride};
}

std::vector<int32_t> TokensOf(py::handle object) {
  const bool is_array =
      PyObject_CheckBuffer(object.ptr()) != 0 || py::hasattr(object, "__dlpack__");
  if (!is_array || PyBytes_Check(object.ptr())) return TokensOfSequence(object);
  const std::shared_ptr<HostArray> array = HostArray::Open(object, "tokens", false);
  if (array->shape().size() != 1 || !IsInteger(array->kind()) || array->item_bytes() > 8) {
    RaiseInvalidArgument(absl::StrCat("tokens: ", array->TypeText(), " ", array->ShapeText(),
                                      ", want integers [tokens]"));
  }
  std::vector<int32_t> tokens(array->shape()[0]);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::byte* at = array->data() + static_cast<int64_t>(i) * array->strides()[0];
    tokens[i] =
        CheckToken(ReadInteger(at, array->item_bytes(), array->kind() == ValueKind::kInt), i);
  }
  return tokens;
}

}  // namespace kvstow::python
