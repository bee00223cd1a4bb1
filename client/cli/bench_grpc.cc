#include "client/cli/bench_grpc.h"

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
#include "kernels/core/status_macros.h"
#include "kernels/core/text.h"

namespace kvstow {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int32_t kTokensPerBlock = 64;
constexpr int32_t kDim = 128;
constexpr int32_t kKvHeads = 8;
constexpr int64_t kPlaneBytes = int64_t{kTokensPerBlock} * kDim * 2;  // bf16
constexpr int64_t kLayerBytes = 2 * int64_t{kKvHeads} * kPlaneBytes;  // 256 KiB
constexpr int32_t kRoundsMax = 100;

// A pool of populated pages.
class Pool {
 public:
  static absl::StatusOr<std::unique_ptr<Pool>> Create(int64_t num_bytes) {
    void* const memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for a pool of ", num_bytes, " bytes; give a smaller --total"));
    }
    return std::unique_ptr<Pool>(new Pool(static_cast<std::byte*>(memory), num_bytes));
  }
  ~Pool() { munmap(bytes_.data(), bytes_.size()); }
  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  Pool(std::byte* memory, int64_t num_bytes) : bytes_(memory, num_bytes) {}
  absl::Span<std::byte> bytes_;
};

// Bytes without a pattern that a copy could get right by accident (SplitMix64).
void FillPool(absl::Span<std::byte> bytes) {
  uint64_t state = 1;
  for (size_t i = 0; i + sizeof(uint64_t) <= bytes.size(); i += sizeof(uint64_t)) {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    std::memcpy(bytes.data() + i, &z, sizeof(z));
  }
}

// A model whose block is `block_bytes` in row form.
ModelSpec BenchSpec(int64_t block_bytes) {
  ModelSpec spec;
  spec.name = "kvstow-bench";
  spec.weights = "synthetic";
  spec.tokens_per_block = kTokensPerBlock;
  spec.groups = {{.first_layer = 0,
                  .num_layers = static_cast<int32_t>(block_bytes / kLayerBytes),
                  .kind = LayerKind::kFull,
                  .num_kv_heads = kKvHeads,
                  .k_dim = kDim,
                  .v_dim = kDim}};
  return spec;
}

// One measured case: a rate per round, CPU over all rounds, a duration per call.
struct Samples {
  std::vector<double> gb_per_s;
  std::vector<double> call_ms;
  double cpu_s = 0;
  double gb = 0;
  bool has_cpu = true;
};

class GrpcBench {
 public:
  explicit GrpcBench(const GrpcBenchOptions& options) : options_(options) {}

  absl::Status Prepare();
  absl::Status Round(int round_idx);
  void ForgetWarmUp() { samples_.clear(); }
  std::vector<PathBenchLine> Lines() const;

 private:
  int32_t num_calls() const {
    return static_cast<int32_t>(options_.total_bytes / options_.block_bytes /
                                options_.blocks_per_call);
  }
  int64_t call_bytes() const { return options_.block_bytes * options_.blocks_per_call; }
  std::vector<LayerRows> LayersAt(absl::Span<std::byte> pool, int32_t call_idx) const;
  KeyContext ContextOf(int round_idx, int32_t call_idx) const;
  absl::Status Timed(const std::string& name, pid_t other,
                     const std::function<absl::Status()>& work);
  absl::Status PutAll(int round_idx);
  absl::Status GetAll();
  absl::Status PlainSockets();
  absl::Status Check(std::string_view what);
  PathBenchLine Line(const std::string& name, const std::string& ceiling) const;

  GrpcBenchOptions options_;
  std::unique_ptr<SocketPeer> peer_;
  std::unique_ptr<DaemonProcess> daemon_;
  pid_t server_pid_ = -1;
  Service service_;
  Model model_;
  std::unique_ptr<Pool> source_;
  std::unique_ptr<Pool> result_;
  std::vector<int32_t> tokens_;
  std::vector<std::vector<BlockKey>> keys_;  // of each call of the round
  std::map<std::string, Samples> samples_;
};

