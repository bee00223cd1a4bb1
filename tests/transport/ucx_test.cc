// What is special about UCX: tickets, the end of a channel by a deadline, and what is left behind.
// The common promises are in contract_test.cc.
#include "transport/ucx.h"

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/transport/peer_process.h"
#include "transport/ucx_ticket.h"
#include "transport/window_ticket.h"

// In front of libc's: UCX's calls come here too.
static std::function<void()> after_connect;  // set while nothing connects

extern "C" int connect(int fd, const sockaddr* address, socklen_t bytes) {
  static const auto real = reinterpret_cast<decltype(&connect)>(dlsym(RTLD_NEXT, "connect"));
  const int result = real(fd, address, bytes);
  const int error = errno;
  if (after_connect != nullptr) after_connect();
  errno = error;
  return result;
}

namespace kvstow {
namespace {

using testing::Eventually;
using testing::PeerProcess;

constexpr absl::Duration kPatience = absl::Seconds(30);
constexpr int64_t kBytes = 1 << 20;
const UcxNetwork& Loopback() {
  static const auto* network = new UcxNetwork{.tls = "tcp", .net_devices = "lo"};
  return *network;
}

class UcxTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!IsUcxBuilt()) GTEST_SKIP() << "built without UCX";
    MakeTransport(64);
  }
  void MakeTransport(int32_t channels_max) {
    transport_ = nullptr;
    auto made = MakeUcxTransport({.channels_max = channels_max, .network = Loopback()});
    ASSERT_TRUE(made.ok()) << made.status();
    transport_ = *std::move(made);
  }
  std::unique_ptr<Window> Open() {
    auto window = OpenUcxWindow({.bytes = kBytes, .network = Loopback()});
    EXPECT_TRUE(window.ok()) << window.status();
    return window.ok() ? *std::move(window) : nullptr;
  }
  absl::Status AttachStatus(const std::string& ticket, absl::Duration timeout = kPatience) {
    return transport_->Attach(ticket, timeout).status();
  }
  std::unique_ptr<Transport> transport_;
};

int NumOpenFds() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

TEST_F(UcxTest, ATicketSurvivesItsEncodingAndNoByteMayChange) {
  const UcxTicket ticket{.window_id = {'i', 'd'}, .bytes = 12345, .listener = "10.0.0.7:4711"};
  const absl::StatusOr<std::string> bytes = EncodeUcxTicket(ticket);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const absl::StatusOr<UcxTicket> back = DecodeUcxTicket(*bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->window_id, ticket.window_id);
  EXPECT_EQ(back->bytes, ticket.bytes);
  EXPECT_EQ(back->listener, ticket.listener);
  for (size_t i = 0; i < bytes->size(); ++i) {
    std::string changed = *bytes;
    changed[i] ^= 1;
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeUcxTicket(changed).status())) << i;
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeUcxTicket(bytes->substr(0, i)).status())) << i;
  }
}

TEST_F(UcxTest, ATicketOfImpossibleSizeOrListenerIsRefused) {
  UcxTicket ticket = {.window_id = {}, .bytes = 4096, .listener = "127.0.0.1:1"};
  EXPECT_TRUE(DecodeUcxTicket(*EncodeUcxTicket(ticket)).ok());
  for (const uint64_t bytes : {uint64_t{0}, (uint64_t{4} << 30) + 1}) {
    ticket.bytes = bytes;
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeUcxTicket(*EncodeUcxTicket(ticket)).status()));
  }
  ticket = {.window_id = {}, .bytes = 1, .listener = ""};
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeUcxTicket(*EncodeUcxTicket(ticket)).status()));
  ticket.listener = std::string(65, '1');
  EXPECT_TRUE(absl::IsInvalidArgument(EncodeUcxTicket(ticket).status()));
  for (const char* listener : {"127.0.0.1", "localhost:80", "127.0.0.1:99999", "[::1:80", ":"}) {
    ticket.listener = listener;
    EXPECT_TRUE(absl::IsInvalidArgument(AttachStatus(*EncodeUcxTicket(ticket)))) << listener;
  }
}

