#include "tests/service/server_fixture.h"

#include <algorithm>
#include <cstring>

#include "tests/testing/rng.h"

namespace kvstow::testing {
namespace {

void AddFrame(const v1::GetFrame& frame, GotBlock& block) {
  if (frame.code() != 0) {
    EXPECT_TRUE(frame.payload().empty());
    block.code = frame.code();
    ++block.num_frames;
    return;
  }
  EXPECT_EQ(block.code, 0) << "nothing follows the end of a block";
  EXPECT_EQ(frame.first_unit(), block.units.size());
  EXPECT_EQ(frame.key().empty(), block.num_frames > 0) << "key in the first frame only";
  if (block.num_frames++ == 0) {
    block.key = frame.key();
    block.fingerprint = frame.fingerprint();
    block.calibration_id = frame.calibration_id();
    block.num_units = frame.num_units();
    block.num_tokens = frame.num_tokens();
  }
  ASSERT_EQ(frame.unit_bytes_size(), frame.unit_xxh3_size());
  ASSERT_EQ(frame.unit_codec_size(), frame.unit_xxh3_size());
  size_t end = 0;
  for (int i = 0; i < frame.unit_bytes_size(); ++i) {
    const auto start = static_cast<size_t>(AlignPayload(static_cast<int64_t>(end)));
    for (; end < start; ++end) EXPECT_EQ(frame.payload()[end], '\0') << "gap at " << end;
    end = start + frame.unit_bytes(i);
    ASSERT_LE(end, frame.payload().size());
    block.units.push_back(frame.payload().substr(start, frame.unit_bytes(i)));
    block.codecs.push_back(static_cast<CodecId>(frame.unit_codec(i)));
    EXPECT_EQ(Xxh3(AsBytes(block.units.back())), frame.unit_xxh3(i)) << "unit " << i;
  }
  EXPECT_EQ(end, frame.payload().size());
}

}  // namespace

ServerFixture::ServerFixture() {
  options_.unix_socket = dir_.path() + "/kvstow.sock";
  options_.store.dram_bytes = int64_t{32} << 20;
  options_.limits.worker_threads = 2;
}

void ServerFixture::Start() {
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options_, &clock_);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  // A channel of its own for each server: gRPC would share one between equal targets.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel_ = grpc::CreateCustomChannel("unix:" + options_.unix_socket,
                                       grpc::InsecureChannelCredentials(), arguments);
  models_ = v1::Models::NewStub(channel_);
  control_ = v1::Control::NewStub(channel_);
  data_ = v1::Data::NewStub(channel_);
  calibrations_ = v1::Calibrations::NewStub(channel_);
}

void ServerFixture::Restart() {
  server_.reset();
  Start();
}

// 2 layers of 2 KV heads: 8 planes of [32, 64], 32 KiB as bf16.
ModelSpec ServerFixture::SmallSpec(DType dtype) {
  ModelSpec spec;
  spec.name = "small";
  spec.weights = "revision 1";
  spec.kv_dtype = dtype;
  spec.groups = {{.first_layer = 0,
                  .num_layers = 2,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 2,
                  .k_dim = 64,
                  .v_dim = 64}};
  spec.tokens_per_block = 32;
  return spec;
}

// 16 layers of 4 KV heads of 128: 128 planes of 16 KiB, 2 MiB as bf16.
ModelSpec ServerFixture::LargeSpec() {
  ModelSpec spec = SmallSpec();
  spec.name = "large";
  spec.groups = {{.first_layer = 0,
                  .num_layers = 16,
                  .kind = LayerKind::kFull,
                  .num_kv_heads = 4,
                  .k_dim = 128,
                  .v_dim = 128}};
  spec.tokens_per_block = 64;
  return spec;
}

ModelRef ServerFixture::Register(const ModelSpec& spec) {
  v1::RegisterModelRequest request;
  *request.mutable_spec() = ModelSpecToProto(spec);
  v1::RegisterModelResponse response;
  grpc::ClientContext context;
  const grpc::Status status = models_->RegisterModel(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.fingerprint(), std::string(spec.Fingerprint().AsStringView()));
  return *RegisteredModel::Create(spec);
}

