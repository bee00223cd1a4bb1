#include "client/python/src/native_client.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/python/src/errors.h"
#include "client/python/src/host_array.h"
#include "client/python/src/values.h"
#include "client/python/src/waits.h"
#include "kernels/codec/codec.h"

namespace kvstow::python {

namespace py = pybind11;

namespace {

// Arrays of some layers, held, and their rows.
struct LayerArrays {
  std::vector<std::shared_ptr<HostArray>> arrays;
  std::vector<LayerRows> rows;
};

struct LayersWanted {
  const BlockLayout& layout;
  int64_t min_tokens = 0;
  bool is_written = false;
  // Tokens before row 0 of the arrays: the library counts from the start of the prompt, and never
  // touches the rows before.
  int64_t skipped_tokens = 0;
};

RowsView OpenRows(py::handle object, const std::string& name, const LayersWanted& wanted,
                  const PlaneInfo& plane, LayerArrays& out) {
  const BlockLayout& layout = wanted.layout;
  const int32_t num_heads = layout.num_planes_of_layer(plane.layer_idx) /
                            (layout.plane_idx(plane.layer_idx, Role::kValue, 0) < 0 ? 1 : 2);
  out.arrays.push_back(HostArray::Open(object, name, wanted.is_written));
  RowsView rows = RowsOf(*out.arrays.back(), {.dtype = layout.dtype(),
                                              .num_heads = num_heads,
                                              .dim = plane.dim,
                                              .min_tokens = wanted.min_tokens,
                                              .is_written = wanted.is_written});
  const auto skipped = static_cast<uintptr_t>(wanted.skipped_tokens * rows.token_stride_bytes);
  rows.data = reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(rows.data) - skipped);
  return rows;
}

void OpenLayer(int32_t layer_idx, const py::object& k, const py::object& v,
               const LayersWanted& wanted, LayerArrays& out) {
  const BlockLayout& layout = wanted.layout;
  const std::string name = absl::StrCat("layers[", layer_idx, "]");
  const int32_t v_plane = layout.plane_idx(layer_idx, Role::kValue, 0);
  if ((v_plane < 0) != v.is_none()) {
    RaiseInvalidArgument(absl::StrCat(
        name, ".v: ",
        v_plane < 0 ? "given, want None: the layer has no values" : "None, want the values"));
  }
  LayerRows rows;
  rows.k =
      OpenRows(k, name + ".k", wanted, layout.plane(layout.first_plane_of_layer(layer_idx)), out);
  if (v_plane >= 0) rows.v = OpenRows(v, name + ".v", wanted, layout.plane(v_plane), out);
  out.rows.push_back(rows);
}

void OpenLayers(const py::object& layers, const LayersWanted& wanted, LayerArrays& out) {
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(layers.ptr(), ""));
  if (!items) {
    PyErr_Clear();
    RaiseInvalidArgument("layers: want a sequence of (k, v), one for each layer");
  }
  const Py_ssize_t num_layers = PySequence_Fast_GET_SIZE(items.ptr());
  if (num_layers != wanted.layout.num_layers()) {
    RaiseInvalidArgument(absl::StrCat("layers: ", num_layers, ", want ", wanted.layout.num_layers(),
                                      " as the model has"));
  }
  for (int32_t i = 0; i < num_layers; ++i) {
    const py::handle item = PySequence_Fast_GET_ITEM(items.ptr(), i);
    if (PyTuple_Check(item.ptr()) == 0 && PyList_Check(item.ptr()) == 0) {
      RaiseInvalidArgument(
          absl::StrCat("layers[", i, "]: ", Py_TYPE(item.ptr())->tp_name, ", want a pair (k, v)"));
    }
    const auto pair = py::reinterpret_borrow<py::sequence>(item);
    if (pair.size() != 2) {
      RaiseInvalidArgument(
          absl::StrCat("layers[", i, "]: ", pair.size(), " arrays, want a pair (k, v)"));
    }
    OpenLayer(i, pair[0], pair[1], wanted, out);
  }
}