TEST_F(UcxTest, ATicketWithAnotherWindowsIdIsNotServed) {
  const std::unique_ptr<Window> window = Open();
  UcxTicket ticket = *DecodeUcxTicket(window->ticket());
  ticket.window_id[3] ^= 1;
  const absl::Status wrong = AttachStatus(*EncodeUcxTicket(ticket));
  EXPECT_TRUE(absl::IsNotFound(wrong)) << wrong;
  // A ticket that promises more than there is: the worker looks at each range.
  ticket = *DecodeUcxTicket(window->ticket());
  ticket.bytes += 4096;
  const auto channel = transport_->Attach(*EncodeUcxTicket(ticket), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  std::vector<std::byte> local(8192);
  for (const TransferOp op : {TransferOp::kRead, TransferOp::kWrite}) {
    ASSERT_TRUE((*channel)
                    ->Post({.op = op,
                            .window_offset = kBytes - 4096,
                            .local = absl::MakeSpan(local),
                            .timeout = kPatience})
                    .ok());
    Completion one;
    ASSERT_EQ((*channel)->Poll({&one, 1}, kPatience), 1u);
    EXPECT_TRUE(absl::IsUnavailable(one.status)) << one.status;
  }
}

TEST_F(UcxTest, TheCapOnChannelsHoldsAndRoomComesBack) {
  MakeTransport(2);
  const std::unique_ptr<Window> windows[] = {Open(), Open(), Open()};
  auto first = transport_->Attach(windows[0]->ticket(), kPatience);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = transport_->Attach(windows[1]->ticket(), kPatience);
  ASSERT_TRUE(second.ok()) << second.status();
  const absl::Status third = AttachStatus(windows[2]->ticket());
  EXPECT_TRUE(absl::IsResourceExhausted(third)) << third;
  EXPECT_NE(third.message().find("at most 2"), absl::string_view::npos) << third;
  first->reset();
  EXPECT_TRUE(AttachStatus(windows[2]->ticket()).ok());
}

TEST_F(UcxTest, AClosedWindowIsNotAttachedAgainByAnyService) {
  const std::unique_ptr<Window> window = Open();
  {
    const auto channel = transport_->Attach(window->ticket(), kPatience);
    ASSERT_TRUE(channel.ok()) << channel.status();
    const auto other = MakeUcxTransport({.network = Loopback()});
    ASSERT_TRUE(other.ok()) << other.status();
    const absl::Status twice = (*other)->Attach(window->ticket(), kPatience).status();
    EXPECT_TRUE(absl::IsNotFound(twice)) << twice;
  }
  EXPECT_TRUE(Eventually([&] { return !window->is_alive(); }, kPatience));
  const absl::Status again = AttachStatus(window->ticket());
  EXPECT_TRUE(absl::IsNotFound(again)) << again;
}

TEST_F(UcxTest, OfManyWhoBringOneTicketOneIsServed) {
  for (int round = 0; round < 5; ++round) {
    const std::unique_ptr<Window> window = Open();
    std::vector<absl::StatusOr<std::unique_ptr<Channel>>> results(6);
    std::vector<std::thread> threads;
    for (auto& result : results) {
      threads.emplace_back([&] { result = transport_->Attach(window->ticket(), kPatience); });
    }
    for (std::thread& thread : threads) thread.join();
    int attached = 0;
    for (const auto& result : results) {
      if (result.ok()) ++attached;
      EXPECT_TRUE(result.ok() || absl::IsNotFound(result.status())) << result.status();
    }
    EXPECT_EQ(attached, 1);
  }
}

TEST_F(UcxTest, TheTicketOfADeadWorkerIsUnavailable) {
  std::string ticket;
  {
    PeerProcess peer({"ucx", absl::StrCat(kBytes), "1"});
    ASSERT_NE(peer.ticket(), "") << peer.output();
    ticket = peer.ticket();
  }
  const absl::Status status = AttachStatus(ticket);
  EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) << status;
  EXPECT_NE(transport_->Attach(Open()->ticket(), kPatience).status().code(),
            absl::StatusCode::kResourceExhausted);
}

// Another stage of the handshake each round.
void SpinFor(absl::Duration duration) {
  const absl::Time end = absl::Now() + duration;
  while (absl::Now() < end) {
  }
}

// Between workers that connect to each other by address, the packaged UCX ends the process whose
// answer finds nobody.
TEST_F(UcxTest, AServiceThatDiesWhileItAttachesLeavesTheWorkerAlive) {
  for (int round = 0; round < 24; ++round) {
    std::unique_ptr<Window> window = Open();
    ASSERT_NE(window, nullptr);
    PeerProcess service({"attach", "0", "0"});
    ASSERT_TRUE(service.Begin(absl::StrCat("attach ", absl::BytesToHexString(window->ticket()))))
        << service.output();
    SpinFor(round * absl::Microseconds(150));
    service.Signal(SIGKILL);
    service.Reap();
    window = nullptr;
  }
}

