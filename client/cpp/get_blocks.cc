// Get: blocks by key, checked whole and then written into the caller's memory.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/block_receiver.h"
#include "client/cpp/client_state.h"
#include "client/cpp/kv_client.h"
#include "client/cpp/parallel.h"
#include "client/cpp/plane_selection.h"
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

// `common`: what is the same for every call of the Get.
grpc::ByteBuffer GetRequestBytes(const v1::GetRequest& common, absl::Span<const BlockKey> keys,
                                 const BulkArea* area) {
  v1::GetRequest request = common;
  if (area != nullptr) {
    request.set_channel(area->channel());
    request.set_window_offset(area->window_offset());
    request.set_window_bytes(area->memory().size());
  }
  request.set_keys(KeysToBytes(keys));
  request.set_form(v1::FORM_ENCODED);
  return ToByteBuffer(request);
}

// The payload of a frame that says where in the window it is. kDataLoss: not within our area.
absl::Status TakeFromWindow(const GetFrameHeader& header, const BulkArea& area,
                            FramePayload& payload) {
  const uint64_t begin = header.window_offset - area.window_offset();
  const uint64_t all = area.memory().size();
  if (begin > all || header.window_bytes > all - begin) {
    return absl::DataLossError(absl::StrCat("get: a payload at ", header.window_offset, " of ",
                                            header.window_bytes, " bytes, outside of the area"));
  }
  payload =
      FramePayload(OwnedSlice(area.owner(), area.memory().subspan(begin, header.window_bytes)),
                   /*is_shared=*/true);
  return absl::OkStatus();
}

