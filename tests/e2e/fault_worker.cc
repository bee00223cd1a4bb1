// One worker of fault_loop: puts and gets numbered blocks on a few threads until SIGTERM, and says
// what it sees.
//
//   fault_worker TARGET PATH SEED DEADLINE_MS [DAMAGE_EVERY]
//
// PATH: shm, ucx or grpc. DAMAGE_EVERY: one bit of every so manieth frame is changed (0: never).
// One line per event:
//   ok        a sequence was put and came back, every byte right
//   missed    it was put, and some of it did not come back
//   corrupt   a block came back damaged and was refused
//   refused   a block was not taken
//   error S   a call failed with status S
//   WRONG     other bytes came back than were put
//   LATE      a call outlived its deadline by more than a second
// Exit status: 0 all well, 3 a line in capitals, 2 bad usage.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/clock.h"
#include "kernels/core/mutex.h"
#include "tests/e2e/damaged_calls.h"
#include "tests/e2e/sequences.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {
namespace {

constexpr int kNumThreads = 2;
constexpr uint64_t kSequencesPerThread = 100000;
constexpr uint64_t kLastOnes = 16;  // sequences that a thread reads again
constexpr absl::Duration kGrace = absl::Seconds(1);

std::atomic<bool> g_stop{false};

// Waits without an event: between calls of a service that is gone, and to count time.
void WaitFor(absl::Duration duration) {
  Mutex mutex;
  CondVar never;
  MutexLock lock(&mutex);
  never.WaitFor(&mutex, duration);
}

// Time as this process lives it: what it is stopped for, or not given a processor for, does not
// count.
class LivedTime {
 public:
  LivedTime() : ticker_([this] { Tick(); }) {}
  ~LivedTime() {
    is_stopping_ = true;
    ticker_.join();
  }
  absl::Duration Now() const { return absl::Microseconds(lived_us_.load()); }

 private:
  static constexpr absl::Duration kTick = absl::Milliseconds(10);
  void Tick() {
    const RealClock clock;
    absl::Time last = clock.Now();
    while (!is_stopping_) {
      WaitFor(kTick);
      const absl::Time now = clock.Now();
      lived_us_ += absl::ToInt64Microseconds(std::min(now - last, 2 * kTick));
      last = now;
    }
  }
  std::atomic<int64_t> lived_us_{0};
  std::atomic<bool> is_stopping_{false};
  std::thread ticker_;
};

class FaultWorker {
 public:
  FaultWorker(const KvClientOptions& options, uint64_t seed)
      : deadline_(options.data_timeout), seed_(seed), client_(KvClient::Create(options).value()) {}

  bool Register();
  void Work(int thread_idx);
  bool has_failed() const { return has_failed_; }

 private:
  void Say(const std::string& line);
  void CheckTime(std::string_view call, absl::Duration start);
  // False: not all of it is stored.
  bool Put(uint64_t sequence);
  void Get(uint64_t sequence);

  const absl::Duration deadline_;
  const uint64_t seed_;
  const LivedTime time_;
  std::unique_ptr<KvClient> client_;
  Model model_;
  std::atomic<bool> has_failed_{false};
  Mutex mutex_;  // of the output
};

void FaultWorker::Say(const std::string& line) {
  if (line[0] >= 'A' && line[0] <= 'Z') has_failed_ = true;
  MutexLock lock(&mutex_);
  std::puts(line.c_str());
  std::fflush(stdout);
}

void FaultWorker::CheckTime(std::string_view call, absl::Duration start) {
  const absl::Duration took = time_.Now() - start;
  if (took <= deadline_ + kGrace) return;
  Say(absl::StrCat("LATE ", std::string(call), " took ", absl::FormatDuration(took)));
}

bool FaultWorker::Register() {
  while (!g_stop) {
    absl::StatusOr<Model> model = client_->RegisterModel(SmallModel());
    if (model.ok()) {
      model_ = *std::move(model);
      return true;
    }
    Say(absl::StrCat("error ", model.status().ToString()));
    WaitFor(absl::Milliseconds(50));
  }
  return false;
}

bool FaultWorker::Put(uint64_t sequence) {
  const KvData data = DataOf(sequence);
  const std::vector<LayerRows> layers = data.layers();
  const absl::Duration start = time_.Now();
  const absl::StatusOr<PutSummary> put = client_->Put(
      model_, {.tokens = data.tokens(), .layers = layers, .codec = ChoiceOf(sequence)});
  CheckTime("put", start);
  if (!put.ok()) {
    Say(absl::StrCat("error put: ", put.status().ToString()));
    return false;
  }
  if (put->num_refused > 0) Say(absl::StrCat("refused ", put->first_refusal.ToString()));
  return put->num_refused == 0;
}

void FaultWorker::Get(uint64_t sequence) {
  const absl::Duration start = time_.Now();
  const SequenceRead read = ReadSequence(*client_, model_, sequence);
  CheckTime("get", start);
  if (read.num_wrong > 0) {
    Say(absl::StrCat("WRONG bytes of sequence ", sequence, ", codec ",
                     std::string(CodecOf(sequence))));
  }
  absl::Status failure = read.call;
  for (const absl::Status& block : read.blocks) {
    if (absl::IsDataLoss(block)) Say(absl::StrCat("corrupt ", block.message()));
    if (absl::IsUnavailable(block) || absl::IsDeadlineExceeded(block)) failure.Update(block);
  }
  if (!failure.ok()) {
    Say(absl::StrCat("error get: ", failure.ToString()));
    WaitFor(absl::Milliseconds(20));
    return;
  }
  Say(read.num_hits == kBlocksPerSequence ? "ok" : "missed");
}

void FaultWorker::Work(int thread_idx) {
  Rng rng(seed_ * kNumThreads + thread_idx);
  const uint64_t first = (seed_ * kNumThreads + thread_idx) * kSequencesPerThread;
  for (uint64_t i = 0; i < kSequencesPerThread && !g_stop; ++i) {
    if (!Put(first + i)) WaitFor(absl::Milliseconds(20));
    Get(first + i);
    Get(first + i - std::min(i, rng.Below(kLastOnes)));
  }
}

int Run(int argc, char** argv) {
  const std::string path = argv[2];
  KvClientOptions options{.target = argv[1]};
  options.control_timeout = options.data_timeout = absl::Milliseconds(std::atoi(argv[4]));
  options.breaker.cool_down = absl::Milliseconds(100);
  options.ucx = {.tls = "tcp", .net_devices = "lo"};
  options.paths.clear();
  for (const PathKind kind : {PathKind::kShm, PathKind::kUcx}) {
    if (PathName(kind) == path) options.paths = {kind};
  }
  if (argc > 5) DamageEvery(std::atoi(argv[5]));
  FaultWorker worker(options, std::strtoull(argv[3], nullptr, 10));
  if (worker.Register()) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kNumThreads; ++i) threads.emplace_back([&worker, i] { worker.Work(i); });
    for (std::thread& thread : threads) thread.join();
  }
  return worker.has_failed() ? 3 : 0;
}

}  // namespace
}  // namespace kvstow::testing

int main(int argc, char** argv) {
  if (argc < 5 || argc > 6) {
    std::fputs("usage: fault_worker TARGET shm|ucx|grpc SEED DEADLINE_MS [DAMAGE_EVERY]\n", stderr);
    return 2;
  }
  std::signal(SIGTERM, [](int) { kvstow::testing::g_stop = true; });
  return kvstow::testing::Run(argc, argv);
}
