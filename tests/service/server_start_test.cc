// Start and stop: addresses, directories, health, reflection, drain.
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "kernels/core/device.h"
#include "tests/service/server_fixture.h"

namespace kvstow {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ServerStart : public ::kvstow::testing::ServerFixture {
 protected:
  absl::Status StartStatus(const ServerOptions& options) {
    return Server::Start(options, &clock_).status();
  }

  // A generic unary call: for services whose generated code would clash with gRPC's own.
  static std::string Unary(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                           const std::string& request, grpc::Status* status);
};

// Health messages are written by hand: gRPC's library has no public stub for its own service.
std::string ServerStart::Unary(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& method, const std::string& request,
                               grpc::Status* status) {
  grpc::ClientContext context;
  const grpc::Slice slice(request);
  const grpc::ByteBuffer sent(&slice, 1);
  grpc::ByteBuffer received;
  std::promise<grpc::Status> done;
  grpc::GenericStub(channel).UnaryCall(&context, method, {}, &sent, &received,
                                       [&](grpc::Status s) { done.set_value(std::move(s)); });
  *status = done.get_future().get();
  grpc::Slice answer;
  if (!status->ok() || !received.TrySingleSlice(&answer).ok()) return "";
  return std::string(reinterpret_cast<const char*>(answer.begin()), answer.size());
}

// The channel of the fixture stays connected, without a call: gRPC alone would wait for it.
TEST_F(ServerStart, DrainDoesNotWaitForClientsThatAreConnectedAndIdle) {
  options_.drain_timeout = absl::Seconds(60);
  Start();
  Stat();
  const auto start = std::chrono::steady_clock::now();
  server_->Drain();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST_F(ServerStart, AnHbmTierNeedsAGpuAndIsRefusedByName) {
  options_.store.hbm_bytes = 64 << 20;
  if (!ListDevices().devices.empty()) {
    Start();
    EXPECT_EQ(Stat().tiers(0).tier(), "hbm");
    EXPECT_EQ(Stat().tiers(0).capacity_bytes(), uint64_t{64} << 20);
    return;
  }
  const absl::Status status = StartStatus(options_);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(),
            absl::StrCat("hbm.capacity is 64 MiB, want 0: no GPU 0: ", ListDevices().why_none));
}

TEST_F(ServerStart, ServesUnixAndTcpAtOnceAndTellsTheRealPort) {
  options_.tcp = "127.0.0.1:0";
  Start();
  ASSERT_GT(server_->tcp_port(), 0);
  const auto tcp = v1::Control::NewStub(grpc::CreateChannel(
      absl::StrCat("127.0.0.1:", server_->tcp_port()), grpc::InsecureChannelCredentials()));
  v1::StatResponse response;
  grpc::ClientContext context;
  EXPECT_TRUE(tcp->Stat(&context, {}, &response).ok());
  EXPECT_EQ(Stat().version(), response.version());
}

TEST_F(ServerStart, LiveUnixSocketIsRefused) {
  Start();
  const absl::Status status = StartStatus(options_);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(),
            absl::StrCat("listen.unix_socket ", options_.unix_socket, ": address in use"));
  EXPECT_EQ(Stat().num_blocks(), 0u) << "the first server lives on";
}

TEST_F(ServerStart, PortInUseIsRefusedAndNamed) {
  options_.tcp = "127.0.0.1:0";
  Start();
  ServerOptions second = options_;
  second.unix_socket = dir_.path() + "/other.sock";
  second.tcp = absl::StrCat("127.0.0.1:", server_->tcp_port());
  const absl::Status status = StartStatus(second);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), absl::StrCat("listen.tcp ", second.tcp, ": address in use"));
  EXPECT_FALSE(fs::exists(second.unix_socket));
}

TEST_F(ServerStart, MetricsPortInUseIsRefusedAndNamedAndNothingListens) {
  options_.metrics_address = "127.0.0.1:0";
  Start();
  ServerOptions second = options_;
  second.unix_socket = dir_.path() + "/other.sock";
  second.metrics_address = absl::StrCat("127.0.0.1:", server_->metrics_port());
  const absl::Status status = StartStatus(second);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(),
            absl::StrCat("metrics.address ", second.metrics_address, ": address in use"));
  EXPECT_FALSE(fs::exists(second.unix_socket));
}

TEST_F(ServerStart, SecondServerOnOneDirectoryIsRefusedAndTheLockIsNamed) {
  options_.store.nvme_path = dir_.path() + "/nvme";
  options_.store.nvme_bytes = int64_t{64} << 20;
  Start();
  ServerOptions second = options_;
  second.unix_socket = dir_.path() + "/other.sock";
  const absl::Status status = StartStatus(second);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr(options_.store.nvme_path));
  EXPECT_FALSE(fs::exists(second.unix_socket));
}