TEST_F(UcxTest, AServiceThatDiesInTheMiddleOfTransfersEndsTheWindowOnly) {
  for (int round = 0; round < 16; ++round) {
    const std::unique_ptr<Window> window = Open();
    PeerProcess service({"attach", "0", "0"});
    ASSERT_TRUE(service.Begin(absl::StrCat("move ", absl::BytesToHexString(window->ticket()))))
        << service.output();
    SpinFor(round * absl::Microseconds(300));
    service.Signal(SIGKILL);
    service.Reap();
    EXPECT_TRUE(Eventually([&] { return !window->is_alive(); }, kPatience)) << round;
  }
}

TEST_F(UcxTest, AWorkerThatDiesWhileItIsAttachedLeavesTheServiceAlive) {
  for (int round = 0; round < 24; ++round) {
    PeerProcess peer({"ucx", absl::StrCat(kBytes), "1"});
    ASSERT_NE(peer.ticket(), "") << peer.output();
    absl::Status status;
    std::thread attach([&] { status = AttachStatus(peer.ticket()); });
    SpinFor(round * absl::Microseconds(150));
    peer.Signal(SIGKILL);
    attach.join();
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
  }
  EXPECT_TRUE(AttachStatus(Open()->ticket()).ok());
}

// Kills `peer` right after the connect of this process with that number, from 0. False: there were
// fewer.
class KillAtConnect {
 public:
  KillAtConnect(PeerProcess& peer, int number) {
    after_connect = [this, &peer, number] {
      if (num_connects_++ != number) return;
      has_killed_ = true;
      peer.Signal(SIGKILL);
      siginfo_t end;
      waitid(P_PID, static_cast<id_t>(peer.pid()), &end, WEXITED | WNOWAIT);
    };
  }
  ~KillAtConnect() { after_connect = nullptr; }
  bool has_killed() const { return has_killed_; }

 private:
  std::atomic<int> num_connects_ = 0;
  std::atomic<bool> has_killed_ = false;
};

// A connect that succeeds to somebody who is dead before the first bytes: the packaged UCX connects
// again from inside, and ends the process when that is refused. The first connect is to the
// listener; the second, for data, is made by whoever has the higher port: in half of the rounds by
// this process.
TEST_F(UcxTest, AWorkerThatDiesBetweenAConnectAndItsFirstBytesLeavesTheServiceAlive) {
  int num_killed = 0;
  for (int round = 0; round < 24; ++round) {
    PeerProcess peer({"ucx", absl::StrCat(kBytes), "1"});
    ASSERT_NE(peer.ticket(), "") << peer.output();
    MakeTransport(64);
    const KillAtConnect kill(peer, round % 8 == 0 ? 0 : 1);
    const absl::Status status = AttachStatus(peer.ticket());
    transport_ = nullptr;
    EXPECT_EQ(status.code(),
              kill.has_killed() ? absl::StatusCode::kUnavailable : absl::StatusCode::kOk)
        << "round " << round << ": " << status;
    if (kill.has_killed()) ++num_killed;
  }
  EXPECT_GT(num_killed, 3) << "of the second connects none was made here";
}

TEST_F(UcxTest, AServiceThatDiesBetweenAConnectAndItsFirstBytesLeavesTheWorkerAlive) {
  int num_killed = 0;
  for (int round = 0; round < 24; ++round) {
    PeerProcess service({"attach", "0", "0"});
    std::unique_ptr<Window> window = Open();
    ASSERT_NE(window, nullptr);
    const KillAtConnect kill(service, 0);
    const bool has_attached =
        service.Begin(absl::StrCat("move ", absl::BytesToHexString(window->ticket())));
    EXPECT_NE(has_attached, kill.has_killed()) << "round " << round << service.output();
    if (kill.has_killed()) ++num_killed;
    window = nullptr;
  }
  EXPECT_GT(num_killed, 0) << "no connect was made here";
}

TEST_F(UcxTest, AttachToAStoppedWorkerEndsAtItsDeadline) {
  PeerProcess peer({"ucx", absl::StrCat(kBytes), "1"});
  ASSERT_NE(peer.ticket(), "") << peer.output();
  ASSERT_TRUE(peer.Stop());
  const absl::Status status = AttachStatus(peer.ticket(), absl::Milliseconds(200));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  peer.Signal(SIGCONT);
}

