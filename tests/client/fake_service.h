// FakeService: kvstow's services in memory, written with the generated stubs, honest until a test
// tells it to lie, to lose things or to keep silent.
#pragma once

#include <grpcpp/server.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/core/block_layout.h"
#include "kernels/core/mutex.h"
#include "kvstow/v1/control.grpc.pb.h"
#include "kvstow/v1/data.grpc.pb.h"
#include "kvstow/v1/model.grpc.pb.h"

namespace kvstow::testing {

struct FakeUnit {
  uint32_t codec = 0;
  std::string bytes;
};

struct FakeBlock {
  std::string fingerprint;
  std::string codec;
  v1::Form form = v1::FORM_ROWS;
  std::map<uint32_t, FakeUnit> units;
};

class FakeService final : public v1::Models::Service,
                          public v1::Control::Service,
                          public v1::Data::Service {
 public:
  // What a test may change. All run without the lock held; an error ends the call.
  struct Hooks {
    std::function<absl::Status(const v1::ReserveBlock&)> reserve;  // per block
    std::function<grpc::Status(grpc::ServerContext*, int call)> put_start;
    std::function<void(v1::PutFrame&, int call)> put_frame;  // damage on the way in
    std::function<grpc::Status(grpc::ServerContext*, int call, int frame)> put_after_frame;
    std::function<absl::Status(uint64_t ticket)> seal;  // per ticket
    // Each frame of a Get before it is sent; false drops it.
    std::function<bool(v1::GetFrame&, int frame)> get_frame;
    std::function<grpc::Status(grpc::ServerContext*, int frame)> get_after_frame;
    std::function<grpc::Status(grpc::ServerContext*)> lookup;
    std::function<void(v1::RegisterModelResponse&)> registered;
  };
  Hooks hooks;
  size_t units_per_get_frame = 3;

  // --- what happened ---
  std::vector<v1::ReserveRequest> reserves;
  std::vector<int64_t> put_payload_bytes;
  std::vector<v1::SealRequest> seals;
  std::vector<uint64_t> aborted;
  std::vector<std::string> verified;  // keys
  int num_lookups = 0;
  int num_puts = 0;
  std::map<std::string, FakeBlock> blocks;  // sealed
  std::map<uint64_t, std::pair<std::string, FakeBlock>> tickets;
  std::map<std::string, v1::ModelSpec> models;
  grpc::Status RegisterModel(grpc::ServerContext*, const v1::RegisterModelRequest* request,
                             v1::RegisterModelResponse* response) override;
  grpc::Status GetModel(grpc::ServerContext*, const v1::GetModelRequest* request,
                        v1::GetModelResponse* response) override;
  grpc::Status ListModels(grpc::ServerContext*, const v1::ListModelsRequest*,
                          v1::ListModelsResponse* response) override;
  grpc::Status Lookup(grpc::ServerContext* context, const v1::LookupRequest* request,
                      v1::LookupResponse* response) override;
  grpc::Status Reserve(grpc::ServerContext*, const v1::ReserveRequest* request,
                       v1::ReserveResponse* response) override;
  grpc::Status Put(grpc::ServerContext* context, grpc::ServerReader<v1::PutFrame>* reader,
                   v1::PutResponse* response) override;
  grpc::Status Seal(grpc::ServerContext*, const v1::SealRequest* request,
                    v1::SealResponse* response) override;
  grpc::Status Abort(grpc::ServerContext*, const v1::AbortRequest* request,
                     v1::AbortResponse* response) override;
  grpc::Status Delete(grpc::ServerContext*, const v1::DeleteRequest* request,
                      v1::DeleteResponse* response) override;
  grpc::Status Verify(grpc::ServerContext*, const v1::VerifyRequest* request,
                      grpc::ServerWriter<v1::VerifyProgress>* writer) override;
  grpc::Status Get(grpc::ServerContext* context, const v1::GetRequest* request,
                   grpc::ServerWriter<v1::GetFrame>* writer) override;

  // The units of a block as frames.
  std::vector<v1::GetFrame> FramesOf(const std::string& key, uint32_t block_idx) const;

 private:
  absl::Status TakeFrame(const v1::PutFrame& frame);

  static void Encode(const BlockLayout& layout, const PlaneInfo& plane, const std::string& codec,
                     FakeUnit& unit);

  Mutex mutex_;  // streams of one Put come at once
  uint64_t next_ticket_ = 1000;
};

// A FakeService on a unix socket of its own, as long as this lives.
class FakeServer {
 public:
  explicit FakeServer(const std::string& path) : path_(path) { Start(); }
  ~FakeServer() { Stop(); }
  void Start();
  // Calls in progress are cancelled.
  void Stop();
  std::string target() const { return "unix:" + path_; }

  FakeService service;

 private:
  const std::string path_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace kvstow::testing
