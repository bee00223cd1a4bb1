// HostArray: borrows the memory of a Python array, by the buffer protocol or by DLPack, and holds
// on to it: as long as the HostArray lives the memory is neither freed nor resized.
//
//   const auto array = HostArray::Open(object, "layers[3].k", /*is_written=*/false);
//   const RowsView rows = RowsOf(*array, {.dtype = DType::kBf16, .num_heads = 8, .dim = 128, ...});
//
// Everything here needs the GIL, the destructor too.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/python/src/dlpack.h"
#include "kernels/core/dtype.h"
#include "kernels/layout/planes.h"

namespace kvstow::python {

enum class ValueKind { kInt, kUInt, kFloat, kBfloat, kFloat8, kOther };

class HostArray {
 public:
  // Raises InvalidArgumentError, naming `name`: no array, not in host memory, read-only though
  // `is_written`, byte order of another machine.
  static std::shared_ptr<HostArray> Open(pybind11::handle object, const std::string& name,
                                         bool is_written);
  ~HostArray();
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;

  const std::string& name() const { return name_; }
  std::byte* data() const { return data_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<int64_t>& strides() const { return strides_; }  // bytes
  int64_t item_bytes() const { return item_bytes_; }
  ValueKind kind() const { return kind_; }
  std::string TypeText() const;   // "float32"
  std::string ShapeText() const;  // "[256, 3, 64]"

 private:
  explicit HostArray(std::string name) : name_(std::move(name)) {}
  void FromBuffer();
  void FromDlpack(pybind11::handle object);

  const std::string name_;
  Py_buffer buffer_{};
  bool has_buffer_ = false;
  DLManagedTensor* tensor_ = nullptr;
  std::byte* data_ = nullptr;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
  int64_t item_bytes_ = 0;
  ValueKind kind_ = ValueKind::kOther;
};

// What the rows of one layer and role have to look like.
struct RowsWanted {
  DType dtype = DType::kBf16;
  int32_t num_heads = 0;
  int32_t dim = 0;
  int64_t min_tokens = 0;
  bool is_written = false;
};

// Raises InvalidArgumentError naming the array, what was found and what is wanted.
RowsView RowsOf(const HostArray& array, const RowsWanted& wanted);

// Token ids: a one-dimensional array of integers, or a sequence of ints.
std::vector<int32_t> TokensOf(pybind11::handle object);

}  // namespace kvstow::python
