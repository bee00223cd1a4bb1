// Put and Get through a window that the worker shares with the service.
#include <cstring>
#include <optional>

#include "kvstow/v1/channels.grpc.pb.h"
#include "tests/service/server_fixture.h"
#include "transport/shm_window.h"

namespace kvstow::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kWindowBytes = int64_t{8} << 20;

class ServerChannel : public ServerFixture {
 protected:
  void StartWithShm() {
    options_.channels.shm_socket = options_.unix_socket + ".shm";
    Start();
    channels_ = v1::Channels::NewStub(channel_);
  }

  std::unique_ptr<Window> OpenWindow() {
    absl::StatusOr<std::unique_ptr<Window>> window =
        OpenShmWindow({.socket_path = options_.channels.shm_socket, .bytes = kWindowBytes});
    EXPECT_TRUE(window.ok()) << window.status();
    return window.ok() ? *std::move(window) : nullptr;
  }

  grpc::Status OpenChannel(const std::vector<std::pair<std::string, std::string>>& offers,
                           v1::OpenChannelResponse* response) {
    v1::OpenChannelRequest request;
    for (const auto& [path, ticket] : offers) {
      v1::WindowOffer* offer = request.add_offers();
      offer->set_path(path);
      offer->set_ticket(ticket);
    }
    grpc::ClientContext context;
    return channels_->OpenChannel(&context, request, response);
  }

  // A window and the channel on it.
  void Connect() {
    window_ = OpenWindow();
    ASSERT_NE(window_, nullptr);
    v1::OpenChannelResponse response;
    const grpc::Status status = OpenChannel({{"shm", window_->ticket()}}, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.path(), "shm");
    channel_id_ = response.channel();
    ASSERT_NE(channel_id_, 0u);
  }

  // The frame with its payload moved into the window at `offset`.
  v1::PutFrame ThroughWindow(v1::PutFrame frame, uint64_t offset) {
    std::memcpy(window_->memory().data() + offset, frame.payload().data(), frame.payload().size());
    frame.set_channel(channel_id_);
    frame.set_window_offset(offset);
    frame.set_window_bytes(frame.payload().size());
    frame.clear_payload();
    return frame;
  }

  v1::GetRequest GetRequestFor(const BlockKey& key, v1::Form form, uint64_t offset,
                               uint64_t bytes) {
    v1::GetRequest request;
    request.set_keys(std::string(key.AsStringView()));
    request.set_form(form);
    request.set_channel(channel_id_);
    request.set_window_offset(offset);
    request.set_window_bytes(bytes);
    return request;
  }

  std::unique_ptr<v1::Channels::Stub> channels_;
  std::unique_ptr<Window> window_;
  uint64_t channel_id_ = 0;
};

TEST_F(ServerChannel, RowsPutThroughTheWindowAreThoseThatComeBackWithoutIt) {
  StartWithShm();
  Connect();
  const ModelRef model = Register(SmallSpec());
  const std::vector<std::string> rows = MakeRows(*model, 1);
  for (const char* codec : {"raw", "k=tqm4,v=tq4"}) {
    const BlockKey through = Sha256(absl::StrCat("window ", codec));
    const BlockKey around = Sha256(absl::StrCat("message ", codec));
    const uint64_t ticket = Reserve(model, through, codec);
    const v1::PutResult result = PutOne({ThroughWindow(RowsFrame(ticket, 0, rows), 4096)});
    EXPECT_EQ(result.status().code(), 0) << result.status().message();
    EXPECT_EQ(result.num_units(), rows.size());
    EXPECT_EQ(Seal(ticket).code(), 0);
    Store(model, around, rows, codec);
    const std::vector<GotBlock> got = Get({through, around}, v1::FORM_ENCODED);
    EXPECT_EQ(got[0].units, got[1].units) << codec;
    EXPECT_EQ(got[0].codecs, got[1].codecs) << codec;
  }
  EXPECT_GT(Stat().counters().at("put_channel_bytes"), 0u);
}

