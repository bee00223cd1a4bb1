// Limits: calls, bytes and queues that are full answer at once; and the numbers of the metrics
// page.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <sstream>

#include "service/service_parts.h"
#include "tests/service/server_fixture.h"

namespace kvstow {
namespace {

using ::testing::HasSubstr;

class ServerLimits : public ::kvstow::testing::ServerFixture {
 protected:
  // One scrape: "kvstow_tier_blocks{tier="dram"}" -> value.
  std::map<std::string, double> Scrape() {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(server_->metrics_port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const std::string request = "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n";
    EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
    std::string page;
    char buffer[65536];
    for (ssize_t n = 0; (n = read(fd, buffer, sizeof(buffer))) > 0;) {
      page.append(buffer, static_cast<size_t>(n));
    }
    close(fd);
    EXPECT_THAT(page, HasSubstr("200 OK"));
    std::map<std::string, double> values;
    std::istringstream lines(page);
    for (std::string line; std::getline(lines, line);) {
      const size_t space = line.rfind(' ');
      if (line.rfind("kvstow_", 0) != 0 || space == std::string::npos) continue;
      values[line.substr(0, space)] = std::stod(line.substr(space + 1));
    }
    return values;
  }
};

TEST_F(ServerLimits, CallsOverTheLimitAreRefusedAtOnceWithAHint) {
  options_.limits.calls_in_flight_max = 1;
  Start();
  const ModelRef model = Register(SmallSpec());
  const uint64_t ticket = Reserve(model, Key(1), "raw");
  grpc::ClientContext open_context;
  v1::PutResponse response;
  const auto open_call = data_->Put(&open_context, &response);
  ASSERT_TRUE(open_call->Write(RowsFrame(ticket, 0, MakeRows(*model, 1))));
  // The first call is known to be in when its units are.
  while (Seal(ticket).code() != 0) {
  }
  v1::GetRequest request;
  request.set_keys(KeysToBytes(std::vector<BlockKey>{Key(1)}));
  std::vector<v1::GetFrame> frames;
  const grpc::Status refused = GetFrames(request, &frames);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.error_message(), "calls in flight: 1 of 1");
  EXPECT_EQ(RetryAfter(FromGrpcStatus(refused)), absl::Milliseconds(100));
  EXPECT_EQ(Stat().num_blocks(), 1u) << "control calls are not data calls";
  open_call->WritesDone();
  EXPECT_TRUE(open_call->Finish().ok());
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ENCODED)[0].code, 0);
}

TEST_F(ServerLimits, BlockThatDoesNotFitTheBytesInFlightEndsTheCall) {
  options_.limits.bytes_in_flight_max = 2 * kCallBytes + (int64_t{1} << 20);
  Start();
  const ModelRef model = Register(LargeSpec());  // 2 MiB a block
  Store(model, Key(1), MakeRows(*model, 1), "raw");
  const ModelRef small = Register(SmallSpec());
  const uint64_t ticket = Reserve(small, Key(2), "raw");
  grpc::ClientContext open_context;
  v1::PutResponse response;
  const auto open_call = data_->Put(&open_context, &response);
  ASSERT_TRUE(open_call->Write(RowsFrame(ticket, 0, MakeRows(*small, 1))));
  while (Seal(ticket).code() != 0) {
  }
  v1::GetRequest request;
  request.set_keys(KeysToBytes(std::vector<BlockKey>{Key(1)}));
  std::vector<v1::GetFrame> frames;
  const grpc::Status refused = GetFrames(request, &frames);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(),
              HasSubstr("bytes in flight: 16777216 of 17825792 are held, 21"));
  EXPECT_EQ(RetryAfter(FromGrpcStatus(refused)), absl::Milliseconds(100));
  open_call->WritesDone();
  EXPECT_TRUE(open_call->Finish().ok());
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ENCODED)[0].code, 0);
}

// 16 MiB may be in flight, 8 of them are the call's own; the block has 16.
TEST_F(ServerLimits, BlockLargerThanTheLimitGoesOutWhenItIsAlone) {
  options_.limits.bytes_in_flight_max = 2 * kCallBytes;
  Start();
  ModelSpec spec = LargeSpec();
  spec.groups[0].num_layers = 128;
  const ModelRef model = Register(spec);
  const std::vector<std::string> rows = MakeRows(*model, 1);
  Store(model, Key(1), rows, "raw");
  EXPECT_TRUE(Get({Key(1)}, v1::FORM_ENCODED)[0].units == rows);
}