absl::Status GrpcBench::Prepare() {
  KVSTOW_RETURN_IF_ERROR(options_.Validate());
  if (options_.total_bytes == 0) {
    options_.total_bytes = std::max<int64_t>(DefaultPoolBytes() / call_bytes(), 1) * call_bytes();
  }
  const bool is_tcp =
      !options_.target.empty() && !absl::StartsWith(NormalTarget(options_.target), "unix:");
  KVSTOW_ASSIGN_OR_RETURN(peer_, SocketPeer::Start(is_tcp ? SocketKind::kTcp : SocketKind::kUnix,
                                                   options_.total_bytes));
  if (options_.target.empty()) {
    // The round's blocks, their headers, and room for those of the round before.
    KVSTOW_ASSIGN_OR_RETURN(daemon_, DaemonProcess::Start(2 * options_.total_bytes +
                                                          options_.total_bytes / 8 + 64 * kMiB));
    options_.target = daemon_->target();
  }
  KVSTOW_ASSIGN_OR_RETURN(service_, ConnectTo(options_.target, options_.timeout));
  server_pid_ = daemon_ != nullptr ? daemon_->pid() : PeerPid(service_.target);
  absl::StatusOr<Model> model = service_.kv->RegisterModel(BenchSpec(options_.block_bytes));
  if (!model.ok()) return service_.Explain(model.status());
  model_ = *std::move(model);
  KVSTOW_ASSIGN_OR_RETURN(source_, Pool::Create(options_.total_bytes));
  KVSTOW_ASSIGN_OR_RETURN(result_, Pool::Create(options_.total_bytes));
  FillPool(source_->bytes());
  for (int32_t i = 0; i < kTokensPerBlock * options_.blocks_per_call; ++i) tokens_.push_back(i);
  return absl::OkStatus();
}

// Head-major, as paged engines keep KV: the rows of a head are contiguous.
std::vector<LayerRows> GrpcBench::LayersAt(absl::Span<std::byte> pool, int32_t call_idx) const {
  const int64_t row_bytes = kDim * 2;
  const int64_t head_bytes = row_bytes * kTokensPerBlock * options_.blocks_per_call;
  std::byte* next = pool.data() + call_idx * call_bytes();
  std::vector<LayerRows> layers(model_.spec.num_layers());
  for (LayerRows& layer : layers) {
    for (RowsView* view : {&layer.k, &layer.v}) {
      *view = {.data = next, .token_stride_bytes = row_bytes, .head_stride_bytes = head_bytes};
      next += head_bytes * kKvHeads;
    }
  }
  return layers;
}

// Every call of every round is a prompt of its own.
KeyContext GrpcBench::ContextOf(int round_idx, int32_t call_idx) const {
  return {.fingerprint = model_.fingerprint,
          .tenant = absl::StrCat("bench-", getpid(), "-", round_idx, "-", call_idx)};
}

// Runs `work`, which moves total_bytes, and notes its rate and the CPU time of both processes.
absl::Status GrpcBench::Timed(const std::string& name, pid_t other,
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

absl::Status GrpcBench::PutAll(int round_idx) {
  keys_.clear();
  for (int32_t call_idx = 0; call_idx < num_calls(); ++call_idx) {
    const std::vector<LayerRows> layers = LayersAt(source_->bytes(), call_idx);
    const absl::Time start = absl::Now();
    absl::StatusOr<PutSummary> put = service_.kv->Put(
        model_, {.context = ContextOf(round_idx, call_idx), .tokens = tokens_, .layers = layers});
    samples_["grpc/put"].call_ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
    if (!put.ok()) return service_.Explain(put.status());
    if (put->num_stored != options_.blocks_per_call) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "put stored ", put->num_stored, " of ", options_.blocks_per_call, " blocks (",
          put->first_refusal.message(), "); a round needs ", FormatBytes(options_.total_bytes),
          " of free memory tier, or a smaller --total"));
    }
    keys_.push_back(std::move(put->keys));
  }
  return absl::OkStatus();
}