TEST_F(ServerChannel, BlocksComeThroughTheWindowInBothForms) {
  StartWithShm();
  Connect();
  const ModelRef model = Register(LargeSpec());
  const std::vector<std::string> rows = MakeRows(*model, 2);
  Store(model, Key(1), rows, "k=tqm4,v=tq4");
  for (const v1::Form form : {v1::FORM_ENCODED, v1::FORM_ROWS}) {
    const GotBlock want = Get({Key(1)}, form)[0];
    std::vector<v1::GetFrame> frames;
    const grpc::Status status =
        GetFrames(GetRequestFor(Key(1), form, 4096, kWindowBytes - 4096), &frames);
    ASSERT_TRUE(status.ok()) << status.error_message();
    std::vector<std::string> units;
    uint64_t end_of_last = 4096;
    for (const v1::GetFrame& frame : frames) {
      EXPECT_TRUE(frame.payload().empty());
      ASSERT_GE(frame.window_offset(), end_of_last);
      end_of_last = frame.window_offset() + frame.window_bytes();
      ASSERT_LE(end_of_last, static_cast<uint64_t>(kWindowBytes));
      const auto* payload =
          reinterpret_cast<const char*>(window_->memory().data()) + frame.window_offset();
      size_t end = 0;
      for (const uint32_t bytes : frame.unit_bytes()) {
        const auto start = static_cast<size_t>(AlignPayload(static_cast<int64_t>(end)));
        end = start + bytes;
        units.emplace_back(payload + start, bytes);
      }
      EXPECT_EQ(end, frame.window_bytes());
    }
    EXPECT_EQ(units, want.units);
  }
}

TEST_F(ServerChannel, BytesInTheWindowThatDoNotHaveTheirChecksumAreRefused) {
  StartWithShm();
  Connect();
  const ModelRef model = Register(SmallSpec());
  const std::vector<std::string> rows = MakeRows(*model, 3);
  for (const char* codec : {"raw", "tq4"}) {
    const uint64_t ticket = Reserve(model, Sha256(codec), codec);
    const v1::PutFrame frame = ThroughWindow(RowsFrame(ticket, 0, rows), 0);
    window_->memory()[rows[0].size() + 5] ^= std::byte{1};
    const v1::PutResult result = PutOne({frame});
    EXPECT_EQ(result.status().code(), static_cast<int>(absl::StatusCode::kDataLoss));
    EXPECT_THAT(result.status().message(), HasSubstr("unit 1"));
    EXPECT_EQ(result.num_units(), 1u);
  }
}