// One worker with a queue of one, and four frames at once: some are refused. What was refused is
// named, and sent again until it is in; nothing is lost without a word.
TEST_F(ServerLimits, FullQueueRefusesFramesWithAHintAndLosesNone) {
  options_.limits.worker_threads = 1;
  options_.limits.queue_max = 1;
  Start();
  const ModelRef model = Register(LargeSpec());
  const std::vector<std::string> rows = MakeRows(*model, 1);
  const uint64_t ticket = Reserve(model, Key(1), "int8");
  std::vector<v1::PutFrame> frames;
  for (uint32_t i = 0; i < rows.size(); ++i) frames.push_back(RowsFrame(ticket, i, {rows[i]}));
  for (;;) {
    const v1::PutResult result = PutOne(frames);
    if (result.status().code() == 0) break;
    ASSERT_EQ(result.status().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    ASSERT_EQ(result.status().message(), "the queue of the worker threads is full: 1 items wait");
    ASSERT_EQ(result.status().retry_after_ms(), 100u);
    ASSERT_LT(result.num_units(), rows.size());
  }
  EXPECT_EQ(Seal(ticket).code(), 0);
}

TEST_F(ServerLimits, TicketsOverTheLimitAreRefusedWithAHint) {
  options_.store.tickets_max = 2;
  Start();
  const ModelRef model = Register(SmallSpec());
  Reserve(model, Key(1), "raw");
  Reserve(model, Key(2), "raw");
  const v1::ReserveResult refused = ReserveItem(model, Key(3), "raw");
  EXPECT_EQ(refused.status().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.status().message(),
            "2 tickets are open or wait for their memory, the limit is 2");
  EXPECT_EQ(refused.status().retry_after_ms(), 100u);
}

TEST_F(ServerLimits, LeasesOverTheLimitAreRefusedWithAHint) {
  options_.store.leases_max = 1;
  Start();
  const ModelRef model = Register(SmallSpec());
  Store(model, Key(1), MakeRows(*model, 1), "raw");
  v1::AcquireRequest request;
  request.set_keys(KeysToBytes(std::vector<BlockKey>{Key(1)}));
  request.set_ttl_ms(1000);
  v1::AcquireResponse response;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(control_->Acquire(&context, request, &response).ok());
  }
  grpc::ClientContext context;
  const grpc::Status refused = control_->Acquire(&context, request, &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.error_message(), "1 leases are open, the limit is 1");
  EXPECT_EQ(RetryAfter(FromGrpcStatus(refused)), absl::Milliseconds(100));
}

// Leases hold every block of a full memory without a disk: a put is refused at once; when the
// leases end it goes through.
TEST_F(ServerLimits, PinnedMemoryRefusesPutsUntilTheLeasesEnd) {
  Start();
  const ModelRef model = Register(LargeSpec());
  const std::vector<std::string> rows = MakeRows(*model, 1);
  std::vector<BlockKey> keys;
  for (int i = 0; i < 15; ++i) {
    keys.push_back(Key(i));
    Store(model, Key(i), rows, "raw");
  }
  v1::AcquireRequest request;
  request.set_keys(KeysToBytes(keys));
  request.set_ttl_ms(1000);
  v1::AcquireResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(control_->Acquire(&context, request, &response).ok());
  const v1::ReserveResult refused = ReserveItem(model, Key(100), "raw");
  EXPECT_EQ(refused.status().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.status().retry_after_ms(), 100u);
  clock_.Advance(absl::Seconds(2));
  Store(model, Key(100), rows, "raw");
}