absl::Status GrpcBench::GetAll() {
  for (int32_t call_idx = 0; call_idx < num_calls(); ++call_idx) {
    const std::vector<LayerRows> layers = LayersAt(result_->bytes(), call_idx);
    const absl::Time start = absl::Now();
    const absl::StatusOr<GetSummary> got = service_.kv->Get(model_, keys_[call_idx], layers);
    samples_["grpc/get"].call_ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
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

absl::Status GrpcBench::Check(std::string_view what) {
  const absl::Span<std::byte> result = result_->bytes();
  if (std::memcmp(result.data(), source_->bytes().data(), result.size()) != 0) {
    return absl::DataLossError(absl::StrCat(ToAbsl(what), " gave other bytes than the source"));
  }
  std::memset(result.data(), 0, result.size());
  return absl::OkStatus();
}

absl::Status GrpcBench::PlainSockets() {
  KVSTOW_RETURN_IF_ERROR(
      Timed("socket/put", peer_->pid(), [&] { return peer_->Send(source_->bytes()); }));
  KVSTOW_RETURN_IF_ERROR(
      Timed("socket/get", peer_->pid(), [&] { return peer_->Receive(result_->bytes()); }));
  return Check("the plain socket");
}

absl::Status GrpcBench::Round(int round_idx) {
  KVSTOW_RETURN_IF_ERROR(Timed("memcpy", 0, [&]() -> absl::Status {
    std::memcpy(result_->bytes().data(), source_->bytes().data(), options_.total_bytes);
    return absl::OkStatus();
  }));
  KVSTOW_RETURN_IF_ERROR(Check("memcpy"));
  // Every other round the service goes first: what runs second finds other caches.
  if (round_idx % 2 == 0) KVSTOW_RETURN_IF_ERROR(PlainSockets());
  KVSTOW_RETURN_IF_ERROR(Timed("grpc/put", server_pid_, [&] { return PutAll(round_idx); }));
  KVSTOW_RETURN_IF_ERROR(Timed("grpc/get", server_pid_, [&] { return GetAll(); }));
  KVSTOW_RETURN_IF_ERROR(Check("get"));
  if (round_idx % 2 != 0) KVSTOW_RETURN_IF_ERROR(PlainSockets());
  for (const std::vector<BlockKey>& keys : keys_) {
    const absl::StatusOr<int64_t> num_deleted = service_.kv->Delete(keys);
    if (!num_deleted.ok()) return service_.Explain(num_deleted.status());
  }
  return absl::OkStatus();
}

PathBenchLine GrpcBench::Line(const std::string& name, const std::string& ceiling) const {
  const Samples& samples = samples_.at(name);
  PathBenchLine line{.case_name = name, .gb_per_s = MedianOf(samples.gb_per_s), .ceiling = ceiling};
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
  return line;
}

std::vector<PathBenchLine> GrpcBench::Lines() const {
  return {Line("memcpy", ""), Line("socket/put", "memcpy"), Line("socket/get", "memcpy"),
          Line("grpc/put", "socket/put"), Line("grpc/get", "socket/get")};
}

}  // namespace

absl::Status GrpcBenchOptions::Validate() const {
  if (block_bytes < kLayerBytes || block_bytes % kLayerBytes != 0 || block_bytes > 64 * kMiB) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--size is ", block_bytes, " bytes, want a multiple of 256KiB, at most 64MiB"));
  }
  if (blocks_per_call < 1 || blocks_per_call > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("--blocks-per-call is ", blocks_per_call, ", want 1 to 4096"));
  }
  const int64_t one_call = block_bytes * blocks_per_call;
  if (total_bytes != 0 && (total_bytes < one_call || total_bytes % one_call != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--total is ", total_bytes, " bytes, want a multiple of one call: ", FormatBytes(one_call),
        " (--size times --blocks-per-call)"));
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

absl::Status RunGrpcBench(const GrpcBenchOptions& options,
                          const std::function<void(const PathBenchLine&)>& emit) {
  GrpcBench bench(options);
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
