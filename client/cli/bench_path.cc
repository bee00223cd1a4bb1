#include "client/cli/bench_path.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/connect.h"
#include "client/cli/daemon.h"
#include "client/cli/output.h"
#include "client/cli/socket_peer.h"
#include "client/cli/wire_process.h"
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int32_t kTokensPerBlock = 64;
constexpr int32_t kDim = 128;
constexpr int64_t kPlaneBytes = int64_t{kTokensPerBlock} * kDim * 2;  // bf16
// As of a model of 8 billion parameters where layers count, else less: more sizes of blocks.
constexpr int32_t kKvHeads = 2;
constexpr int32_t kKvHeadsLayerwise = 8;
constexpr int64_t kBytesPerCall = 32 * kMiB;
constexpr int32_t kRoundsMax = 100;

// A pool of populated pages. Before it are those of one plane, where a block would be that stands
// before the first one.
class Pool {
 public:
  static constexpr int64_t kLeadBytes = kPlaneBytes;

  static absl::StatusOr<std::unique_ptr<Pool>> Create(int64_t num_bytes) {
    void* const memory = mmap(nullptr, kLeadBytes + num_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for a pool of ", num_bytes, " bytes; give a smaller --total"));
    }
    return std::unique_ptr<Pool>(new Pool(static_cast<std::byte*>(memory) + kLeadBytes, num_bytes));
  }
  ~Pool() { munmap(bytes_.data() - kLeadBytes, kLeadBytes + bytes_.size()); }
  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  Pool(std::byte* memory, int64_t num_bytes) : bytes_(memory, num_bytes) {}
  absl::Span<std::byte> bytes_;
};

// bf16 values of both signs between 2^-31 and 2, without a pattern that a copy could get right by
// accident (SplitMix64). Arbitrary bytes hold values that are not finite, whose planes stay raw.
void FillPool(absl::Span<std::byte> bytes) {
  uint64_t state = 1;
  for (size_t i = 0; i + sizeof(uint64_t) <= bytes.size(); i += sizeof(uint64_t)) {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    z = (z & 0x8fff8fff8fff8fffu) | 0x3000300030003000u;
    std::memcpy(bytes.data() + i, &z, sizeof(z));
  }
}

int32_t NumHeads(const PathBenchOptions& options) {
  return options.layerwise ? kKvHeadsLayerwise : kKvHeads;
}

int64_t LayerBytes(const PathBenchOptions& options) {
  return 2 * int64_t{NumHeads(options)} * kPlaneBytes;  // 64 KiB or 256 KiB
}

// A model whose block is options.block_bytes in row form.
ModelSpec BenchSpec(const PathBenchOptions& options) {
  ModelSpec spec;
  spec.name = "kvstow-bench";
  spec.weights = "synthetic";
  spec.tokens_per_block = kTokensPerBlock;
  spec.groups = {{.first_layer = 0,
                  .num_layers = static_cast<int32_t>(options.block_bytes / LayerBytes(options)),
                  .kind = LayerKind::kFull,
                  .num_kv_heads = NumHeads(options),
                  .k_dim = kDim,
                  .v_dim = kDim}};
  return spec;
}

// One measured case: a rate per round, CPU over all rounds, a duration per call.
struct Samples {
  std::vector<double> gb_per_s;
  std::vector<double> call_ms;
  std::vector<double> first_layer_shares;  // of each call, layer by layer
  double cpu_s = 0;
  double gb = 0;
  bool has_cpu = true;
};

// A way through the service.
struct PathCase {
  PathKind path = PathKind::kGrpc;
  std::string preset;
  CodecChoice codec;
  std::string name;  // "shm", "shm/safe", "shm/copy"
  std::unique_ptr<KvClient> kv;
  // Of a case whose KV stands where the service reads and writes it; null: in pools.
  std::unique_ptr<WindowBuffer> source;
  std::unique_ptr<WindowBuffer> result;
};

