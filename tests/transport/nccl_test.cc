// What is special about NCCL: libraries that are missing, unlike, slow, faulty or hung, and who may
// ask a worker for its memory. The common promises are in contract_test.cc.
#include "transport/nccl.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/core/check.h"
#include "kernels/core/clock.h"
#include "tests/transport/peer_process.h"
#include "transport/nccl_wire.h"

namespace kvstow {
namespace {

using testing::Eventually;
using testing::FillPattern;
using testing::IsPattern;
using testing::PeerProcess;

constexpr absl::Duration kPatience = absl::Seconds(30);
constexpr int64_t kBytes = 1 << 20;

// As nccl_stand_in.cc numbers them.
enum Mode { kWell, kHang, kFail, kAbortHangs, kLie };
void SetMode(Mode mode) {
  static auto* const set = [] {
    void* const handle = dlopen(KVSTOW_NCCL_STAND_IN, RTLD_NOW | RTLD_LOCAL);
    KVSTOW_CHECK(handle != nullptr);
    return reinterpret_cast<void (*)(int)>(dlsym(handle, "KvstowStandInMode"));
  }();
  set(mode);
}

class NcclTest : public ::testing::Test {
 protected:
  void SetUp() override { MakeTransport(8); }
  void TearDown() override { SetMode(kWell); }
  void MakeTransport(int32_t channels_max) {
    auto made = MakeNcclTransport({.channels_max = channels_max, .device = device_});
    ASSERT_TRUE(made.ok()) << made.status();
    transport_ = *std::move(made);
  }
  std::unique_ptr<Window> Open() {
    auto window = OpenNcclWindow({.bytes = kBytes, .device = device_});
    KVSTOW_CHECK(window.ok());
    return *std::move(window);
  }
  void Connect() {
    window_ = Open();
    auto channel = transport_->Attach(window_->ticket(), kPatience);
    ASSERT_TRUE(channel.ok()) << channel.status();
    channel_ = *std::move(channel);
  }
  absl::Status Read(absl::Duration timeout) {
    const auto id = channel_->Post({.local = absl::MakeSpan(local_), .timeout = timeout});
    if (!id.ok()) return id.status();
    Completion completion;
    if (channel_->Poll({&completion, 1}, kPatience) != 1) return absl::UnknownError("none");
    return completion.status;
  }

  NcclDevice device_ = {.nccl_path = KVSTOW_NCCL_STAND_IN, .cudart_path = KVSTOW_NCCL_STAND_IN};
  std::vector<std::byte> local_ = std::vector<std::byte>(kBytes);
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Window> window_;
  std::unique_ptr<Channel> channel_;
};

bool Mentions(const absl::Status& status, const std::string& text) {
  return status.ToString().find(text) != std::string::npos;
}

TEST_F(NcclTest, MissingLibrariesAndFunctionsAreUnavailableByName) {
  const absl::Status none =
      OpenNcclWindow({.bytes = 1, .device = {.nccl_path = "libnosuch.so.7"}}).status();
  EXPECT_TRUE(absl::IsUnavailable(none) && Mentions(none, "libnosuch.so.7")) << none;
  const absl::Status other = MakeNcclTransport({.device = {.nccl_path = "libm.so.6"}}).status();
  EXPECT_TRUE(absl::IsUnavailable(other) && Mentions(other, "ncclGetVersion")) << other;
  const absl::Status no_cuda =
      OpenNcclWindow(
          {.bytes = 1, .device = {.nccl_path = KVSTOW_NCCL_STAND_IN, .cudart_path = "libm.so.6"}})
          .status();
  EXPECT_TRUE(absl::IsUnavailable(no_cuda) && Mentions(no_cuda, "cudaSetDevice")) << no_cuda;
  NcclDevice third = device_;
  third.device_idx = 3;
  const absl::Status no_device = OpenNcclWindow({.bytes = 1, .device = third}).status();
  EXPECT_TRUE(absl::IsUnavailable(no_device) && Mentions(no_device, "error 101")) << no_device;
}

TEST_F(NcclTest, BadOptionsAreInvalid) {
  for (const int64_t bytes : {int64_t{0}, int64_t{-1}, kMaxWindowBytes + 1}) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(OpenNcclWindow({.bytes = bytes, .device = device_}).status()));
  }
  const absl::Status host =
      OpenNcclWindow({.bytes = 1, .host = "nowhere", .device = device_}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(host) && Mentions(host, "nowhere")) << host;
  EXPECT_TRUE(
      absl::IsInvalidArgument(MakeNcclTransport({.channels_max = 0, .device = device_}).status()));
}