// What a put borrows from, and the request itself.
struct PutArgs {
  std::vector<int32_t> tokens;
  LayerArrays layers;
  PutRequest request;
};

std::shared_ptr<PutArgs> PutArgsOf(const Model& model, const py::object& request) {
  auto args = std::make_shared<PutArgs>();
  args->tokens = TokensOf(request.attr("tokens"));
  PutRequest& put = args->request;
  put.tokens = args->tokens;
  put.context = ContextOf(request, model.fingerprint);
  const auto codec = request.attr("codec").cast<std::string>();
  LayeredText words = ValueOrRaise(SplitLayers(codec));
  put.codec = ValueOrRaise(ParseCodecChoice(words.choice));
  put.layer_codecs = std::move(words.layers);
  const auto compress_at = request.attr("compress_at").cast<std::string>();
  if (compress_at != "service" && compress_at != "worker") {
    RaiseInvalidArgument(
        absl::StrCat("compress_at: \"", compress_at, "\", want \"service\" or \"worker\""));
  }
  put.compress_at = compress_at == "worker" ? CompressAt::kWorker : CompressAt::kService;
  put.durable = request.attr("durable").cast<bool>();
  put.first_block = request.attr("first_block").cast<int32_t>();
  const int64_t num_blocks =
      static_cast<int64_t>(args->tokens.size()) / model.layout->tokens_per_block();
  if (put.first_block < 0 || (put.first_block > 0 && put.first_block >= num_blocks)) {
    RaiseInvalidArgument(absl::StrCat("first_block: ", put.first_block, ", want 0 to ",
                                      num_blocks - 1, ", the last full block"));
  }
  return args;
}

LayersWanted PutLayersWanted(const Model& model, int64_t first_block, int64_t num_blocks) {
  const int32_t tokens_per_block = model.layout->tokens_per_block();
  return {.layout = *model.layout,
          .min_tokens = (num_blocks - first_block) * tokens_per_block,
          .skipped_tokens = first_block * tokens_per_block};
}

// In a forked child the library's threads are gone: what they would have to end is left as it is.
template <typename T>
void DropOrLeak(std::shared_ptr<T>& pointer) {
  if (IsForked() && pointer != nullptr) new std::shared_ptr<T>(std::move(pointer));
  pointer.reset();
}

}  // namespace

NativeSession::~NativeSession() {
  if (IsForked()) {
    DropOrLeak(session_);
    return;
  }
  const py::gil_scoped_release release;
  session_.reset();
}

std::shared_ptr<PutSession> NativeSession::Open() const {
  RaiseIfForked();
  if (session_ == nullptr) {
    Raise(absl::FailedPreconditionError("put session: it is finished or aborted"));
  }
  return session_;
}

void NativeSession::PutLayer(int32_t layer_idx, const py::object& k, const py::object& v) {
  std::shared_ptr<PutSession> session = Open();
  if (layer_idx < 0 || layer_idx >= model_.layout->num_layers()) {
    RaiseInvalidArgument(
        absl::StrCat("layer_idx: ", layer_idx, ", want 0 to ", model_.layout->num_layers() - 1));
  }
  auto arrays = std::make_shared<LayerArrays>();
  OpenLayer(layer_idx, k, v, PutLayersWanted(model_, first_block_, num_blocks_), *arrays);
  RaiseIfError(Wait<absl::Status>(arrays, [session, layer_idx, rows = arrays->rows[0]] {
    return session->PutLayer(layer_idx, rows);
  }));
}

py::dict NativeSession::Finish() {
  using Result = absl::StatusOr<PutSummary>;
  const PutSummary summary = ValueOrRaise(
      Wait<Result>(nullptr, [session = Open()]() -> Result { return session->Finish(); }));
  session_.reset();
  return PutToPython(summary);
}

void NativeSession::Abort() {
  if (IsForked()) DropOrLeak(session_);
  if (session_ == nullptr) return;
  RunInterruptibly(nullptr, [session = std::move(session_)]() mutable { session.reset(); });
}