class PathBench {
 public:
  explicit PathBench(const PathBenchOptions& options) : options_(options) {}

  absl::Status Prepare();
  absl::Status Round(int round_idx);
  void ForgetWarmUp() { samples_.clear(); }
  std::vector<PathBenchLine> Lines() const;

 private:
  std::vector<PathBenchLine> WireLines() const;
  int32_t num_calls() const {
    return static_cast<int32_t>(options_.total_bytes / options_.block_bytes /
                                options_.blocks_per_call);
  }
  bool has_wire() const { return options_.wire_bytes_per_s > 0; }
  // Blocks of a prompt that stand before those that are put, and are not put themselves.
  int32_t num_before() const { return has_wire() ? 1 : 0; }
  int64_t call_bytes() const { return options_.block_bytes * options_.blocks_per_call; }
  void ChooseSizes();
  absl::Status AddCase(PathKind path, const std::string& preset, bool in_place);
  absl::Span<std::byte> SourceOf(const PathCase& path) const {
    return path.source != nullptr ? path.source->memory() : source_->bytes();
  }
  absl::Span<std::byte> ResultOf(const PathCase& path) const {
    return path.result != nullptr ? path.result->memory() : result_->bytes();
  }
  absl::Status CheckPath(const PathCase& path) const;
  std::vector<LayerRows> LayersAt(absl::Span<std::byte> pool, int32_t call_idx) const;
  KeyContext ContextOf(int round_idx, int32_t call_idx) const;
  absl::Status Timed(const std::string& name, pid_t other,
                     const std::function<absl::Status()>& work);
  absl::Status PutAll(const PathCase& path, int round_idx);
  absl::Status GetAll(const PathCase& path, const std::string& name, bool layerwise);
  absl::Status GetAndCheck(const PathCase& path, const std::string& name, bool layerwise);
  absl::Status PutAndGet(const PathCase& path, int round_idx);
  absl::Status PlainSockets();
  absl::Status Check(std::string_view what, absl::Span<std::byte> result);
  absl::Status CheckDecoded(const PathCase& path);
  PathBenchLine Line(const std::string& name, const std::string& ceiling) const;

  PathBenchOptions options_;
  bool is_tcp_ = false;
  std::unique_ptr<SocketPeer> unix_peer_;
  std::unique_ptr<SocketPeer> tcp_peer_;
  std::unique_ptr<WireProcess> wire_;  // null: not held
  std::unique_ptr<DaemonProcess> daemon_;
  pid_t server_pid_ = -1;
  Service service_;
  Model model_;
  std::vector<PathCase> cases_;
  std::unique_ptr<Pool> source_;
  std::unique_ptr<Pool> result_;
  std::vector<int32_t> tokens_;
  std::vector<std::vector<BlockKey>> keys_;  // of each call of the round
  std::map<std::string, Samples> samples_;
};

void PathBench::ChooseSizes() {
  if (options_.blocks_per_call == 0) {
    options_.blocks_per_call =
        static_cast<int32_t>(std::max<int64_t>(kBytesPerCall / options_.block_bytes, 1));
  }
  if (options_.total_bytes == 0) {
    options_.total_bytes = std::max<int64_t>(DefaultPoolBytes() / call_bytes(), 1) * call_bytes();
  }
}