TEST_F(NcclTest, TwoVersionsOfNcclDoNotMeet) {
  setenv("NCCL_STAND_IN_VERSION", "22901", 1);
  PeerProcess peer({"nccl", absl::StrCat(kBytes), "1"});
  unsetenv("NCCL_STAND_IN_VERSION");
  ASSERT_NE(peer.ticket(), "") << peer.output();
  const absl::Status status = transport_->Attach(peer.ticket(), kPatience).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(Mentions(status, "22809 here and 22901 at the worker")) << status;
}

TEST_F(NcclTest, ATransferThatHangsEndsAtItsDeadlineOnBothSides) {
  Connect();
  SetMode(kHang);
  const absl::Status status = Read(absl::Milliseconds(100));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_TRUE(channel_->Quiesce(kPatience).ok());
  EXPECT_FALSE(channel_->is_alive());
  EXPECT_TRUE(Eventually([&] { return !window_->is_alive(); }, kPatience));
  // The path goes on with new windows.
  SetMode(kWell);
  Connect();
  FillPattern(window_->memory(), 6);
  EXPECT_TRUE(Read(kPatience).ok());
  EXPECT_TRUE(IsPattern(local_, 6));
}

TEST_F(NcclTest, AnErrorOfNcclEndsTheChannelBeforeTheDeadline) {
  PeerProcess peer({"nccl", absl::StrCat(kBytes), "1"});  // its own library is well
  ASSERT_NE(peer.ticket(), "") << peer.output();
  auto channel = transport_->Attach(peer.ticket(), kPatience);
  ASSERT_TRUE(channel.ok()) << channel.status();
  channel_ = *std::move(channel);
  SetMode(kFail);
  const absl::Status status = Read(absl::Minutes(10));
  EXPECT_TRUE(absl::IsUnavailable(status) && Mentions(status, "stand-in error")) << status;
  EXPECT_TRUE(channel_->Quiesce(kPatience).ok());
  EXPECT_TRUE(Eventually([&] { return peer.Ask("alive") == "no"; }, kPatience));
}

// Why whoever reads from a window checks what was read.
TEST_F(NcclTest, ALibraryThatLiesIsBelieved) {
  Connect();
  FillPattern(window_->memory(), 6);
  SetMode(kLie);
  EXPECT_TRUE(Read(kPatience).ok());
  EXPECT_FALSE(IsPattern(local_, 6));
}

TEST_F(NcclTest, WhereAbortHangsMemoryStaysHeldAndThePathIsClosed) {
  // The same library by another name: the one of the other tests is not closed with it.
  testing::TempFolder folder;
  const std::string path = folder.path() + "/nccl.so";
  std::filesystem::create_symlink(std::filesystem::absolute(KVSTOW_NCCL_STAND_IN), path);
  device_ = {.nccl_path = path, .cudart_path = path};
  MakeTransport(8);
  Connect();
  SetMode(kAbortHangs);
  const auto id =
      channel_->Post({.local = absl::MakeSpan(local_), .timeout = absl::Milliseconds(100)});
  ASSERT_TRUE(id.ok()) << id.status();
  Completion completion;
  ASSERT_EQ(channel_->Poll({&completion, 1}, kPatience), 1u);
  EXPECT_TRUE(absl::IsDeadlineExceeded(completion.status)) << completion.status;
  // Before the abort is given up, and after.
  EXPECT_TRUE(absl::IsDeadlineExceeded(channel_->Quiesce(absl::Milliseconds(50))));
  const absl::StatusOr<const NcclLibrary*> library = LoadNccl(device_);
  ASSERT_TRUE(library.ok()) << library.status();
  ASSERT_TRUE(Eventually([&] { return (*library)->is_stuck.load(); }, kPatience));
  EXPECT_TRUE(absl::IsDeadlineExceeded(channel_->Quiesce(absl::Milliseconds(500))));
  ASSERT_TRUE(Eventually([&] { return !window_->is_alive(); }, kPatience));
  channel_ = nullptr;
  window_ = nullptr;
  SetMode(kWell);
  const std::unique_ptr<Window> next = Open();
  const absl::Status status = transport_->Attach(next->ticket(), kPatience).status();
  EXPECT_TRUE(absl::IsUnavailable(status) && Mentions(status, "hung")) << status;
}

