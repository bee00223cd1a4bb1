// The extension module kvstow._kvstow: names and nothing else.
#include <pybind11/pybind11.h>

#include "client/python/src/errors.h"
#include "client/python/src/host_array.h"
#include "client/python/src/native_client.h"
#include "client/python/src/plane_codec.h"
#include "client/python/src/values.h"
#include "client/python/src/waits.h"

namespace kvstow::python {

namespace py = pybind11;

namespace {

py::bytes FingerprintOf(const Model& model) {
  return py::bytes(std::string(model.fingerprint.AsStringView()));
}

// (heads, k_dim, v_dim) per layer.
py::list LayerShapes(const Model& model) {
  py::list shapes;
  for (const LayerGroup& group : model.spec.groups) {
    for (int32_t i = 0; i < group.num_layers; ++i) {
      shapes.append(py::make_tuple(group.num_kv_heads, group.k_dim, group.v_dim));
    }
  }
  return shapes;
}

// Keys of the full blocks; `context` as in values.h.
py::bytes BlockKeys(const Model& model, const py::object& tokens, const py::object& context) {
  const std::vector<int32_t> ids = TokensOf(tokens);
  const KeyContext key_context = ContextOf(context, model.fingerprint);
  std::vector<BlockKey> keys;
  {
    const py::gil_scoped_release release;
    keys = ChainKeys(key_context, ids, model.layout->tokens_per_block());
  }
  return KeysToPython(keys);
}

void BindModel(py::module_& m) {
  py::class_<Model>(m, "Model")
      .def(py::init([](const py::object& spec) { return MakeModel(SpecOf(spec)); }))
      .def("spec", [](const Model& model) { return SpecToPython(model.spec); })
      .def_property_readonly("fingerprint", &FingerprintOf)
      .def_property_readonly("num_layers", [](const Model& m) { return m.layout->num_layers(); })
      .def_property_readonly("block_bytes", [](const Model& m) { return m.layout->block_bytes(); })
      .def("layer_shapes", &LayerShapes);
  m.def("block_keys", &BlockKeys);
}

void BindCodecs(py::module_& m) {
  m.def("check_codec", [](const std::string& text) {
    ValueOrRaise(ParseCodecChoice(ValueOrRaise(SplitLayers(text)).choice));
  });
  m.def("codec_choice", &CodecChoiceToPython);
  m.def("codecs", &CodecsToPython);
  m.def("bundle", &BundleToPython);
  m.def("split_layers", &LayersToPython);
  py::class_<PlaneCodec>(m, "PlaneCodec")
      .def(py::init([](const std::string& codec, const std::string& role, int32_t dim,
                       const py::dict& options) {
        return PlaneCodec({.codec = codec,
                           .role = role,
                           .dtype = options["dtype"].cast<std::string>(),
                           .dim = dim,
                           .tokens_per_block = options["tokens_per_block"].cast<int32_t>(),
                           .rotation = options["rotation"]});
      }))
      .def_property_readonly("name", &PlaneCodec::name)
      .def_property_readonly("plane_bytes", &PlaneCodec::plane_bytes)
      .def("encode", &PlaneCodec::Encode)
      .def("decode", &PlaneCodec::Decode);
}

}  // namespace

PYBIND11_MODULE(_kvstow, m) {
  RememberMainThread();
  BindModel(m);
  m.def("tune_malloc", &TuneMallocForBulkTransfers);
  BindCodecs(m);
  py::class_<NativeSession>(m, "Session")
      .def("put_layer", &NativeSession::PutLayer)
      .def("finish", &NativeSession::Finish)
      .def("abort", &NativeSession::Abort);
  // An array over it keeps it.
  py::class_<WindowBuffer, std::shared_ptr<WindowBuffer>>(m, "WindowBuffer", py::buffer_protocol())
      .def_property_readonly("is_in_place", &WindowBuffer::is_in_place)
      .def_buffer([](const WindowBuffer& buffer) {
        const absl::Span<std::byte> memory = buffer.memory();
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()),
                               static_cast<py::ssize_t>(memory.size()));
      });
  py::class_<NativeClient>(m, "Client")
      .def(py::init<const py::dict&>())
      .def("close", &NativeClient::Close)
      .def("register_model", &NativeClient::RegisterModel)
      .def("get_model", &NativeClient::GetModel)
      .def("lookup", &NativeClient::Lookup)
      .def("put", &NativeClient::Put)
      .def("start_put", &NativeClient::StartPut)
      .def("get", &NativeClient::Get)
      .def("delete", &NativeClient::Delete)
      .def("window_buffer", &NativeClient::NewWindowBuffer)
      .def("stat", &NativeClient::Stat)
      .def("ping", &NativeClient::Ping)
      .def("list_blocks", &NativeClient::ListBlocks)
      .def("verify", &NativeClient::Verify)
      .def("acquire", &NativeClient::Acquire)
      .def("release", &NativeClient::Release)
      .def_property_readonly("breaker_state", &NativeClient::breaker_state)
      .def_property_readonly("corrupt_blocks", &NativeClient::corrupt_blocks);
}

}  // namespace kvstow::python