absl::Status PathBench::Prepare() {
  KVSTOW_RETURN_IF_ERROR(options_.Validate());
  ChooseSizes();
  is_tcp_ = !options_.target.empty() && !absl::StartsWith(NormalTarget(options_.target), "unix:");
  KVSTOW_ASSIGN_OR_RETURN(unix_peer_, SocketPeer::Start(SocketKind::kUnix, options_.total_bytes));
  KVSTOW_ASSIGN_OR_RETURN(tcp_peer_, SocketPeer::Start(SocketKind::kTcp, options_.total_bytes));
  if (has_wire()) {
    KVSTOW_ASSIGN_OR_RETURN(wire_, WireProcess::Start({.bytes_per_s = options_.wire_bytes_per_s}));
  }
  if (options_.target.empty()) {
    // The round's blocks, their headers, and room for those of the round before.
    std::vector<std::string> flags;
    if (std::count(options_.paths.begin(), options_.paths.end(), PathKind::kUcx) > 0) {
      flags = {"--channels.ucx=true", "--channels.ucx_tls=tcp", "--channels.ucx_devices=lo"};
    }
    KVSTOW_ASSIGN_OR_RETURN(
        daemon_, DaemonProcess::Start(
                     2 * options_.total_bytes + options_.total_bytes / 8 + 64 * kMiB, flags));
    options_.target = daemon_->target();
  }
  KVSTOW_ASSIGN_OR_RETURN(service_, ConnectTo(options_.target, options_.timeout));
  if (has_wire()) KVSTOW_RETURN_IF_ERROR(wire_->ConnectTo(service_.target));
  server_pid_ = daemon_ != nullptr ? daemon_->pid() : PeerPid(service_.target);
  absl::StatusOr<Model> model = service_.kv->RegisterModel(BenchSpec(options_));
  if (!model.ok()) return service_.Explain(model.status());
  model_ = *std::move(model);
  KVSTOW_ASSIGN_OR_RETURN(source_, Pool::Create(options_.total_bytes));
  KVSTOW_ASSIGN_OR_RETURN(result_, Pool::Create(options_.total_bytes));
  FillPool(source_->bytes());
  const int32_t num_blocks = num_before() + options_.blocks_per_call;
  for (int32_t i = 0; i < kTokensPerBlock * num_blocks; ++i) tokens_.push_back(i);
  for (const PathKind path : options_.paths) {
    for (const std::string& preset : options_.presets) {
      const bool has_place = path == PathKind::kShm && preset == "lossless";
      if (has_place) KVSTOW_RETURN_IF_ERROR(AddCase(path, preset, /*in_place=*/true));
      KVSTOW_RETURN_IF_ERROR(AddCase(path, preset, /*in_place=*/false));
    }
  }
  return absl::OkStatus();
}

absl::Status PathBench::AddCase(PathKind path, const std::string& preset, bool in_place) {
  PathCase added{.path = path, .preset = preset, .name = std::string(PathName(path))};
  // The plain case has the plain name.
  if (preset != "lossless") absl::StrAppend(&added.name, "/", preset);
  if (preset == "lossless" && path == PathKind::kShm && !in_place) added.name += "/copy";
  KVSTOW_ASSIGN_OR_RETURN(added.codec, ParseCodecChoice(preset));
  KvClientOptions options{.target = has_wire() ? wire_->target() : service_.target,
                          .data_timeout = options_.timeout};
  options.paths.clear();
  if (path != PathKind::kGrpc) options.paths = {path};
  options.ucx = {.tls = "tcp", .net_devices = "lo"};  // as the daemon that we start
  KVSTOW_ASSIGN_OR_RETURN(added.kv, KvClient::Create(options));
  if (in_place) {
    for (std::unique_ptr<WindowBuffer>* buffer : {&added.source, &added.result}) {
      absl::StatusOr<std::unique_ptr<WindowBuffer>> made =
          added.kv->NewWindowBuffer(options_.total_bytes);
      if (!made.ok()) return service_.Explain(made.status());
      *buffer = *std::move(made);
    }
    std::memcpy(added.source->memory().data(), source_->bytes().data(), options_.total_bytes);
  }
  cases_.push_back(std::move(added));
  return absl::OkStatus();
}