TEST_F(ServerStart, DirectoryThatCannotBeUsedIsNamed) {
  std::ofstream(dir_.path() + "/file") << "in the way";
  options_.store.nvme_path = dir_.path() + "/file/nvme";
  const absl::Status status = StartStatus(options_);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(options_.store.nvme_path));
}

TEST_F(ServerStart, StaleSocketIsReplaced) {
  {
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, options_.unix_socket.c_str(), sizeof(address.sun_path) - 1);
    ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    close(fd);
  }
  ASSERT_TRUE(fs::exists(options_.unix_socket));
  Start();
  EXPECT_EQ(Stat().num_blocks(), 0u);
}

TEST_F(ServerStart, DrainRemovesTheSocketAndFlushesToDisk) {
  options_.store.nvme_path = dir_.path() + "/nvme";
  options_.store.nvme_bytes = int64_t{64} << 20;
  Start();
  const ModelRef model = Register(SmallSpec());
  const std::vector<std::string> rows = MakeRows(*model, 1);
  Store(model, Key(1), rows, "raw");
  server_->Drain();
  server_->Drain();  // does nothing
  EXPECT_FALSE(fs::exists(options_.unix_socket));
  server_.reset();
  Start();
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ENCODED)[0].units, rows);
}

TEST_F(ServerStart, DrainWaitsForACallInFlight) {
  Start();
  const ModelRef model = Register(SmallSpec());
  const uint64_t ticket = Reserve(model, Key(1), "raw");
  grpc::ClientContext context;
  v1::PutResponse response;
  const auto writer = data_->Put(&context, &response);
  const std::vector<std::string> rows = MakeRows(*model, 1);
  ASSERT_TRUE(writer->Write(RowsFrame(ticket, 0, {rows[0]})));
  // The call is known to be in when its first unit is there: a seal then misses the other seven.
  while (Seal(ticket).message().find(" 7 of 8 ") == std::string::npos) {
  }
  std::thread drain([&] { server_->Drain(); });
  // New calls are refused from some moment on; the open one goes on.
  for (;;) {
    grpc::ClientContext probe;
    v1::StatResponse stat;
    if (!control_->Stat(&probe, {}, &stat).ok()) break;
  }
  EXPECT_TRUE(writer->Write(RowsFrame(ticket, 1, {rows.begin() + 1, rows.end()})));
  writer->WritesDone();
  EXPECT_TRUE(writer->Finish().ok());
  EXPECT_EQ(response.results(0).num_units(), 8u);
  drain.join();
}

TEST_F(ServerStart, DrainCancelsWhatOutlivesItsTimeout) {
  options_.drain_timeout = absl::Milliseconds(50);
  Start();
  grpc::ClientContext context;
  v1::PutResponse response;
  const auto writer = data_->Put(&context, &response);
  const ModelRef model = Register(SmallSpec());
  const uint64_t ticket = Reserve(model, Key(1), "raw");
  ASSERT_TRUE(writer->Write(RowsFrame(ticket, 0, MakeRows(*model, 1))));
  server_->Drain();  // returns: the idle stream is cancelled
  EXPECT_FALSE(writer->Finish().ok());
}

TEST_F(ServerStart, HealthAnswersForTheServerAndNotForUnknownServices) {
  Start();
  grpc::Status status;
  // HealthCheckResponse { status: SERVING }
  EXPECT_EQ(Unary(channel_, "/grpc.health.v1.Health/Check", "", &status), std::string("\x08\x01"));
  EXPECT_TRUE(status.ok()) << status.error_message();
  // HealthCheckRequest { service: "nobody" }
  Unary(channel_, "/grpc.health.v1.Health/Check", "\x0a\x06nobody", &status);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerStart, ReflectionListsOurServices) {
  Start();
  grpc::ClientContext context;
  const grpc::internal::RpcMethod rpc(
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
      grpc::internal::RpcMethod::BIDI_STREAMING);
  const std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          channel_.get(), rpc, &context));
  const grpc::Slice slice(std::string("\x3a\x00", 2));  // { list_services: "" }
  ASSERT_TRUE(stream->Write(grpc::ByteBuffer(&slice, 1)));
  grpc::ByteBuffer received;
  ASSERT_TRUE(stream->Read(&received));
  grpc::Slice answer;
  ASSERT_TRUE(received.DumpToSingleSlice(&answer).ok());
  const std::string text(reinterpret_cast<const char*>(answer.begin()), answer.size());
  for (const char* name : {"kvstow.v1.Control", "kvstow.v1.Data", "kvstow.v1.Models"}) {
    EXPECT_THAT(text, HasSubstr(name));
  }
  stream->WritesDone();
  stream->Finish();
}

}  // namespace
}  // namespace kvstow
