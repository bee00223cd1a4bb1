#include "tests/client/fake_service.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <chrono>
#include <cstring>

#include "kernels/codec/codec.h"
#include "kernels/core/checksum.h"
#include "proto/convert.h"
#include "proto/frames.h"
#include "proto/status.h"

namespace kvstow::testing {
namespace {

uint64_t HashOf(const std::string& bytes) {
  return Xxh3({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
}

}  // namespace

grpc::Status FakeService::RegisterModel(grpc::ServerContext*,
                                        const v1::RegisterModelRequest* request,
                                        v1::RegisterModelResponse* response) {
  const absl::StatusOr<ModelSpec> spec = ModelSpecFromProto(request->spec());
  if (!spec.ok()) return ToGrpcStatus(spec.status());
  const BlockLayout layout = *BlockLayout::Create(*spec);
  const std::string fingerprint(spec->Fingerprint().AsStringView());
  models[fingerprint] = request->spec();
  response->set_fingerprint(fingerprint);
  response->set_num_planes(layout.num_planes());
  response->set_block_bytes(layout.block_bytes());
  if (hooks.registered) hooks.registered(*response);
  return grpc::Status::OK;
}

grpc::Status FakeService::GetModel(grpc::ServerContext*, const v1::GetModelRequest* request,
                                   v1::GetModelResponse* response) {
  const auto found = models.find(request->fingerprint());
  if (found == models.end()) return {grpc::StatusCode::NOT_FOUND, "model not registered"};
  *response->mutable_spec() = found->second;
  return grpc::Status::OK;
}

grpc::Status FakeService::ListModels(grpc::ServerContext*, const v1::ListModelsRequest*,
                                     v1::ListModelsResponse* response) {
  for (const auto& [fingerprint, spec] : models) *response->add_specs() = spec;
  return grpc::Status::OK;
}

grpc::Status FakeService::Lookup(grpc::ServerContext* context, const v1::LookupRequest* request,
                                 v1::LookupResponse* response) {
  ++num_lookups;
  if (hooks.lookup) {
    if (const grpc::Status status = hooks.lookup(context); !status.ok()) return status;
  }
  for (size_t i = 0; i + 32 <= request->keys().size(); i += 32) {
    response->mutable_locations()->push_back(blocks.count(request->keys().substr(i, 32)) > 0 ? 1
                                                                                             : 0);
  }
  return grpc::Status::OK;
}

grpc::Status FakeService::Reserve(grpc::ServerContext*, const v1::ReserveRequest* request,
                                  v1::ReserveResponse* response) {
  reserves.push_back(*request);
  for (const v1::ReserveBlock& block : request->blocks()) {
    v1::ReserveResult* result = response->add_results();
    absl::Status status;
    if (hooks.reserve) status = hooks.reserve(block);
    if (status.ok() && blocks.count(block.key()) > 0) status = absl::AlreadyExistsError("sealed");
    *result->mutable_status() = ToItemStatus(status);
    if (!status.ok()) continue;
    result->set_ticket(next_ticket_);
    tickets[next_ticket_++] = {block.key(), FakeBlock{.fingerprint = request->fingerprint(),
                                                      .codec = block.codec(),
                                                      .form = request->form()}};
  }
  return grpc::Status::OK;
}

grpc::Status FakeService::Put(grpc::ServerContext* context,
                              grpc::ServerReader<v1::PutFrame>* reader, v1::PutResponse* response) {
  int call = 0;
  {
    MutexLock lock(&mutex_);
    call = num_puts++;
  }
  if (hooks.put_start) {
    if (const grpc::Status status = hooks.put_start(context, call); !status.ok()) return status;
  }
  std::map<uint64_t, absl::Status> results;
  v1::PutFrame frame;
  for (int num_frames = 0; reader->Read(&frame); ++num_frames) {
    if (hooks.put_frame) hooks.put_frame(frame, call);
    const absl::Status status = TakeFrame(frame);
    absl::Status& result = results.emplace(frame.ticket(), absl::OkStatus()).first->second;
    if (result.ok()) result = status;
    if (!hooks.put_after_frame) continue;
    const grpc::Status after = hooks.put_after_frame(context, call, num_frames);
    if (!after.ok()) return after;
  }
  for (const auto& [ticket, status] : results) {
    v1::PutResult* result = response->add_results();
    result->set_ticket(ticket);
    *result->mutable_status() = ToItemStatus(status);
  }
  return grpc::Status::OK;
}

grpc::Status FakeService::Seal(grpc::ServerContext*, const v1::SealRequest* request,
                               v1::SealResponse* response) {
  seals.push_back(*request);
  for (const uint64_t id : request->tickets()) {
    absl::Status status;
    if (hooks.seal) status = hooks.seal(id);
    const auto found = tickets.find(id);
    if (found == tickets.end()) status = absl::NotFoundError("unknown ticket");
    if (status.ok()) {
      blocks[found->second.first] = found->second.second;
      tickets.erase(found);
    }
    *response->add_results() = ToItemStatus(status);
  }
  return grpc::Status::OK;
}

grpc::Status FakeService::Abort(grpc::ServerContext*, const v1::AbortRequest* request,
                                v1::AbortResponse* response) {
  for (const uint64_t id : request->tickets()) {
    aborted.push_back(id);
    tickets.erase(id);
    response->add_results();
  }
  return grpc::Status::OK;
}

grpc::Status FakeService::Delete(grpc::ServerContext*, const v1::DeleteRequest* request,
                                 v1::DeleteResponse* response) {
  uint32_t num_deleted = 0;
  for (size_t i = 0; i + 32 <= request->keys().size(); i += 32) {
    num_deleted += blocks.erase(request->keys().substr(i, 32));
  }
  response->set_num_deleted(num_deleted);
  return grpc::Status::OK;
}

grpc::Status FakeService::Verify(grpc::ServerContext*, const v1::VerifyRequest* request,
                                 grpc::ServerWriter<v1::VerifyProgress>* writer) {
  v1::VerifyProgress progress;
  for (size_t i = 0; i + 32 <= request->keys().size(); i += 32) {
    verified.push_back(request->keys().substr(i, 32));
    progress.set_num_checked(i / 32 + 1);
    progress.set_num_total(request->keys().size() / 32);
    writer->Write(progress);
  }
  progress.set_done(true);
  progress.add_bad_keys(std::string(32, 'b'));
  writer->Write(progress);
  return grpc::Status::OK;
}

grpc::Status FakeService::Get(grpc::ServerContext* context, const v1::GetRequest* request,
                              grpc::ServerWriter<v1::GetFrame>* writer) {
  int num_frames = 0;
  for (uint32_t i = 0; i * 32 + 32 <= request->keys().size(); ++i) {
    for (v1::GetFrame& frame : FramesOf(request->keys().substr(i * 32, 32), i)) {
      const int frame_idx = num_frames++;
      if (!hooks.get_frame || hooks.get_frame(frame, frame_idx)) writer->Write(frame);
      if (!hooks.get_after_frame) continue;
      const grpc::Status status = hooks.get_after_frame(context, frame_idx);
      if (!status.ok()) return status;
    }
  }
  return grpc::Status::OK;
}

std::vector<v1::GetFrame> FakeService::FramesOf(const std::string& key, uint32_t block_idx) const {
  std::vector<v1::GetFrame> frames;
  const auto found = blocks.find(key);
  if (found == blocks.end()) {
    frames.emplace_back().set_block_idx(block_idx);
    frames.back().set_code(static_cast<int>(grpc::StatusCode::NOT_FOUND));
    return frames;
  }
  const FakeBlock& block = found->second;
  const BlockLayout layout =
      *BlockLayout::Create(*ModelSpecFromProto(models.at(block.fingerprint)));
  for (const auto& [unit_idx, unit] : block.units) {
    if (unit_idx % units_per_get_frame == 0) {
      v1::GetFrame& frame = frames.emplace_back();
      frame.set_block_idx(block_idx);
      frame.set_first_unit(unit_idx);
    }
    v1::GetFrame& frame = frames.back();
    if (unit_idx == 0) {
      frame.set_key(key);
      frame.set_fingerprint(block.fingerprint);
      frame.set_num_units(layout.num_planes());
      frame.set_num_tokens(layout.tokens_per_block());
    }
    frame.mutable_payload()->resize(AlignPayload(frame.payload().size()));
    *frame.mutable_payload() += unit.bytes;
    frame.add_unit_bytes(unit.bytes.size());
    frame.add_unit_codec(unit.codec);
    frame.add_unit_xxh3(HashOf(unit.bytes));
  }
  return frames;
}

absl::Status FakeService::TakeFrame(const v1::PutFrame& frame) {
  MutexLock lock(&mutex_);
  put_payload_bytes.push_back(static_cast<int64_t>(frame.payload().size()));
  const auto found = tickets.find(frame.ticket());
  if (found == tickets.end()) return absl::NotFoundError("unknown ticket");
  FakeBlock& block = found->second.second;
  const BlockLayout layout =
      *BlockLayout::Create(*ModelSpecFromProto(models.at(block.fingerprint)));
  int64_t at = 0;
  for (int i = 0; i < frame.unit_xxh3_size(); ++i) {
    const uint32_t unit_idx = frame.first_unit() + i;
    const PlaneInfo& plane = layout.plane(static_cast<int32_t>(unit_idx));
    const bool is_encoded = block.form == v1::FORM_ENCODED;
    const int64_t bytes = is_encoded ? frame.unit_bytes(i) : plane.row_bytes;
    at = AlignPayload(at);
    FakeUnit unit{.codec = is_encoded ? frame.unit_codec(i) : 0,
                  .bytes = frame.payload().substr(at, bytes)};
    if (HashOf(unit.bytes) != frame.unit_xxh3(i)) return absl::DataLossError("checksum");
    at += bytes;
    if (!is_encoded) Encode(layout, plane, block.codec, unit);
    block.units[unit_idx] = unit;
  }
  if (at != static_cast<int64_t>(frame.payload().size())) {
    return absl::InvalidArgumentError("payload size");
  }
  return absl::OkStatus();
}

void FakeService::Encode(const BlockLayout& layout, const PlaneInfo& plane,
                         const std::string& codec, FakeUnit& unit) {
  const PlaneShape shape{.num_tokens = layout.tokens_per_block(),
                         .dim = plane.dim,
                         .role = plane.role,
                         .dtype = layout.dtype()};
  const CodecPair pair = *CodecPairFromName(codec, "codec");
  const CodecId id = EffectiveCodec(pair.of(plane.role), shape);
  if (id == CodecId::kRaw) return;
  std::string out(FindCodec(id)->plane_bytes(shape), '\0');
  if (BestBackend(*FindCodec(id))
          .encode(shape, reinterpret_cast<const std::byte*>(unit.bytes.data()),
                  reinterpret_cast<std::byte*>(out.data())) == EncodeResult::kEncoded) {
    unit = {.codec = static_cast<uint32_t>(id), .bytes = out};
  }
}

void FakeServer::Start() {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + path_, grpc::InsecureServerCredentials());
  builder.RegisterService(static_cast<v1::Models::Service*>(&service));
  builder.RegisterService(static_cast<v1::Control::Service*>(&service));
  builder.RegisterService(static_cast<v1::Data::Service*>(&service));
  builder.SetMaxReceiveMessageSize(16 << 20);
  server_ = builder.BuildAndStart();
}

void FakeServer::Stop() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  server_ = nullptr;
}

}  // namespace kvstow::testing