BlockKey ServerFixture::Key(int i) { return Sha256(absl::StrCat("key ", i)); }

// Gaussian bf16 rows of every plane of a block.
std::vector<std::string> ServerFixture::MakeRows(const RegisteredModel& model, uint64_t seed) {
  Rng rng(seed);
  std::vector<std::string> planes;
  for (const PlaneInfo& plane : model.layout().planes()) {
    std::string rows(static_cast<size_t>(plane.row_bytes), '\0');
    for (size_t at = 0; at + 2 <= rows.size(); at += 2) {
      const uint16_t bits = FloatToBf16(static_cast<float>(rng.Gaussian()));
      std::memcpy(rows.data() + at, &bits, 2);
    }
    planes.push_back(std::move(rows));
  }
  return planes;
}

v1::ReserveResult ServerFixture::ReserveItem(const ModelRef& model, const BlockKey& key,
                                             const std::string& codec, v1::Form form) {
  v1::ReserveRequest request;
  request.set_fingerprint(std::string(model->fingerprint().AsStringView()));
  request.set_form(form);
  v1::ReserveBlock* block = request.add_blocks();
  block->set_key(std::string(key.AsStringView()));
  block->set_codec(codec);
  v1::ReserveResponse response;
  grpc::ClientContext context;
  const grpc::Status status = control_->Reserve(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.results_size() == 1 ? response.results(0) : v1::ReserveResult();
}

uint64_t ServerFixture::Reserve(const ModelRef& model, const BlockKey& key,
                                const std::string& codec, v1::Form form) {
  const v1::ReserveResult result = ReserveItem(model, key, codec, form);
  EXPECT_EQ(result.status().code(), 0) << result.status().message();
  return result.ticket();
}

// A frame of rows: units [first, first + units.size()).
v1::PutFrame ServerFixture::RowsFrame(uint64_t ticket, uint32_t first,
                                      const std::vector<std::string>& units) {
  v1::PutFrame frame;
  frame.set_ticket(ticket);
  frame.set_first_unit(first);
  std::string& payload = *frame.mutable_payload();
  for (const std::string& unit : units) {
    payload.resize(static_cast<size_t>(AlignPayload(static_cast<int64_t>(payload.size()))));
    payload += unit;
    frame.add_unit_xxh3(Xxh3(AsBytes(unit)));
  }
  return frame;
}

v1::PutFrame ServerFixture::EncodedFrame(uint64_t ticket, uint32_t first,
                                         const std::vector<std::string>& units,
                                         const std::vector<CodecId>& codecs) {
  v1::PutFrame frame = RowsFrame(ticket, first, units);
  for (const std::string& unit : units) {
    frame.add_unit_bytes(static_cast<uint32_t>(unit.size()));
  }
  for (const CodecId codec : codecs) frame.add_unit_codec(static_cast<uint32_t>(codec));
  return frame;
}

grpc::Status ServerFixture::Put(const std::vector<v1::PutFrame>& frames,
                                v1::PutResponse* response) {
  grpc::ClientContext context;
  const auto writer = data_->Put(&context, response);
  for (const v1::PutFrame& frame : frames) {
    if (!writer->Write(frame)) break;
  }
  writer->WritesDone();
  return writer->Finish();
}

// One call for one ticket.
v1::PutResult ServerFixture::PutOne(const std::vector<v1::PutFrame>& frames) {
  v1::PutResponse response;
  const grpc::Status status = Put(frames, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.results_size(), 1);
  return response.results_size() == 1 ? response.results(0) : v1::PutResult();
}

v1::ItemStatus ServerFixture::Seal(uint64_t ticket, bool durable) {
  v1::SealRequest request;
  request.add_tickets(ticket);
  request.set_durable(durable);
  v1::SealResponse response;
  grpc::ClientContext context;
  const grpc::Status status = control_->Seal(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response.results_size() == 1 ? response.results(0) : v1::ItemStatus();
}

v1::ItemStatus ServerFixture::Abort(uint64_t ticket) {
  v1::AbortRequest request;
  request.add_tickets(ticket);
  v1::AbortResponse response;
  grpc::ClientContext context;
  EXPECT_TRUE(control_->Abort(&context, request, &response).ok());
  return response.results_size() == 1 ? response.results(0) : v1::ItemStatus();
}

// Reserve, put all rows in one frame, seal.
void ServerFixture::Store(const ModelRef& model, const BlockKey& key,
                          const std::vector<std::string>& rows, const std::string& codec,
                          bool durable) {
  const uint64_t ticket = Reserve(model, key, codec);
  std::vector<v1::PutFrame> frames;
  for (size_t first = 0; first < rows.size(); first += 32) {
    const size_t last = std::min(first + 32, rows.size());
    frames.push_back(RowsFrame(
        ticket, static_cast<uint32_t>(first),
        {rows.begin() + static_cast<int64_t>(first), rows.begin() + static_cast<int64_t>(last)}));
  }
  const v1::PutResult put = PutOne(frames);
  EXPECT_EQ(put.status().code(), 0) << put.status().message();
  EXPECT_EQ(put.num_units(), rows.size());
  const v1::ItemStatus sealed = Seal(ticket, durable);
  EXPECT_EQ(sealed.code(), 0) << sealed.message();
}

grpc::Status ServerFixture::GetFrames(const v1::GetRequest& request,
                                      std::vector<v1::GetFrame>* frames) {
  grpc::ClientContext context;
  const auto reader = data_->Get(&context, request);
  v1::GetFrame frame;
  while (reader->Read(&frame)) frames->push_back(frame);
  return reader->Finish();
}

// Puts the frames of a Get together, holding every one to the rules of data.proto.
std::vector<GotBlock> ServerFixture::Get(const std::vector<BlockKey>& keys, v1::Form form) {
  v1::GetRequest request;
  request.set_keys(KeysToBytes(keys));
  request.set_form(form);
  std::vector<v1::GetFrame> frames;
  const grpc::Status status = GetFrames(request, &frames);
  EXPECT_TRUE(status.ok()) << status.error_message();
  std::vector<GotBlock> blocks(keys.size());
  uint32_t last_idx = 0;
  for (const v1::GetFrame& frame : frames) {
    EXPECT_GE(frame.block_idx(), last_idx) << "blocks come in the order asked for";
    last_idx = frame.block_idx();
    if (frame.block_idx() >= blocks.size()) return blocks;
    AddFrame(frame, blocks[frame.block_idx()]);
  }
  return blocks;
}

v1::StatResponse ServerFixture::Stat() {
  v1::StatResponse response;
  grpc::ClientContext context;
  EXPECT_TRUE(control_->Stat(&context, {}, &response).ok());
  return response;
}

v1::LookupResponse ServerFixture::Lookup(const std::vector<BlockKey>& keys) {
  v1::LookupRequest request;
  request.set_keys(KeysToBytes(keys));
  v1::LookupResponse response;
  grpc::ClientContext context;
  EXPECT_TRUE(control_->Lookup(&context, request, &response).ok());
  return response;
}

// The plane as the scalar reference encodes it; empty where it is to be kept raw.
std::string ScalarEncode(const RegisteredModel& model, int32_t plane, CodecId codec_id,
                         const std::string& rows, const Calibration* calibration) {
  const Codec& codec = *FindCodec(codec_id);
  const PlaneShape shape = model.shape(plane, calibration);
  std::string unit(static_cast<size_t>(codec.plane_bytes(shape)), '\0');
  const EncodeResult result =
      codec.host[0].encode(shape, AsBytes(rows).data(), reinterpret_cast<std::byte*>(unit.data()));
  return result == EncodeResult::kKeepRaw ? "" : unit;
}

std::string ScalarDecode(const RegisteredModel& model, int32_t plane, CodecId codec_id,
                         const std::string& unit, const Calibration* calibration) {
  std::string rows(static_cast<size_t>(model.layout().plane(plane).row_bytes), '\0');
  FindCodec(codec_id)->host[0].decode(model.shape(plane, calibration), AsBytes(unit).data(),
                                      reinterpret_cast<std::byte*>(rows.data()));
  return rows;
}

}  // namespace kvstow::testing