TEST_F(UcxTest, ALateTransferEndsItsChannelAndTheOthersSayWhy) {
  PeerProcess peer({"ucx", absl::StrCat(kBytes), "1"});
  ASSERT_NE(peer.ticket(), "") << peer.output();
  const auto channel = transport_->Attach(peer.ticket(), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  ASSERT_TRUE(peer.Stop());
  std::vector<std::vector<std::byte>> locals(4, std::vector<std::byte>(kBytes));
  std::vector<TransferId> ids;
  for (size_t i = 0; i < locals.size(); ++i) {
    const absl::StatusOr<TransferId> id =
        (*channel)->Post({.local = absl::MakeSpan(locals[i]),
                          .timeout = i == 2 ? absl::Milliseconds(200) : kPatience});
    ASSERT_TRUE(id.ok()) << id.status();
    ids.push_back(*id);
  }
  std::map<TransferId, absl::Status> done;
  while (done.size() < locals.size()) {
    Completion one;
    ASSERT_EQ((*channel)->Poll({&one, 1}, kPatience), 1u);
    done[one.id] = one.status;
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(done[ids[i]].code(),
              i == 2 ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kUnavailable)
        << done[ids[i]];
  }
  EXPECT_FALSE((*channel)->is_alive());
  EXPECT_TRUE((*channel)->Quiesce(kPatience).ok());
  // The transport goes on with other workers.
  EXPECT_TRUE(AttachStatus(Open()->ticket()).ok());
}

TEST_F(UcxTest, RoundsLeaveNoDescriptorBehind) {
  { const auto warm = transport_->Attach(Open()->ticket(), kPatience); }
  const auto round = [&] {
    const std::unique_ptr<Window> window = Open();
    const auto channel = transport_->Attach(window->ticket(), kPatience);
    EXPECT_TRUE(channel.ok()) << channel.status();
  };
  round();
  const int before = NumOpenFds();
  for (int i = 0; i < 20; ++i) round();
  EXPECT_TRUE(Eventually([&] { return NumOpenFds() <= before; }, kPatience))
      << NumOpenFds() << " descriptors, before " << before;
}

TEST_F(UcxTest, ChannelsOutliveTheTransport) {
  const std::unique_ptr<Window> window = Open();
  const auto channel = transport_->Attach(window->ticket(), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  transport_ = nullptr;
  window->memory()[5] = std::byte{9};
  std::vector<std::byte> local(16);
  ASSERT_TRUE((*channel)->Post({.local = absl::MakeSpan(local)}).ok());
  Completion one;
  ASSERT_EQ((*channel)->Poll({&one, 1}, kPatience), 1u);
  EXPECT_TRUE(one.status.ok()) << one.status;
  EXPECT_EQ(local[5], std::byte{9});
}

TEST_F(UcxTest, UnknownDevicesAndSizesAreErrors) {
  const absl::Status none =
      OpenUcxWindow({.bytes = kBytes, .network = {.tls = "tcp", .net_devices = "nosuch0"}})
          .status();
  EXPECT_TRUE(absl::IsUnavailable(none)) << none;
  for (const int64_t bytes : {int64_t{0}, int64_t{-5}, kMaxWindowBytes + 1}) {
    EXPECT_TRUE(absl::IsInvalidArgument(OpenUcxWindow({.bytes = bytes}).status()));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(MakeUcxTransport({.channels_max = 0}).status()));
}

// In workers of their own: a process has its settings from its first use of UCX on.
TEST_F(UcxTest, SettingsOfTheOperatorAreKeptAndTheOthersAreOurs) {
  const auto settings = [](const char* name, const char* value) {
    unsetenv("UCX_TCP_RX_SEG_SIZE");
    unsetenv("UCX_TCP_TX_SEG_SIZE");
    if (name != nullptr) setenv(name, value, 1);
    PeerProcess peer({"ucx", absl::StrCat(kBytes), "1"});
    if (name != nullptr) unsetenv(name);
    EXPECT_NE(peer.ticket(), "") << peer.output();
    return absl::StrCat(peer.Ask("env UCX_TCP_RX_SEG_SIZE"), " ",
                        peer.Ask("env UCX_TCP_TX_SEG_SIZE"), " ", peer.Ask("env UCX_TLS"));
  };
  EXPECT_EQ(settings(nullptr, nullptr), "256k 256k ^shm");
  EXPECT_EQ(settings("UCX_TCP_RX_SEG_SIZE", "64k"), "64k  ^shm");
  EXPECT_EQ(settings("UCX_TCP_TX_SEG_SIZE", "4k"), " 4k ^shm");
}

}  // namespace
}  // namespace kvstow