// Head-major, as paged engines keep KV: the rows of a head are contiguous.
std::vector<LayerRows> PathBench::LayersAt(absl::Span<std::byte> pool, int32_t call_idx) const {
  const int64_t row_bytes = kDim * 2;
  const int64_t head_bytes = row_bytes * kTokensPerBlock * options_.blocks_per_call;
  std::byte* next = pool.data() + call_idx * call_bytes();
  std::vector<LayerRows> layers(model_.spec.num_layers());
  for (LayerRows& layer : layers) {
    for (RowsView* view : {&layer.k, &layer.v}) {
      *view = {.data = next, .token_stride_bytes = row_bytes, .head_stride_bytes = head_bytes};
      next += head_bytes * NumHeads(options_);
    }
  }
  return layers;
}

// Every call of every round is a prompt of its own.
KeyContext PathBench::ContextOf(int round_idx, int32_t call_idx) const {
  return {.fingerprint = model_.fingerprint,
          .tenant = absl::StrCat("bench-", getpid(), "-", round_idx, "-", call_idx)};
}

// Runs `work`, which moves total_bytes, and notes its rate and the CPU time of both processes.
absl::Status PathBench::Timed(const std::string& name, pid_t other,
                              const std::function<absl::Status()>& work) {
  Samples& samples = samples_[name];
  const double other_before = other > 0 ? ProcessCpuSeconds(other) : 0;
  const double own_before = OwnCpuSeconds();
  const absl::Time start = absl::Now();
  KVSTOW_RETURN_IF_ERROR(work());
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const double gb = static_cast<double>(options_.total_bytes) / 1e9;
  samples.gb_per_s.push_back(gb / seconds);
  samples.gb += gb;
  samples.cpu_s += OwnCpuSeconds() - own_before;
  if (other > 0) samples.cpu_s += ProcessCpuSeconds(other) - other_before;
  samples.has_cpu = samples.has_cpu && other >= 0 && other_before >= 0;
  return absl::OkStatus();
}

absl::Status PathBench::PutAll(const PathCase& path, int round_idx) {
  keys_.clear();
  for (int32_t call_idx = 0; call_idx < num_calls(); ++call_idx) {
    std::vector<LayerRows> layers = LayersAt(SourceOf(path), call_idx);
    // Token 0 of a view is token 0 of the prompt, whether it is put or not.
    for (LayerRows& layer : layers) {
      for (RowsView* view : {&layer.k, &layer.v}) view->data -= num_before() * kPlaneBytes;
    }
    const absl::Time start = absl::Now();
    absl::StatusOr<PutSummary> put = path.kv->Put(
        model_, {.context = ContextOf(round_idx, call_idx),
                 .tokens = tokens_,
                 .layers = layers,
                 .codec = path.codec,
                 .first_block = num_before(),
                 .compress_at = has_wire() ? CompressAt::kWorker : CompressAt::kService});
    samples_[path.name + "/put"].call_ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
    if (!put.ok()) return service_.Explain(put.status());
    if (put->num_stored != options_.blocks_per_call) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "put stored ", put->num_stored, " of ", options_.blocks_per_call, " blocks (",
          put->first_refusal.message(), "); a round needs ", FormatBytes(options_.total_bytes),
          " of free memory tier, or a smaller --total"));
    }
    put->keys.erase(put->keys.begin(), put->keys.begin() + num_before());
    keys_.push_back(std::move(put->keys));
  }
  return absl::OkStatus();
}

absl::Status PathBench::GetAll(const PathCase& path, const std::string& name, bool layerwise) {
  Samples& samples = samples_[name];
  for (int32_t call_idx = 0; call_idx < num_calls(); ++call_idx) {
    const std::vector<LayerRows> layers = LayersAt(ResultOf(path), call_idx);
    const absl::Time start = absl::Now();
    absl::Duration first_layer;
    GetOptions get;
    if (layerwise) {
      get.on_layers = [&](const LayersReady& ready) {
        if (ready.first_layer == 0) first_layer = absl::Now() - start;
      };
    }
    const absl::StatusOr<GetSummary> got =
        path.kv->Get(model_, keys_[call_idx], layers, /*first_token=*/0, get);
    const absl::Duration all = absl::Now() - start;
    samples.call_ms.push_back(absl::ToDoubleMilliseconds(all));
    if (layerwise) {
      samples.first_layer_shares.push_back(absl::FDivDuration(first_layer, all) *
                                           model_.spec.num_layers());
    }
    if (!got.ok()) return service_.Explain(got.status());
    for (const absl::Status& block : got->blocks) {
      if (absl::IsNotFound(block)) {
        return absl::NotFoundError(
            "a block that was just put is gone: the memory tier is too small or shared; give a "
            "smaller --total");
      }
      if (!block.ok()) return service_.Explain(block);
    }
  }
  return absl::OkStatus();
}

