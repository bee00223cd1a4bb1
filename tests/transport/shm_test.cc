// What is special about shared memory: whom the side socket lets in, what it accepts as a window,
// and what it holds afterwards. The common promises are in contract_test.cc.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/core/check.h"
#include "tests/testing/rng.h"
#include "tests/transport/peer_process.h"
#include "transport/shm_mapping.h"
#include "transport/shm_transport.h"
#include "transport/shm_window.h"
#include "transport/shm_wire.h"

namespace kvstow {
namespace {

using testing::Eventually;
using testing::FillPattern;
using testing::IsPattern;
using testing::PeerProcess;
using testing::Rng;

constexpr absl::Duration kPatience = absl::Seconds(30);
constexpr int64_t kBytes = 64 << 10;

int NumOpenFds() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

// A memfd with these seals, its first `populated` bytes written.
OwnedFd MemfdOf(int64_t bytes, int seals, int64_t populated) {
  OwnedFd fd(memfd_create("window", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  KVSTOW_CHECK(fd.is_open() && ftruncate(fd.get(), bytes) == 0);
  const std::vector<std::byte> page(static_cast<size_t>(populated), std::byte{1});
  KVSTOW_CHECK(pwrite(fd.get(), page.data(), page.size(), 0) == populated);
  KVSTOW_CHECK(seals == 0 || fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}
OwnedFd GoodMemfd(int64_t bytes = kBytes) { return MemfdOf(bytes, F_SEAL_SHRINK, bytes); }

class ShmTest : public ::testing::Test {
 protected:
  void Listen(const ShmLimits& limits = {}) {
    absl::StatusOr<std::unique_ptr<ShmTransport>> listening =
        ShmTransport::Listen({.socket_path = socket_, .limits = limits});
    ASSERT_TRUE(listening.ok()) << listening.status();
    transport_ = *std::move(listening);
  }
  absl::StatusOr<std::unique_ptr<Window>> Open(int64_t bytes = kBytes) {
    return OpenShmWindow({.socket_path = socket_, .bytes = bytes, .timeout = kPatience});
  }
  // A connection that says nothing.
  OwnedFd Connect() {
    OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const sockaddr_un address = *ShmSocketAddress(socket_);
    KVSTOW_CHECK(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) ==
                 0);
    return fd;
  }
  // What the service answers to these bytes, sent with these descriptors.
  absl::Status Answer(absl::Span<const std::byte> hello, const std::vector<int>& fds) {
    const OwnedFd fd = Connect();
    Send(fd.get(), hello, fds);
    return Reply(fd.get());
  }
  absl::Status Offer(int memfd, int64_t bytes) {
    return Answer(EncodeShmHello({.window_bytes = static_cast<uint64_t>(bytes)}), {memfd});
  }
  static void Send(int fd, absl::Span<const std::byte> bytes, const std::vector<int>& fds) {
    std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
    iovec part = {const_cast<std::byte*>(bytes.data()), bytes.size()};
    msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (!fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(head), fds.data(), fds.size() * sizeof(int));
    }
    sendmsg(fd, &message, MSG_NOSIGNAL);
  }
  static absl::Status Reply(int fd) {
    if (!WaitReadable(fd)) return absl::UnknownError("no answer");
    absl::StatusOr<ShmPacket> packet = ReceiveShmPacket(fd, kShmReplyBytes);
    if (!packet.ok()) packet = ReceiveShmPacket(fd, kShmReplyBytes);  // reset comes first
    if (!packet.ok()) return packet.status();
    return DecodeShmReply(packet->bytes).status();
  }
  static bool WaitReadable(int fd) {
    pollfd entry = {.fd = fd, .events = POLLIN};
    return poll(&entry, 1, 30000) == 1;
  }
  // The service has closed this connection without another word.
  static bool IsClosed(int fd) {
    if (!WaitReadable(fd)) return false;
    std::array<char, 8> rest;
    return recv(fd, rest.data(), rest.size(), 0) <= 0;
  }
  bool EventuallyWindows(int32_t windows) {
    return Eventually([&] { return transport_->totals().windows == windows; }, kPatience);
  }

  testing::TempFolder folder_;
  const std::string socket_ = folder_.path() + "/shm";
  std::unique_ptr<ShmTransport> transport_;
};

bool Mentions(const absl::Status& status, const std::string& text) {
  return status.ToString().find(text) != std::string::npos;
}

TEST_F(ShmTest, OnlyASealedPopulatedMemfdIsAWindow) {
  Listen();
  const std::string path = folder_.path() + "/file";
  const OwnedFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(ftruncate(file.get(), kBytes), 0);
  const OwnedFd on_tmpfs(open("/dev/shm", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  const OwnedFd unsealed = MemfdOf(kBytes, 0, kBytes);
  const OwnedFd grows_only = MemfdOf(kBytes, F_SEAL_GROW, kBytes);
  const OwnedFd empty = MemfdOf(kBytes, F_SEAL_SHRINK, 4096);
  const OwnedFd read_only = MemfdOf(kBytes, F_SEAL_SHRINK | F_SEAL_WRITE, kBytes);
  const OwnedFd good = GoodMemfd();
  std::array<int, 2> pipe_ends;
  ASSERT_EQ(pipe2(pipe_ends.data(), O_CLOEXEC), 0);
  const OwnedFd pipe_in(pipe_ends[0]);
  const OwnedFd pipe_out(pipe_ends[1]);
  const std::vector<std::pair<int, std::string>> cases = {
      {file.get(), "memfd_create with MFD_ALLOW_SEALING"},
      {pipe_in.get(), "memfd_create with MFD_ALLOW_SEALING"},
      {unsealed.get(), "not sealed with F_SEAL_SHRINK"},
      {grows_only.get(), "not sealed with F_SEAL_SHRINK"},
      {empty.get(), "populated with 4096 of 65536 bytes"},
      {read_only.get(), "cannot be mapped for writing"}};
  for (const auto& [fd, why] : cases) {
    const absl::Status status = Offer(fd, kBytes);
    EXPECT_TRUE(absl::IsInvalidArgument(status) && Mentions(status, why)) << status << why;
  }
  if (on_tmpfs.is_open()) {
    ASSERT_EQ(posix_fallocate(on_tmpfs.get(), 0, kBytes), 0);
    const absl::Status status = Offer(on_tmpfs.get(), kBytes);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  }
  const absl::Status wrong_size = Offer(good.get(), kBytes - 1);
  EXPECT_TRUE(Mentions(wrong_size, "has 65536 bytes, its hello says 65535")) << wrong_size;
  EXPECT_TRUE(absl::IsInvalidArgument(Offer(good.get(), kBytes + 4096)));
  EXPECT_TRUE(Offer(good.get(), kBytes).ok());
}

TEST_F(ShmTest, AWindowsMemoryCannotBeCutAfterwards) {
  const absl::StatusOr<OwnedFd> fd = CreateWindowFd(kBytes);
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(ftruncate(fd->get(), 0), -1);
  EXPECT_EQ(ftruncate(fd->get(), 2 * kBytes), -1);
  EXPECT_EQ(fcntl(fd->get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
}

TEST_F(ShmTest, EveryOddHelloIsRefusedWithAReason) {
  Listen();
  const OwnedFd good = GoodMemfd();
  const auto hello = EncodeShmHello({.window_bytes = kBytes});
  for (size_t length = 1; length < hello.size(); ++length) {
    const absl::Status cut = Answer(absl::MakeSpan(hello).first(length), {good.get()});
    EXPECT_TRUE(absl::IsInvalidArgument(cut)) << length << ": " << cut;
  }
  std::vector<std::byte> longer(hello.begin(), hello.end());
  longer.resize(hello.size() + 1);
  EXPECT_TRUE(Mentions(Answer(longer, {good.get()}), "longer than 24 bytes"));
  longer.resize(60000);
  EXPECT_TRUE(Mentions(Answer(longer, {good.get()}), "longer than 24 bytes"));
  for (const size_t at : {size_t{0}, size_t{7}, size_t{12}, size_t{15}}) {
    auto changed = hello;
    changed[at] ^= std::byte{0x20};
    EXPECT_TRUE(absl::IsInvalidArgument(Answer(changed, {good.get()}))) << at;
  }
  const absl::Status future =
      Answer(EncodeShmHello({.version = 2, .window_bytes = kBytes}), {good.get()});
  EXPECT_TRUE(absl::IsInvalidArgument(future)) << future;
  EXPECT_TRUE(Mentions(future, "version 2; known are 1 to 1")) << future;
  EXPECT_TRUE(Mentions(Answer(hello, {}), "hello with 0 descriptors"));
  EXPECT_TRUE(Mentions(Answer(hello, {good.get(), good.get()}), "hello with 2 descriptors"));
  const std::vector<int> many(200, good.get());
  EXPECT_TRUE(absl::IsInvalidArgument(Answer(hello, many)));
  EXPECT_TRUE(Mentions(Offer(good.get(), 0), "a window of 0 bytes"));
  EXPECT_TRUE(Mentions(Offer(good.get(), kMaxWindowBytes + 1), "4294967296 are allowed"));
  EXPECT_TRUE(absl::IsInvalidArgument(Offer(good.get(), -1)));
  EXPECT_EQ(transport_->totals().windows, 0);
  EXPECT_TRUE(Answer(hello, {good.get()}).ok());
}

TEST_F(ShmTest, RandomHellosAndRepliesAreRefused) {
  Rng rng(5);
  const auto hello = EncodeShmHello({.window_bytes = kBytes});
  const auto reply = EncodeShmReply(absl::InternalError(std::string(500, 'x')), {});
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes(hello.begin(), hello.end());
    bytes[rng.Below(16)] ^= static_cast<std::byte>(1 + rng.Below(255));
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeShmHello(bytes).status()));
    bytes.assign(reply.begin(), reply.end());
    for (int i = 0; i < 20; ++i) bytes[8 + rng.Below(184)] = static_cast<std::byte>(rng.Next());
    const absl::StatusOr<ShmToken> token = DecodeShmReply(bytes);
    for (const char letter : token.status().message()) EXPECT_TRUE(letter >= ' ' && letter <= '~');
    bytes.resize(rng.Below(192));
    EXPECT_TRUE(absl::IsUnavailable(DecodeShmReply(bytes).status()));
  }
}

TEST_F(ShmTest, TheCapsOnWindowsAndBytesHoldAndRoomComesBack) {
  Listen({.channels_max = 3, .window_bytes_max = 4 * kBytes});
  std::vector<std::unique_ptr<Window>> windows;
  for (int i = 0; i < 3; ++i) {
    absl::StatusOr<std::unique_ptr<Window>> window = Open();
    ASSERT_TRUE(window.ok()) << window.status();
    windows.push_back(*std::move(window));
  }
  const absl::Status fourth = Open(1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(fourth)) << fourth;
  EXPECT_TRUE(Mentions(fourth, "3 shared windows are open, at most 3")) << fourth;
  windows.pop_back();
  ASSERT_TRUE(EventuallyWindows(2));
  const absl::Status large = Open(2 * kBytes + 1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(large)) << large;
  EXPECT_TRUE(Mentions(large, absl::StrCat("at most ", 4 * kBytes, " together"))) << large;
  absl::StatusOr<std::unique_ptr<Window>> fits = Open(2 * kBytes);
  ASSERT_TRUE(fits.ok()) << fits.status();
  // An attached window counts until its channel closes, whatever its worker does.
  absl::StatusOr<std::unique_ptr<Channel>> channel =
      transport_->Attach((*fits)->ticket(), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  fits->reset();
  EXPECT_TRUE(Eventually([&] { return !(*channel)->is_alive(); }, kPatience));
  EXPECT_EQ(transport_->totals().window_bytes, 4 * kBytes);
  channel->reset();
  EXPECT_EQ(transport_->totals().window_bytes, 2 * kBytes);
  windows.clear();
  ASSERT_TRUE(EventuallyWindows(0));
  EXPECT_EQ(transport_->totals().window_bytes, 0);
}

TEST_F(ShmTest, AWindowThatNobodyAttachesEnds) {
  Listen({.attach_timeout = absl::Milliseconds(30)});
  absl::StatusOr<std::unique_ptr<Window>> window = Open();
  ASSERT_TRUE(window.ok()) << window.status();
  EXPECT_TRUE(Eventually([&] { return !(*window)->is_alive(); }, kPatience));
  ASSERT_TRUE(EventuallyWindows(0));
  EXPECT_TRUE(absl::IsNotFound(transport_->Attach((*window)->ticket(), kPatience).status()));
}

TEST_F(ShmTest, AnAttachedWindowHasNoTimeLimit) {
  Listen({.attach_timeout = absl::Seconds(1)});
  absl::StatusOr<std::unique_ptr<Window>> kept = Open();
  ASSERT_TRUE(kept.ok()) << kept.status();
  const auto channel = transport_->Attach((*kept)->ticket(), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  // A later window's limit has passed: so has the time in which this one would have ended.
  absl::StatusOr<std::unique_ptr<Window>> later = Open();
  ASSERT_TRUE(later.ok()) << later.status();
  EXPECT_TRUE(Eventually([&] { return !(*later)->is_alive(); }, kPatience));
  EXPECT_TRUE((*kept)->is_alive());
  EXPECT_TRUE((*channel)->is_alive());
}

// A profiler's signals, for example. Who takes a living service for gone may use memory again that
// it still writes to.
TEST_F(ShmTest, SignalsDoNotMakeAWindowLookDead) {
  Listen();
  absl::StatusOr<std::unique_ptr<Window>> window = Open();
  ASSERT_TRUE(window.ok()) << window.status();
  const auto channel = transport_->Attach((*window)->ticket(), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  static std::atomic<int64_t> num_signals{0};
  num_signals = 0;
  struct sigaction action = {};
  struct sigaction before = {};
  action.sa_handler = [](int) { ++num_signals; };
  sigaction(SIGUSR1, &action, &before);
  std::atomic<bool> is_over{false};
  const pthread_t poller = pthread_self();
  std::thread sender([&] {
    while (!is_over) pthread_kill(poller, SIGUSR1);
  });
  int64_t num_asked = 0;
  int64_t num_dead = 0;
  for (; num_signals < 20000; ++num_asked) {
    if (!(*window)->is_alive()) ++num_dead;
  }
  is_over = true;
  sender.join();
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(num_dead, 0) << "of " << num_asked;
}

TEST_F(ShmTest, ASilentConnectionEnds) {
  Listen({.handshake_timeout = absl::Milliseconds(30)});
  const OwnedFd silent = Connect();
  EXPECT_TRUE(IsClosed(silent.get()));
  EXPECT_EQ(transport_->totals().connections, 0);
}

TEST_F(ShmTest, APeerThatNeverReadsItsReplyHoldsUpNobody) {
  Listen({.attach_timeout = absl::Seconds(2)});
  const OwnedFd good = GoodMemfd();
  std::vector<OwnedFd> deaf;
  for (int i = 0; i < 20; ++i) {
    deaf.push_back(Connect());
    Send(deaf.back().get(), EncodeShmHello({.window_bytes = kBytes}), {good.get()});
  }
  absl::StatusOr<std::unique_ptr<Window>> window = Open();
  ASSERT_TRUE(window.ok()) << window.status();
  EXPECT_TRUE(transport_->Attach((*window)->ticket(), kPatience).ok());
  EXPECT_TRUE(EventuallyWindows(0));
}

TEST_F(ShmTest, APeerThatTalksOnIsEnded) {
  Listen();
  const OwnedFd good = GoodMemfd();
  const OwnedFd peer = Connect();
  Send(peer.get(), EncodeShmHello({.window_bytes = kBytes}), {good.get()});
  ASSERT_TRUE(Reply(peer.get()).ok());
  Send(peer.get(), EncodeShmHello({.window_bytes = kBytes}), {good.get()});
  EXPECT_TRUE(IsClosed(peer.get()));
  EXPECT_TRUE(EventuallyWindows(0));
}

TEST_F(ShmTest, IdleConnectionsAreBoundedAndTheNextIsToldSo) {
  Listen({.handshake_timeout = absl::Minutes(10)});
  std::vector<OwnedFd> idle;
  for (int i = 0; i < ShmPeers::kMaxConnections; ++i) idle.push_back(Connect());
  ASSERT_TRUE(Eventually(
      [&] { return transport_->totals().connections == ShmPeers::kMaxConnections; }, kPatience));
  const absl::Status refused = Open().status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_TRUE(Mentions(refused, "64 connections")) << refused;
  idle.clear();
  ASSERT_TRUE(Eventually([&] { return transport_->totals().connections == 0; }, kPatience));
  EXPECT_TRUE(Open().ok());
}

TEST_F(ShmTest, TenThousandConnectionsLeaveNothingBehind) {
  Listen({.handshake_timeout = absl::Minutes(10)});
  const int before = NumOpenFds();
  std::vector<OwnedFd> idle;
  for (int i = 0; i < ShmPeers::kMaxConnections; ++i) idle.push_back(Connect());
  int refused = 0;
  for (int i = 0; i < 10000; ++i) {
    const OwnedFd one = Connect();
    if (absl::IsResourceExhausted(Reply(one.get()))) ++refused;
  }
  EXPECT_EQ(refused, 10000);
  EXPECT_GE(transport_->totals().refused, 10000);
  idle.clear();
  EXPECT_TRUE(Eventually([&] { return NumOpenFds() == before; }, kPatience));
  EXPECT_TRUE(Open().ok());
}

TEST_F(ShmTest, TwoHundredRoundsLeaveNoDescriptorAndNoByte) {
  Listen();
  const int before = NumOpenFds();
  for (int round = 0; round < 200; ++round) {
    absl::StatusOr<std::unique_ptr<Window>> window = Open();
    ASSERT_TRUE(window.ok()) << round << window.status();
    if (round % 4 == 0) continue;  // never attached
    auto channel = transport_->Attach((*window)->ticket(), kPatience);
    ASSERT_TRUE(channel.ok()) << round << channel.status();
    if (round % 4 == 1) window->reset();  // ends before its channel
  }
  ASSERT_TRUE(EventuallyWindows(0));
  EXPECT_EQ(transport_->totals().window_bytes, 0);
  EXPECT_TRUE(Eventually([&] { return NumOpenFds() == before; }, kPatience))
      << NumOpenFds() << " descriptors, before " << before;
}

TEST_F(ShmTest, ManyWorkersAtOnceEachGetTheirOwnWindow) {
  Listen({.channels_max = 200});
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 6; ++thread) {
    threads.emplace_back([this, thread] {
      for (uint64_t round = 0; round < 30; ++round) {
        absl::StatusOr<std::unique_ptr<Window>> window = Open();
        ASSERT_TRUE(window.ok()) << window.status();
        FillPattern((*window)->memory(), thread * 1000 + round);
        auto channel = transport_->Attach((*window)->ticket(), kPatience);
        ASSERT_TRUE(channel.ok()) << channel.status();
        EXPECT_TRUE(IsPattern((*channel)->InPlace(0, kBytes), thread * 1000 + round));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(EventuallyWindows(0));
}

TEST_F(ShmTest, AWorkerThatForkedEndsWithItsOwnProcess) {
  Listen();
  PeerProcess peer({"shm", absl::StrCat(kBytes), "1", socket_});
  ASSERT_NE(peer.ticket(), "") << peer.output();
  const auto channel = transport_->Attach(peer.ticket(), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  ASSERT_EQ(peer.Ask("fork"), "yes");  // the child keeps the socket open
  EXPECT_TRUE((*channel)->is_alive());
  peer.Signal(SIGKILL);
  EXPECT_TRUE(Eventually([&] { return !(*channel)->is_alive(); }, kPatience));
}

TEST_F(ShmTest, TheWindowOfADeadWorkerStaysReadableUntilItsChannelCloses) {
  Listen();
  PeerProcess peer({"shm", absl::StrCat(kBytes), "8", socket_});
  ASSERT_NE(peer.ticket(), "") << peer.output();
  const auto channel = transport_->Attach(peer.ticket(), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  const absl::Span<std::byte> in_place = (*channel)->InPlace(0, kBytes);
  peer.Signal(SIGKILL);
  peer.Reap();
  EXPECT_TRUE(Eventually([&] { return !(*channel)->is_alive(); }, kPatience));
  EXPECT_TRUE(IsPattern(in_place, 8));
  in_place[17] = std::byte{1};
  EXPECT_EQ((*channel)->InPlace(17, 1)[0], std::byte{1});
}

TEST_F(ShmTest, ChannelsOutliveTheTransportAsDeadOnes) {
  Listen();
  absl::StatusOr<std::unique_ptr<Window>> window = Open();
  ASSERT_TRUE(window.ok()) << window.status();
  FillPattern((*window)->memory(), 4);
  auto channel = transport_->Attach((*window)->ticket(), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  transport_ = nullptr;
  EXPECT_FALSE((*channel)->is_alive());
  EXPECT_FALSE((*window)->is_alive());
  EXPECT_TRUE(IsPattern((*channel)->InPlace(0, kBytes), 4));
  channel->reset();
  EXPECT_TRUE(absl::IsUnavailable(Open().status()));
}

TEST_F(ShmTest, TheSocketFileIsItsOwnersAloneAndGoesWithTheTransport) {
  Listen();
  struct stat info = {};
  ASSERT_EQ(stat(socket_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0600u);
  transport_ = nullptr;
  EXPECT_NE(stat(socket_.c_str(), &info), 0);
}

TEST_F(ShmTest, AStaleSocketIsReplacedAndALiveOneIsNot) {
  Listen();
  const absl::Status second = ShmTransport::Listen({.socket_path = socket_}).status();
  EXPECT_TRUE(absl::IsUnavailable(second) && Mentions(second, "in use")) << second;
  EXPECT_TRUE(Open().ok());
  // As a killed service leaves it: the file, and nobody behind it.
  const std::string stale = folder_.path() + "/stale";
  {
    const OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const sockaddr_un address = *ShmSocketAddress(stale);
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  const auto replaced = ShmTransport::Listen({.socket_path = stale});
  EXPECT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_TRUE(OpenShmWindow({.socket_path = stale, .bytes = 1}).ok());
}

TEST_F(ShmTest, ATransportRemovesNoSocketButItsOwn) {
  Listen();
  ASSERT_EQ(unlink(socket_.c_str()), 0);
  const auto next = ShmTransport::Listen({.socket_path = socket_});
  ASSERT_TRUE(next.ok()) << next.status();
  transport_ = nullptr;
  EXPECT_TRUE(Open().ok());
}

TEST_F(ShmTest, APathThatCannotBeASocketIsRefused) {
  const auto listen = [](const std::string& path) {
    return ShmTransport::Listen({.socket_path = path}).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(listen("")));
  EXPECT_TRUE(absl::IsInvalidArgument(listen("/tmp/" + std::string(120, 'x'))));
  EXPECT_TRUE(absl::IsNotFound(listen(folder_.path() + "/none/s")));
  const std::string file = folder_.path() + "/file";
  const OwnedFd fd(open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  EXPECT_TRUE(absl::IsFailedPrecondition(listen(file)));
  EXPECT_TRUE(std::filesystem::exists(file));
  EXPECT_TRUE(absl::IsInvalidArgument(
      ShmTransport::Listen({.socket_path = socket_, .limits = {.channels_max = 0}}).status()));
  // The worker's side of the same.
  EXPECT_TRUE(absl::IsUnavailable(Open().status()));
  for (const int64_t bytes : {int64_t{0}, int64_t{-1}, kMaxWindowBytes + 1}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Open(bytes).status()));
  }
}

TEST_F(ShmTest, AnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  Listen();
  ASSERT_EQ(chmod(folder_.path().c_str(), 0711), 0);
  absl::Status status;
  const auto open_as_nobody = [&] {
    std::thread other([&] {
      // The system call itself changes one thread; the C library's function all of them.
      ASSERT_EQ(syscall(SYS_setresuid, -1, 65534, -1), 0);
      status = Open().status();
    });
    other.join();
  };
  open_as_nobody();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;  // by the file's mode
  ASSERT_EQ(chmod(socket_.c_str(), 0666), 0);
  open_as_nobody();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  EXPECT_TRUE(Mentions(status, "user 65534 may not share memory with user 0")) << status;
}

TEST_F(ShmTest, WithoutDescriptorsConnectionsWaitAndAreServedLater) {
  Listen();
  OwnedFd client(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const OwnedFd good = GoodMemfd();
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low = {.rlim_cur = 256, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  std::vector<OwnedFd> all;
  while (true) {
    OwnedFd fd(dup(good.get()));
    if (!fd.is_open()) break;
    all.push_back(std::move(fd));
  }
  const sockaddr_un address = *ShmSocketAddress(socket_);
  ASSERT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  Send(client.get(), EncodeShmHello({.window_bytes = kBytes}), {good.get()});
  pollfd entry = {.fd = client.get(), .events = POLLIN};
  EXPECT_EQ(poll(&entry, 1, 250), 0);  // waits, is neither refused nor dropped
  all.clear();
  EXPECT_TRUE(Reply(client.get()).ok());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace kvstow
