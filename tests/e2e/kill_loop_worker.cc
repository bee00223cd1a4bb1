// One process of kill_loop.sh: writes, reads or checks blocks whose every byte follows from a
// sequence number, against a daemon that may die at any moment.
//
//   kill_loop_worker write TARGET LEDGER ROUND   puts sequences until the daemon is gone
//   kill_loop_worker read TARGET LEDGER ROUND    gets what the ledger names until the daemon is
//   gone kill_loop_worker check TARGET LEDGER ROUND   after a restart: every block, every number
//
// The ledger has a line per event: `T sequence` before a put, `S sequence` after it was
// acknowledged, `D sequence` where it was acknowledged as durable, `F sequence` when forgotten.
// Exit status: 0 all well, 3 wrong bytes or a broken promise, 2 bad usage.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "client/cpp/kv_client.h"
#include "kvstow/v1/control.grpc.pb.h"
#include "tests/e2e/sequences.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {
namespace {

constexpr uint64_t kSequencesPerRound = 1000;

volatile std::sig_atomic_t g_stop = 0;

enum class Promise { kTried, kSealed, kDurable };

using Ledger = std::map<uint64_t, Promise>;

struct Worker {
  std::unique_ptr<KvClient> client;
  std::unique_ptr<v1::Control::Stub> control;
  Model model;
  std::string ledger_path;
  uint64_t round = 0;
};

Ledger ReadLedger(const std::string& path) {
  Ledger ledger;
  std::ifstream stream(path);
  char event = 0;
  uint64_t sequence = 0;
  while (stream >> event >> sequence) {
    if (event == 'T') ledger[sequence] = Promise::kTried;
    if (event == 'S') ledger[sequence] = Promise::kSealed;
    if (event == 'D') ledger[sequence] = Promise::kDurable;
    if (event == 'F') ledger.erase(sequence);
  }
  return ledger;
}

class LedgerWriter {
 public:
  explicit LedgerWriter(const std::string& path)
      : fd_(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) {}
  ~LedgerWriter() { close(fd_); }
  void Add(char event, uint64_t sequence) {
    const std::string line = std::string(1, event) + " " + std::to_string(sequence) + "\n";
    if (write(fd_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
  }

 private:
  int fd_;
};

int Write(Worker& worker) {
  LedgerWriter ledger(worker.ledger_path);
  int num_puts = 0;
  for (uint64_t i = 0; i < kSequencesPerRound && g_stop == 0; ++i) {
    const uint64_t sequence = worker.round * kSequencesPerRound + i;
    const KvData data = DataOf(sequence);
    const std::vector<LayerRows> layers = data.layers();
    const bool durable = sequence % 2 == 0;
    ledger.Add('T', sequence);
    const absl::StatusOr<PutSummary> put =
        worker.client->Put(worker.model, {.tokens = data.tokens(),
                                          .layers = layers,
                                          .codec = ChoiceOf(sequence),
                                          .durable = durable});
    if (!put.ok()) break;  // the daemon is gone: that is what the loop is for
    ++num_puts;
    if (put->num_refused == 0) ledger.Add(durable ? 'D' : 'S', sequence);
  }
  std::printf("writer: %d puts\n", num_puts);
  return 0;
}

struct Tally {
  int num_hits = 0;
  int num_misses = 0;
  int num_wrong = 0;
  int num_lost = 0;  // durable, and not there
  bool daemon_is_gone = false;
};

void CheckSequence(Worker& worker, uint64_t sequence, Promise promise, Tally& tally) {
  const SequenceRead read = ReadSequence(*worker.client, worker.model, sequence);
  tally.num_hits += read.num_hits;
  tally.num_wrong += read.num_wrong;
  if (read.num_wrong > 0) {
    std::printf("WRONG BYTES: sequence %llu, codec %s\n", static_cast<unsigned long long>(sequence),
                std::string(CodecOf(sequence)).c_str());
  }
  tally.daemon_is_gone = !read.call.ok();
  if (tally.daemon_is_gone) return;
  for (int block = 0; block < kBlocksPerSequence; ++block) {
    if (read.blocks[block].ok()) continue;
    ++tally.num_misses;
    if (promise != Promise::kDurable) continue;
    ++tally.num_lost;
    std::printf("LOST: sequence %llu block %d was durable: %s\n",
                static_cast<unsigned long long>(sequence), block,
                read.blocks[block].ToString().c_str());
  }
}

int Read(Worker& worker) {
  Rng rng(worker.round + 17);
  Tally tally;
  while (g_stop == 0 && !tally.daemon_is_gone) {
    const Ledger ledger = ReadLedger(worker.ledger_path);
    if (ledger.empty()) continue;
    auto entry = ledger.begin();
    std::advance(entry, static_cast<int64_t>(rng.Below(ledger.size())));
    // While the daemon runs, a block may be anywhere in its life: only wrong bytes are wrong.
    CheckSequence(worker, entry->first, Promise::kTried, tally);
  }
  std::printf("reader: %d hits, %d misses\n", tally.num_hits, tally.num_misses);
  return tally.num_wrong > 0 ? 3 : 0;
}

std::unique_ptr<grpc::ClientContext> Deadline() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  return context;
}

// Sums of the listed records, per tier.
struct Listed {
  uint64_t num_blocks = 0;
  std::map<std::string, uint64_t> tier_bytes;
};

bool ListAll(Worker& worker, Listed& listed) {
  v1::ListRequest request;
  do {
    v1::ListResponse response;
    const auto context = Deadline();
    if (!worker.control->List(context.get(), request, &response).ok()) return false;
    for (const v1::BlockInfo& block : response.blocks()) {
      ++listed.num_blocks;
      if (block.locations() & v1::LOCATION_DRAM) listed.tier_bytes["dram"] += block.record_bytes();
      if (block.locations() & v1::LOCATION_NVME) listed.tier_bytes["nvme"] += block.record_bytes();
    }
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  return true;
}

// What is wrong with the daemon's numbers; empty when they agree.
std::string Disagreement(const v1::StatResponse& stat, Listed& listed) {
  if (stat.open_tickets() != 0) return "open tickets: " + std::to_string(stat.open_tickets());
  if (stat.num_blocks() != listed.num_blocks) {
    return "stat counts " + std::to_string(stat.num_blocks()) + " blocks, list " +
           std::to_string(listed.num_blocks);
  }
  for (const v1::TierStat& tier : stat.tiers()) {
    const uint64_t listed_bytes = listed.tier_bytes[tier.tier()];
    if (tier.reserved_bytes() != 0) {
      return tier.tier() + " has reserved bytes: " + std::to_string(tier.reserved_bytes());
    }
    if (tier.sealed_bytes() != listed_bytes) {
      return tier.tier() + " has " + std::to_string(tier.sealed_bytes()) +
             " sealed bytes, the listed records sum to " + std::to_string(listed_bytes);
    }
    if (tier.used_bytes() > tier.capacity_bytes()) return tier.tier() + " is over its capacity";
  }
  return "";
}

// Stat and list are two calls, between which blocks may still move to disk: asks until they agree,
// for at most ten seconds.
int CheckNumbers(Worker& worker) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  std::string disagreement;
  do {
    v1::StatResponse stat;
    Listed listed;
    const auto context = Deadline();
    if (!worker.control->Stat(context.get(), {}, &stat).ok() || !ListAll(worker, listed)) {
      std::printf("BROKEN: stat or list does not answer\n");
      return 3;
    }
    disagreement = Disagreement(stat, listed);
    if (disagreement.empty()) return 0;
  } while (std::chrono::steady_clock::now() < end);
  std::printf("BROKEN: %s\n", disagreement.c_str());
  return 3;
}

int CheckVerify(Worker& worker) {
  const auto context = Deadline();
  auto reader = worker.control->Verify(context.get(), {});
  v1::VerifyProgress progress;
  uint64_t num_checked = 0;
  uint64_t num_total = 0;
  int num_bad = 0;
  while (reader->Read(&progress)) {
    num_checked = progress.num_checked();
    num_total = progress.num_total();
    num_bad += progress.bad_keys_size();
  }
  if (reader->Finish().ok() && num_bad == 0 && num_checked == num_total) return 0;
  std::printf("BROKEN: verify checked %llu of %llu records, %d bad\n",
              static_cast<unsigned long long>(num_checked),
              static_cast<unsigned long long>(num_total), num_bad);
  return 3;
}

// Forgets the sequences of rounds before the last one, so that the disk never fills.
int ForgetOldRounds(Worker& worker, const Ledger& ledger) {
  LedgerWriter writer(worker.ledger_path);
  for (const auto& [sequence, promise] : ledger) {
    if (sequence / kSequencesPerRound + 1 >= worker.round) continue;
    if (!worker.client->Delete(KeysOf(worker.model, DataOf(sequence))).ok()) {
      std::printf("BROKEN: delete does not answer\n");
      return 3;
    }
    writer.Add('F', sequence);
  }
  return 0;
}

int Check(Worker& worker) {
  if (CheckNumbers(worker) != 0 || CheckVerify(worker) != 0) return 3;
  const Ledger ledger = ReadLedger(worker.ledger_path);
  Tally tally;
  int num_durable = 0;
  for (const auto& [sequence, promise] : ledger) {
    CheckSequence(worker, sequence, promise, tally);
    num_durable += promise == Promise::kDurable ? 1 : 0;
    if (tally.daemon_is_gone) {
      std::printf("BROKEN: get does not answer\n");
      return 3;
    }
  }
  std::printf("check: %zu sequences, %d durable: %d blocks equal, %d missed, %d wrong, %d lost\n",
              ledger.size(), num_durable, tally.num_hits, tally.num_misses, tally.num_wrong,
              tally.num_lost);
  if (tally.num_wrong > 0 || tally.num_lost > 0) return 3;
  if (ForgetOldRounds(worker, ledger) != 0) return 3;
  return CheckNumbers(worker);
}

int Run(std::string_view mode, const std::string& target, const std::string& ledger, int round) {
  KvClientOptions options{
      .target = target, .control_timeout = absl::Seconds(5), .data_timeout = absl::Seconds(20)};
  options.ucx = {.tls = "tcp", .net_devices = "lo"};
  constexpr PathKind kPaths[] = {PathKind::kShm, PathKind::kUcx, PathKind::kGrpc};
  const PathKind path = kPaths[round % 3];
  options.paths.clear();
  if (path != PathKind::kGrpc) options.paths = {path};
  Worker worker;
  worker.client = KvClient::Create(options).value();
  worker.control =
      v1::Control::NewStub(grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
  worker.ledger_path = ledger;
  worker.round = static_cast<uint64_t>(round);
  absl::StatusOr<Model> model = worker.client->RegisterModel(SmallModel());
  if (!model.ok()) {
    // A kill may be faster than the first call.
    std::printf("%s: no daemon: %s\n", std::string(mode).c_str(),
                model.status().ToString().c_str());
    return mode == "check" ? 3 : 0;
  }
  worker.model = *std::move(model);
  if (mode == "write") return Write(worker);
  if (mode == "read") return Read(worker);
  if (mode == "check") return Check(worker);
  return 2;
}

}  // namespace
}  // namespace kvstow::testing

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fputs("usage: kill_loop_worker write|read|check TARGET LEDGER ROUND\n", stderr);
    return 2;
  }
  std::signal(SIGTERM, [](int) { kvstow::testing::g_stop = 1; });
  return kvstow::testing::Run(argv[1], argv[2], argv[3], std::atoi(argv[4]));
}
