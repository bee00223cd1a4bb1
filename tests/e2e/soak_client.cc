// One client of soak.sh: calls the daemon without pause and checks every byte and every deadline.
//
//   soak_client mixed|abort|slow|reader TARGET shm|ucx|grpc SEED
//
// mixed: puts with several codecs (some by layers and given up half way), gets, lookups, deletes.
// abort: reserves and does not finish: aborts, dies, seals too early, breaks calls off.
// slow: reads streams with pauses, and forgets its leases.
// reader: holds leases and reads; soak.sh kills it with -9.
//
// Runs until SIGTERM; then its last line says what it did. Exit status: 0 all well, 3 wrong bytes,
// a late call or an answer that must not be, 2 bad usage.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/checksum.h"
#include "kernels/core/clock.h"
#include "tests/e2e/daemon.h"
#include "tests/e2e/kv_data.h"
#include "tests/e2e/raw_calls.h"
#include "tests/testing/rng.h"

namespace kvstow::testing {
namespace {

// Sequences of two blocks, 1 MiB of rows each. Stored, they are more than both tiers hold.
constexpr uint64_t kSequences = 1024;
constexpr int kBlocks = 2;
constexpr const char* kCodecs[] = {"raw", "int8", "raw", "k=tqm4,v=tq4", "int4"};
constexpr absl::Duration kControlTimeout = absl::Seconds(5);
constexpr absl::Duration kDataTimeout = absl::Seconds(10);
// What a call may take past its deadline, on a machine that runs everything at once.
constexpr absl::Duration kGrace = absl::Seconds(2);
constexpr absl::Duration kTicketLife = absl::Milliseconds(800);

volatile std::sig_atomic_t g_stop = 0;

CodecChoice ChoiceOf(uint64_t sequence) {
  return ParseCodecChoice(kCodecs[sequence % std::size(kCodecs)]).value();
}

struct Tally {
  int64_t puts = 0, gets = 0, hits = 0, misses = 0, refused = 0, gave_up = 0, failed = 0;
  int64_t faults = 0;  // must stay zero
};

class Client {
 public:
  Client(const std::string& target, std::string_view path, uint64_t seed) : rng_(seed) {
    KvClientOptions options{.target = target,
                            .num_channels = 1,
                            .control_timeout = kControlTimeout,
                            .data_timeout = kDataTimeout};
    options.ucx = {.tls = "tcp", .net_devices = "lo"};
    options.window_bytes = int64_t{16} << 20;
    options.paths.clear();
    if (path == "shm") options.paths = {PathKind::kShm};
    if (path == "ucx") options.paths = {PathKind::kUcx};
    client_ = KvClient::Create(options).value();
    const auto channel = grpc::CreateChannel(target, grpc::InsecureChannelCredentials());
    control_ = v1::Control::NewStub(channel);
    data_ = v1::Data::NewStub(channel);
  }

  bool Register() {
    absl::StatusOr<Model> model = client_->RegisterModel(LargerModel());
    if (!model.ok()) return false;
    model_ = *std::move(model);
    return true;
  }

  void RunMixed();
  void RunAborts();
  void RunSlow();
  void RunReader();
  int Report(const char* role);

 private:
  uint64_t Pick() { return rng_.Below(kSequences); }
  static KvData DataOf(uint64_t sequence) { return KvData(LargerModel(), sequence, kBlocks); }
  std::vector<BlockKey> KeysOf(const KvData& data) const {
    return ChainKeys({.fingerprint = model_.fingerprint}, data.tokens(),
                     model_.spec.tokens_per_block);
  }
  // XXH3 of the rows of both blocks, as a reader must get them. Remembered: the reference is slow.
  const std::vector<uint64_t>& Expected(uint64_t sequence, const KvData& data);

  void Put(uint64_t sequence);
  void PutSomeLayers(uint64_t sequence);
  void Get(uint64_t sequence);
  void LookUp(uint64_t sequence);
  void Delete(uint64_t sequence);

  uint64_t Reserve(const BlockKey& key);  // 0: refused
  void SendPlanes(uint64_t ticket, const KvData& data, int num_planes, bool breaks_off);
  void End(uint64_t ticket, bool seals_early);

  uint64_t Acquire(const std::vector<BlockKey>& keys);  // 0: nothing is there
  void ReadSlowly(const std::vector<BlockKey>& keys);
  void CheckFrame(const v1::GetFrame& frame);