absl::Status ReceiveFrames(RawStream& stream, const BulkArea* area, BlockReceiver& receiver,
                           const BlockFn& on_block) {
  grpc::ByteBuffer message;
  while (stream.Read(message)) {
    stream.StartRead();  // the next one arrives while this one is checked
    GetFrameHeader header;
    FramePayload payload;
    KVSTOW_RETURN_IF_ERROR(ParseFrame(message, header, payload));
    if (header.window_bytes > 0) {
      if (area == nullptr) return absl::DataLossError("get: a payload in a window, but none is");
      KVSTOW_RETURN_IF_ERROR(TakeFromWindow(header, *area, payload));
    }
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

// What is the same for all streams of a fetch.
struct FetchPlan {
  const Model& model;
  absl::Span<const int32_t> planes;  // ascending, at least one
  absl::Time deadline;
};

// The units of the planes, as ranges; none where they are all of a block's.
void AddRanges(const FetchPlan& plan, v1::GetRequest& request) {
  if (plan.planes.size() == static_cast<size_t>(plan.model.layout->num_planes())) return;
  for (const int32_t plane : plan.planes) {
    const auto unit = static_cast<uint32_t>(plane);
    v1::UnitRange* last =
        request.ranges_size() == 0 ? nullptr : request.mutable_ranges(request.ranges_size() - 1);
    if (last == nullptr || last->first() + last->count() != unit) {
      last = request.add_ranges();
      last->set_first(unit);
    }
    last->set_count(last->count() + 1);
  }
}

// What came of one stream, in the order of its keys.
struct StreamResult {
  absl::Status status;
  absl::Duration longest_wait = absl::ZeroDuration();
  std::vector<std::unique_ptr<BlockReceiver>> receivers;  // one for each call
};

// Keys of one call; `first_block` is the place of the first one among all that are asked for.
struct KeyRange {
  absl::Span<const BlockKey> keys;
  size_t first_block = 0;
  const BlockKey* all = nullptr;  // keys asked for, of which this is a stretch
  // The block before the first key, or null.
  const BlockKey* after() const { return keys.data() == all ? nullptr : keys.data() - 1; }
};

// Fetches the blocks of one stream: in one call, or with a window in as many as it takes to pass
// all of them through an area of it. Where the window fails, the rest goes by gRPC.
class StreamFetcher {
 public:
  StreamFetcher(ClientState& client, const FetchPlan& plan) : client_(client), plan_(plan) {}

  StreamResult Fetch(KeyRange range, const BlockFn& on_block);

 private:
  absl::Status Call(const KeyRange& range, const BulkArea* area, const BlockFn& on_block,
                    BlockReceiver& receiver);

  ClientState& client_;
  const FetchPlan& plan_;
  absl::Duration longest_wait_ = absl::ZeroDuration();
};

absl::Status StreamFetcher::Call(const KeyRange& range, const BulkArea* area,
                                 const BlockFn& on_block, BlockReceiver& receiver) {
  Connection& connection = *client_.connection;
  const absl::Duration timeout =
      std::max(plan_.deadline - connection.clock().Now(), absl::ZeroDuration());
  RawStream stream(connection.NextDataStub(), {.method = kGetMethod, .timeout = timeout});
  v1::GetRequest common;
  common.set_fingerprint(std::string(plan_.model.fingerprint.AsStringView()));
  common.set_local_only(connection.options().local_only);
  AddRanges(plan_, common);
  if (range.after() != nullptr) common.set_after(std::string(range.after()->AsStringView()));
  stream.Write(GetRequestBytes(common, range.keys, area));
  stream.WritesDone();
  const absl::Status fault = ReceiveFrames(stream, area, receiver, on_block);
  if (!fault.ok()) stream.Cancel();
  // The limit that the caller knows, not what was left of it for this call.
  absl::Status status = connection.WithTarget(stream.Finish(), connection.options().data_timeout);
  if (!fault.ok()) status = absl::DataLossError(fault.message());
  longest_wait_ = std::max(longest_wait_, stream.longest_wait());
  receiver.OnEnd(status);
  return status;
}

StreamResult StreamFetcher::Fetch(KeyRange range, const BlockFn& on_block) {
  const auto block_bytes = static_cast<size_t>(MaxBlockBytes(*plan_.model.layout, plan_.planes));
  std::optional<BulkArea> area =
      client_.windows->Take(static_cast<int64_t>(block_bytes), plan_.deadline);
  StreamResult result;
  while (!range.keys.empty() && result.status.ok()) {
    size_t count = range.keys.size();
    if (area.has_value()) {
      const auto bytes = std::min<size_t>(area->memory().size(), kBulkCallBytes);
      count = std::min(count, std::max<size_t>(1, bytes / block_bytes));
    }
    const KeyRange some{range.keys.subspan(0, count), range.first_block, range.all};
    auto receiver = std::make_unique<BlockReceiver>(plan_.model, *client_.calibrations,
                                                    plan_.planes, some.keys, some.first_block);
    result.status = Call(some, area.has_value() ? &*area : nullptr, on_block, *receiver);
    if (!result.status.ok() && area.has_value()) {
      area->Abandon();
      area.reset();
      if (!absl::IsDeadlineExceeded(result.status)) {
        // What came has come; the rest by gRPC.
        result.status = absl::OkStatus();
        receiver->DropUnfinished();
        count = receiver->statuses().size();
      }
    }
    result.receivers.push_back(std::move(receiver));
    range = {range.keys.subspan(count), range.first_block + count, range.all};
  }
  if (!range.keys.empty()) {  // never asked for: they end as the last call did
    auto rest = std::make_unique<BlockReceiver>(plan_.model, *client_.calibrations, plan_.planes,
                                                range.keys, range.first_block);
    rest->OnEnd(result.status);
    result.receivers.push_back(std::move(rest));
  }
  result.longest_wait = longest_wait_;
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
absl::StatusOr<Fetched> FetchBlocks(ClientState& client, const FetchPlan& plan,
                                    absl::Span<const BlockKey> keys, const BlockFnMaker& make_fn) {
  Connection& connection = *client.connection;
  KVSTOW_RETURN_IF_ERROR(connection.Allow());
  const auto num_keys = static_cast<int64_t>(keys.size());
  const int num_streams = NumStreams(num_keys, num_keys * RowBytes(*plan.model.layout, plan.planes),
                                     connection.options().num_channels);
  std::vector<StreamResult> results(num_streams);
  RunParallel(num_streams, [&](int i) {
    const KeyRange range{Stretch(keys, i, num_streams), StretchBegin(keys.size(), i, num_streams),
                         keys.data()};
    results[i] = StreamFetcher(client, plan).Fetch(range, make_fn());
  });

  absl::Status status;
  absl::Duration longest_wait = absl::ZeroDuration();
  Fetched fetched;
  std::vector<BlockKey> corrupt;
  int64_t num_answered = 0;
  for (const StreamResult& result : results) {
    status.Update(result.status);
    longest_wait = std::max(longest_wait, result.longest_wait);
    for (const auto& receiver : result.receivers) {
      num_answered += receiver->num_answered();
      fetched.received_bytes += receiver->received_bytes();
      fetched.blocks.insert(fetched.blocks.end(), receiver->statuses().begin(),
                            receiver->statuses().end());
      corrupt.insert(corrupt.end(), receiver->corrupt_keys().begin(),
                     receiver->corrupt_keys().end());
    }
  }
  connection.Record(status, longest_wait);
  client.corrupt_blocks += static_cast<int64_t>(corrupt.size());
  const absl::Duration left = plan.deadline - connection.clock().Now();
  if (!corrupt.empty() && left > absl::ZeroDuration()) {
    AskToVerify(connection, corrupt, std::min(left, kVerifyTimeout));
  }
  if (num_answered == 0 && !status.ok()) return status;
  return fetched;
}

// Where rows are written to.
struct RowsPlace {
  absl::Span<const LayerRows> layers;
  int64_t first_token = 0;  // of block 0
  HeadRange heads;
};

// Writes the rows of complete blocks. One for each stream.
class RowsWriter {
 public:
  // `blocks`: the place of each fetched block among those of the caller.
  RowsWriter(const FetchPlan& plan, const RowsPlace& place, absl::Span<const int32_t> blocks)
      : plan_(plan), place_(place), blocks_(blocks) {}

  void Write(const ReceivedBlock& block) {
    const BlockLayout& layout = *plan_.model.layout;
    const int64_t first_token =
        place_.first_token + int64_t{blocks_[block.block_idx]} * layout.tokens_per_block();
    for (size_t i = 0; i < plan_.planes.size(); ++i) {
      const int32_t plane_idx = plan_.planes[i];
      const PlaneInfo& plane = layout.plane(plane_idx);
      const ReceivedBlock::Unit& unit = block.units[i];
      const std::byte* rows = unit.bytes.data();
      if (unit.codec != CodecId::kRaw) {
        scratch_.resize(std::max<size_t>(scratch_.size(), plane.row_bytes));
        const PlaneShape shape = CalibratedShape(layout, plane, block.calibration.get());
        BestBackend(*FindCodec(unit.codec)).decode(shape, rows, scratch_.data());
        rows = scratch_.data();
      }
      ScatterPlane(layout, plane_idx, rows, first_token,
                   ViewOfPlane(layout, plane_idx, place_.heads, place_.layers[plane.layer_idx]));
    }
  }

 private:
  const FetchPlan& plan_;
  const RowsPlace& place_;
  const absl::Span<const int32_t> blocks_;
  std::vector<std::byte> scratch_;  // one plane
};

// Layers that are fetched together: all, or, where they are wanted one after the other, so many
// that their calls are worth it.
std::vector<LayerRange> LayerGroups(const BlockLayout& layout, int64_t num_blocks,
                                    const GetOptions& options) {
  constexpr int64_t kGroupBytesMin = int64_t{1} << 20;
  if (!options.on_layers) return {{.first = 0, .count = layout.num_layers()}};
  std::vector<LayerRange> groups;
  int64_t bytes = kGroupBytesMin;  // of the last group
  for (int32_t layer = 0; layer < layout.num_layers(); ++layer) {
    if (bytes >= kGroupBytesMin) {
      groups.push_back({.first = layer});
      bytes = 0;
    }
    ++groups.back().count;
    const std::vector<int32_t> planes =
        PlanesOf(layout, {.first = layer, .count = 1}, options.heads);
    bytes += num_blocks * RowBytes(layout, planes);
  }
  return groups;
}

// Fetches some layers of the blocks that have not failed yet. An error: of the whole Get.
absl::Status GetLayers(ClientState& client, const FetchPlan& plan, absl::Span<const BlockKey> keys,
                       const RowsPlace& place, GetSummary& summary) {
  std::vector<BlockKey> wanted;
  std::vector<int32_t> places;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!summary.blocks[i].ok()) continue;
    wanted.push_back(keys[i]);
    places.push_back(static_cast<int32_t>(i));
  }
  if (wanted.empty()) return absl::OkStatus();
  const auto make_fn = [&]() -> BlockFn {
    const auto writer = std::make_shared<RowsWriter>(plan, place, places);
    return [writer](const ReceivedBlock& block) { writer->Write(block); };
  };
  KVSTOW_ASSIGN_OR_RETURN(Fetched fetched, FetchBlocks(client, plan, wanted, make_fn));
  for (size_t i = 0; i < places.size(); ++i) {
    summary.blocks[places[i]] = std::move(fetched.blocks[i]);
  }
  summary.received_bytes += fetched.received_bytes;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GetSummary> KvClient::Get(const Model& model, absl::Span<const BlockKey> keys,
                                         absl::Span<const LayerRows> layers, int64_t first_token,
                                         const GetOptions& options) {
  const BlockLayout& layout = *model.layout;
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  KVSTOW_RETURN_IF_ERROR(CheckNumLayers(layout, layers.size()));
  KVSTOW_RETURN_IF_ERROR(CheckRows(layout, 0, layers));
  KVSTOW_RETURN_IF_ERROR(CheckHeads(layout, options.heads));
  if (first_token < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_token: ", first_token, ", want 0 or more"));
  }
  const Connection& connection = *state_->connection;
  const absl::Time deadline = connection.clock().Now() + connection.options().data_timeout;
  const RowsPlace place{.layers = layers, .first_token = first_token, .heads = options.heads};
  GetSummary summary;
  summary.blocks.resize(keys.size());
  for (const LayerRange& group : LayerGroups(layout, static_cast<int64_t>(keys.size()), options)) {
    const std::vector<int32_t> planes = PlanesOf(layout, group, options.heads);
    const FetchPlan plan{model, planes, deadline};
    const absl::Status status = GetLayers(*state_, plan, keys, place, summary);
    if (!status.ok() && group.first == 0) return status;
    for (absl::Status& block : summary.blocks) {
      if (block.ok()) block = status;
    }
    if (options.on_layers) options.on_layers({group.first, group.count, summary.blocks});
  }
  for (const absl::Status& status : summary.blocks) {
    if (!status.ok()) break;
    ++summary.num_leading;
  }
  return summary;
}

absl::StatusOr<std::vector<EncodedBlock>> KvClient::GetEncoded(const Model& model,
                                                               absl::Span<const BlockKey> keys,
                                                               absl::Duration timeout) {
  KVSTOW_RETURN_IF_ERROR(CheckNumKeys(static_cast<int64_t>(keys.size()), "keys", 1));
  const Connection& connection = *state_->connection;
  const std::vector<int32_t> planes =
      PlanesOf(*model.layout, {.first = 0, .count = model.layout->num_layers()}, {});
  const FetchPlan plan{
      model, planes,
      connection.clock().Now() + std::min(connection.options().data_timeout, timeout)};
  std::vector<EncodedBlock> blocks(keys.size());
  const auto take = [&](const ReceivedBlock& block) {
    blocks[block.block_idx].calibration = block.calibration;
    for (const ReceivedBlock::Unit& unit : block.units) {
      blocks[block.block_idx].units.push_back({.codec = unit.codec,
                                               .xxh3 = unit.xxh3,
                                               .bytes = {unit.bytes.begin(), unit.bytes.end()}});
    }
  };
  KVSTOW_ASSIGN_OR_RETURN(const Fetched fetched,
                          FetchBlocks(*state_, plan, keys, [&]() -> BlockFn { return take; }));
  for (size_t i = 0; i < keys.size(); ++i) blocks[i].status = fetched.blocks[i];
  return blocks;
}

}  // namespace kvstow
