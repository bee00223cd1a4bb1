// What every path promises (transport/transport.h), over all of them.
#include <csignal>
#include <map>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/core/clock.h"
#include "tests/testing/rng.h"
#include "tests/transport/peer_process.h"
#include "transport/nccl.h"
#include "transport/shm_transport.h"
#include "transport/shm_window.h"
#include "transport/ucx.h"

namespace kvstow {
namespace {

using testing::Eventually;
using testing::FillPattern;
using testing::IsPattern;
using testing::PatternOf;
using testing::PeerProcess;
using testing::Rng;

constexpr int64_t kWindowBytes = 8 << 20;
constexpr absl::Duration kPatience = absl::Seconds(30);

struct Shm {
  static constexpr bool kNeedsPeerToRun = false;  // for a transfer to move
  static bool IsBuilt() { return true; }
  testing::TempFolder folder;
  std::string socket = folder.path() + "/s";
  std::unique_ptr<Transport> transport = *ShmTransport::Listen({.socket_path = socket});

  absl::StatusOr<std::unique_ptr<Window>> Open(int64_t bytes) {
    return OpenShmWindow({.socket_path = socket, .bytes = bytes});
  }
  std::vector<std::string> PeerArgs(uint64_t seed) {
    return {"shm", absl::StrCat(kWindowBytes), absl::StrCat(seed), socket};
  }
};

struct Ucx {
  static constexpr bool kNeedsPeerToRun = true;
  static bool IsBuilt() { return IsUcxBuilt(); }
  UcxNetwork network = {.tls = "tcp", .net_devices = "lo"};
  std::unique_ptr<Transport> transport = *MakeUcxTransport({.network = network});

  absl::StatusOr<std::unique_ptr<Window>> Open(int64_t bytes) {
    return OpenUcxWindow({.bytes = bytes, .network = network});
  }
  std::vector<std::string> PeerArgs(uint64_t seed) {
    return {"ucx", absl::StrCat(kWindowBytes), absl::StrCat(seed)};
  }
};

// Over the stand-in of nccl_stand_in.cc, whose device memory is host memory.
struct Nccl {
  static constexpr bool kNeedsPeerToRun = true;
  static bool IsBuilt() { return true; }
  NcclDevice device = {.nccl_path = KVSTOW_NCCL_STAND_IN, .cudart_path = KVSTOW_NCCL_STAND_IN};
  std::unique_ptr<Transport> transport = *MakeNcclTransport({.device = device});

  absl::StatusOr<std::unique_ptr<Window>> Open(int64_t bytes) {
    return OpenNcclWindow({.bytes = bytes, .device = device});
  }
  std::vector<std::string> PeerArgs(uint64_t seed) {
    return {"nccl", absl::StrCat(kWindowBytes), absl::StrCat(seed)};
  }
};

template <typename T>
class TransportContract : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!T::IsBuilt()) GTEST_SKIP() << "not in this build";
    made_ = std::make_unique<T>();
  }
  T& path() { return *made_; }
  void Connect(int64_t bytes = kWindowBytes) {
    absl::StatusOr<std::unique_ptr<Window>> opened = path().Open(bytes);
    ASSERT_TRUE(opened.ok()) << opened.status();
    window_ = *std::move(opened);
    channel_ = Attach(window_->ticket());
  }
  std::unique_ptr<Channel> Attach(const std::string& ticket) {
    absl::StatusOr<std::unique_ptr<Channel>> attached = path().transport->Attach(ticket, kPatience);
    EXPECT_TRUE(attached.ok()) << attached.status();
    return attached.ok() ? *std::move(attached) : nullptr;
  }
  // Posts one transfer and waits for its completion.
  absl::Status Move(const Transfer& transfer) {
    const absl::StatusOr<TransferId> id = channel_->Post(transfer);
    if (!id.ok()) return id.status();
    Completion completion;
    if (channel_->Poll({&completion, 1}, kPatience) != 1)
      return absl::UnknownError("no completion");
    EXPECT_EQ(completion.id, *id);
    return completion.status;
  }
  // The completions that come until `count` are there or the patience ends.
  std::map<TransferId, absl::Status> Collect(size_t count) {
    std::map<TransferId, absl::Status> all;
    std::vector<Completion> some(7);
    while (all.size() < count) {
      const size_t taken = channel_->Poll(absl::MakeSpan(some), kPatience);
      if (taken == 0) break;
      for (size_t i = 0; i < taken; ++i) {
        EXPECT_TRUE(all.emplace(some[i].id, some[i].status).second) << "twice: " << some[i].id;
      }
    }
    return all;
  }

  std::unique_ptr<T> made_;  // outlives window and channel
  std::unique_ptr<Window> window_;
  std::unique_ptr<Channel> channel_;
};

