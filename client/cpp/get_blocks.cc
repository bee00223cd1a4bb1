// Get: blocks by key, checked whole and then written into the caller's memory.
#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/block_receiver.h"
#include "client/cpp/client_state.h"
#include "client/cpp/kv_client.h"
#include "client/cpp/raw_stream.h"
#include "kernels/core/status_macros.h"
#include "kernels/layout/planes.h"
#include "kvstow/v1/data.pb.h"
#include "proto/convert.h"

namespace kvstow {
namespace {

constexpr char kGetMethod[] = "/kvstow.v1.Data/Get";
// The service is asked to look at a block that came damaged, but nobody waits long for it.
constexpr absl::Duration kVerifyTimeout = absl::Seconds(1);

using BlockFn = std::function<void(const ReceivedBlock&)>;

grpc::ByteBuffer GetRequestBytes(absl::Span<const BlockKey> keys) {
  v1::GetRequest request;
  request.set_keys(KeysToBytes(keys));
  request.set_form(v1::FORM_ENCODED);
  return ToByteBuffer(request);
}

absl::Status ReceiveFrames(RawStream& stream, BlockReceiver& receiver, const BlockFn& on_block) {
  grpc::ByteBuffer message;
  while (stream.Read(message)) {
    stream.StartRead();  // the next one arrives while this one is checked
    GetFrameHeader header;
    FramePayload payload;
    KVSTOW_RETURN_IF_ERROR(ParseFrame(message, header, payload));
    KVSTOW_ASSIGN_OR_RETURN(const ReceivedBlock* block, receiver.OnFrame(header, payload));
    if (block != nullptr) on_block(*block);
  }
  return absl::OkStatus();
}

// Best effort: the service checks the record and drops it where it is bad there too.
void AskToVerify(Connection& connection, absl::Span<const BlockKey> keys,
                 const std::vector<int32_t>& block_idxs, absl::Duration timeout) {
  std::vector<BlockKey> bad;
  for (const int32_t block_idx : block_idxs) bad.push_back(keys[block_idx]);
  v1::VerifyRequest request;
  request.set_keys(KeysToBytes(bad));
  const absl::Status ignored = connection.Call(timeout, [&](grpc::ClientContext* context) {
    const auto reader = connection.control().Verify(context, request);
    v1::VerifyProgress progress;
    while (reader->Read(&progress)) {
    }
    return reader->Finish();
  });
}

// Receives `keys` into `receiver` and `on_block`. An error: nothing at all came.
absl::Status FetchBlocks(ClientState& client, absl::Span<const BlockKey> keys,
                         BlockReceiver& receiver, const BlockFn& on_block) {
  Connection& connection = *client.connection;
  KVSTOW_RETURN_IF_ERROR(connection.Allow());
  const absl::Duration timeout = connection.options().data_timeout;
  const absl::Time deadline = connection.clock().Now() + timeout;
  absl::Status status;
  {
    RawStream stream(connection.NextDataStub(), {.method = kGetMethod, .timeout = timeout});
    stream.Write(GetRequestBytes(keys));
    stream.WritesDone();
    const absl::Status fault = ReceiveFrames(stream, receiver, on_block);
    if (!fault.ok()) stream.Cancel();
    status = connection.WithTarget(stream.Finish(), timeout);
    if (!fault.ok()) status = absl::DataLossError(fault.message());
    connection.Record(status, stream.longest_wait());
  }
  receiver.OnEnd(status);
  const std::vector<int32_t>& corrupt = receiver.corrupt_block_idxs();
  client.corrupt_blocks += static_cast<int64_t>(corrupt.size());
  const absl::Duration left = deadline - connection.clock().Now();
  if (!corrupt.empty() && left > absl::ZeroDuration()) {
    AskToVerify(connection, keys, corrupt, std::min(left, kVerifyTimeout));
  }
  return receiver.num_answered() == 0 ? status : absl::OkStatus();
}

// Writes the rows of a complete block.
class RowsWriter {
 public:
  RowsWriter(const Model& model, absl::Span<const LayerRows> layers, int64_t first_token)
      : layout_(*model.layout), layers_(layers), first_token_(first_token) {}

  void Write(const ReceivedBlock& block) {
    const int64_t first_token =
        first_token_ + int64_t{block.block_idx} * layout_.tokens_per_block();
    for (int32_t i = 0; i < layout_.num_planes(); ++i) {
      const PlaneInfo& plane = layout_.plane(i);
      const ReceivedBlock::Unit& unit = block.units[i];
      const std::byte* rows = unit.bytes.data();
      if (unit.codec != CodecId::kRaw) {
        scratch_.resize(std::max<size_t>(scratch_.size(), plane.row_bytes));
        BestBackend(*FindCodec(unit.codec)).decode(ShapeOf(layout_, plane), rows, scratch_.data());
        rows = scratch_.data();
      }
      ScatterPlane(layout_, i, rows, first_token, RowsOf(plane, layers_[plane.layer_idx]));
    }
  }

 private:
  const BlockLayout& layout_;
  const absl::Span<const LayerRows> layers_;
  const int64_t first_token_;
  std::vector<std::byte> scratch_;  // one plane
};

}  // namespace

absl::StatusOr<GetSummary> KvClient::Get(const Model& model, absl::Span<const BlockKey> keys,
                                         absl::Span<const LayerRows> layers, int64_t first_token) {
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  KVSTOW_RETURN_IF_ERROR(CheckNumLayers(*model.layout, layers.size()));
  KVSTOW_RETURN_IF_ERROR(CheckRows(*model.layout, 0, layers));
  if (first_token < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_token: ", first_token, ", want 0 or more"));
  }
  BlockReceiver receiver(model, keys);
  RowsWriter writer(model, layers, first_token);
  KVSTOW_RETURN_IF_ERROR(FetchBlocks(*state_, keys, receiver,
                                     [&](const ReceivedBlock& block) { writer.Write(block); }));
  GetSummary summary;
  summary.blocks = receiver.statuses();
  summary.received_bytes = receiver.received_bytes();
  for (const absl::Status& status : summary.blocks) {
    if (!status.ok()) break;
    ++summary.num_leading;
  }
  return summary;
}

absl::StatusOr<std::vector<EncodedBlock>> KvClient::GetEncoded(const Model& model,
                                                               absl::Span<const BlockKey> keys) {
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  BlockReceiver receiver(model, keys);
  std::vector<EncodedBlock> blocks(keys.size());
  KVSTOW_RETURN_IF_ERROR(FetchBlocks(*state_, keys, receiver, [&](const ReceivedBlock& block) {
    for (const ReceivedBlock::Unit& unit : block.units) {
      blocks[block.block_idx].units.push_back(
          {.codec = unit.codec, .bytes = {unit.bytes.begin(), unit.bytes.end()}});
    }
  }));
  for (size_t i = 0; i < keys.size(); ++i) blocks[i].status = receiver.statuses()[i];
  return blocks;
}

}  // namespace kvstow