absl::Status PathBench::Check(std::string_view what, absl::Span<std::byte> result) {
  if (std::memcmp(result.data(), source_->bytes().data(), result.size()) != 0) {
    return absl::DataLossError(absl::StrCat(ToAbsl(what), " gave other bytes than the source"));
  }
  std::memset(result.data(), 0, result.size());
  return absl::OkStatus();
}

// What came back must be the source, plane by plane encoded and decoded.
absl::Status PathBench::CheckDecoded(const PathCase& path) {
  const BlockLayout& layout = *model_.layout;
  std::vector<std::byte> want(kPlaneBytes), got(kPlaneBytes), unit(2 * kPlaneBytes);
  for (int32_t call_idx = 0; call_idx < num_calls(); ++call_idx) {
    const std::vector<LayerRows> source = LayersAt(source_->bytes(), call_idx);
    const std::vector<LayerRows> result = LayersAt(result_->bytes(), call_idx);
    for (int32_t at = 0; at < options_.blocks_per_call * layout.num_planes(); ++at) {
      const int32_t block_idx = at / layout.num_planes();
      const PlaneInfo& plane = layout.plane(at % layout.num_planes());
      const bool is_key = plane.role == Role::kKey;
      const int64_t token = int64_t{block_idx} * kTokensPerBlock;
      const PlaneShape shape{kTokensPerBlock, kDim, plane.role, layout.dtype()};
      const LayerRows& from = source[plane.layer_idx];
      const LayerRows& to = result[plane.layer_idx];
      const int32_t idx = at % layout.num_planes();
      GatherPlane(layout, idx, is_key ? from.k : from.v, token, want.data());
      GatherPlane(layout, idx, is_key ? to.k : to.v, token, got.data());
      const bool is_raw = num_before() + block_idx == 0 && path.codec.raw_first_block;
      const Codec& codec = *FindCodec(
          is_raw ? CodecId::kRaw : EffectiveCodec(path.codec.pair.of(plane.role), shape));
      if (codec.id != CodecId::kRaw &&
          BestBackend(codec).encode(shape, want.data(), unit.data()) != EncodeResult::kKeepRaw) {
        BestBackend(codec).decode(shape, unit.data(), want.data());
      }
      if (want != got) {
        return absl::DataLossError(absl::StrCat(path.name, " gave other rows than its codecs"));
      }
    }
  }
  std::memset(result_->bytes().data(), 0, result_->bytes().size());
  return absl::OkStatus();
}

absl::Status PathBench::PlainSockets() {
  for (const auto& [name, peer] : {std::pair<std::string, SocketPeer*>("unix", unix_peer_.get()),
                                   std::pair<std::string, SocketPeer*>("tcp", tcp_peer_.get())}) {
    KVSTOW_RETURN_IF_ERROR(Timed(absl::StrCat("socket/", name, "/put"), peer->pid(),
                                 [&] { return peer->Send(source_->bytes()); }));
    KVSTOW_RETURN_IF_ERROR(Timed(absl::StrCat("socket/", name, "/get"), peer->pid(),
                                 [&] { return peer->Receive(result_->bytes()); }));
    KVSTOW_RETURN_IF_ERROR(Check("the plain socket", result_->bytes()));
  }
  return absl::OkStatus();
}

