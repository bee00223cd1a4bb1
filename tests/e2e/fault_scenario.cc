#include "tests/e2e/fault_scenario.h"

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/clock.h"
#include "tests/e2e/damage.h"
#include "tests/e2e/raw_calls.h"
#include "tests/e2e/sequences.h"

namespace kvstow::testing {
namespace {

constexpr int kWorkerThreads = 2;
// For what has no limit of its own: a process that starts, work that goes on after a fault.
constexpr absl::Duration kPatience = absl::Seconds(20);
constexpr absl::Duration kGrace = absl::Seconds(1);

DaemonOptions OptionsFor(PathKind path) {
  const std::string deadline = absl::FormatDuration(FaultScenario::kDeadline);
  DaemonOptions options{.dram = "24MiB", .nvme = "256MiB", .with_metrics = true};
  options.extra_flags = {"--tickets.write_deadline=" + deadline,
                         "--tickets.reuse_delay=" + deadline};
  if (path == PathKind::kUcx) {
    options.extra_flags.insert(
        options.extra_flags.end(),
        {"--channels.ucx=true", "--channels.ucx_tls=tcp", "--channels.ucx_devices=lo"});
  }
  return options;
}

}  // namespace

const std::vector<FaultScenario::Fault>& FaultScenario::Faults() {
  static const auto* faults = new std::vector<Fault>{
      {"kill-daemon", &FaultScenario::KillDaemon},
      {"stop-daemon", &FaultScenario::StopDaemon},
      {"kill-worker", &FaultScenario::KillWorker},
      {"stop-worker", &FaultScenario::StopWorker},
      {"damage-frames", &FaultScenario::DamageFrames},
      {"damage-store", &FaultScenario::DamageStore},
      {"damage-wire", &FaultScenario::DamageWire},
      {"trickle", &FaultScenario::Trickle},
      {"slow-reader", &FaultScenario::SlowReader},
      {"lease-expires", &FaultScenario::LeaseExpires},
  };
  return *faults;
}

std::vector<std::string_view> FaultScenario::FaultNames() {
  std::vector<std::string_view> names;
  for (const Fault& fault : Faults()) names.push_back(fault.name);
  return names;
}

FaultScenario::FaultScenario(PathKind path, uint64_t seed)
    : path_(path), seed_(seed), rng_(seed), daemon_(folder_, OptionsFor(path)) {
  absl::StatusOr<std::unique_ptr<Relay>> relay = Relay::Listen(folder_.path() + "/wire");
  KVSTOW_CHECK(relay.ok());
  relay_ = *std::move(relay);
  relay_->SetTarget(folder_.path() + "/kvstow.sock");
  wire_ = std::thread([this] { relay_->Run(); });
}

FaultScenario::~FaultScenario() {
  worker_.reset();
  relay_->Stop();
  wire_.join();
}

std::vector<std::string> FaultScenario::Run(std::string_view fault) {
  if (!daemon_.Start()) return {"the daemon does not start: " + daemon_.log()};
  absl::StatusOr<Model> model = NewClient()->RegisterModel(SmallModel());
  if (!model.ok()) return {"no model: " + model.status().ToString()};
  model_ = *std::move(model);
  for (const Fault& known : Faults()) {
    if (known.name == fault) (this->*known.run)();
  }
  if (worker_ != nullptr) EndWorker();
  ExpectNothingHeld(/*windows_too=*/true);
  Expect(daemon_.Terminate() == 0, "SIGTERM ends the daemon with status 0");
  if (!failures_.empty()) failures_.push_back("the daemon said: " + daemon_.log());
  return failures_;
}

// --- the faults ---

void FaultScenario::KillDaemon() {
  StartWorker();
  ExpectProgress();
  daemon_.Kill();
  Expect(daemon_.Start(), "the daemon starts again");
  ExpectProgress();
}

void FaultScenario::StopDaemon() {
  StartWorker();
  ExpectProgress();
  daemon_.Signal(SIGSTOP);
  ExpectErrors();
  daemon_.Signal(SIGCONT);
  ExpectProgress();
}

void FaultScenario::KillWorker() {
  StartWorker();
  ExpectProgress();
  worker_->Signal(SIGKILL);
  worker_->WaitForExit(kPatience);
  worker_.reset();
  ExpectNothingHeld(/*windows_too=*/true);
  StartWorker();
  ExpectProgress();
}

void FaultScenario::StopWorker() {
  StartWorker();
  ExpectProgress();
  worker_->Signal(SIGSTOP);
  Expect(Soon([&] { return AllThreadsAreStopped(worker_->pid()); }), "the worker stops");
  ExpectNothingHeld(/*windows_too=*/false);
  worker_->Signal(SIGCONT);
  ExpectProgress();
}

void FaultScenario::DamageFrames() {
  StartWorker(/*damage_every=*/5);
  Expect(Soon([&] { return Count("corrupt") > 0; }), "damage on the way back is seen");
  Expect(Soon([&] { return Count("refused") > 0; }), "damage on the way there is seen");
  ExpectProgress();
  const v1::StatResponse stat = daemon_.Stat();
  Expect(stat.counters().at("bad_checksums") > 0, "bad_checksums counts");
}

void FaultScenario::DamageStore() {
  StartWorker();
  const std::unique_ptr<KvClient> client = NewClient();
  DamageMemory(*client);
  DamageDisk(*client);
  ExpectProgress();
}

void FaultScenario::DamageWire() {
  StartWorker();
  ExpectProgress();
  // By gRPC blocks pass here, else only calls.
  const int64_t every = path_ == PathKind::kGrpc ? 150000 : 2500;
  for (const WireDirection direction : {WireDirection::kToService, WireDirection::kToClient}) {
    const int64_t before = relay_->num_damaged();
    relay_->SetRule(
        {.damage_every = every + static_cast<int64_t>(rng_.Below(every)), .direction = direction});
    Expect(Soon([&] { return relay_->num_damaged() >= before + 4; }), "bytes pass the wire");
    relay_->SetRule({});
    ExpectProgress();
  }
}

void FaultScenario::Trickle() {
  StartWorker();
  ExpectProgress();
  // Too slow even for the small calls that go with shared memory.
  relay_->SetRule({.bytes_per_s = 200, .piece_bytes = 7});
  ExpectErrors();
  relay_->SetRule({});
  ExpectProgress();
}

// A hundredth of what a busy machine passes; another worker must not notice.
void FaultScenario::SlowReader() {
  StartWorker();
  ExpectProgress();
  relay_->SetRule({.bytes_per_s = 2e6});
  const std::unique_ptr<KvClient> other = NewClient();
  const KvData kv(SmallModel(), seed_ + 1, 4);
  const RealClock clock;
  for (int i = 0; i < 5; ++i) {
    const absl::Time start = clock.Now();
    PutRaw(*other, kv, /*durable=*/false);
    CountHits(*other, kv);
    Expect(clock.Now() - start < 2 * (kDeadline + kGrace), "others are served in time");
  }
  relay_->SetRule({});
  ExpectProgress();
}

void FaultScenario::LeaseExpires() {
  StartWorker();
  const std::unique_ptr<KvClient> slow = NewClient("unix:" + folder_.path() + "/wire");
  const KvData kv(SmallModel(), seed_ + 2, 16);
  PutRaw(*slow, kv, /*durable=*/false);
  RawCalls calls(daemon_, model_);
  relay_->SetRule({.bytes_per_s = 3e6});
  const v1::AcquireResponse lease = calls.Acquire(KeysOf(model_, kv), absl::Milliseconds(300));
  Expect(lease.lease() != 0, "blocks are there to be leased");
  // Read again and again while the lease ends and the worker's blocks push these out.
  Expect(Soon([&] {
           CountHits(*slow, kv);
           return daemon_.Stat().open_leases() == 0;
         }),
         "the lease ends");
  CountHits(*slow, kv);
  Expect(calls.Release(lease.lease()).error_code() == grpc::StatusCode::NOT_FOUND,
         "a lease that has ended is not found");
  relay_->SetRule({});
  ExpectProgress();
}

void FaultScenario::DamageMemory(KvClient& client) {
  for (int attempt = 0; attempt < 5; ++attempt) {
    const KvData kv(SmallModel(), seed_ * 100 + attempt, 4);
    PutRaw(client, kv, /*durable=*/false);
    const int damaged_block = static_cast<int>(rng_.Below(4));
    const std::vector<std::byte> rows = kv.RowForm(damaged_block);
    const auto plane_bytes = static_cast<size_t>(kv.layout().plane(0).row_bytes);
    const int num_copies = FlipInMemory(daemon_.pid(), {rows.data(), plane_bytes});
    Expect(num_copies >= 0, "a parent may write its child's memory");
    if (num_copies == 0) continue;  // pushed out by the worker's blocks
    // What is read from memory is refused, what was written to disk before is right.
    CountHits(client, kv);
    Expect(client.corrupt_blocks() > 0 || daemon_.Stat().counters().at("dram_evictions") > 0,
           "the changed bit is seen");
    CountHits(client, kv);
    return;
  }
  Expect(false, "a block is found in memory");
}

void FaultScenario::DamageDisk(KvClient& client) {
  const KvData kv(SmallModel(), seed_ * 100 + 50, 4);
  PutRaw(client, kv, /*durable=*/true);
  Expect(daemon_.Terminate() == 0, "SIGTERM ends the daemon with status 0");
  const std::vector<std::filesystem::path> files = BlobFiles(daemon_.nvme_path());
  Expect(!files.empty(), "there is a file with blocks");
  for (const std::filesystem::path& file : files) {
    const uint64_t bytes = std::filesystem::file_size(file);
    for (uint64_t at = rng_.Below(300000); at < bytes; at += 300000) FlipByte(file, at);
  }
  Expect(daemon_.Start(), "the daemon starts on a damaged disk");
  Expect(Soon([&] { return client.RegisterModel(SmallModel()).ok(); }), "it answers");
  CountHits(client, kv);
  CountHits(client, kv);
}

// --- how they are watched ---

void FaultScenario::Expect(bool holds, const std::string& claim) {
  if (!holds) failures_.push_back(absl::StrCat("does not hold: ", claim));
}

bool FaultScenario::Soon(const std::function<bool()>& holds) {
  return Eventually(holds, kPatience);
}

void FaultScenario::StartWorker(int damage_every) {
  worker_ = std::make_unique<ChildProcess>(std::vector<std::string>{
      FaultWorkerBinary(), "unix:" + folder_.path() + "/wire", std::string(PathName(path_)),
      absl::StrCat(seed_ * 10 + num_workers_++), absl::StrCat(absl::ToInt64Milliseconds(kDeadline)),
      absl::StrCat(damage_every)});
}

void FaultScenario::EndWorker() {
  worker_->Signal(SIGTERM);
  const std::optional<int> status = worker_->WaitForExit(kPatience);
  Expect(status == 0, absl::StrCat("the worker ends with status 0, not ", status.value_or(-1)));
  if (!failures_.empty()) {
    const std::string output = worker_->output();
    const size_t tail = output.size() - std::min<size_t>(output.size(), 4000);
    failures_.push_back("the worker said: ..." + output.substr(tail));
  }
  worker_.reset();
}

int FaultScenario::Count(std::string_view beginning) const {
  const std::string output = "\n" + worker_->output();
  const std::string wanted = "\n" + std::string(beginning);
  int count = 0;
  for (size_t at = output.find(wanted); at != std::string::npos; at = output.find(wanted, at + 1)) {
    ++count;
  }
  return count;
}

void FaultScenario::ExpectProgress(int rounds) {
  const int before = Count("ok");
  Expect(Soon([&] { return Count("ok") >= before + rounds; }), "blocks come and go");
}

void FaultScenario::ExpectErrors() {
  const int before = Count("error");
  Expect(
      Eventually([&] { return Count("error") >= before + kWorkerThreads; }, kDeadline + 2 * kGrace),
      "calls end by their deadline");
}

std::string FaultScenario::WhatIsHeld(bool windows_too) {
  const v1::StatResponse stat = daemon_.Stat();
  std::string held;
  const auto add = [&held](std::string_view what, uint64_t count) {
    if (count > 0) absl::StrAppend(&held, std::string(what), " ", count, "; ");
  };
  add("open tickets", stat.open_tickets());
  add("open leases", stat.open_leases());
  add("pinned bytes", stat.pinned_bytes());
  if (windows_too) add("open channels", stat.open_channels());
  for (const v1::TierStat& tier : stat.tiers()) add("reserved bytes", tier.reserved_bytes());
  for (const std::string_view gauge : {"calls_in_flight", "bytes_in_flight"}) {
    add(gauge, static_cast<uint64_t>(daemon_.Metric("kvstow_" + std::string(gauge))));
  }
  return held;
}

void FaultScenario::ExpectNothingHeld(bool windows_too) {
  std::string held;
  Expect(Eventually(
             [&] {
               held = WhatIsHeld(windows_too);
               return held.empty();
             },
             2 * kDeadline + kGrace),
         "");
  if (!held.empty()) failures_.back() = "held after two deadlines: " + held;
}

std::unique_ptr<KvClient> FaultScenario::NewClient(const std::string& target) const {
  KvClientOptions options;
  options.paths.clear();
  if (path_ != PathKind::kGrpc) options.paths = {path_};
  options.ucx = {.tls = "tcp", .net_devices = "lo"};
  options.breaker.cool_down = absl::Milliseconds(100);
  options.target = target.empty() ? daemon_.target() : target;
  return KvClient::Create(options).value();
}

void FaultScenario::PutRaw(KvClient& client, const KvData& kv, bool durable) {
  const std::vector<LayerRows> layers = kv.layers();
  const absl::StatusOr<PutSummary> put =
      client.Put(model_, {.tokens = kv.tokens(), .layers = layers, .durable = durable});
  Expect(put.ok() && put->num_refused == 0, "a put while all is well: " + put.status().ToString());
}

int FaultScenario::CountHits(KvClient& client, const KvData& kv) {
  const KvData got = KvData::Empty(SmallModel(), kv.num_blocks());
  const std::vector<LayerRows> layers = got.layers();
  const absl::StatusOr<GetSummary> summary = client.Get(model_, KeysOf(model_, kv), layers);
  int num_hits = 0;
  for (int block = 0; block < kv.num_blocks(); ++block) {
    const bool is_hit = summary.ok() && summary->blocks[block].ok();
    Expect(is_hit ? got.EqualsBlock(kv, block) : got.IsUntouched(block),
           absl::StrCat("the bytes of block ", block, " are right"));
    if (is_hit) ++num_hits;
  }
  return num_hits;
}

}  // namespace kvstow::testing