using Paths = ::testing::Types<Shm, Ucx, Nccl>;
TYPED_TEST_SUITE(TransportContract, Paths);

TYPED_TEST(TransportContract, AWindowIsAlignedZeroAndOfItsSize) {
  this->Connect(kWindowBytes);
  const absl::Span<std::byte> memory = this->window_->memory();
  EXPECT_EQ(memory.size(), kWindowBytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 4096, 0u);
  EXPECT_EQ(memory, absl::MakeConstSpan(std::vector<std::byte>(kWindowBytes)));
  EXPECT_EQ(this->channel_->window_bytes(), kWindowBytes);
  EXPECT_EQ(this->channel_->path(), this->window_->path());
  EXPECT_EQ(this->path().transport->path(), this->window_->path());
  EXPECT_TRUE(this->window_->is_alive());
  EXPECT_TRUE(this->channel_->is_alive());
}

TYPED_TEST(TransportContract, ReadsAndWritesMoveExactlyTheirBytes) {
  this->Connect();
  const int64_t sizes[] = {0, 1, 65535, 65536, 1 << 20, kWindowBytes - 3, kWindowBytes};
  uint64_t seed = 1;
  for (const int64_t bytes : sizes) {
    for (const int64_t offset : {int64_t{0}, (kWindowBytes - bytes) / 2, kWindowBytes - bytes}) {
      const absl::Span<std::byte> memory = this->window_->memory();
      const auto at = static_cast<size_t>(offset);
      const auto size = static_cast<size_t>(bytes);
      FillPattern(memory, ++seed);
      const std::vector<std::byte> whole(memory.begin(), memory.end());
      // Read into the middle of a larger buffer: nothing around it changes.
      std::vector<std::byte> local(size + 128, std::byte{0x5a});
      absl::Span<std::byte> target = absl::MakeSpan(local).subspan(64, size);
      ASSERT_TRUE(this->Move({.window_offset = offset, .local = target}).ok());
      EXPECT_EQ(absl::MakeConstSpan(target), absl::MakeConstSpan(whole).subspan(at, size));
      for (size_t i = 0; i < 64; ++i) {
        ASSERT_EQ(local[i], std::byte{0x5a});
        ASSERT_EQ(local[64 + size + i], std::byte{0x5a});
      }
      EXPECT_EQ(memory, absl::MakeConstSpan(whole));
      // Write other bytes: nothing around them changes.
      FillPattern(target, ++seed);
      ASSERT_TRUE(
          this->Move({.op = TransferOp::kWrite, .window_offset = offset, .local = target}).ok());
      EXPECT_TRUE(IsPattern(memory.subspan(at, size), seed)) << bytes << " at " << offset;
      EXPECT_EQ(memory.subspan(0, at), absl::MakeConstSpan(whole).subspan(0, at));
      EXPECT_EQ(memory.subspan(at + size), absl::MakeConstSpan(whole).subspan(at + size));
      EXPECT_TRUE(IsPattern(target, seed));
    }
  }
}

