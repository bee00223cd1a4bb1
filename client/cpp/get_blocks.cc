// Get: blocks by key, checked whole and then written into the caller's memory.
#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/block_receiver.h"
#include "client/cpp/client_state.h"
#include "client/cpp/kv_client.h"
#include "client/cpp/parallel.h"
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

// `after`: the block before the first key, or null.
grpc::ByteBuffer GetRequestBytes(absl::Span<const BlockKey> keys, const BlockKey* after) {
  v1::GetRequest request;
  if (after != nullptr) request.set_after(std::string(after->AsStringView()));
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
void AskToVerify(Connection& connection, absl::Span<const BlockKey> keys, absl::Duration timeout) {
  v1::VerifyRequest request;
  request.set_keys(KeysToBytes(keys));
  const absl::Status ignored = connection.Call(timeout, [&](grpc::ClientContext* context) {
    const auto reader = connection.control().Verify(context, request);
    v1::VerifyProgress progress;
    while (reader->Read(&progress)) {
    }
    return reader->Finish();
  });
}

// What came of one stream.
struct StreamResult {
  absl::Status status;
  absl::Duration longest_wait = absl::ZeroDuration();
};

// A stretch of the keys of one prompt.
struct KeyStretch {
  absl::Span<const BlockKey> keys;
  const BlockKey* after = nullptr;  // the key before it
};

StreamResult ReceiveStream(Connection& connection, const KeyStretch& stretch,
                           BlockReceiver& receiver, const BlockFn& on_block) {
  const absl::Duration timeout = connection.options().data_timeout;
  RawStream stream(connection.NextDataStub(), {.method = kGetMethod, .timeout = timeout});
  stream.Write(GetRequestBytes(stretch.keys, stretch.after));
  stream.WritesDone();
  const absl::Status fault = ReceiveFrames(stream, receiver, on_block);
  if (!fault.ok()) stream.Cancel();
  StreamResult result{.status = connection.WithTarget(stream.Finish(), timeout)};
  if (!fault.ok()) result.status = absl::DataLossError(fault.message());
  result.longest_wait = stream.longest_wait();
  receiver.OnEnd(result.status);
  return result;
}

// Makes what takes the blocks of one stream.
using BlockFnMaker = std::function<BlockFn()>;

struct Fetched {
  std::vector<absl::Status> blocks;  // per key
  int64_t received_bytes = 0;
};

// Fetches `keys`, over several channels where that pays: each stream takes a stretch of the keys.
// An error: nothing at all came.
absl::StatusOr<Fetched> FetchBlocks(ClientState& client, const Model& model,
                                    absl::Span<const BlockKey> keys, const BlockFnMaker& make_fn) {
  Connection& connection = *client.connection;
  KVSTOW_RETURN_IF_ERROR(connection.Allow());
  const absl::Time deadline = connection.clock().Now() + connection.options().data_timeout;
  const auto num_keys = static_cast<int64_t>(keys.size());
  const int num_streams = NumStreams(num_keys, num_keys * model.layout->block_bytes(),
                                     connection.options().num_channels);
  std::vector<std::unique_ptr<BlockReceiver>> receivers(num_streams);
  std::vector<StreamResult> results(num_streams);
  RunParallel(num_streams, [&](int i) {
    const absl::Span<const BlockKey> some = Stretch(keys, i, num_streams);
    receivers[i] =
        std::make_unique<BlockReceiver>(model, some, StretchBegin(keys.size(), i, num_streams));
    const BlockKey* after = some.data() == keys.data() ? nullptr : some.data() - 1;
    results[i] = ReceiveStream(connection, {some, after}, *receivers[i], make_fn());
  });

  absl::Status status;
  absl::Duration longest_wait = absl::ZeroDuration();
  Fetched fetched;
  std::vector<BlockKey> corrupt;
  int64_t num_answered = 0;
  for (int i = 0; i < num_streams; ++i) {
    const BlockReceiver& receiver = *receivers[i];
    status.Update(results[i].status);
    longest_wait = std::max(longest_wait, results[i].longest_wait);
    num_answered += receiver.num_answered();
    fetched.received_bytes += receiver.received_bytes();
    fetched.blocks.insert(fetched.blocks.end(), receiver.statuses().begin(),
                          receiver.statuses().end());
    corrupt.insert(corrupt.end(), receiver.corrupt_keys().begin(), receiver.corrupt_keys().end());
  }
  connection.Record(status, longest_wait);
  client.corrupt_blocks += static_cast<int64_t>(corrupt.size());
  const absl::Duration left = deadline - connection.clock().Now();
  if (!corrupt.empty() && left > absl::ZeroDuration()) {
    AskToVerify(connection, corrupt, std::min(left, kVerifyTimeout));
  }
  if (num_answered == 0 && !status.ok()) return status;
  return fetched;
}

// Writes the rows of complete blocks. One for each stream.
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
  KVSTOW_ASSIGN_OR_RETURN(Fetched fetched, FetchBlocks(*state_, model, keys, [&]() -> BlockFn {
                            const auto writer =
                                std::make_shared<RowsWriter>(model, layers, first_token);
                            return [writer](const ReceivedBlock& block) { writer->Write(block); };
                          }));
  GetSummary summary;
  summary.blocks = std::move(fetched.blocks);
  summary.received_bytes = fetched.received_bytes;
  for (const absl::Status& status : summary.blocks) {
    if (!status.ok()) break;
    ++summary.num_leading;
  }
  return summary;
}

absl::StatusOr<std::vector<EncodedBlock>> KvClient::GetEncoded(const Model& model,
                                                               absl::Span<const BlockKey> keys) {
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  std::vector<EncodedBlock> blocks(keys.size());
  const auto take = [&](const ReceivedBlock& block) {
    for (const ReceivedBlock::Unit& unit : block.units) {
      blocks[block.block_idx].units.push_back(
          {.codec = unit.codec, .bytes = {unit.bytes.begin(), unit.bytes.end()}});
    }
  };
  KVSTOW_ASSIGN_OR_RETURN(const Fetched fetched,
                          FetchBlocks(*state_, model, keys, [&]() -> BlockFn { return take; }));
  for (size_t i = 0; i < keys.size(); ++i) blocks[i].status = fetched.blocks[i];
  return blocks;
}

}  // namespace kvstow
