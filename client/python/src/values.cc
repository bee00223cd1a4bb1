#include "client/python/src/values.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/python/src/errors.h"

namespace kvstow::python {

namespace py = pybind11;

namespace {

// Attribute `name` as T; an attribute of another type is named in the error.
template <typename T>
T Field(py::handle object, const char* name) {
  const py::object value = object.attr(name);
  try {
    return value.cast<T>();
  } catch (const py::cast_error&) {
    RaiseInvalidArgument(absl::StrCat(name, ": ", Py_TYPE(value.ptr())->tp_name,
                                      " is of the wrong type or out of range"));
  }
}

LayerGroup GroupOf(py::handle object) {
  return {.first_layer = Field<int32_t>(object, "first_layer"),
          .num_layers = Field<int32_t>(object, "num_layers"),
          .kind = ValueOrRaise(LayerKindFromName(Field<std::string>(object, "kind"))),
          .num_kv_heads = Field<int32_t>(object, "num_kv_heads"),
          .k_dim = Field<int32_t>(object, "k_dim"),
          .v_dim = Field<int32_t>(object, "v_dim")};
}

py::dict GroupToPython(const LayerGroup& group) {
  py::dict dict;
  dict["first_layer"] = group.first_layer;
  dict["num_layers"] = group.num_layers;
  dict["kind"] = std::string(LayerKindName(group.kind));
  dict["num_kv_heads"] = group.num_kv_heads;
  dict["k_dim"] = group.k_dim;
  dict["v_dim"] = group.v_dim;
  return dict;
}

py::bytes BytesOf(const Digest& digest) {
  return py::bytes(reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size());
}

}  // namespace

ModelSpec SpecOf(py::handle object) {
  ModelSpec spec;
  spec.name = Field<std::string>(object, "name");
  spec.weights = Field<std::string>(object, "weights");
  spec.kv_dtype = ValueOrRaise(DTypeFromName(Field<std::string>(object, "kv_dtype")));
  for (const py::handle group : Field<py::sequence>(object, "groups")) {
    spec.groups.push_back(GroupOf(group));
  }
  spec.rope = Field<std::string>(object, "rope");
  spec.keys_are_rotated = Field<bool>(object, "keys_are_rotated");
  spec.tokens_per_block = Field<int32_t>(object, "tokens_per_block");
  spec.tokenizer = Field<std::string>(object, "tokenizer");
  return spec;
}

py::dict SpecToPython(const ModelSpec& spec) {
  py::dict dict;
  dict["name"] = spec.name;
  dict["weights"] = spec.weights;
  dict["kv_dtype"] = std::string(DTypeName(spec.kv_dtype));
  py::list groups;
  for (const LayerGroup& group : spec.groups) groups.append(GroupToPython(group));
  dict["groups"] = groups;
  dict["rope"] = spec.rope;
  dict["keys_are_rotated"] = spec.keys_are_rotated;
  dict["tokens_per_block"] = spec.tokens_per_block;
  dict["tokenizer"] = spec.tokenizer;
  return dict;
}

Model MakeModel(const ModelSpec& spec) {
  BlockLayout layout = ValueOrRaise(BlockLayout::Create(spec));
  return {.spec = spec,
          .fingerprint = spec.Fingerprint(),
          .layout = std::make_shared<const BlockLayout>(std::move(layout))};
}

KeyContext ContextOf(py::handle object, const Digest& fingerprint) {
  KeyContext context{.fingerprint = fingerprint,
                     .tenant = Field<std::string>(object, "tenant"),
                     .lora_digest = Field<std::string>(object, "lora_digest")};
  for (const py::handle digest : Field<py::sequence>(object, "multimodal_digests")) {
    context.multimodal_digests.push_back(digest.cast<std::string>());
  }
  return context;
}

std::vector<BlockKey> KeysOf(const std::string& packed) {
  if (packed.size() % sizeof(BlockKey) != 0) {
    RaiseInvalidArgument(absl::StrCat("keys: ", packed.size(), " bytes, want 32 for each key"));
  }
  std::vector<BlockKey> keys(packed.size() / sizeof(BlockKey));
  if (!keys.empty()) std::memcpy(keys.data(), packed.data(), packed.size());
  return keys;
}

py::bytes KeysToPython(absl::Span<const BlockKey> keys) {
  static_assert(sizeof(BlockKey) == 32);
  return py::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(BlockKey));
}