  // An error is an answer as long as it is one of those that load may bring.
  void Note(const char* call, const absl::Status& status);
  void Note(const char* call, const grpc::Status& status) {
    Note(call,
         absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message()));
  }
  void Fault(const std::string& what) {
    ++tally_.faults;
    std::printf("FAULT: %s\n", what.c_str());
  }
  // Checks that what is called in the life of the object ends in time.
  class Timed {
   public:
    Timed(Client* client, const char* call, absl::Duration limit)
        : client_(client), call_(call), limit_(limit), began_(client->clock_.Now()) {}
    ~Timed() {
      const absl::Duration took = client_->clock_.Now() - began_;
      if (took > limit_ + kGrace) {
        client_->Fault(absl::StrCat(call_, " took ", absl::FormatDuration(took), ", its limit is ",
                                    absl::FormatDuration(limit_)));
      }
    }

   private:
    Client* const client_;
    const char* const call_;
    const absl::Duration limit_;
    const absl::Time began_;
  };

  const RealClock clock_;
  Rng rng_;
  std::unique_ptr<KvClient> client_;
  std::unique_ptr<v1::Control::Stub> control_;
  std::unique_ptr<v1::Data::Stub> data_;
  Model model_;
  std::map<uint64_t, std::vector<uint64_t>> expected_;
  Tally tally_;
};

void Client::Note(const char* call, const absl::Status& status) {
  if (status.ok()) return;
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      ++tally_.refused;
      return;
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
      return;
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kFailedPrecondition:
      ++tally_.failed;
      return;
    default:
      Fault(absl::StrCat(call, ": ", status.ToString()));
  }
}

// --- mixed ---

const std::vector<uint64_t>& Client::Expected(uint64_t sequence, const KvData& data) {
  std::vector<uint64_t>& hashes = expected_[sequence];
  if (hashes.empty()) {
    const KvData want = data.AfterCodec(ChoiceOf(sequence).pair);
    for (int block = 0; block < kBlocks; ++block) hashes.push_back(Xxh3(want.RowForm(block)));
  }
  return hashes;
}

void Client::Put(uint64_t sequence) {
  const KvData data = DataOf(sequence);
  const std::vector<LayerRows> layers = data.layers();
  // Reserve, send, seal.
  const Timed timed(this, "Put", 2 * kControlTimeout + kDataTimeout);
  const auto put = client_->Put(
      model_, {.tokens = data.tokens(),
               .layers = layers,
               .codec = ChoiceOf(sequence),
               .compress_at = rng_.Below(2) == 0 ? CompressAt::kService : CompressAt::kWorker});
  Note("Put", put.status());
  if (!put.ok()) return;
  ++tally_.puts;
  tally_.refused += put->num_refused;
  Note("Put", put->first_refusal);
}

// A prefill that is given up half way.
void Client::PutSomeLayers(uint64_t sequence) {
  const KvData data = DataOf(sequence);
  const std::vector<LayerRows> layers = data.layers();
  const Timed timed(this, "PutLayer", 2 * kControlTimeout + kDataTimeout);
  auto session = client_->StartPut(
      model_, {.tokens = data.tokens(), .layers = layers, .codec = ChoiceOf(sequence)});
  Note("StartPut", session.status());
  if (!session.ok()) return;
  const uint64_t num_layers = rng_.Below(layers.size());
  for (uint64_t layer = 0; layer < num_layers; ++layer) {
    const absl::Status status = (*session)->PutLayer(static_cast<int32_t>(layer), layers[layer]);
    Note("PutLayer", status);
    if (!status.ok()) break;
  }
  ++tally_.gave_up;
}

void Client::Get(uint64_t sequence) {
  const KvData data = DataOf(sequence);
  const KvData got = KvData::Empty(LargerModel(), kBlocks);
  const std::vector<LayerRows> layers = got.layers();
  absl::StatusOr<GetSummary> summary;
  {
    const Timed timed(this, "Get", kDataTimeout);
    summary = client_->Get(model_, KeysOf(data), layers);
  }
  Note("Get", summary.status());
  if (!summary.ok()) return;
  ++tally_.gets;
  for (int block = 0; block < kBlocks; ++block) {
    const absl::Status& status = summary->blocks[block];
    if (!status.ok()) {
      ++tally_.misses;
      if (absl::IsDataLoss(status)) Fault(absl::StrCat("refused bytes: ", status.message()));
      if (!got.IsUntouched(block)) Fault("a miss changed the caller's rows");
      continue;
    }
    ++tally_.hits;
    if (Xxh3(got.RowForm(block)) != Expected(sequence, data)[block]) {
      Fault(absl::StrCat("WRONG BYTES: sequence ", sequence, " block ", block, ", codec ",
                         kCodecs[sequence % std::size(kCodecs)]));
    }
  }
}