TYPED_TEST(TransportContract, ARangeOutsideTheWindowIsInvalid) {
  this->Connect(1 << 20);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::vector<std::byte> local(2 << 20);
  const std::pair<int64_t, size_t> outside[] = {
      {-1, 0},       {-1, 1},        {0, (1 << 20) + 1},       {1 << 20, 1}, {kMost, 1},
      {kMost, 4096}, {-kMost, 4096}, {(1 << 20) - 4095, 4096}, {0, 2 << 20}};
  for (const auto& [offset, bytes] : outside) {
    for (const TransferOp op : {TransferOp::kRead, TransferOp::kWrite}) {
      const absl::StatusOr<TransferId> posted = this->channel_->Post(
          {.op = op, .window_offset = offset, .local = absl::MakeSpan(local).first(bytes)});
      EXPECT_TRUE(absl::IsInvalidArgument(posted.status())) << posted.status() << offset;
    }
    EXPECT_TRUE(this->channel_->InPlace(offset, static_cast<int64_t>(bytes)).empty());
  }
  EXPECT_TRUE(this->channel_->InPlace(0, -1).empty());
  EXPECT_TRUE(this->channel_->InPlace(1, kMost).empty());
  Completion none;
  EXPECT_EQ(this->channel_->Poll({&none, 1}, absl::ZeroDuration()), 0u);
}

TYPED_TEST(TransportContract, ATimeoutMustBePositive) {
  this->Connect(4096);
  std::vector<std::byte> local(16);
  for (const absl::Duration timeout : {absl::ZeroDuration(), absl::Seconds(-1)}) {
    const absl::Status status =
        this->channel_->Post({.local = absl::MakeSpan(local), .timeout = timeout}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  }
}

TYPED_TEST(TransportContract, ManyInFlightCompleteExactlyOnce) {
  this->Connect();
  FillPattern(this->window_->memory(), 3);
  const std::vector<std::byte> want = PatternOf(kWindowBytes, 3);
  constexpr size_t kThreads = 4;
  constexpr size_t kEach = 60;  // all together fewer than the limit
  constexpr size_t kBytes = 20000;
  std::vector<std::vector<std::byte>> locals(kThreads * kEach, std::vector<std::byte>(kBytes));
  std::vector<TransferId> ids(locals.size());
  std::vector<int64_t> offsets(locals.size());
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      Rng rng(thread);
      for (size_t i = thread * kEach; i < (thread + 1) * kEach; ++i) {
        offsets[i] = static_cast<int64_t>(rng.Below(kWindowBytes - kBytes));
        const absl::StatusOr<TransferId> id =
            this->channel_->Post({.window_offset = offsets[i],
                                  .local = absl::MakeSpan(locals[i]),
                                  .timeout = kPatience});
        ASSERT_TRUE(id.ok()) << id.status();
        ids[i] = *id;
      }
    });
  }
  const std::map<TransferId, absl::Status> done = this->Collect(locals.size());
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(done.size(), locals.size());
  for (size_t i = 0; i < locals.size(); ++i) {
    ASSERT_EQ(done.count(ids[i]), 1u);
    EXPECT_TRUE(done.at(ids[i]).ok()) << done.at(ids[i]);
    EXPECT_EQ(absl::MakeConstSpan(locals[i]),
              absl::MakeConstSpan(want).subspan(static_cast<size_t>(offsets[i]), kBytes));
  }
  Completion none;
  EXPECT_EQ(this->channel_->Poll({&none, 1}, absl::ZeroDuration()), 0u);
}

TYPED_TEST(TransportContract, PostIsRefusedAtTheLimitAndPollMakesRoom) {
  this->Connect();
  std::vector<std::byte> local(64);
  const Transfer transfer = {.local = absl::MakeSpan(local), .timeout = kPatience};
  for (int i = 0; i < kMaxTransfersInFlight; ++i) {
    ASSERT_TRUE(this->channel_->Post(transfer).ok()) << i;
  }
  const absl::Status refused = this->channel_->Post(transfer).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_NE(refused.message().find("256"), absl::string_view::npos) << refused;
  Completion one;
  ASSERT_EQ(this->channel_->Poll({&one, 1}, kPatience), 1u);
  EXPECT_TRUE(this->channel_->Post(transfer).ok());
  EXPECT_EQ(this->Collect(kMaxTransfersInFlight).size(), size_t{kMaxTransfersInFlight});
}