absl::Status PathBench::GetAndCheck(const PathCase& path, const std::string& name, bool layerwise) {
  KVSTOW_RETURN_IF_ERROR(Timed(name, server_pid_, [&] { return GetAll(path, name, layerwise); }));
  return path.preset == "lossless" ? Check(path.name, ResultOf(path)) : CheckDecoded(path);
}

// That it is what was measured.
absl::Status PathBench::CheckPath(const PathCase& path) const {
  if (path.result != nullptr) {
    if (path.source->is_in_place() && path.result->is_in_place()) return absl::OkStatus();
    return absl::FailedPreconditionError("the service is gone from the windows");
  }
  const std::string taken = path.kv->ExplainPath();
  if (path.path == PathKind::kGrpc || taken == PathName(path.path)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("path ", ToAbsl(PathName(path.path)), " cannot be had: ", taken));
}

absl::Status PathBench::PutAndGet(const PathCase& path, int round_idx) {
  KVSTOW_RETURN_IF_ERROR(
      Timed(path.name + "/put", server_pid_, [&] { return PutAll(path, round_idx); }));
  KVSTOW_RETURN_IF_ERROR(GetAndCheck(path, path.name + "/get", /*layerwise=*/false));
  if (options_.layerwise) {
    KVSTOW_RETURN_IF_ERROR(GetAndCheck(path, path.name + "/layers/get", /*layerwise=*/true));
  }
  KVSTOW_RETURN_IF_ERROR(CheckPath(path));
  for (const std::vector<BlockKey>& keys : keys_) {
    const absl::StatusOr<int64_t> num_deleted = path.kv->Delete(keys);
    if (!num_deleted.ok()) return service_.Explain(num_deleted.status());
  }
  return absl::OkStatus();
}

absl::Status PathBench::Round(int round_idx) {
  KVSTOW_RETURN_IF_ERROR(Timed("memcpy", 0, [&]() -> absl::Status {
    std::memcpy(result_->bytes().data(), source_->bytes().data(), options_.total_bytes);
    return absl::OkStatus();
  }));
  KVSTOW_RETURN_IF_ERROR(Check("memcpy", result_->bytes()));
  if (has_wire()) {
    samples_["wire"].gb_per_s.push_back(options_.wire_bytes_per_s / 1e9);
    samples_["wire"].has_cpu = false;
  }
  // Every other round the service goes first: what runs second finds other caches.
  const bool sockets_first = round_idx % 2 == 0;
  if (!has_wire() && sockets_first) KVSTOW_RETURN_IF_ERROR(PlainSockets());
  for (const PathCase& path : cases_) KVSTOW_RETURN_IF_ERROR(PutAndGet(path, round_idx));
  if (!has_wire() && !sockets_first) KVSTOW_RETURN_IF_ERROR(PlainSockets());
  return absl::OkStatus();
}

PathBenchLine PathBench::Line(const std::string& name, const std::string& ceiling) const {
  const Samples& samples = samples_.at(name);
  PathBenchLine line{.case_name = name,
                     .block_bytes = options_.block_bytes,
                     .gb_per_s = MedianOf(samples.gb_per_s),
                     .ceiling = ceiling};
  if (!ceiling.empty()) {
    std::vector<double> ratios;
    for (size_t i = 0; i < samples.gb_per_s.size(); ++i) {
      ratios.push_back(samples.gb_per_s[i] / samples_.at(ceiling).gb_per_s[i]);
    }
    line.ratio = MedianOf(std::move(ratios));
  }
  if (samples.has_cpu) line.cpu_s_per_gb = samples.cpu_s / samples.gb;
  if (!samples.call_ms.empty()) {
    line.p50_ms = PercentileOf(samples.call_ms, 0.50);
    line.p99_ms = PercentileOf(samples.call_ms, 0.99);
  }
  if (!samples.first_layer_shares.empty()) {
    line.first_layer_shares = MedianOf(samples.first_layer_shares);
  }
  return line;
}

