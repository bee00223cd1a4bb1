#include "tests/e2e/raw_calls.h"

#include <grpcpp/grpcpp.h>

#include "kernels/core/check.h"
#include "kernels/core/checksum.h"

namespace kvstow::testing {

std::string PackKeys(absl::Span<const BlockKey> keys) {
  std::string packed;
  for (const BlockKey& key : keys) packed.append(key.AsStringView());
  return packed;
}

v1::PutFrame FrameOf(const KvData& kv, int block_idx, int first_plane, int num_planes) {
  constexpr size_t kAlignment = 64;
  const std::vector<std::byte> rows = kv.RowForm(block_idx);
  v1::PutFrame frame;
  frame.set_first_unit(static_cast<uint32_t>(first_plane));
  std::string& payload = *frame.mutable_payload();
  for (int i = first_plane; i < first_plane + num_planes; ++i) {
    const PlaneInfo& plane = kv.layout().plane(i);
    payload.resize((payload.size() + kAlignment - 1) / kAlignment * kAlignment);
    const absl::Span<const std::byte> unit(rows.data() + plane.row_offset,
                                           static_cast<size_t>(plane.row_bytes));
    payload.append(reinterpret_cast<const char*>(unit.data()), unit.size());
    frame.add_unit_xxh3(Xxh3(unit));
  }
  return frame;
}

v1::ReserveResult RawCalls::ReserveOne(const BlockKey& key, const std::string& codec) {
  v1::ReserveRequest request;
  request.set_fingerprint(std::string(model_.fingerprint.AsStringView()));
  request.set_form(v1::FORM_ROWS);
  v1::ReserveBlock* const block = request.add_blocks();
  block->set_key(std::string(key.AsStringView()));
  block->set_codec(codec);
  v1::ReserveResponse response;
  const grpc::Status status = daemon_.control().Reserve(Deadline().get(), request, &response);
  KVSTOW_CHECK(status.ok());
  return response.results(0);
}

v1::PutResult RawCalls::PutFrames(absl::Span<const v1::PutFrame> frames) {
  v1::PutResponse response;
  const auto context = Deadline();
  const auto writer = daemon_.data().Put(context.get(), &response);
  for (const v1::PutFrame& frame : frames) {
    if (!writer->Write(frame)) break;
  }
  writer->WritesDone();
  KVSTOW_CHECK(writer->Finish().ok());
  KVSTOW_CHECK(response.results_size() == 1);
  return response.results(0);
}

v1::PutResult RawCalls::PutPlanes(uint64_t ticket, const KvData& kv, int block_idx, int first_plane,
                                  int num_planes) {
  v1::PutFrame frame = FrameOf(kv, block_idx, first_plane, num_planes);
  frame.set_ticket(ticket);
  return PutFrames({&frame, 1});
}

v1::ItemStatus RawCalls::SealOne(uint64_t ticket) {
  v1::SealRequest request;
  request.add_tickets(ticket);
  v1::SealResponse response;
  KVSTOW_CHECK(daemon_.control().Seal(Deadline().get(), request, &response).ok());
  return response.results(0);
}

v1::ItemStatus RawCalls::AbortOne(uint64_t ticket) {
  v1::AbortRequest request;
  request.add_tickets(ticket);
  v1::AbortResponse response;
  KVSTOW_CHECK(daemon_.control().Abort(Deadline().get(), request, &response).ok());
  return response.results(0);
}

v1::AcquireResponse RawCalls::Acquire(absl::Span<const BlockKey> keys, absl::Duration ttl) {
  v1::AcquireRequest request;
  request.set_keys(PackKeys(keys));
  request.set_ttl_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(ttl)));
  v1::AcquireResponse response;
  KVSTOW_CHECK(daemon_.control().Acquire(Deadline().get(), request, &response).ok());
  return response;
}

grpc::Status RawCalls::Release(uint64_t lease) {
  v1::ReleaseRequest request;
  request.set_lease(lease);
  v1::ReleaseResponse response;
  return daemon_.control().Release(Deadline().get(), request, &response);
}

std::string RawCalls::Locations(absl::Span<const BlockKey> keys) {
  v1::LookupRequest request;
  request.set_keys(PackKeys(keys));
  v1::LookupResponse response;
  KVSTOW_CHECK(daemon_.control().Lookup(Deadline().get(), request, &response).ok());
  return response.locations();
}

}  // namespace kvstow::testing
