// Tickets and leases of a real daemon: what a writer that dies, a reader that stays and a client
// that says everything twice can do to others.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <array>
#include <thread>

#include "tests/e2e/store_fixture.h"

namespace kvstow::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Tickets : public RunningDaemon {
 protected:
  int NumPlanes() const { return model_.layout->num_planes(); }
  uint64_t ReservedBytes() { return TierOf(daemon_->Stat(), "dram").reserved_bytes(); }
};

TEST_F(Tickets, U03DeadWritersBlockIsNeverVisibleAndItsKeyIsFreeAgain) {
  StartDaemon({.extra_flags = {"--tickets.write_deadline=1s", "--tickets.reuse_delay=1s"}});
  const KvData kv(model_.spec, 1, 1);
  const BlockKey key = KeysOf(kv)[0];
  const uint64_t ticket = calls_->ReserveOne(key, "raw").ticket();
  ASSERT_NE(ticket, 0u);
  EXPECT_EQ(calls_->PutPlanes(ticket, kv, 0, 0, NumPlanes() / 2).status().code(), 0);
  EXPECT_GT(ReservedBytes(), 0u);
  EXPECT_EQ(calls_->Locations({key}), std::string(1, '\0'));
  EXPECT_EQ(CountHits(kv), 0);

  uint64_t next = 0;
  ASSERT_TRUE(Eventually(
      [&] {
        const v1::ReserveResult result = calls_->ReserveOne(key, "raw");
        if (result.status().code() == 0) next = result.ticket();
        return next != 0;
      },
      absl::Seconds(20)))
      << "the key stays taken after its writer's deadline";
  // The late writer is told so, and does not land in the new writer's block.
  EXPECT_EQ(calls_->PutPlanes(ticket, kv, 0, 0, 1).status().code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(calls_->PutPlanes(next, kv, 0, 0, NumPlanes()).status().code(), 0);
  EXPECT_EQ(calls_->SealOne(next).code(), 0);
  EXPECT_EQ(CountHits(kv), 1);
  EXPECT_TRUE(Eventually([&] { return ReservedBytes() == 0; }, absl::Seconds(20)));
}

TEST_F(Tickets, PlanesMayComeInAnyOrderAndTwice) {
  StartDaemon({});
  const KvData kv(model_.spec, 2, 1);
  const uint64_t ticket = calls_->ReserveOne(KeysOf(kv)[0], "int8").ticket();
  for (int i = NumPlanes() - 1; i >= 0; --i) {
    EXPECT_EQ(calls_->PutPlanes(ticket, kv, 0, i, 1).status().code(), 0) << i;
  }
  EXPECT_EQ(calls_->PutPlanes(ticket, kv, 0, 0, 2).status().code(), 0) << "equal bytes again";
  EXPECT_EQ(calls_->SealOne(ticket).code(), 0);
  EXPECT_EQ(CountHits(kv.AfterCodec({CodecId::kInt8, CodecId::kInt8})), 1);
}

TEST_F(Tickets, OtherBytesForAPlaneAreRefused) {
  StartDaemon({});
  const KvData kv(model_.spec, 3, 1);
  const KvData other(model_.spec, 4, 1);
  const uint64_t ticket = calls_->ReserveOne(KeysOf(kv)[0], "raw").ticket();
  EXPECT_EQ(calls_->PutPlanes(ticket, kv, 0, 0, 1).status().code(), 0);
  EXPECT_EQ(calls_->PutPlanes(ticket, other, 0, 0, 1).status().code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(calls_->PutPlanes(ticket, kv, 0, 1, NumPlanes() - 1).status().code(), 0);
  EXPECT_EQ(calls_->SealOne(ticket).code(), 0);
  EXPECT_EQ(CountHits(kv), 1);
}

TEST_F(Tickets, MissingPlanesKeepASealBackAndAreNamed) {
  StartDaemon({});
  const KvData kv(model_.spec, 5, 1);
  const uint64_t ticket = calls_->ReserveOne(KeysOf(kv)[0], "raw").ticket();
  calls_->PutPlanes(ticket, kv, 0, 0, 3);
  calls_->PutPlanes(ticket, kv, 0, 4, NumPlanes() - 4);
  const v1::ItemStatus early = calls_->SealOne(ticket);
  EXPECT_EQ(early.code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(early.message(), HasSubstr("3"));
  EXPECT_EQ(CountHits(kv), 0);
  calls_->PutPlanes(ticket, kv, 0, 3, 1);
  EXPECT_EQ(calls_->SealOne(ticket).code(), 0);
  EXPECT_EQ(CountHits(kv), 1);
}

TEST_F(Tickets, WrongChecksumIsDataLossAndTheFrameMayBeSentAgain) {
  StartDaemon({});
  const KvData kv(model_.spec, 6, 1);
  const uint64_t ticket = calls_->ReserveOne(KeysOf(kv)[0], "raw").ticket();
  v1::PutFrame frame = FrameOf(kv, 0, 0, NumPlanes());
  frame.set_ticket(ticket);
  v1::PutFrame flipped = frame;
  (*flipped.mutable_payload())[5000] ^= 1;
  EXPECT_EQ(calls_->PutFrames({&flipped, 1}).status().code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(calls_->SealOne(ticket).code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(calls_->PutFrames({&frame, 1}).status().code(), 0);
  EXPECT_EQ(calls_->SealOne(ticket).code(), 0);
  EXPECT_EQ(CountHits(kv), 1);
}

TEST_F(Tickets, FramesThatFitNoPlaneAreInvalid) {
  StartDaemon({});
  const KvData kv(model_.spec, 7, 1);
  const uint64_t ticket = calls_->ReserveOne(KeysOf(kv)[0], "raw").ticket();
  v1::PutFrame frame = FrameOf(kv, 0, 0, 1);
  frame.set_ticket(ticket);
  v1::PutFrame beyond = frame;
  beyond.set_first_unit(static_cast<uint32_t>(NumPlanes()));
  EXPECT_EQ(calls_->PutFrames({&beyond, 1}).status().code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::PutFrame cut = frame;
  cut.mutable_payload()->resize(100);
  EXPECT_EQ(calls_->PutFrames({&cut, 1}).status().code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::PutFrame stranger = frame;
  stranger.set_ticket(ticket + 1);
  EXPECT_EQ(calls_->PutFrames({&stranger, 1}).status().code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(Tickets, SecondWriterIsToldTheBlockExists) {
  StartDaemon({});
  const KvData kv(model_.spec, 8, 1);
  const BlockKey key = KeysOf(kv)[0];
  const uint64_t ticket = calls_->ReserveOne(key, "raw").ticket();
  EXPECT_EQ(calls_->ReserveOne(key, "int8").status().code(), grpc::StatusCode::ALREADY_EXISTS);
  calls_->PutPlanes(ticket, kv, 0, 0, NumPlanes());
  EXPECT_EQ(calls_->SealOne(ticket).code(), 0);
  EXPECT_EQ(calls_->ReserveOne(key, "int8").status().code(), grpc::StatusCode::ALREADY_EXISTS);
}

TEST_F(Tickets, U13SayingThingsTwiceIsAnsweredCleanly) {
  StartDaemon({});
  const KvData kv(model_.spec, 9, 1);
  const BlockKey key = KeysOf(kv)[0];
  const uint64_t used_before = TierOf(daemon_->Stat(), "dram").used_bytes();

  const uint64_t sealed = calls_->ReserveOne(key, "raw").ticket();
  calls_->PutPlanes(sealed, kv, 0, 0, NumPlanes());
  EXPECT_EQ(calls_->SealOne(sealed).code(), 0);
  EXPECT_EQ(calls_->SealOne(sealed).code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(calls_->AbortOne(sealed).code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(calls_->PutPlanes(sealed, kv, 0, 0, 1).status().code(),
            grpc::StatusCode::FAILED_PRECONDITION);

  const v1::AcquireResponse lease = calls_->Acquire({key}, absl::Seconds(30));
  EXPECT_TRUE(calls_->Release(lease.lease()).ok());
  EXPECT_EQ(calls_->Release(lease.lease()).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(calls_->Release(12345).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(calls_->SealOne(12345).code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(calls_->AbortOne(12345).code(), grpc::StatusCode::NOT_FOUND);

  ASSERT_TRUE(client_->Delete({key}).ok());
  const uint64_t aborted = calls_->ReserveOne(key, "raw").ticket();
  EXPECT_EQ(calls_->AbortOne(aborted).code(), 0);
  EXPECT_EQ(calls_->AbortOne(aborted).code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(calls_->SealOne(aborted).code(), grpc::StatusCode::FAILED_PRECONDITION);

  for (int i = 0; i < 1000; ++i) {
    const uint64_t ticket = calls_->ReserveOne(key, "raw").ticket();
    ASSERT_NE(ticket, 0u) << i;
    ASSERT_EQ(calls_->AbortOne(ticket).code(), 0) << i;
  }
  const v1::StatResponse stat = daemon_->Stat();
  EXPECT_EQ(TierOf(stat, "dram").used_bytes(), used_before);
  EXPECT_EQ(TierOf(stat, "dram").reserved_bytes(), 0u);
  EXPECT_EQ(stat.open_tickets(), 0u);
  EXPECT_EQ(stat.open_leases(), 0u);
  EXPECT_EQ(stat.pinned_bytes(), 0u);
  for (const auto& [name, value] : stat.counters()) EXPECT_LT(value, uint64_t{1} << 62) << name;
}

TEST_F(Tickets, U12FullyLeasedTierRefusesAtOnceAndRecoversByItself) {
  StartDaemon({.dram = "8MiB"});
  std::vector<BlockKey> keys;
  for (uint64_t i = 0; i < 12; ++i) {
    const KvData kv(model_.spec, 100 + i, 8);
    MustPut(kv, "raw");
    const std::vector<BlockKey> added = KeysOf(kv);
    keys.insert(keys.end(), added.begin(), added.end());
  }
  const v1::AcquireResponse lease = calls_->Acquire(keys, absl::Seconds(2));
  ASSERT_NE(lease.lease(), 0u);

  const KvData kv(model_.spec, 999, 8);
  const RealClock clock;
  const absl::Time asked = clock.Now();
  const v1::ReserveResult last = [&] {
    // Unleased slack may take a block or two.
    v1::ReserveResult result;
    for (const BlockKey& key : KeysOf(kv)) result = calls_->ReserveOne(key, "raw");
    return result;
  }();
  EXPECT_EQ(last.status().code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << last.status().message();
  EXPECT_GT(last.status().retry_after_ms(), 0u);
  EXPECT_LT(clock.Now() - asked, absl::Seconds(1));

  const KvData late(model_.spec, 1000, 4);
  EXPECT_TRUE(Eventually(
      [&] {
        const absl::StatusOr<PutSummary> put = Put(late, "raw");
        return put.ok() && put->num_refused == 0;
      },
      absl::Seconds(20)));
  EXPECT_EQ(CountHits(late), 4);
}

TEST_F(Tickets, U09PollingLookupsKeepNothingAliveAndStopNoWriter) {
  StartDaemon({.dram = "8MiB"});
  const KvData polled(model_.spec, 200, 32);
  MustPut(polled, "raw");
  std::vector<BlockKey> keys = KeysOf(polled);
  keys.resize(100);  // the rest was never there

  std::atomic<bool> stop{false};
  std::thread poller([&] {
    const auto own = daemon_->NewClient();
    while (!stop) {
      EXPECT_TRUE(own->Lookup(keys).ok());
    }
  });
  for (uint64_t i = 0; i < 24; ++i) MustPut(KvData(model_.spec, 300 + i, 8), "raw");
  stop = true;
  poller.join();
  EXPECT_EQ(CountHits(polled), 0) << "24 MiB went through 8 MiB: what was only looked up is gone";
}

TEST_F(Tickets, LeasedBlocksOutliveThreeTimesTheirTier) {
  StartDaemon({.dram = "8MiB"});
  const KvData kept(model_.spec, 400, 8);
  MustPut(kept, "raw");
  const v1::AcquireResponse lease = calls_->Acquire(KeysOf(kept), absl::Seconds(60));
  for (uint64_t i = 0; i < 24; ++i) MustPut(KvData(model_.spec, 500 + i, 8), "raw");
  EXPECT_EQ(CountHits(kept), 8);
  EXPECT_TRUE(calls_->Release(lease.lease()).ok());
}

// --- the standard services, by bytes: no copy of their protos is kept ---

class StandardServices : public RunningDaemon {
 protected:
  // One request and one answer over a generic stub; the answer's bytes, or the error's text.
  std::string Exchange(const std::string& method, const std::string& request) {
    grpc::GenericStub stub(daemon_->channel());
    grpc::CompletionQueue queue;
    const auto context = Deadline();
    const auto call = stub.PrepareCall(context.get(), method, &queue);
    const auto step = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    call->StartCall(this);
    bool ok = step();
    const grpc::Slice slice(request);
    call->Write(grpc::ByteBuffer(&slice, 1), this);
    ok = step() && ok;
    grpc::ByteBuffer answer;
    call->Read(&answer, this);
    ok = step() && ok;
    call->WritesDone(this);
    step();
    grpc::Status status;
    call->Finish(&status, this);
    step();
    if (!ok) return "error: " + status.error_message();
    std::vector<grpc::Slice> slices;
    std::string bytes;
    if (answer.Dump(&slices).ok()) {
      for (const grpc::Slice& s : slices)
        bytes.append(reinterpret_cast<const char*>(s.begin()), s.size());
    }
    return bytes;
  }
};

TEST_F(StandardServices, HealthSaysServing) {
  StartDaemon({});
  // HealthCheckResponse{status: SERVING}: field 1, value 1.
  EXPECT_EQ(Exchange("/grpc.health.v1.Health/Check", ""), std::string("\x08\x01"));
}

TEST_F(StandardServices, ReflectionListsTheServices) {
  StartDaemon({});
  // ServerReflectionRequest{list_services: "*"}: field 7, one byte.
  const std::string answer =
      Exchange("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "\x3a\x01*");
  for (const char* name : {"kvstow.v1.Models", "kvstow.v1.Control", "kvstow.v1.Data"}) {
    EXPECT_THAT(answer, HasSubstr(name));
  }
}

TEST_F(StandardServices, CommandLinePingAnswers) {
  StartDaemon({});
  const CommandResult alive = RunCommand({CliBinary(), "ping", "--target", daemon_->target()});
  EXPECT_EQ(alive.status, 0) << alive.output;
  daemon_->Kill();
  const CommandResult gone = RunCommand({CliBinary(), "ping", "--target", daemon_->target()});
  EXPECT_EQ(gone.status, 1) << gone.output;
}

}  // namespace
}  // namespace kvstow::testing