std::vector<PathBenchLine> PathBench::WireLines() const {
  std::vector<PathBenchLine> lines = {Line("wire", "")};
  for (const PathCase& path : cases_) {
    const bool is_first = &path == &cases_.front();
    for (const std::string op : {"/put", "/get"}) {
      lines.push_back(Line(path.name + op, is_first ? "wire" : cases_.front().name + op));
    }
  }
  return lines;
}

std::vector<PathBenchLine> PathBench::Lines() const {
  if (has_wire()) return WireLines();
  std::vector<PathBenchLine> lines = {Line("memcpy", "")};
  for (const char* name :
       {"socket/unix/put", "socket/unix/get", "socket/tcp/put", "socket/tcp/get"}) {
    lines.push_back(Line(name, "memcpy"));
  }
  for (const PathCase& path : cases_) {
    for (const std::string op : {"/put", "/get"}) {
      const bool is_tcp = is_tcp_ || path.path == PathKind::kUcx;
      const std::string socket = absl::StrCat("socket/", is_tcp ? "tcp" : "unix", op);
      lines.push_back(Line(path.name + op, path.path == PathKind::kShm ? "memcpy" : socket));
    }
    if (options_.layerwise) lines.push_back(Line(path.name + "/layers/get", path.name + "/get"));
  }
  return lines;
}

}  // namespace

absl::Status PathBenchOptions::Validate() const {
  const int64_t layer_bytes = LayerBytes(*this);
  if (block_bytes < layer_bytes || block_bytes % layer_bytes != 0 || block_bytes > 64 * kMiB) {
    return absl::InvalidArgumentError(absl::StrCat("--size is ", block_bytes,
                                                   " bytes, want a multiple of ",
                                                   FormatBytes(layer_bytes), ", at most 64MiB"));
  }
  if (wire_bytes_per_s != 0 && layerwise) {
    return absl::InvalidArgumentError("--wire-limit and --layerwise: want one of them");
  }
  if (blocks_per_call < 0 || blocks_per_call > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("--blocks-per-call is ", blocks_per_call, ", want 1 to 4096"));
  }
  const int64_t one_call = block_bytes * std::max(blocks_per_call, 1);
  if (total_bytes != 0 && (total_bytes < one_call || total_bytes % one_call != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--total is ", total_bytes, " bytes, want a multiple of one call: ", FormatBytes(one_call),
        " (--size times --blocks-per-call)"));
  }
  if (wire_bytes_per_s != 0 && paths != std::vector<PathKind>{PathKind::kGrpc}) {
    return absl::InvalidArgumentError("--wire-limit holds gRPC's wire: want --path grpc");
  }
  if (rounds < 1 || rounds > kRoundsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rounds is ", rounds, ", want 1 to ", kRoundsMax));
  }
  return absl::OkStatus();
}

int64_t DefaultPoolBytes() {
  const int64_t cache_bytes = std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 0);
  const int64_t memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const int64_t wanted = std::max(cache_bytes + cache_bytes / 4, 256 * kMiB);
  const int64_t bounded = std::min(wanted, memory_bytes / 16);
  return std::max(bounded / (64 * kMiB) * (64 * kMiB), 64 * kMiB);
}

absl::Status RunPathBench(const PathBenchOptions& options,
                          const std::function<void(const PathBenchLine&)>& emit) {
  PathBench bench(options);
  KVSTOW_RETURN_IF_ERROR(bench.Prepare());
  KVSTOW_RETURN_IF_ERROR(bench.Round(-1));
  bench.ForgetWarmUp();
  for (int round_idx = 0; round_idx < options.rounds; ++round_idx) {
    if (options.progress) options.progress(round_idx + 1, options.rounds + 1);
    KVSTOW_RETURN_IF_ERROR(bench.Round(round_idx));
  }
  for (const PathBenchLine& line : bench.Lines()) emit(line);
  return absl::OkStatus();
}

}  // namespace kvstow