NativeClient::NativeClient(const py::dict& options) {
  RaiseIfForked();
  const KvClientOptions parsed = OptionsOf(options);
  kv_ = ValueOrRaise(KvClient::Create(parsed));
  admin_ = ValueOrRaise(AdminClient::Create(parsed));
}

NativeClient::~NativeClient() { Close(); }

void NativeClient::Close() {
  if (IsForked()) {
    DropOrLeak(kv_);
    DropOrLeak(admin_);
    return;
  }
  // Calls of other threads hold the clients until they are done.
  const std::shared_ptr<KvClient> kv = std::move(kv_);
  const std::shared_ptr<AdminClient> admin = std::move(admin_);
  kv_.reset();
  admin_.reset();
}

std::shared_ptr<KvClient> NativeClient::Kv() const {
  RaiseIfForked();
  if (kv_ == nullptr) Raise(absl::FailedPreconditionError("client: it is closed"));
  return kv_;
}

std::shared_ptr<AdminClient> NativeClient::Admin() const {
  RaiseIfForked();
  if (admin_ == nullptr) Raise(absl::FailedPreconditionError("client: it is closed"));
  return admin_;
}

Model NativeClient::RegisterModel(const py::object& spec) {
  using Result = absl::StatusOr<Model>;
  return ValueOrRaise(Wait<Result>(
      nullptr, [kv = Kv(), spec = SpecOf(spec)]() -> Result { return kv->RegisterModel(spec); }));
}

Model NativeClient::GetModel(const std::string& fingerprint) {
  using Result = absl::StatusOr<Model>;
  const Digest digest = ValueOrRaise(Digest::FromBytes(fingerprint, "fingerprint"));
  return ValueOrRaise(
      Wait<Result>(nullptr, [kv = Kv(), digest]() -> Result { return kv->GetModel(digest); }));
}

py::dict NativeClient::Lookup(const std::string& keys) {
  using Result = absl::StatusOr<LookupSummary>;
  return LookupToPython(ValueOrRaise(Wait<Result>(
      nullptr, [kv = Kv(), keys = KeysOf(keys)]() -> Result { return kv->Lookup(keys); })));
}

py::dict NativeClient::Put(const Model& model, const py::object& request) {
  using Result = absl::StatusOr<PutSummary>;
  const std::shared_ptr<PutArgs> args = PutArgsOf(model, request);
  const int64_t num_blocks =
      static_cast<int64_t>(args->tokens.size()) / model.layout->tokens_per_block();
  OpenLayers(request.attr("layers"), PutLayersWanted(model, args->request.first_block, num_blocks),
             args->layers);
  args->request.layers = args->layers.rows;
  return PutToPython(ValueOrRaise(Wait<Result>(
      args, [kv = Kv(), model, r = &args->request]() -> Result { return kv->Put(model, *r); })));
}

std::unique_ptr<NativeSession> NativeClient::StartPut(const Model& model,
                                                      const py::object& request) {
  using Result = absl::StatusOr<std::unique_ptr<PutSession>>;
  const std::shared_ptr<PutArgs> args = PutArgsOf(model, request);
  std::unique_ptr<PutSession> session =
      ValueOrRaise(Wait<Result>(args, [kv = Kv(), model, r = &args->request]() -> Result {
        return kv->StartPut(model, *r);
      }));
  const int64_t num_blocks =
      static_cast<int64_t>(args->tokens.size()) / model.layout->tokens_per_block();
  return std::make_unique<NativeSession>(model, args->request.first_block, num_blocks,
                                         std::move(session));
}