void Client::LookUp(uint64_t sequence) {
  const Timed timed(this, "Lookup", kControlTimeout);
  Note("Lookup", client_
                     ->Lookup(KeysOf(DataOf(sequence)),
                              {.conversation = {.session = absl::StrCat("soak-", sequence),
                                                .session_over = rng_.Below(4) == 0},
                               .prefill_tokens_per_s = 20000})
                     .status());
}

void Client::Delete(uint64_t sequence) {
  const Timed timed(this, "Delete", kControlTimeout);
  Note("Delete", client_->Delete(KeysOf(DataOf(sequence))).status());
}

void Client::RunMixed() {
  while (g_stop == 0) {
    const uint64_t sequence = Pick();
    const uint64_t dice = rng_.Below(100);
    if (dice < 50) {
      Put(sequence);
    } else if (dice < 55) {
      PutSomeLayers(sequence);
    } else if (dice < 88) {
      Get(sequence);
    } else if (dice < 98) {
      LookUp(sequence);
    } else {
      Delete(sequence);
    }
  }
}

// --- writers that do not finish ---

uint64_t Client::Reserve(const BlockKey& key) {
  v1::ReserveRequest request;
  request.set_fingerprint(std::string(model_.fingerprint.AsStringView()));
  request.set_form(v1::FORM_ROWS);
  request.set_write_deadline_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(kTicketLife)));
  v1::ReserveBlock* const block = request.add_blocks();
  block->set_key(std::string(key.AsStringView()));
  block->set_codec("int8");
  v1::ReserveResponse response;
  const Timed timed(this, "Reserve", kControlTimeout);
  const grpc::Status status =
      control_->Reserve(Deadline(kControlTimeout).get(), request, &response);
  Note("Reserve", status);
  if (!status.ok()) return 0;
  const v1::ItemStatus& item = response.results(0).status();
  Note("Reserve", absl::Status(static_cast<absl::StatusCode>(item.code()), item.message()));
  return item.code() == 0 ? response.results(0).ticket() : 0;
}

void Client::SendPlanes(uint64_t ticket, const KvData& data, int num_planes, bool breaks_off) {
  v1::PutResponse response;
  const auto context = Deadline(kDataTimeout);
  const Timed timed(this, "Put frames", kDataTimeout);
  const auto writer = data_->Put(context.get(), &response);
  for (int plane = 0; plane < num_planes; plane += 4) {
    v1::PutFrame frame = FrameOf(data, 0, plane, std::min(4, num_planes - plane));
    frame.set_ticket(ticket);
    if (!writer->Write(frame)) break;
  }
  if (breaks_off) context->TryCancel();
  writer->WritesDone();
  Note("Put frames", writer->Finish());
}

void Client::End(uint64_t ticket, bool seals_early) {
  const Timed timed(this, "Abort", 2 * kControlTimeout);
  if (seals_early) {
    v1::SealRequest request;
    request.add_tickets(ticket);
    v1::SealResponse response;
    const grpc::Status status = control_->Seal(Deadline(kControlTimeout).get(), request, &response);
    Note("Seal", status);
    if (status.ok() && response.results(0).code() == 0) Fault("a block with holes was sealed");
  }
  v1::AbortRequest request;
  request.add_tickets(ticket);
  v1::AbortResponse response;
  Note("Abort", control_->Abort(Deadline(kControlTimeout).get(), request, &response));
}

void Client::RunAborts() {
  while (g_stop == 0) {
    const KvData data = DataOf(Pick());
    const uint64_t ticket = Reserve(KeysOf(data)[0]);
    if (ticket == 0) continue;
    const uint64_t dice = rng_.Below(100);
    // Never all of the planes: what is sealed here would be of another codec than the readers know.
    const int most = data.layout().num_planes() - 1;
    SendPlanes(ticket, data, static_cast<int>(rng_.Below(static_cast<uint64_t>(most) + 1)),
               /*breaks_off=*/dice < 20);
    if (dice % 2 == 0) End(ticket, /*seals_early=*/dice >= 60);  // else it dies by its clock
    ++tally_.gave_up;
  }
}

// --- readers that hold on ---