TYPED_TEST(TransportContract, ACancelledTransferCompletesOnceAndTheChannelGoesOn) {
  this->Connect();
  std::vector<std::byte> local(kWindowBytes);
  std::set<TransferId> ids;
  for (int i = 0; i < 8; ++i) {
    const absl::StatusOr<TransferId> id =
        this->channel_->Post({.local = absl::MakeSpan(local), .timeout = kPatience});
    ASSERT_TRUE(id.ok()) << id.status();
    this->channel_->Cancel(*id);
    ids.insert(*id);
  }
  for (const auto& [id, status] : this->Collect(ids.size())) {
    EXPECT_EQ(ids.erase(id), 1u);
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
    this->channel_->Cancel(id);  // completed: nothing happens
  }
  EXPECT_TRUE(ids.empty());
  this->channel_->Cancel(0);
  this->channel_->Cancel(~TransferId{0});
  EXPECT_TRUE(this->channel_->Quiesce(kPatience).ok());
  FillPattern(this->window_->memory(), 11);
  ASSERT_TRUE(this->Move({.local = absl::MakeSpan(local), .timeout = kPatience}).ok());
  EXPECT_TRUE(IsPattern(local, 11));
}

TYPED_TEST(TransportContract, ATransferIsInTimeOrSaysThatItIsLate) {
  this->Connect();
  FillPattern(this->window_->memory(), 5);
  for (int i = 0; i < 20; ++i) {
    std::vector<std::byte> local(kWindowBytes);
    const absl::Status status =
        this->Move({.local = absl::MakeSpan(local), .timeout = absl::Microseconds(1 + 100 * i)});
    if (status.ok()) {
      EXPECT_TRUE(IsPattern(local, 5));
    } else {
      EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    }
    ASSERT_TRUE(this->channel_->Quiesce(kPatience).ok());
    if (!this->channel_->is_alive()) break;  // a path may give the channel up with the transfer
  }
}

TYPED_TEST(TransportContract, OverlappingTransfersEndAsOneOfThem) {
  this->Connect();
  std::vector<std::vector<std::byte>> locals;
  for (uint64_t seed = 1; seed <= 6; ++seed) locals.push_back(PatternOf(100000, seed));
  for (std::vector<std::byte>& local : locals) {
    ASSERT_TRUE(this->channel_
                    ->Post({.op = TransferOp::kWrite,
                            .window_offset = 4096,
                            .local = absl::MakeSpan(local),
                            .timeout = kPatience})
                    .ok());
  }
  for (const auto& [id, status] : this->Collect(locals.size())) EXPECT_TRUE(status.ok()) << status;
  // Bytes of any of them, and none of a seventh.
  const absl::Span<std::byte> memory = this->window_->memory();
  for (size_t i = 0; i < 100000; ++i) {
    const bool is_one = std::any_of(locals.begin(), locals.end(), [&](const auto& local) {
      return local[i] == memory[4096 + i];
    });
    ASSERT_TRUE(is_one) << i;
  }
  EXPECT_EQ(memory[4095], std::byte{0});
  EXPECT_EQ(memory[104096], std::byte{0});
}

TYPED_TEST(TransportContract, AWindowIsAttachedOnce) {
  this->Connect();
  const absl::Status again =
      this->path().transport->Attach(this->window_->ticket(), kPatience).status();
  EXPECT_TRUE(absl::IsNotFound(again)) << again;
  std::vector<std::byte> local(4096);
  EXPECT_TRUE(this->Move({.local = absl::MakeSpan(local)}).ok());
}