py::dict NativeClient::Get(const Model& model, const std::string& keys, const py::object& layers,
                           int64_t first_token) {
  using Result = absl::StatusOr<GetSummary>;
  if (first_token < 0) {
    RaiseInvalidArgument(absl::StrCat("first_token: ", first_token, ", want 0 or more"));
  }
  std::vector<BlockKey> parsed = KeysOf(keys);
  const int64_t num_tokens =
      first_token + static_cast<int64_t>(parsed.size()) * model.layout->tokens_per_block();
  auto arrays = std::make_shared<LayerArrays>();
  OpenLayers(layers, {.layout = *model.layout, .min_tokens = num_tokens, .is_written = true},
             *arrays);
  return GetToPython(ValueOrRaise(
      Wait<Result>(arrays,
                   [kv = Kv(), model, keys = std::move(parsed), rows = arrays->rows,
                    first_token]() -> Result { return kv->Get(model, keys, rows, first_token); })));
}

int64_t NativeClient::Delete(const std::string& keys) {
  using Result = absl::StatusOr<int64_t>;
  return ValueOrRaise(Wait<Result>(
      nullptr, [kv = Kv(), keys = KeysOf(keys)]() -> Result { return kv->Delete(keys); }));
}

std::shared_ptr<WindowBuffer> NativeClient::NewWindowBuffer(int64_t bytes) {
  using Result = absl::StatusOr<std::shared_ptr<WindowBuffer>>;
  return ValueOrRaise(
      Wait<Result>(nullptr, [kv = Kv(), bytes]() -> Result { return kv->NewWindowBuffer(bytes); }));
}

py::dict NativeClient::Stat() {
  using Result = absl::StatusOr<ServiceStat>;
  return StatToPython(
      ValueOrRaise(Wait<Result>(nullptr, [admin = Admin()]() -> Result { return admin->Stat(); })));
}

double NativeClient::Ping(double timeout) {
  using Result = absl::StatusOr<absl::Duration>;
  const absl::Duration limit = DurationOf(timeout, "timeout");
  return absl::ToDoubleSeconds(ValueOrRaise(
      Wait<Result>(nullptr, [admin = Admin(), limit]() -> Result { return admin->Ping(limit); })));
}

py::dict NativeClient::ListBlocks(const std::string& page_token, int32_t page_size,
                                  const std::string& fingerprint) {
  using Result = absl::StatusOr<BlockPage>;
  ListOptions options{.page_token = page_token, .page_size = page_size};
  if (!fingerprint.empty()) {
    options.fingerprint = ValueOrRaise(Digest::FromBytes(fingerprint, "fingerprint"));
  }
  return PageToPython(ValueOrRaise(Wait<Result>(
      nullptr, [admin = Admin(), options]() -> Result { return admin->ListBlocks(options); })));
}

py::tuple NativeClient::Verify(const std::string& keys) {
  using Result = absl::StatusOr<VerifySummary>;
  const VerifySummary summary =
      ValueOrRaise(Wait<Result>(nullptr, [admin = Admin(), keys = KeysOf(keys)]() -> Result {
        return admin->Verify(keys, {});
      }));
  return py::make_tuple(summary.num_checked, KeysToPython(summary.bad_keys));
}

py::tuple NativeClient::Acquire(const std::string& keys, double ttl) {
  using Result = absl::StatusOr<Lease>;
  const absl::Duration limit = DurationOf(ttl, "ttl");
  const Lease lease =
      ValueOrRaise(Wait<Result>(nullptr, [admin = Admin(), keys = KeysOf(keys), limit]() -> Result {
        return admin->Acquire(keys, limit);
      }));
  py::list held;
  for (const bool is_held : lease.held) held.append(is_held);
  return py::make_tuple(lease.id, held, absl::ToDoubleSeconds(lease.ttl));
}

void NativeClient::Release(uint64_t lease_id) {
  RaiseIfError(Wait<absl::Status>(
      nullptr, [admin = Admin(), lease_id] { return admin->Release(lease_id); }));
}

std::string NativeClient::breaker_state() const {
  return std::string(BreakerStateName(Kv()->breaker_state()));
}

int64_t NativeClient::corrupt_blocks() const { return Kv()->corrupt_blocks(); }

}  // namespace kvstow::python
