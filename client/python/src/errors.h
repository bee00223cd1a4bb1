// Errors: absl::Status as Python exceptions (kvstow/errors.py), the one place that throws.
//
//   Model model = ValueOrRaise(client->RegisterModel(spec));
//   RaiseIfError(status);
//
// The GIL is held.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvstow::python {

// Throws the exception of the status's code, for pybind11 to hand to Python.
[[noreturn]] void Raise(const absl::Status& status);
// Throws what Python has set: KeyboardInterrupt, MemoryError.
[[noreturn]] void RaisePythonError();

inline void RaiseIfError(const absl::Status& status) {
  if (!status.ok()) Raise(status);
}

template <typename T>
T ValueOrRaise(absl::StatusOr<T> value) {
  if (!value.ok()) Raise(value.status());
  return *std::move(value);
}

[[noreturn]] void RaiseInvalidArgument(const std::string& message);

// The text of the Python error that is set, which is cleared.
std::string TakePythonErrorText();

// (code name, message) of a status, None for OK: how statuses within an answer reach Python.
pybind11::object StatusToPython(const absl::Status& status);

}  // namespace kvstow::python
