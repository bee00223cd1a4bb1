// ServerFixture: a real server in this process over a unix socket in a directory of its own, and
// the generated stubs to talk to it: what any client in any language would do.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/core/checksum.h"
#include "kvstow/v1/calibrations.grpc.pb.h"
#include "kvstow/v1/control.grpc.pb.h"
#include "kvstow/v1/data.grpc.pb.h"
#include "kvstow/v1/model.grpc.pb.h"
#include "proto/convert.h"
#include "proto/frames.h"
#include "proto/status.h"
#include "service/model_registry.h"
#include "service/server.h"
#include "tests/service/temp_dir.h"
#include "tests/testing/fake_clock.h"

namespace kvstow::testing {

// A block as Get gave it.
struct GotBlock {
  int code = 0;
  std::vector<std::string> units;
  std::vector<CodecId> codecs;
  std::string key;
  std::string fingerprint;
  std::string calibration_id;
  uint32_t num_units = 0;
  uint32_t num_tokens = 0;
  int num_frames = 0;
};

inline absl::Span<const std::byte> AsBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// The plane as the scalar reference encodes it; empty where it is to be kept raw.
std::string ScalarEncode(const RegisteredModel& model, int32_t plane, CodecId codec_id,
                         const std::string& rows, const Calibration* calibration = nullptr);
std::string ScalarDecode(const RegisteredModel& model, int32_t plane, CodecId codec_id,
                         const std::string& unit, const Calibration* calibration = nullptr);

class ServerFixture : public ::testing::Test {
 protected:
  // 32 MiB of memory, no disk, two workers; a test changes options_ before Start.
  ServerFixture();

  void Start();
  void Restart();

  // 2 layers of 2 KV heads: 8 planes of [32, 64], 32 KiB as bf16.
  static ModelSpec SmallSpec(DType dtype = DType::kBf16);
  // 16 layers of 4 KV heads of 128: 128 planes of 16 KiB, 2 MiB as bf16.
  static ModelSpec LargeSpec();
  ModelRef Register(const ModelSpec& spec);

  static BlockKey Key(int i);
  // Gaussian bf16 rows of every plane of a block.
  static std::vector<std::string> MakeRows(const RegisteredModel& model, uint64_t seed);

  v1::ReserveResult ReserveItem(const ModelRef& model, const BlockKey& key,
                                const std::string& codec, v1::Form form = v1::FORM_ROWS);
  uint64_t Reserve(const ModelRef& model, const BlockKey& key, const std::string& codec,
                   v1::Form form = v1::FORM_ROWS);

  // Frames of units [first, first + units.size()).
  static v1::PutFrame RowsFrame(uint64_t ticket, uint32_t first,
                                const std::vector<std::string>& units);
  static v1::PutFrame EncodedFrame(uint64_t ticket, uint32_t first,
                                   const std::vector<std::string>& units,
                                   const std::vector<CodecId>& codecs);
  grpc::Status Put(const std::vector<v1::PutFrame>& frames, v1::PutResponse* response);
  // One call for one ticket.
  v1::PutResult PutOne(const std::vector<v1::PutFrame>& frames);

  v1::ItemStatus Seal(uint64_t ticket, bool durable = false);
  v1::ItemStatus Abort(uint64_t ticket);
  // Reserve, put all rows, seal.
  void Store(const ModelRef& model, const BlockKey& key, const std::vector<std::string>& rows,
             const std::string& codec, bool durable = false);

  grpc::Status GetFrames(const v1::GetRequest& request, std::vector<v1::GetFrame>* frames);
  // Puts the frames of a Get together, holding every one to the rules of data.proto.
  std::vector<GotBlock> Get(const std::vector<BlockKey>& keys, v1::Form form);

  v1::StatResponse Stat();
  v1::LookupResponse Lookup(const std::vector<BlockKey>& keys);

  const TempDir dir_;
  ServerOptions options_;
  FakeClock clock_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Models::Stub> models_;
  std::unique_ptr<v1::Control::Stub> control_;
  std::unique_ptr<v1::Data::Stub> data_;
  std::unique_ptr<v1::Calibrations::Stub> calibrations_;
};

}  // namespace kvstow::testing