TEST_F(ServerLimits, MetricsMoveByExactlyWhatWasDone) {
  options_.metrics_address = "127.0.0.1:0";
  Start();
  ASSERT_GT(server_->metrics_port(), 0);
  const ModelRef model = Register(SmallSpec());
  const std::vector<std::string> rows = MakeRows(*model, 1);
  Store(model, Key(1), rows, "raw");
  std::map<std::string, double> before = Scrape();
  Store(model, Key(2), rows, "int8");
  Store(model, Key(3), rows, "int8");
  Lookup({Key(1), Key(2), Key(50)});
  Get({Key(1), Key(50)}, v1::FORM_ENCODED);
  Get({Key(2)}, v1::FORM_ROWS);
  ReserveItem(model, Key(1), "raw");
  std::map<std::string, double> after = Scrape();
  const auto delta = [&](const std::string& name) {
    EXPECT_TRUE(after.count(name)) << name;
    return after[name] - before[name];
  };
  double int8_bytes = 0;
  for (int32_t i = 0; i < 8; ++i) int8_bytes += model->unit_bytes(i, CodecId::kInt8);
  const auto record_bytes = static_cast<double>(server_->store().Get(Key(2))->bytes().size());
  EXPECT_EQ(delta("kvstow_tier_blocks{tier=\"dram\"}"), 2);
  EXPECT_EQ(delta("kvstow_tier_sealed_bytes{tier=\"dram\"}"), 2 * record_bytes);
  EXPECT_EQ(after["kvstow_tier_capacity_bytes{tier=\"dram\"}"], 32 << 20);
  EXPECT_EQ(after["kvstow_codec_blocks{codec=\"int8\"}"], 2);
  EXPECT_EQ(after["kvstow_codec_blocks{codec=\"raw\"}"], 1);
  EXPECT_EQ(after["kvstow_codec_record_bytes{codec=\"int8\"}"], 2 * record_bytes);
  EXPECT_EQ(after["kvstow_codec_logical_bytes{codec=\"int8\"}"], 2 * 32768);
  EXPECT_EQ(delta("kvstow_seals_total"), 2);
  EXPECT_EQ(delta("kvstow_lookups_total"), 3);
  EXPECT_EQ(delta("kvstow_lookup_hits_total"), 2);
  EXPECT_EQ(delta("kvstow_dram_hits_total"), 2);
  EXPECT_EQ(delta("kvstow_misses_total"), 1);
  EXPECT_EQ(delta("kvstow_put_rows_bytes_total"), 2 * 32768);
  EXPECT_EQ(delta("kvstow_put_encoded_bytes_total"), 0);
  EXPECT_EQ(delta("kvstow_put_unit_bytes_total"), 2 * int8_bytes);
  EXPECT_EQ(delta("kvstow_get_encoded_bytes_total"), 32768);
  EXPECT_EQ(delta("kvstow_get_rows_bytes_total"), 32768);
  EXPECT_EQ(delta("kvstow_get_unit_bytes_total"), 32768 + int8_bytes);
  EXPECT_EQ(delta("kvstow_rpc_total{method=\"Get\",code=\"OK\"}"), 2);
  EXPECT_EQ(delta("kvstow_rpc_total{method=\"Put\",code=\"OK\"}"), 2);
  EXPECT_EQ(delta("kvstow_rpc_total{method=\"Reserve\",code=\"OK\"}"), 3);
  EXPECT_EQ(delta("kvstow_rpc_seconds_count{method=\"Seal\"}"), 2);
  EXPECT_EQ(delta("kvstow_rpc_seconds_bucket{method=\"Seal\",le=\"+Inf\"}"), 2);
  EXPECT_EQ(after["kvstow_open_tickets"], 0);
  EXPECT_EQ(after["kvstow_calls_in_flight"], 0);
}

TEST_F(ServerLimits, RefusedCallsAreCountedByCodeAndLimit) {
  options_.metrics_address = "127.0.0.1:0";
  options_.limits.bytes_in_flight_max = kCallBytes - 1;
  Start();
  v1::GetRequest request;
  request.set_keys(KeysToBytes(std::vector<BlockKey>{Key(1)}));
  std::vector<v1::GetFrame> frames;
  EXPECT_FALSE(GetFrames(request, &frames).ok());
  std::map<std::string, double> page = Scrape();
  EXPECT_EQ(page["kvstow_admission_refused_total{limit=\"bytes\"}"], 1);
  EXPECT_EQ(page["kvstow_admission_refused_total{limit=\"calls\"}"], 0);
  EXPECT_EQ(page["kvstow_rpc_total{method=\"Get\",code=\"RESOURCE_EXHAUSTED\"}"], 1);
}

}  // namespace
}  // namespace kvstow
