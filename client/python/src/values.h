// Values: kvstow's values as Python has them, both ways. Summaries become dicts, which the Python
// side (kvstow/_types.py) turns into its own classes.
//
// Everything here needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/cpp/admin_client.h"
#include "client/cpp/kv_client.h"
#include "kernels/core/block_key.h"
#include "kernels/core/model_spec.h"

namespace kvstow::python {

// From an object with the attributes of kvstow.ModelSpec. Not validated.
ModelSpec SpecOf(pybind11::handle object);
pybind11::dict SpecToPython(const ModelSpec& spec);

// Raises InvalidArgumentError where the spec is not valid.
Model MakeModel(const ModelSpec& spec);

// From an object with tenant, lora_digest (bytes), multimodal_digests.
KeyContext ContextOf(pybind11::handle object, const Digest& fingerprint);

// 32 bytes each, one after the other.
std::vector<BlockKey> KeysOf(const std::string& packed);
pybind11::bytes KeysToPython(absl::Span<const BlockKey> keys);

// Seconds of a Python number. Raises InvalidArgumentError for NaN and negative ones.
absl::Duration DurationOf(double seconds, const std::string& name);

// From a dict with the names of the fields.
KvClientOptions OptionsOf(const pybind11::dict& options);

pybind11::dict PutToPython(const PutSummary& summary);
pybind11::dict LookupToPython(const LookupSummary& summary);
pybind11::dict GetToPython(const GetSummary& summary);
pybind11::dict StatToPython(const ServiceStat& stat);
pybind11::dict PageToPython(const BlockPage& page);

}  // namespace kvstow::python