uint64_t Client::Acquire(const std::vector<BlockKey>& keys) {
  v1::AcquireRequest request;
  request.set_keys(PackKeys(keys));
  request.set_ttl_ms(1500);
  v1::AcquireResponse response;
  const Timed timed(this, "Acquire", kControlTimeout);
  const grpc::Status status =
      control_->Acquire(Deadline(kControlTimeout).get(), request, &response);
  Note("Acquire", status);
  return status.ok() ? response.lease() : 0;
}

void Client::CheckFrame(const v1::GetFrame& frame) {
  if (frame.code() != 0) {
    ++tally_.misses;
    return;
  }
  if (frame.num_units() > 0) ++tally_.hits;
  size_t at = 0;
  for (int i = 0; i < frame.unit_bytes_size(); ++i) {
    at = (at + 63) / 64 * 64;
    const size_t bytes = frame.unit_bytes(i);
    if (at + bytes > frame.payload().size()) return Fault("a unit is longer than its frame");
    const auto* const data = reinterpret_cast<const std::byte*>(frame.payload().data()) + at;
    if (Xxh3({data, bytes}) != frame.unit_xxh3(i)) Fault("WRONG BYTES: a unit's checksum differs");
    at += bytes;
  }
}

void Client::ReadSlowly(const std::vector<BlockKey>& keys) {
  v1::GetRequest request;
  request.set_keys(PackKeys(keys));
  request.set_form(v1::FORM_ENCODED);
  const auto context = Deadline(kDataTimeout);
  const Timed timed(this, "Get frames", kDataTimeout);
  const auto reader = data_->Get(context.get(), request);
  v1::GetFrame frame;
  while (reader->Read(&frame)) {
    CheckFrame(frame);
    Eventually([] { return g_stop != 0; }, absl::Milliseconds(rng_.Below(200)));
    if (rng_.Below(40) == 0) context->TryCancel();
  }
  Note("Get frames", reader->Finish());
  ++tally_.gets;
}

void Client::RunSlow() {
  while (g_stop == 0) {
    std::vector<BlockKey> keys;
    for (int i = 0; i < 4; ++i) {
      for (const BlockKey& key : KeysOf(DataOf(Pick()))) keys.push_back(key);
    }
    const uint64_t lease = Acquire(keys);
    ReadSlowly(keys);
    if (lease == 0 || rng_.Below(2) == 0) continue;  // the lease ends by its clock
    v1::ReleaseRequest request;
    request.set_lease(lease);
    v1::ReleaseResponse response;
    const Timed timed(this, "Release", kControlTimeout);
    Note("Release", control_->Release(Deadline(kControlTimeout).get(), request, &response));
  }
}

void Client::RunReader() {
  while (g_stop == 0) {
    const uint64_t sequence = Pick();
    Acquire(KeysOf(DataOf(sequence)));
    Get(sequence);
  }
}

int Client::Report(const char* role) {
  if (client_->corrupt_blocks() != 0) {
    Fault(absl::StrCat("the client refused ", client_->corrupt_blocks(), " corrupt blocks"));
  }
  std::printf(
      "%s: %lld puts, %lld given up, %lld gets, %lld blocks found, %lld not, %lld refused, %lld "
      "failed, %lld faults\n",
      role, static_cast<long long>(tally_.puts), static_cast<long long>(tally_.gave_up),
      static_cast<long long>(tally_.gets), static_cast<long long>(tally_.hits),
      static_cast<long long>(tally_.misses), static_cast<long long>(tally_.refused),
      static_cast<long long>(tally_.failed), static_cast<long long>(tally_.faults));
  return tally_.faults == 0 ? 0 : 3;
}

int Run(const std::string& role, const std::string& target, std::string_view path, uint64_t seed) {
  Client client(target, path, seed);
  if (!client.Register()) {
    std::printf("FAULT: %s: the daemon does not answer\n", role.c_str());
    return 3;
  }
  if (role == "mixed") {
    client.RunMixed();
  } else if (role == "abort") {
    client.RunAborts();
  } else if (role == "slow") {
    client.RunSlow();
  } else if (role == "reader") {
    client.RunReader();
  } else {
    return 2;
  }
  return client.Report(role.c_str());
}

}  // namespace
}  // namespace kvstow::testing

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fputs("usage: soak_client mixed|abort|slow|reader TARGET shm|ucx|grpc SEED\n", stderr);
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::signal(SIGTERM, [](int) { kvstow::testing::g_stop = 1; });
  return kvstow::testing::Run(argv[1], argv[2], argv[3], std::strtoull(argv[4], nullptr, 10));
}
