#include "client/python/src/errors.h"

#include "absl/time/time.h"
#include "proto/status.h"

namespace kvstow::python {

namespace py = pybind11;

void RaisePythonError() { throw py::error_already_set(); }

void Raise(const absl::Status& status) {
  const py::object error = py::module_::import("kvstow.errors")
                               .attr("from_status")(absl::StatusCodeToString(status.code()),
                                                    std::string(status.message()),
                                                    absl::ToDoubleSeconds(RetryAfter(status)));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  RaisePythonError();
}

void RaiseInvalidArgument(const std::string& message) {
  Raise(absl::InvalidArgumentError(message));
}

std::string TakePythonErrorText() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  const auto owned_type = py::reinterpret_steal<py::object>(type);
  const auto owned_value = py::reinterpret_steal<py::object>(value);
  const auto owned_trace = py::reinterpret_steal<py::object>(trace);
  if (!owned_value) return "no reason given";
  const auto text = py::reinterpret_steal<py::object>(PyObject_Str(owned_value.ptr()));
  if (!text) {
    PyErr_Clear();
    return "no reason given";
  }
  return text.cast<std::string>();
}

py::object StatusToPython(const absl::Status& status) {
  if (status.ok()) return py::none();
  return py::make_tuple(absl::StatusCodeToString(status.code()), std::string(status.message()));
}

}  // namespace kvstow::python
