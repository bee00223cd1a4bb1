// RawCalls: the calls of the wire, one function each, for tests of what KvClient would never send.
//
//   RawCalls calls(daemon, model);
//   const uint64_t ticket = calls.ReserveOne(key, "raw").ticket();
//   calls.PutPlanes(ticket, kv, /*block_idx=*/0, /*first=*/0, /*num=*/4);
//   EXPECT_EQ(calls.SealOne(ticket).code(), grpc::StatusCode::OK);
//
// Every function CHECKs that the call itself succeeds and returns what it says about its one item.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/kv_client.h"
#include "tests/e2e/daemon.h"
#include "tests/e2e/kv_data.h"

namespace kvstow::testing {

// Keys one after the other, as the wire wants them.
std::string PackKeys(absl::Span<const BlockKey> keys);

// A frame with planes [first_plane, first_plane + num_planes) of a block in row form.
v1::PutFrame FrameOf(const KvData& kv, int block_idx, int first_plane, int num_planes);

class RawCalls {
 public:
  RawCalls(Daemon& daemon, const Model& model) : daemon_(daemon), model_(model) {}

  v1::ReserveResult ReserveOne(const BlockKey& key, const std::string& codec);
  v1::PutResult PutFrames(absl::Span<const v1::PutFrame> frames);
  v1::PutResult PutPlanes(uint64_t ticket, const KvData& kv, int block_idx, int first_plane,
                          int num_planes);
  v1::ItemStatus SealOne(uint64_t ticket);
  v1::ItemStatus AbortOne(uint64_t ticket);
  v1::AcquireResponse Acquire(absl::Span<const BlockKey> keys, absl::Duration ttl);
  grpc::Status Release(uint64_t lease);
  // One byte of LocationBit values per key.
  std::string Locations(absl::Span<const BlockKey> keys);

 private:
  Daemon& daemon_;
  const Model model_;
};

}  // namespace kvstow::testing