TEST_F(NcclTest, WhoDoesNotKnowTheSecretGetsNothing) {
  window_ = Open();
  absl::StatusOr<NcclTicket> ticket = DecodeNcclTicket(window_->ticket());
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ticket->secret[0] ^= 1;
  const absl::Status status = transport_->Attach(EncodeNcclTicket(*ticket), kPatience).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_TRUE(window_->is_alive());
  EXPECT_TRUE(transport_->Attach(window_->ticket(), kPatience).ok());
}

TEST_F(NcclTest, ARequestOutsideTheWindowEndsIt) {
  window_ = Open();
  const absl::StatusOr<NcclTicket> ticket = DecodeNcclTicket(window_->ticket());
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  const RealClock clock;
  const absl::Time deadline = clock.Now() + kPatience;
  auto socket = NcclSocket::Connect(ticket->host, ticket->port, deadline);
  ASSERT_TRUE(socket.ok()) << socket.status();
  ASSERT_TRUE(socket->Receive(NcclMessageKind::kGreeting, deadline).ok());
  ASSERT_TRUE(
      socket->Send({.kind = NcclMessageKind::kHello, .secret = ticket->secret}, deadline).ok());
  const auto accept = socket->Receive(NcclMessageKind::kAccept, deadline);
  ASSERT_TRUE(accept.ok()) << accept.status();
  const absl::StatusOr<const NcclLibrary*> library = LoadNccl(device_);
  ASSERT_TRUE(library.ok()) << library.status();
  void* comm = nullptr;
  NcclConfig config;
  (*library)->comm_init_rank_config(&comm, 2, accept->unique_id, 1, &config);
  ASSERT_TRUE(
      socket->Send({.kind = NcclMessageKind::kRequest, .offset = 1, .bytes = kBytes}, deadline)
          .ok());
  EXPECT_TRUE(Eventually([&] { return !window_->is_alive(); }, kPatience));
  (*library)->comm_abort(comm);
}

TEST_F(NcclTest, AWindowClosesAtOnceWhileItsServiceNeverConnects) {
  window_ = Open();
  const absl::StatusOr<NcclTicket> ticket = DecodeNcclTicket(window_->ticket());
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  const RealClock clock;
  const absl::Time start = clock.Now();
  auto socket = NcclSocket::Connect(ticket->host, ticket->port, start + kPatience);
  ASSERT_TRUE(socket.ok()) << socket.status();
  ASSERT_TRUE(socket->Receive(NcclMessageKind::kGreeting, start + kPatience).ok());
  ASSERT_TRUE(
      socket->Send({.kind = NcclMessageKind::kHello, .secret = ticket->secret}, start + kPatience)
          .ok());
  ASSERT_TRUE(socket->Receive(NcclMessageKind::kAccept, start + kPatience).ok());
  window_ = nullptr;  // its communicator waits for the other rank
  EXPECT_LT(clock.Now() - start, absl::Seconds(20));
}

TEST_F(NcclTest, TheCapOnChannelsHoldsAndRoomComesBack) {
  MakeTransport(1);
  Connect();
  const std::unique_ptr<Window> other = Open();
  const absl::Status status = transport_->Attach(other->ticket(), kPatience).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status) && Mentions(status, "at most 1")) << status;
  channel_ = nullptr;
  EXPECT_TRUE(transport_->Attach(other->ticket(), kPatience).ok());
}

TEST_F(NcclTest, ATicketSurvivesItsEncodingAndNoByteMayChange) {
  NcclTicket ticket = {.secret = {'s'}, .port = 4711, .bytes = 12345};
  ticket.host.s_addr = htonl(INADDR_LOOPBACK);
  const std::string bytes = EncodeNcclTicket(ticket);
  const absl::StatusOr<NcclTicket> back = DecodeNcclTicket(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->secret, ticket.secret);
  EXPECT_EQ(back->host.s_addr, ticket.host.s_addr);
  EXPECT_EQ(back->port, 4711);
  EXPECT_EQ(back->bytes, 12345);
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] ^= 1;
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeNcclTicket(changed).status())) << i;
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeNcclTicket(bytes.substr(0, i)).status())) << i;
  }
}

}  // namespace
}  // namespace kvstow