absl::Duration DurationOf(double seconds, const std::string& name) {
  if (!std::isfinite(seconds) || seconds < 0) {
    RaiseInvalidArgument(
        absl::StrCat(name, ": ", seconds, " s, want a finite number that is not negative"));
  }
  return absl::Seconds(seconds);
}

KvClientOptions OptionsOf(const py::dict& options) {
  const auto seconds = [&](const char* name) {
    return DurationOf(options[name].cast<double>(), name);
  };
  KvClientOptions result;
  result.target = options["target"].cast<std::string>();
  result.num_channels = options["num_channels"].cast<int>();
  result.control_timeout = seconds("control_timeout");
  result.data_timeout = seconds("data_timeout");
  result.breaker.errors_to_open = options["breaker_errors"].cast<int>();
  result.breaker.cool_down = seconds("breaker_cool_down");
  return result;
}

py::dict PutToPython(const PutSummary& summary) {
  py::dict dict;
  dict["keys"] = KeysToPython(summary.keys);
  dict["num_stored"] = summary.num_stored;
  dict["num_existing"] = summary.num_existing;
  dict["num_refused"] = summary.num_refused;
  dict["first_refusal"] = StatusToPython(summary.first_refusal);
  dict["num_leftover_tokens"] = summary.num_leftover_tokens;
  dict["sent_bytes"] = summary.sent_bytes;
  return dict;
}

py::dict LookupToPython(const LookupSummary& summary) {
  py::dict dict;
  dict["keys"] = KeysToPython(summary.keys);
  dict["locations"] =
      py::bytes(reinterpret_cast<const char*>(summary.locations.data()), summary.locations.size());
  dict["num_leading"] = summary.num_leading;
  return dict;
}

py::dict GetToPython(const GetSummary& summary) {
  py::dict dict;
  py::list blocks;
  for (const absl::Status& status : summary.blocks) blocks.append(StatusToPython(status));
  dict["num_leading"] = summary.num_leading;
  dict["blocks"] = blocks;
  dict["received_bytes"] = summary.received_bytes;
  return dict;
}

py::dict StatToPython(const ServiceStat& stat) {
  py::dict tiers, codecs, counters, dict;
  for (const ServiceTier& tier : stat.tiers) {
    py::dict row;
    row["capacity_bytes"] = tier.capacity_bytes;
    row["used_bytes"] = tier.used_bytes;
    row["sealed_bytes"] = tier.sealed_bytes;
    row["reserved_bytes"] = tier.reserved_bytes;
    row["num_blocks"] = tier.num_blocks;
    tiers[py::str(tier.tier)] = row;
  }
  for (const ServiceCodec& codec : stat.codecs) {
    py::dict row;
    row["num_blocks"] = codec.num_blocks;
    row["record_bytes"] = codec.record_bytes;
    row["logical_bytes"] = codec.logical_bytes;
    codecs[py::str(codec.codec)] = row;
  }
  for (const auto& [name, value] : stat.counters) counters[py::str(name)] = value;
  dict["tiers"] = tiers;
  dict["codecs"] = codecs;
  dict["counters"] = counters;
  dict["num_blocks"] = stat.num_blocks;
  dict["index_bytes"] = stat.index_bytes;
  dict["open_tickets"] = stat.open_tickets;
  dict["open_leases"] = stat.open_leases;
  dict["pinned_bytes"] = stat.pinned_bytes;
  dict["version"] = stat.version;
  dict["uptime_s"] = absl::ToDoubleSeconds(stat.uptime);
  dict["resident_bytes"] = stat.resident_bytes;
  return dict;
}

py::dict PageToPython(const BlockPage& page) {
  py::list blocks;
  for (const ListedBlock& block : page.blocks) {
    py::dict row;
    row["key"] = BytesOf(block.key);
    row["fingerprint"] = BytesOf(block.fingerprint);
    row["codec"] = block.codec;
    row["locations"] = block.locations;
    row["num_tokens"] = block.num_tokens;
    row["record_bytes"] = block.record_bytes;
    row["logical_bytes"] = block.logical_bytes;
    row["is_pinned"] = block.is_pinned;
    blocks.append(row);
  }
  py::dict dict;
  dict["blocks"] = blocks;
  dict["next_page_token"] = page.next_page_token;
  return dict;
}

}  // namespace kvstow::python