TEST_F(ServerChannel, RangesOutsideOfTheWindowAreRefusedWithItsSize) {
  StartWithShm();
  Connect();
  const ModelRef model = Register(SmallSpec());
  const std::vector<std::string> rows = MakeRows(*model, 4);
  const uint64_t ticket = Reserve(model, Key(1), "raw");
  const v1::PutFrame good = ThroughWindow(RowsFrame(ticket, 0, rows), 0);
  const uint64_t bytes = good.window_bytes();
  for (const uint64_t offset : {kWindowBytes - bytes + 1, uint64_t{kWindowBytes} + 1, ~uint64_t{0},
                                ~uint64_t{0} - bytes + 1}) {
    v1::PutFrame frame = good;
    frame.set_window_offset(offset);
    const v1::PutResult result = PutOne({frame});
    EXPECT_EQ(result.status().code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(result.status().message(), HasSubstr("the window has 8388608"));
    std::vector<v1::GetFrame> frames;
    const grpc::Status got =
        GetFrames(GetRequestFor(Key(1), v1::FORM_ENCODED, offset, bytes), &frames);
    EXPECT_EQ(got.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << offset;
  }
  EXPECT_EQ(PutOne({good}).status().code(), 0) << "the ticket lives on";
  EXPECT_EQ(Seal(ticket).code(), 0);
}

TEST_F(ServerChannel, AFrameHasAPayloadOrAWindowAndNoMoreThanAFrameMayHave) {
  StartWithShm();
  Connect();
  const ModelRef model = Register(SmallSpec());
  const uint64_t ticket = Reserve(model, Key(1), "raw");
  v1::PutFrame both = RowsFrame(ticket, 0, MakeRows(*model, 5));
  both.set_channel(channel_id_);
  v1::PutResponse response;
  EXPECT_EQ(Put({both}, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::PutFrame large = RowsFrame(ticket, 0, {});
  large.set_channel(channel_id_);
  large.set_window_bytes(static_cast<uint64_t>(kMaxFrameBytes) + 1);
  const grpc::Status status = Put({large}, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr(absl::StrCat("at most ", kMaxFrameBytes)));
}

TEST_F(ServerChannel, AGetThatDoesNotFitItsRangeSaysHowMuchIsMissing) {
  StartWithShm();
  Connect();
  const ModelRef model = Register(SmallSpec());
  Store(model, Key(1), MakeRows(*model, 6), "raw");
  std::vector<v1::GetFrame> frames;
  const grpc::Status status = GetFrames(GetRequestFor(Key(1), v1::FORM_ENCODED, 0, 1000), &frames);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("1000 bytes are left"));
  EXPECT_EQ(Get({Key(1)}, v1::FORM_ENCODED)[0].code, 0) << "the block is as it was";
}

TEST_F(ServerChannel, UnknownAndClosedChannelsAreNotFound) {
  StartWithShm();
  Connect();
  const ModelRef model = Register(SmallSpec());
  const uint64_t ticket = Reserve(model, Key(1), "raw");
  v1::CloseChannelRequest request;
  request.set_channel(channel_id_);
  v1::CloseChannelResponse closed;
  grpc::ClientContext first, second;
  EXPECT_TRUE(channels_->CloseChannel(&first, request, &closed).ok());
  EXPECT_EQ(channels_->CloseChannel(&second, request, &closed).error_code(),
            grpc::StatusCode::NOT_FOUND);
  v1::PutResponse response;
  EXPECT_EQ(
      Put({ThroughWindow(RowsFrame(ticket, 0, MakeRows(*model, 7)), 0)}, &response).error_code(),
      grpc::StatusCode::NOT_FOUND);
  std::vector<v1::GetFrame> frames;
  EXPECT_EQ(GetFrames(GetRequestFor(Key(1), v1::FORM_ENCODED, 0, 64), &frames).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServerChannel, AChannelGoesWithItsWorker) {
  StartWithShm();
  Connect();
  EXPECT_EQ(Stat().open_channels(), 1u);
  window_.reset();
  const absl::Time limit = absl::Now() + absl::Seconds(20);
  while (Stat().open_channels() != 0 && absl::Now() < limit) {
  }
  EXPECT_EQ(Stat().open_channels(), 0u);
}

TEST_F(ServerChannel, OffersThatCannotBeHadAreNamedWithTheirReason) {
  StartWithShm();
  v1::OpenChannelResponse response;
  EXPECT_EQ(OpenChannel({}, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(
      OpenChannel(std::vector<std::pair<std::string, std::string>>(9, {"shm", "x"}), &response)
          .error_code(),
      grpc::StatusCode::INVALID_ARGUMENT);
  const grpc::Status status = OpenChannel({{"pigeon", "x"}, {"shm", "garbage"}}, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("pigeon: this service does not know it"));
  EXPECT_THAT(status.error_message(), HasSubstr("shm: "));
  // The first that can be had is taken.
  window_ = OpenWindow();
  ASSERT_TRUE(OpenChannel({{"pigeon", "x"}, {"shm", window_->ticket()}}, &response).ok());
  EXPECT_EQ(response.path(), "shm");
  EXPECT_EQ(response.refusals_size(), 1);
}

TEST_F(ServerChannel, ChannelsAreLimited) {
  options_.channels.channels_max = 1;
  StartWithShm();
  Connect();
  const absl::StatusOr<std::unique_ptr<Window>> second =
      OpenShmWindow({.socket_path = options_.channels.shm_socket, .bytes = kWindowBytes});
  EXPECT_TRUE(absl::IsResourceExhausted(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("at most 1"));
}

TEST_F(ServerChannel, WithoutASocketThePathSaysWhyItIsNotThere) {
  Start();
  channels_ = v1::Channels::NewStub(channel_);
  grpc::ClientContext context;
  v1::ListPathsResponse response;
  ASSERT_TRUE(channels_->ListPaths(&context, v1::ListPathsRequest(), &response).ok());
  ASSERT_GE(response.paths_size(), 1);
  EXPECT_EQ(response.paths(0).path(), "shm");
  EXPECT_EQ(response.paths(0).unavailable(), "channels.shm_socket is empty");
}

}  // namespace
}  // namespace kvstow::testing