TYPED_TEST(TransportContract, ATicketFromTheFutureIsRefusedWithTheVersionsKnown) {
  absl::StatusOr<std::unique_ptr<Window>> window = this->path().Open(4096);
  ASSERT_TRUE(window.ok()) << window.status();
  std::string ticket = (*window)->ticket();
  ticket[4] = 99;
  const absl::Status status = this->path().transport->Attach(ticket, kPatience).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_NE(status.message().find("version 99; known are 1 to "), absl::string_view::npos)
      << status;
  EXPECT_NE(this->Attach((*window)->ticket()), nullptr);
}

TYPED_TEST(TransportContract, GarbageIsNoTicket) {
  absl::StatusOr<std::unique_ptr<Window>> window = this->path().Open(4096);
  ASSERT_TRUE(window.ok()) << window.status();
  const std::string& real = (*window)->ticket();
  Rng rng(77);
  for (int round = 0; round < 2000; ++round) {
    std::string ticket = real;
    switch (rng.Below(4)) {
      case 0:  // other bytes
        for (size_t n = 1 + rng.Below(8); n > 0; --n) {
          ticket[rng.Below(ticket.size())] ^= static_cast<char>(1 + rng.Below(255));
        }
        break;
      case 1:
        ticket.resize(rng.Below(ticket.size()));
        break;
      case 2:
        ticket.append(1 + rng.Below(64), static_cast<char>(rng.Next()));
        break;
      default:
        ticket.resize(rng.Below(6000));
        for (char& letter : ticket) letter = static_cast<char>(rng.Next());
    }
    if (ticket == real) continue;
    const absl::Status status = this->path().transport->Attach(ticket, absl::Seconds(1)).status();
    ASSERT_TRUE(absl::IsInvalidArgument(status) || absl::IsNotFound(status))
        << round << ": " << status;
  }
  EXPECT_NE(this->Attach(real), nullptr);  // and the real one still works
}

TYPED_TEST(TransportContract, ClosingTheChannelEndsTheWindow) {
  this->Connect();
  this->channel_ = nullptr;
  EXPECT_TRUE(Eventually([&] { return !this->window_->is_alive(); }, kPatience));
  EXPECT_EQ(this->window_->memory().size(), kWindowBytes);
  FillPattern(this->window_->memory(), 1);
}

TYPED_TEST(TransportContract, ClosingTheWindowEndsTheChannel) {
  this->Connect();
  this->window_ = nullptr;
  std::vector<std::byte> local(4096);
  // Paths that hear nothing by themselves learn it from a transfer.
  EXPECT_TRUE(Eventually(
      [&] {
        return !this->channel_->is_alive() ||
               absl::IsUnavailable(this->Move(
                   {.local = absl::MakeSpan(local), .timeout = absl::Milliseconds(200)}));
      },
      kPatience));
  EXPECT_TRUE(absl::IsUnavailable(this->channel_->Post({.local = absl::MakeSpan(local)}).status()));
}

TYPED_TEST(TransportContract, TheServiceMovesBytesOfAnotherProcess) {
  PeerProcess peer(this->path().PeerArgs(21));
  ASSERT_NE(peer.ticket(), "") << peer.output();
  this->channel_ = this->Attach(peer.ticket());
  ASSERT_NE(this->channel_, nullptr);
  std::vector<std::byte> local(kWindowBytes);
  ASSERT_TRUE(this->Move({.local = absl::MakeSpan(local), .timeout = kPatience}).ok());
  EXPECT_TRUE(IsPattern(local, 21));
  std::vector<std::byte> other = PatternOf(1 << 20, 22);
  ASSERT_TRUE(this->Move({.op = TransferOp::kWrite,
                          .window_offset = 12345,
                          .local = absl::MakeSpan(other),
                          .timeout = kPatience})
                  .ok());
  EXPECT_EQ(peer.Ask("check 12345 1048576 22"), "yes") << peer.output();
  EXPECT_EQ(peer.Ask("check 0 12345 21"), "yes");
  EXPECT_EQ(peer.Ask("alive"), "yes");
  this->channel_ = nullptr;
  EXPECT_TRUE(Eventually([&] { return peer.Ask("alive") == "no"; }, kPatience));
}

TYPED_TEST(TransportContract, AKilledPeerEndsEveryTransferAndTheChannel) {
  PeerProcess peer(this->path().PeerArgs(31));
  ASSERT_NE(peer.ticket(), "") << peer.output();
  this->channel_ = this->Attach(peer.ticket());
  ASSERT_NE(this->channel_, nullptr);
  std::vector<std::vector<std::byte>> locals(16, std::vector<std::byte>(kWindowBytes / 2));
  std::map<TransferId, size_t> posted;
  for (size_t i = 0; i < locals.size(); ++i) {
    if (i == 8) peer.Signal(SIGKILL);  // not reaped: it stays a zombie
    const absl::StatusOr<TransferId> id =
        this->channel_->Post({.local = absl::MakeSpan(locals[i]), .timeout = kPatience});
    if (id.ok()) posted.emplace(*id, i);
    EXPECT_TRUE(id.ok() || absl::IsUnavailable(id.status())) << id.status();
  }
  const std::map<TransferId, absl::Status> done = this->Collect(posted.size());
  ASSERT_EQ(done.size(), posted.size());
  for (const auto& [id, status] : done) {
    if (status.ok()) {
      EXPECT_TRUE(IsPattern(locals[posted.at(id)], 31));
    } else {
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    }
  }
  EXPECT_TRUE(Eventually([&] { return !this->channel_->is_alive(); }, kPatience));
  EXPECT_TRUE(this->channel_->Quiesce(kPatience).ok());
  const absl::Status after = this->channel_->Post({.local = absl::MakeSpan(locals[0])}).status();
  EXPECT_TRUE(absl::IsUnavailable(after)) << after;
  peer.Reap();
}

TYPED_TEST(TransportContract, AStoppedPeerHoldsNobodyPastTheDeadline) {
  PeerProcess peer(this->path().PeerArgs(41));
  ASSERT_NE(peer.ticket(), "") << peer.output();
  this->channel_ = this->Attach(peer.ticket());
  ASSERT_NE(this->channel_, nullptr);
  std::vector<std::byte> local(kWindowBytes);
  ASSERT_TRUE(this->Move({.local = absl::MakeSpan(local), .timeout = kPatience}).ok());
  ASSERT_TRUE(peer.Stop());
  const RealClock clock;
  const absl::Time start = clock.Now();
  const absl::Status status =
      this->Move({.local = absl::MakeSpan(local), .timeout = absl::Milliseconds(300)});
  EXPECT_LT(clock.Now() - start, absl::Seconds(10));
  if (TypeParam::kNeedsPeerToRun) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  } else {
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(IsPattern(local, 41));
  }
  ASSERT_TRUE(this->channel_->Quiesce(kPatience).ok());
  // Ours alone from here on: what the peer does when it wakes does not reach it.
  FillPattern(absl::MakeSpan(local), 99);
  peer.Signal(SIGCONT);
  EXPECT_EQ(peer.Ask("check 0 8388608 41"), "yes") << peer.output();
  EXPECT_TRUE(IsPattern(local, 99));
}

TYPED_TEST(TransportContract, AChannelWithTransfersUnderWayCanBeClosed) {
  for (int round = 0; round < 5; ++round) {
    this->Connect();
    std::vector<std::vector<std::byte>> locals(8, std::vector<std::byte>(kWindowBytes));
    for (std::vector<std::byte>& local : locals) {
      ASSERT_TRUE(this->channel_->Post({.local = absl::MakeSpan(local)}).ok());
    }
    this->channel_ = nullptr;
    for (std::vector<std::byte>& local : locals) FillPattern(absl::MakeSpan(local), 7);
    for (const std::vector<std::byte>& local : locals) EXPECT_TRUE(IsPattern(local, 7));
    this->window_ = nullptr;
  }
}

}  // namespace
}  // namespace kvstow
